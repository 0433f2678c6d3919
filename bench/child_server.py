"""Our own server as a child process, as a user starts it. Called by `startup` and `serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.ir import knobs

CLI = str(Path(__file__).resolve().parents[1] / "cli.py")
DEADLINE_S = 600.0
_PHASE = re.compile(r"([a-zA-Z][^,]*?) (\d+\.\d+) s(?:,|$)")


@dataclass(frozen=True)
class Server:
    """A server that is ready: its address, the seconds it took, and what it has told so far."""

    address: str
    ready_s: float
    told: str

    @property
    def phases_s(self) -> dict[str, float]:
        """The seconds of each phase of its start, as it tells them when it is ready."""
        lines = [line for line in self.told.splitlines() if line.startswith("start-up ")]
        text = lines[-1].removeprefix("start-up ").strip() if lines else ""
        return {phase.strip(): float(seconds) for phase, seconds in _PHASE.findall(text)}

    def get(self, path: str) -> object:
        """Get a JSON answer."""
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            return json.load(answer)


def environment(cache: Path) -> dict[str, str]:
    """Give a child's environment with this cache folder."""
    return knobs.child_environment(
        TREADLE_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"), TRITON_INTERPRET=None
    )


def run_command(words: Sequence[str], cache: Path) -> float:
    """Run a command of ours to its end and give the seconds. Raises: RuntimeError: it fails."""
    command = [sys.executable, CLI, *words]
    began_s = time.perf_counter()
    done = subprocess.run(
        command, env=environment(cache), capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - began_s


@contextmanager
def running_server(artifact: Path, cache: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Start `serve`, wait until /ready says so, and stop it at the end.

    Raises: RuntimeError: it ended, or was not ready in time; tells what it said.
    """
    command = [sys.executable, CLI, "serve", str(artifact), "--port", "0", "--progress", "log"]
    with tempfile.TemporaryFile("w+b") as output:
        began_s = time.perf_counter()
        child = subprocess.Popen(
            [*command, *options], env=environment(cache), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            address = ""
            while True:
                told = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
                seconds = time.perf_counter() - began_s
                if child.poll() is not None or seconds > DEADLINE_S:
                    raise RuntimeError(
                        f"serve was not ready after {seconds:.1f} s (exit code "
                        f"{child.returncode}):\n{told}"
                    )
                address = address or _address(told)
                if address and _is_ready(address):
                    break
                time.sleep(0.01)
            while "start-up " not in told and time.perf_counter() - began_s < seconds + 5:
                time.sleep(0.01)  # it is printed right after
                told = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
            yield Server(address, seconds, told)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _address(told: str) -> str:
    found = re.search(r"listening at (http://[^\s;]+)", told)
    return found[1] if found else ""


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
