"""How near two sizes of a kernel are: what was never tuned takes what won for its neighbours.

A model is served at many more sizes than are tuned: every bucket of every step, and models whose
widths lie between those of others. Called by `tuned.py`, whose keys it reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

# What may differ between neighbours. All else of a shape decides how much room a tile takes, as a
# head's width does, or what is computed, as a format does.
WIDTHS = frozenset(
    ("HIDDEN", "K", "N", "N_OUT", "NUM_EXPERTS", "NUM_HEADS", "NUM_KV_HEADS", "VOCAB", "WIDTH")
)
MOST_ROWS_APART = 2.0  # powers of two
MOST_WIDTH_APART = 1.0
FRACTION = re.compile(r"-?\d+(\.\d+(e-?\d+)?|e-?\d+)")  # an epsilon, a scale
OTHER_STEP = 0.5  # a prompt's neighbours in the step are others than a decode step's


@dataclass(frozen=True)
class _Parts:
    """Hold the parts of a key: those that must agree, and those whose distance counts."""

    fixed: tuple[str, ...]
    widths: dict[str, int]
    step: str
    rows: int


def nearest(key: str, keys: Iterable[str]) -> Iterator[str]:
    """Yield those of `keys` that are near enough to `key`, the nearest first."""
    wanted = _parts(key)
    found = ((_distance(wanted, _parts(each)), each) for each in keys if each != key)
    yield from (each for distance, each in sorted(found) if distance < math.inf)


def _distance(one: _Parts, other: _Parts) -> float:
    """Give how far apart two keys are in powers of two; infinite where they can't be compared."""
    if one.fixed != other.fixed or one.widths.keys() != other.widths.keys():
        return math.inf
    rows = abs(math.log2(one.rows / other.rows))
    widths = [abs(math.log2(size / other.widths[name])) for name, size in one.widths.items()]
    width = max(widths, default=0.0)
    if rows > MOST_ROWS_APART or width > MOST_WIDTH_APART:
        return math.inf
    return rows + width + (OTHER_STEP if one.step != other.step else 0.0)


@lru_cache(maxsize=4096)
def _parts(key: str) -> _Parts:
    """Take a key of `tuning_key` apart; what was written by hand otherwise is near to nothing."""
    parts = key.split("/")
    if len(parts) != 5 or not parts[4].isdecimal():
        return _Parts((key,), {}, "", 1)
    kernel, shape, dtype, step, rows = parts
    fixed, widths = [kernel, dtype], {}
    for fact in shape.split(",") if shape else ():
        name, _, value = fact.partition("=")
        if name in WIDTHS:
            widths[name] = int(value)
        elif not FRACTION.fullmatch(value):
            fixed.append(fact)
    if "NUM_KV_HEADS" in widths:  # so many queries share a tile of keys
        fixed.append(f"{widths['NUM_HEADS'] // widths['NUM_KV_HEADS']} heads to a KV head")
    return _Parts(tuple(fixed), widths, step, int(rows))
