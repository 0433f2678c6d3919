"""Rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir import dims as d
from treadle.ir.ops.checks import expect, expect_ints
from treadle.ir.ops.definition import Types, define, per_element
from treadle.ir.ops.params import rare
from treadle.ir.types import TensorType


@dataclass(frozen=True)
class RopeParams:
    """`head_dim` is the width of a head; the table's width r says how much of it is rotated.

    Pairs are made of the two halves of these r features, or of neighbours if `interleaved`. The
    features before `start` pass through.
    """

    head_dim: int
    interleaved: bool = rare(False)
    start: int = rare(0)


@define("rope", RopeParams, "x positions table", "y", "pointwise", flops=per_element(6))
def rope(params: RopeParams, x: TensorType, positions: TensorType, table: TensorType) -> Types:
    """Rotate each head's halves by the angle of the token's position.

    Formula: y[:r/2] = x1*cos - x2*sin; y[r/2:r] = x2*cos + x1*sin; dims beyond r pass through;
    interleaved, x1 and y[:r/2] are the even features below r, x2 and y[r/2:r] the odd ones; all
    counted from `start`
    Shapes: x [T, n*D]; positions i32[T]; table f32[C, r], cosines first, then sines.
    Numerics: computed in f32.
    Source: Su et al., RoFormer, 2021; halves as in Hugging Face's `rotate_half`.
    """
    expect_ints("rope", positions=(positions, (d.T,)))
    head_dim, rotary_dim = params.head_dim, table.size(-1)
    expect(x.size(-1) % head_dim == 0, "rope", f"heads of {head_dim}", x)
    expect(
        params.start + rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "rope",
        f"a table of even width no wider than the head of {head_dim} from {params.start} on",
        table,
    )
    return (x,)
