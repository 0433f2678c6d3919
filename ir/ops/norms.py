"""Norms: of rows, of their heads, of their sections."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.ops.checks import expect
from treadle.ir.ops.definition import Types, define, per_element
from treadle.ir.types import TensorType


@dataclass(frozen=True)
class RmsNormParams:
    """`eps` is added to the mean square; `offset` to the weight."""

    eps: float
    offset: float = 0.0


@define("rms_norm", RmsNormParams, "x weight", "y", "row", flops=per_element(4), any_rows=True)
def rms_norm(params: RmsNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale each row to unit root mean square, then by the weight.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset)
    Shapes: x [T, E]; weight [E]; y [T, E].
    Numerics: computed in f32.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    expect(weight.shape == x.shape[-1:], "rms_norm", "a weight as wide as x's last axis", x, weight)
    return (x,)


@define("head_norm", RmsNormParams, "x weight", "y", "row", flops=per_element(4))
def head_norm(params: RmsNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale each head of each row to unit root mean square, then by the weight that heads share.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset), the mean over the D of a head
    Shapes: x [T, n*D]; weight [D]; y [T, n*D].
    Numerics: computed in f32.
    Source: Henry et al., Query-Key Normalization for Transformers, 2020.
    """
    expect(
        len(weight.shape) == 1 and x.size(-1) % weight.size(0) == 0,
        "head_norm",
        "a weight as wide as a head, and x of whole heads",
        x,
        weight,
    )
    return (x,)


@dataclass(frozen=True)
class LayerNormParams:
    """`eps` is added to the variance."""

    eps: float


@define(
    "layer_norm",
    LayerNormParams,
    "x weight bias?",
    "y",
    "row",
    flops=per_element(7),
    any_rows=True,
)
def layer_norm(
    params: LayerNormParams, x: TensorType, weight: TensorType, bias: TensorType | None = None
) -> Types:
    """Shift and scale each row to mean 0 and variance 1, then by the weight, and add the bias.

    Formula: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    Shapes: x [T, E]; weight [E]; bias [E]; y [T, E].
    Numerics: computed in f32; the variance is that of the row, not an estimate (divided by E).
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    for vector in (weight, bias):
        if vector is not None:
            expected = "weight and bias as wide as x's last axis"
            expect(vector.shape == x.shape[-1:], "layer_norm", expected, x, vector)
    return (x,)


@dataclass(frozen=True)
class SectionNormParams:
    """`sizes` are the widths of the sections; `eps` is added to each mean square, `offset` to the
    weight.
    """

    sizes: tuple[int, ...]
    eps: float
    offset: float = 0.0


@define("section_norm", SectionNormParams, "x weight", "y", "row", flops=per_element(4))
def section_norm(params: SectionNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale the first sections of each row, each to unit root mean square, then by the weight.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset), the mean over a section; what lies
    beyond the sections passes through
    Shapes: x [T, W]; weight [sum(sizes)], at most W; y [T, W].
    Numerics: computed in f32.
    Source: the norms of q and k in OLMo 2, 2025, where q, k and v are one projection.
    """
    width = sum(params.sizes)
    expect(
        weight.shape == (width,) and width <= x.size(-1),
        "section_norm",
        f"a weight of {'+'.join(map(str, params.sizes))} elements and x no narrower",
        x,
        weight,
    )
    return (x,)
