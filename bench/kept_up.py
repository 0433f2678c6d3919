"""Keep something up for seconds, as a server does, and tell what the card makes of it.

A card that draws all the power it may lowers its clock: what takes 11.6 ms once takes 12.6 again
and again. Called by the benchmarks of this folder.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

QUERY = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--id=0")
LINE = re.compile(r"^([\d.]+), ([\d.]+)$", re.MULTILINE)
PERIOD_MS = 100  # between two readings
BURST_S = 0.02  # of calls between two looks at the clock: the card never waits for the next one


@dataclass(frozen=True)
class KeptUp:
    """Tell the mean of a call, and the medians of clock and power; 0 where they can't be read."""

    ms: float
    mhz: float = 0.0
    watts: float = 0.0

    @property
    def joules(self) -> float:
        """The energy of a call; 0 where the power can't be read."""
        return self.ms * self.watts / 1e3

    def conditions(self) -> dict[str, float]:
        """Give the fields as a row's conditions name them."""
        return {f"kept_up_{name}": value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        card = f" at {self.mhz:.0f} MHz and {self.watts:.0f} W, {self.joules:.2f} J"
        return f"{self.ms:.4g} ms kept up" + (card if self.watts else "")


def keep_up(call: Callable[[], object], device: torch.device, seconds: float) -> KeptUp:
    """Call again and again for so many seconds, without waiting between, and tell what it took."""
    call()
    _wait(device)
    calls, began_s = 0, time.perf_counter()
    with _readings(device) as readings:
        while (took_s := time.perf_counter() - began_s) < seconds or not calls:
            each_s = took_s / calls if calls else BURST_S
            for _ in range(max(1, int(BURST_S / each_s))):
                call()
                calls += 1
            _wait(device)
        took_s = time.perf_counter() - began_s
    found = readings()
    ms = 1e3 * took_s / calls
    if not found:
        return KeptUp(ms)
    mhz, watts = (statistics.median(column) for column in zip(*found, strict=True))
    return KeptUp(ms, mhz, watts)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _readings(device: torch.device) -> Iterator[Callable[[], list[tuple[float, float]]]]:
    """Read clock (MHz) and power (W) meanwhile; after the block what is given has them."""
    tool = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if tool is None:
        yield list
        return
    command = [tool, *QUERY, f"--loop-ms={PERIOD_MS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        told: list[str] = []
        try:
            yield lambda: read_lines("".join(told))
        finally:
            child.terminate()
            told.append(child.communicate()[0])


def read_lines(text: str) -> list[tuple[float, float]]:
    """Read lines of clock and power; one without figures, or cut off, is left out."""
    whole, _, _ = text.rpartition("\n")
    return [(float(found[1]), float(found[2])) for found in LINE.finditer(whole)]
