"""Products of rows and a weight, whole or head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir import dims as d
from treadle.ir.ops.checks import expect
from treadle.ir.ops.definition import Dims, Types, define, elements
from treadle.ir.types import DTYPE_BYTES, TensorType


@dataclass(frozen=True)
class LinearParams:
    """`out_dtype` is the result's dtype; empty for the input's."""

    out_dtype: str = ""


def _linear_flops(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return 2 * elements(outputs[0], dims) * d.bind(inputs[1].shape[1], dims)


@define("linear", LinearParams, "x weight bias?", "y", "anchor", flops=_linear_flops, any_rows=True)
def linear(
    params: LinearParams, x: TensorType, weight: TensorType, bias: TensorType | None = None
) -> Types:
    """Multiply each row by the transposed weight and add the bias.

    Formula: y = x @ weight.T + bias
    Shapes: x [T, K]; weight [N, K]; bias [N]; y [T, N].
    Numerics: accumulated in f32.
    """
    expect(
        len(weight.shape) == 2 and x.shape[-1] == weight.shape[1],
        "linear",
        "x [.., K] and a weight [N, K]",
        x,
        weight,
    )
    if bias is not None:
        expect(bias.shape == weight.shape[:1], "linear", "a bias [N]", weight, bias)
    return (TensorType((*x.shape[:-1], weight.shape[0]), params.out_dtype or x.dtype),)


@dataclass(frozen=True)
class HeadLinearParams:
    """Heads of x and of the weight; of a head's rows of the weight, `rows` from `first` on count.

    With `transposed` it is their columns that are multiplied by.
    """

    num_heads: int
    first: int
    rows: int
    transposed: bool = False


def _head_linear_flops(params: HeadLinearParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    summed = params.rows if params.transposed else inputs[1].size(1)
    return 2 * elements(outputs[0], dims) * summed


def _head_linear_bytes(params: HeadLinearParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    x, weight = inputs
    touched = params.num_heads * params.rows * weight.size(1) * DTYPE_BYTES[weight.dtype]
    return x.num_bytes(dims) + touched + outputs[0].num_bytes(dims)


@define(
    "head_linear",
    HeadLinearParams,
    "x weight",
    "y",
    "anchor",
    flops=_head_linear_flops,
    bytes_=_head_linear_bytes,
)
def head_linear(params: HeadLinearParams, x: TensorType, weight: TensorType) -> Types:
    """Multiply each head of each row by the head's own rows of the weight.

    Formula: y[t, h] = x[t, h, :K] @ w.T, w = weight[h*n + first : h*n + first + rows], n = N/H;
    transposed, y[t, h] = x[t, h, :rows] @ w
    Shapes: x [T, H*D], whose heads may be wider than what is multiplied; weight [N, K]; y
    [T, H*rows], or [T, H*K] if transposed.
    Numerics: accumulated in f32.
    Source: of latent attention, DeepSeek-V2, 2024: the projections up from the latent, moved from
    the keys to the queries and from the values to the results.
    """
    heads, kind = params.num_heads, "head_linear"
    is_whole = len(weight.shape) == 2 and weight.size(0) % heads == 0 and x.size(-1) % heads == 0
    expect(is_whole, kind, f"x and a weight [N, K] of {heads} heads", x, weight)
    fits = params.first >= 0 and params.first + params.rows <= weight.size(0) // heads
    expect(fits and params.rows > 0, kind, f"{params.rows} rows from {params.first} on", weight)
    taken, made = weight.size(1), params.rows
    if params.transposed:
        taken, made = made, taken
    expect(x.size(-1) // heads >= taken, kind, f"heads of at least {taken}", x)
    return (x.with_shape(*x.shape[:-1], heads * made),)
