"""Mixtures of experts: choose them, multiply by their weights, add up what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir import dims as d
from treadle.ir.errors import SpecError
from treadle.ir.ops.checks import expect
from treadle.ir.ops.definition import Dims, Types, define, elements, per_element
from treadle.ir.ops.params import NoParams
from treadle.ir.types import FLOATS, TensorType


@dataclass(frozen=True)
class RouteParams:
    """`score` turns logits into probabilities: `softmax` over experts, or `sigmoid` of each.

    `top_k` experts are chosen for each token; with `normalise` their probabilities are made to sum
    to 1, then multiplied by `scaling`. Experts in `num_groups` groups of equal size: only those of
    the `kept_groups` best are chosen from, a group scored by the sum of its `group_top` best.
    """

    top_k: int
    score: str = "softmax"
    normalise: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_top: int = 1


@define("route", RouteParams, "logits correction?", "experts scales", "row", any_rows=True)
def route(params: RouteParams, logits: TensorType, correction: TensorType | None = None) -> Types:
    """Choose the experts of each token, and what their results are scaled by.

    Formula: p = score(logits); experts = top_k of p + correction within the best groups;
    scales = scaling * p[experts], over their sum where normalised
    Shapes: logits f32[T, X]; correction f32[X]; experts i32[T, k], the best first, of equal ones
    the lower number; scales f32[T, k].
    Numerics: the correction decides the choice alone, not the scales.
    Source: Shazeer et al., Outrageously Large Neural Networks, 2017; groups and correction as in
    DeepSeek-V2 and DeepSeek-V3 Technical Reports, 2024.
    """
    expect(logits.dtype == "f32" and len(logits.shape) == 2, "route", "logits f32[T, X]", logits)
    num_experts = logits.size(1)
    if correction is not None:
        expected = TensorType((num_experts,), "f32")
        expect(correction == expected, "route", f"a correction {expected}", correction)
    if params.score not in ("softmax", "sigmoid"):
        raise SpecError(f"`route` scores by `softmax` or `sigmoid`, found `{params.score}`.")
    groups, kept = params.num_groups, params.kept_groups
    if groups < 1 or num_experts % groups or not 1 <= kept <= groups:
        raise SpecError(
            f"`route` keeps some of several equal groups; found {kept} of {groups} groups of "
            f"{num_experts} experts."
        )
    size = num_experts // groups
    if not 1 <= params.top_k <= kept * size or not 1 <= params.group_top <= size:
        raise SpecError(
            f"`route` can't choose {params.top_k} experts from {kept} groups of {size}, scored by "
            f"their best {params.group_top}."
        )
    shape = (logits.shape[0], params.top_k)
    return (TensorType(shape, "i32"), TensorType(shape, "f32"))


def _expect_expert_weight(
    kind: str, x: TensorType, weight: TensorType, bias: TensorType | None
) -> None:
    expect(
        len(weight.shape) == 3 and x.shape[-1] == weight.shape[2],
        kind,
        "x [.., K] and a weight [X, N, K]",
        x,
        weight,
    )
    if bias is not None:
        expect(bias.shape == weight.shape[:2], kind, "a bias [X, N]", weight, bias)


def _choice_rows(experts: TensorType) -> d.Dim:
    """Give kT: one row for each choice of each token."""
    return experts.shape[0] * experts.size(1)


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Give how many distinct experts that many tokens choose, if each choice is as likely.

    Formula: X * (1 - (1 - k/X)^T)
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def _expert_bytes(
    x: TensorType, weight: TensorType, choices: int, tokens: int, outputs: Types, dims: Dims
) -> int:
    """Count x, results and ids once, and the weights of the experts that the choices touch."""
    touched = expected_experts(weight.size(0), choices, tokens)
    each = weight.num_bytes(dims) // weight.size(0)
    ids = TensorType((choices,), "i32").num_bytes(dims) * tokens
    moved = x.num_bytes(dims) + sum(type_.num_bytes(dims) for type_ in outputs)
    return round(touched * each) + ids + moved


def _expert_linear_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    x, weight, experts, *_ = inputs
    tokens = d.bind(experts.shape[0], dims)
    return _expert_bytes(x, weight, experts.size(1), tokens, outputs, dims)


def _expert_flops(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return 2 * elements(outputs[0], dims) * inputs[1].size(2)


@define(
    "expert_linear",
    NoParams,
    "x weight experts bias?",
    "y",
    "anchor",
    flops=_expert_flops,
    bytes_=_expert_linear_bytes,
    any_rows=True,
)
def expert_linear(
    params: NoParams,
    x: TensorType,
    weight: TensorType,
    experts: TensorType,
    bias: TensorType | None = None,
) -> Types:
    """Multiply rows by the weights of the experts chosen for their token.

    Formula: y[t*k+j] = x[row] @ weight[experts[t, j]].T + bias[experts[t, j]]; row is t where x has
    a row per token, t*k+j where it has one per choice
    Shapes: x [T, K] or [kT, K]; weight [X, N, K]; experts i32[T, k]; bias [X, N]; y [kT, N].
    Numerics: accumulated in f32.
    Cost: bytes are of the experts that T tokens touch on average, every choice being as likely.
    """
    expect(
        experts.dtype == "i32" and len(experts.shape) == 2,
        "expert_linear",
        "experts i32[T, k]",
        experts,
    )
    _expect_expert_weight("expert_linear", x, weight, bias)
    rows = _choice_rows(experts)
    expect(
        x.shape[0] in (experts.shape[0], rows),
        "expert_linear",
        "x with a row per token or per choice",
        x,
        experts,
    )
    return (x.with_shape(rows, weight.shape[1]),)


@dataclass(frozen=True)
class SortParams:
    """`num_experts` is how many there are, chosen or not."""

    num_experts: int


@define("sort_by_expert", SortParams, "experts", "order starts", "row")
def sort_by_expert(params: SortParams, experts: TensorType) -> Types:
    """Sort the choices of all tokens by expert, those of one expert in the order of tokens.

    Formula: order = argsort of experts, stable; starts[e] = the number of choices below e
    Shapes: experts i32[T, k]; order i32[kT], of numbers t*k+j; starts i32[X+1].
    """
    expect(
        experts.dtype == "i32" and len(experts.shape) == 2,
        "sort_by_expert",
        "experts i32[T, k]",
        experts,
    )
    starts = TensorType((params.num_experts + 1,), "i32")
    return (TensorType((_choice_rows(experts),), "i32"), starts)


def _grouped_linear_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    x, weight, order, *_ = inputs
    choices = d.bind(order.shape[0], {"T": 1, "B": 1})
    tokens = d.bind(order.shape[0], dims) // choices
    return _expert_bytes(x, weight, choices, tokens, outputs, dims)


@define(
    "grouped_linear",
    NoParams,
    "x weight order starts bias?",
    "y",
    "anchor",
    flops=_expert_flops,
    bytes_=_grouped_linear_bytes,
)
def grouped_linear(
    params: NoParams,
    x: TensorType,
    weight: TensorType,
    order: TensorType,
    starts: TensorType,
    bias: TensorType | None = None,
) -> Types:
    """Multiply rows by the weights of the experts chosen for their token, expert by expert.

    Formula: as `expert_linear`; the choices of expert e are order[starts[e]:starts[e+1]]
    Shapes: x [T, K] or [kT, K]; weight [X, N, K]; order i32[kT]; starts i32[X+1]; bias [X, N];
    y [kT, N].
    Numerics: accumulated in f32.
    Cost: bytes are of the experts that T tokens touch on average, every choice being as likely.
    """
    _expect_expert_weight("grouped_linear", x, weight, bias)
    expected = TensorType((weight.size(0) + 1,), "i32")
    expect(starts == expected, "grouped_linear", f"starts of type {expected}", starts)
    expect(
        order.dtype == "i32" and len(order.shape) == 1,
        "grouped_linear",
        "order i32[kT]",
        order,
    )
    return (x.with_shape(order.shape[0], weight.shape[1]),)


@define("combine", NoParams, "rows scales", "y", "row", any_rows=True)
def combine(params: NoParams, rows: TensorType, scales: TensorType) -> Types:
    """Add up the results of each token's experts, scaled.

    Formula: y[t] = sum over j of scales[t, j] * rows[t*k+j]
    Shapes: rows [kT, E]; scales f32[T, k]; y [T, E].
    Numerics: added in f32, in the order of the choices.
    """
    expect(
        scales.dtype == "f32" and len(scales.shape) == 2 and rows.shape[0] == _choice_rows(scales),
        "combine",
        "rows [kT, E] and scales f32[T, k]",
        rows,
        scales,
    )
    return (rows.with_shape(scales.shape[0], *rows.shape[1:]),)


@define("row_gate", NoParams, "x gate", "y", "pointwise", flops=per_element(2), any_rows=True)
def row_gate(params: NoParams, x: TensorType, gate: TensorType) -> Types:
    """Scale each row by the sigmoid of its gate.

    Formula: y[t] = x[t] / (1 + exp(-gate[t]))
    Shapes: x [T, E]; gate [T, 1]; y [T, E].
    Numerics: computed in f32.
    """
    expect(
        gate.dtype in FLOATS and gate.shape == (x.shape[0], 1),
        "row_gate",
        "x [T, E] and a gate [T, 1]",
        x,
        gate,
    )
    return (x,)
