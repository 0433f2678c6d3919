"""Checks that type rules share: each raises with what it expected and the types it found."""

from __future__ import annotations

from treadle.ir import dims as d
from treadle.ir.errors import ShapeError
from treadle.ir.types import TensorType


def expect(ok: bool, kind: str, expected: str, *found: TensorType) -> None:
    """Refuse the types found unless all is `ok`. Raises: ShapeError."""
    if not ok:
        raise ShapeError(f"`{kind}` expects {expected}; found {' and '.join(map(str, found))}.")


def expect_ints(kind: str, **operands: tuple[TensorType, tuple[d.Dim, ...]]) -> None:
    """Refuse an operand that is not i32 of the shape beside it. Raises: ShapeError."""
    for name, (type_, shape) in operands.items():
        expected = TensorType(shape, "i32")
        expect(type_ == expected, kind, f"`{name}` of type {expected}", type_)
