"""Time calls as a server would run them: on a GPU in a CUDA graph, elsewhere by the clock.

Called by the benchmarks of this folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
    return time_in_turn({"": timed_round(call, device, before)}, rounds)[""]


def timed_round(
    call: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> Callable[[], float]:
    """Make ready what plays and times one round of a call, in µs; it has been called once then.

    `before` runs ahead of each round and is not timed.
    """
    before()
    call()
    return timed_call(_capture(call) if device.type == "cuda" else call, device, before)


def time_in_turn(timed: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Time a round of each in turn, and again: all meet the same clocks.

    A GPU under load lowers its clock within seconds: of two that were timed one after the other the
    second would seem slower.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, timed_once in timed.items():
            times[name].append(timed_once())
    return {name: _spread(sorted(found)) for name, found in times.items()}


def _spread(times: list[float]) -> Spread:
    edge = len(times) // 10
    return Spread(times[len(times) // 2], times[edge], times[-1 - edge])


def timed_call(
    call: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> Callable[[], float]:
    """Make what plays and times one call as it is, in µs: on a GPU between two events."""

    def time_events() -> float:
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def time_clock() -> float:
        before()
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)

    return time_events if device.type == "cuda" else time_clock


def _capture(call: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
