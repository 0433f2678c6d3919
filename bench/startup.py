"""Time a start from nothing: the first compilation, and a server's way to ready with warm caches.

Run: python bench/startup.py --model llama-3.1-8b --folder /dev/shm/bench
Each step is a process of its own, as a user starts it; Python's own imports count. The file
system still has the weights in memory, because they were just written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.ir import knobs  # noqa: E402

CLI = str(ROOT / "cli.py")
DEADLINE_S = 900.0


def time_compile(model: Path, artifact: Path, options: list[str], cache: Path) -> float:
    """Time `compile` in a process with this cache folder."""
    command = [sys.executable, CLI, "compile", str(model), "-o", str(artifact), *options]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--progress", "none"], env=_environment(cache), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - began


def time_ready(artifact: Path, cache: Path) -> tuple[float, str]:
    """Time `serve` from its start until /ready says so; give what it told on the way as well."""
    command = [sys.executable, CLI, "serve", str(artifact), "--port", "0", "--progress", "log"]
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        child = subprocess.Popen(
            command, env=_environment(cache), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            address = ""
            while time.perf_counter() - began < DEADLINE_S:
                if child.poll() is not None:
                    output.seek(0)
                    raise SystemExit(f"serve ended with {child.returncode}:\n{output.read()}")
                address = address or _address(output)
                if address and _is_ready(address):
                    seconds = time.perf_counter() - began
                    output.seek(0)
                    return seconds, output.read()
                time.sleep(0.01)
            raise SystemExit(f"serve was not ready after {DEADLINE_S:g} s")
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()


def _address(output: object) -> str:
    """Find the address in what the server has told so far."""
    text = os.pread(output.fileno(), 1 << 16, 0).decode(errors="replace")  # type: ignore[attr-defined]
    found = [word for word in text.split() if word.startswith("http://")]
    return found[0].rstrip("/.,;)") if found else ""


def _is_ready(address: str) -> bool:
    base = "/".join(address.split("/")[:3])
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _environment(cache: Path) -> dict[str, str]:
    return knobs.child_environment(
        TREADLE_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"), TRITON_INTERPRET=None
    )


def main(arguments: list[str] | None = None) -> None:
    """Time the starts of the command line's model and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--rounds", type=int, default=3, help="warm starts; the median counts")
    parser.add_argument("--options", default="", help="more options of compile, in quotes")
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    parser.add_argument("--out", type=Path, help="a folder for startup.json")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        model = write_checkpoint(asked.model, folder, asked.layers)
        artifact, cache = Path(temporary) / "artifact", Path(temporary) / "cache"
        options = ["--target", asked.target, *asked.options.split()]
        cold_s = time_compile(model, artifact, options, cache)
        again_s = time_compile(model, artifact, options, cache)
        first_s, _ = time_ready(artifact, cache)
        warm, told = [], ""
        for _ in range(asked.rounds):
            seconds, told = time_ready(artifact, cache)
            warm.append(seconds)
    warm_s = sorted(warm)[len(warm) // 2]
    stated = conditions(weights="random", target=asked.target, cores=os.cpu_count())
    rows = []
    for what, value, more in (
        ("first compile", cold_s, {"again_s": again_s}),
        ("ready, first", first_s, {}),
        ("ready, warm", warm_s, {"all_s": warm, "told": told.splitlines()[-30:]}),
    ):
        case = f"{asked.model} {what}"
        goal, peers = with_goal("startup", case)
        rows.append(
            Row("startup", case, value, "s", "lower", goal, None, peers, {**stated, **more})
        )
        print(f"{case}: {value:.2f} s, goal {goal}", flush=True)
    print(json.dumps({"again_s": round(again_s, 2)}))
    print(write_rows("startup", rows, asked.out))


if __name__ == "__main__":
    main()
