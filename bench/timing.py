"""Time calls as a server would run them: on a GPU in a CUDA graph, elsewhere by the clock.

Called by the benchmarks of this folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """Hold the median of some rounds, with p10 and p90, in µs."""

    us: float
    low: float
    high: float

    def per(self, count: int) -> Spread:
        """Give the time of one of `count` parts."""
        return Spread(self.us / count, self.low / count, self.high / count)


def time_us(
    call: Callable[[], object],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Spread:
    """Time a call; `before` runs ahead of each round and is not timed."""
    before()
    call()
    times = (
        _graphed(call, rounds, before) if device.type == "cuda" else _plain(call, rounds, before)
    )
    times.sort()
    edge = len(times) // 10
    return Spread(times[len(times) // 2], times[edge], times[-1 - edge])


def _graphed(call: Callable[[], object], rounds: int, before: Callable[[], object]) -> list[float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(rounds):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return times


def _plain(call: Callable[[], object], rounds: int, before: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(rounds):
        before()
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times
