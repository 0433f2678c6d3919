"""Dimensions of tensor types: whole numbers and the few symbols whose value a step decides.

Glossary, used in types, comments and kernels alike:
T tokens in the step, B sequences in the step, R rows of the persistent batch, C longest context,
P pages of the pool, M pages per row, S slots per page, E hidden, F feed-forward, H query heads,
G KV heads, D head dim, V vocabulary, L layers; M, N, K mean a matmul's sizes only inside templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from treadle.ir.errors import ShapeError

SYMBOLS: dict[str, str] = {
    "T": "tokens in the step",
    "B": "sequences in the step",
    "R": "rows of the persistent batch",
    "C": "longest context, in tokens",
    "P": "pages of the KV pool",
    "M": "pages per row of the block table",
}


@dataclass(frozen=True)
class Sym:
    """Stand for `scale * symbol + offset`; anything beyond that arithmetic is refused.

    Raises: ShapeError: an unknown symbol, or arithmetic that is not affine.
    """

    name: str
    scale: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if self.name not in SYMBOLS:
            raise ShapeError(f"Unknown symbolic dim `{self.name}`; known are {', '.join(SYMBOLS)}.")

    def __mul__(self, factor: int) -> Sym:
        if not isinstance(factor, int):
            raise ShapeError(f"Only `{self}` times a whole number is a dim, not times `{factor}`.")
        return Sym(self.name, self.scale * factor, self.offset * factor)

    __rmul__ = __mul__

    def __add__(self, other: int) -> Sym:
        if not isinstance(other, int):
            raise ShapeError(f"Only `{self}` plus a whole number is a dim, not plus `{other}`.")
        return Sym(self.name, self.scale, self.offset + other)

    # A symbol in an `if` or as an index is a mistake that must not pass for a number.
    def __bool__(self) -> bool:
        raise self._unbound()

    def __index__(self) -> int:
        raise self._unbound()

    def _unbound(self) -> ShapeError:
        return ShapeError(f"The dim `{self}` has no value before a step binds it.")

    def __str__(self) -> str:
        text = self.name if self.scale == 1 else f"{self.scale}{self.name}"
        return f"{text}+{self.offset}" if self.offset else text


Dim = int | Sym

_PATTERN = re.compile(r"^(\d*)([A-Z])(?:\+(\d+))?$")


def bind(dim: Dim, values: Mapping[str, int]) -> int:
    """Give the value of `dim` where the step has `values`, for example `{"T": 17, "B": 3}`."""
    if isinstance(dim, int):
        return dim
    if dim.name not in values:
        raise ShapeError(
            f"The dim `{dim}` needs a value of `{dim.name}`; given are {dict(values)}."
        )
    return dim.scale * values[dim.name] + dim.offset


def parse_dim(text: str) -> Dim:
    """Read a dim as `str()` writes it."""
    if text.isdigit():
        return int(text)
    found = _PATTERN.match(text)
    if not found:
        raise ShapeError(
            f"`{text}` is not a dim: expected a whole number or a symbol like `T`, `B+1`."
        )
    return Sym(found[2], int(found[1] or 1), int(found[3] or 0))


T = Sym("T")
B = Sym("B")
R = Sym("R")
C = Sym("C")
P = Sym("P")
M = Sym("M")
