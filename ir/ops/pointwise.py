"""Ops on each element alone: sums, factors, caps, activations with a gate or without."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.errors import SpecError
from treadle.ir.ops.checks import expect
from treadle.ir.ops.definition import Types, define, per_element
from treadle.ir.ops.params import NoParams, rare
from treadle.ir.types import TensorType

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@define("add", NoParams, "a b", "y", "pointwise", flops=per_element(1), any_rows=True)
def add(params: NoParams, a: TensorType, b: TensorType) -> Types:
    """Add two tensors of one shape: the residual connection.

    Formula: y = a + b
    """
    expect(a == b, "add", "two operands of one type", a, b)
    return (a,)


@dataclass(frozen=True)
class ScaleParams:
    """`factor` is what every element is multiplied by."""

    factor: float


@define("scale", ScaleParams, "x", "y", "pointwise", flops=per_element(1), any_rows=True)
def scale(params: ScaleParams, x: TensorType) -> Types:
    """Multiply by a constant.

    Formula: y = factor * x
    """
    return (x,)


@dataclass(frozen=True)
class SoftCapParams:
    """`cap` is what no result's absolute value exceeds."""

    cap: float


@define("soft_cap", SoftCapParams, "x", "y", "pointwise", flops=per_element(5), any_rows=True)
def soft_cap(params: SoftCapParams, x: TensorType) -> Types:
    """Bend what is large, so that nothing exceeds the cap.

    Formula: y = cap * tanh(x / cap)
    Numerics: computed in f32.
    Source: Gemma Team, Gemma 2, 2024.
    """
    return (x,)


def _expect_activation(kind: str, act: str) -> None:
    if act not in ACTIVATIONS:
        raise SpecError(f"`{kind}` knows the activations {', '.join(ACTIVATIONS)}; found `{act}`.")


@dataclass(frozen=True)
class ActivateParams:
    """`act` is the activation."""

    act: str


@define("activate", ActivateParams, "x", "y", "pointwise", flops=per_element(6), any_rows=True)
def activate(params: ActivateParams, x: TensorType) -> Types:
    """Apply an activation to every element: of a feed-forward without a gate.

    Formula: y = act(x)
    Numerics: computed in f32; `gelu_tanh` is the approximation by tanh.
    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    _expect_activation("activate", params.act)
    return (x,)


@dataclass(frozen=True)
class GluParams:
    """`act` is the gate's activation; `interleave` the width of alternating gate and up groups.

    With a `limit` the gate is cut off above it, up on both sides. `sharpness` multiplies what the
    activation is applied to and divides the result; `up_offset` is added to up.
    """

    act: str = "silu"
    interleave: int = 0
    limit: float = rare(0.0)
    sharpness: float = rare(1.0)
    up_offset: float = rare(0.0)


@define("glu", GluParams, "gate_up", "y", "pointwise", flops=per_element(6), any_rows=True)
def glu(params: GluParams, gate_up: TensorType) -> Types:
    """Gate one half of the features with the activated other half.

    Formula: y = act(s * min(gate, limit)) / s * (clamp(up, -limit, limit) + up_offset), s being the
    sharpness; by default act(gate) * up
    Shapes: gate_up [T, 2F]; y [T, F]. With interleave 0 the first F features are the gate; with
    g > 0 groups of g gate features alternate with groups of g up features.
    Numerics: computed in f32.
    Source: Shazeer, GLU Variants Improve Transformer, 2020; limit, sharpness and offset as in
    OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025.
    """
    width = gate_up.size(-1)
    expect(width % 2 == 0, "glu", "an even last axis", gate_up)
    _expect_activation("glu", params.act)
    if params.limit < 0 or params.sharpness <= 0:
        raise SpecError(
            f"`glu` expects a limit of 0 or more and a sharpness above 0; found {params.limit} and "
            f"{params.sharpness}."
        )
    if params.interleave and (width // 2) % params.interleave:
        raise SpecError(f"`glu` can't alternate groups of {params.interleave} in {gate_up}.")
    return (gate_up.with_shape(*gate_up.shape[:-1], width // 2),)
