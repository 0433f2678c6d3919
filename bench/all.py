"""Run every benchmark on this GPU, the most wanted first, as far as the time goes; then the goals.

Run: python bench/all.py --budget 3600, or with --out DIR --only decode,prefill --budget 540
Each is a process of its own; one that fails is told and leaves the others alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench import goals  # noqa: E402

BATCHES = "1,8,32,64,128,256"
STEPS: dict[str, list[str]] = {
    "decode": ["--models", "llama-3.1-8b", "--batches", BATCHES, "--keep-up", "3"],
    "decode-small": ["--models", "llama-3.2-1b,qwen3-0.6b-shapes", "--batches", "1"],
    "prefill": ["--prompts", "1x1024,8x1024,1x512,1x2048,1x8192", "--keep-up", "3"],
    "kernels": ["--batches", "1,2,8,32,64,256", "--prompts", "1x1024,8x1024,1x8192"],
    "startup": [],
    "host_time": ["--batches", "256,1"],
    "throughput": ["--shapes", "1024x1024", "--concurrency", "256"],
    "serve": [],
    "throughput-more": ["--shapes", "mix,128x2048,2048x128", "--concurrency", "256,64,16,1"],
    "decode-families": ["--models", "gemma-3-4b,qwen3-30b-a3b,gpt-oss-20b", "--batches", "1,8,32"],
    "prefill-families": ["--models", "gemma-3-4b,qwen3-30b-a3b,gpt-oss-20b", "--prompts", "1x1024"],
    "decode-long": ["--batches", "1,32", "--contexts", "128,8192", "--models", "llama-3.1-8b"],
}

# These keep a time by themselves, so that they end with all they measured.
BUDGETED = {"decode", "prefill", "kernels", "startup", "host_time", "throughput", "serve"}


def run_steps(
    steps: Mapping[str, Sequence[str]], budget_s: float, more: Sequence[str], folder: Path
) -> dict[str, str]:
    """Run the programs of `folder`, each by the word before its dash; say how each ended."""
    deadline_s = time.monotonic() + budget_s
    ends = {}
    for name, arguments in steps.items():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            ends[name] = "left out: no time"
            continue
        program = folder / f"{name.partition('-')[0]}.py"
        print(f"== {name} ({left_s:.0f} s left)", flush=True)
        began_s = time.monotonic()
        command = [sys.executable, str(program), *arguments]
        if program.stem in BUDGETED:
            command += ["--budget", f"{left_s:.0f}"]
        try:
            done = subprocess.run([*command, *more], timeout=left_s)
            ends[name] = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ends[name] = "cut off: no time"
        ends[name] += f" after {time.monotonic() - began_s:.0f} s"
    return ends


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks and give the exit code of the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of them")
    parser.add_argument("--out", type=Path, help="a folder for the results (default: results/)")
    asked = parser.parse_args(arguments)
    wanted = asked.only.split(",") if asked.only else list(STEPS)
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        parser.error(f"--only: there is no {', '.join(unknown)}")
    more = ["--out", str(asked.out)] if asked.out else []
    steps = {name: STEPS[name] for name in wanted}
    for name, end in run_steps(steps, asked.budget, more, ROOT / "bench").items():
        print(f"{name}: {end}")
    return goals.main(["--results", str(asked.out)] if asked.out else [])


if __name__ == "__main__":
    sys.exit(main())
