"""Play a benchmark's cases one by one, as far as the time goes, and keep each figure at once.

A case that fails is written down beside the results and leaves the others alone. Called by the
benchmarks of this folder.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from treadle.bench.rows import Row, forget_failure, write_failure, write_rows

Measure = Callable[[], Iterable[Row]]
"""Measure one case; each row that it yields is written before the next is asked for."""


@dataclass
class Ends:
    """Tell how the cases ended, by name; `where` is the file of the rows, if there are any."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    where: Path | None = None

    @property
    def exit_code(self) -> int:
        """1 where a case failed; one that was left out for want of time is no failure."""
        return int(bool(self.failed))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `play` wants."""
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no case begins"
    )
    parser.add_argument("--out", type=Path, help="a folder for the results (default: results/)")


def play(
    bench: str, cases: Iterable[tuple[str, Measure]], asked: argparse.Namespace, began_s: float
) -> Ends:
    """Play the cases in their order and say how it went; `asked` holds the options above.

    `began_s`, by `time.monotonic`, is when the benchmark began: its preparation counts.
    """
    ends = Ends()
    for name, measure in cases:
        used_s = time.monotonic() - began_s
        if used_s >= asked.budget or (ends.failed and not _device_lives()):
            ends.left_out.append(name)
            continue
        print(f"[{used_s:4.0f} s] {name}", flush=True)
        failure = ""
        try:
            for row in measure():
                ends.where = write_rows(bench, [row], asked.out)
                print(f"         {_told(row)}", flush=True)
        except Exception as error:  # the boundary of one case
            failure = traceback.format_exc()
            ends.failed[name] = f"{type(error).__name__}: {error}"
        if failure:
            print(failure, flush=True)
            write_failure(bench, name, failure, asked.out)
        else:
            ends.done.append(name)
            forget_failure(bench, name, asked.out)
        # What the case held is given back only now that its frames are gone.
        gc.collect()
        if torch.cuda.is_available() and _device_lives():
            torch.cuda.empty_cache()
    for line in _summary(bench, ends):
        print(line, flush=True)
    return ends


def _told(row: Row) -> str:
    text = f"{row.case}: {row.value:.4g} {row.unit}"
    if row.goal is not None:
        text += f", goal {row.goal:g}"
    if row.floor is not None:
        text += f", floor {row.floor:.4g} ({100 * row.floor / row.value:.0f} % of the ceiling)"
    return text + "".join(f", {name} {value:.4g}" for name, value in row.peers.items())


def _device_lives() -> bool:
    """Say whether the GPU can still be used: after some faults every call fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _summary(bench: str, ends: Ends) -> Iterator[str]:
    counts = (
        f"{len(ends.done)} done",
        f"{len(ends.failed)} failed",
        f"{len(ends.left_out)} left out",
    )
    yield f"{bench}: {', '.join(counts)}"
    for name, reason in ends.failed.items():
        yield f"  failed: {name}: {reason.splitlines()[0]}"
    if ends.left_out:
        yield f"  left out: {', '.join(ends.left_out)}"
    if ends.where is not None:
        yield f"  {ends.where}"
