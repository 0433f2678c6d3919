"""Ops that pick rows or cut them, without arithmetic beyond a constant factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir import dims as d
from treadle.ir.ops.checks import expect, expect_ints
from treadle.ir.ops.definition import Dims, Types, define
from treadle.ir.ops.params import NoParams
from treadle.ir.types import FLOATS, TensorType


@dataclass(frozen=True)
class EmbedParams:
    """`scale` multiplies the embedding (Gemma); 1.0 for most models."""

    scale: float = 1.0


def _embed_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return inputs[0].num_bytes(dims) + 2 * outputs[0].num_bytes(dims)


@define("embed", EmbedParams, "token_ids table", "rows", "anchor", bytes_=_embed_bytes)
def embed(params: EmbedParams, token_ids: TensorType, table: TensorType) -> Types:
    """Look up one row of the table per token.

    Formula: rows[t] = scale * table[token_ids[t]]
    Shapes: token_ids i32[T]; table [V, E]; rows [T, E].
    """
    expect_ints("embed", token_ids=(token_ids, (d.T,)))
    expect(len(table.shape) == 2 and table.dtype in FLOATS, "embed", "a table [V, E]", table)
    return (TensorType((d.T, table.shape[1]), table.dtype),)


@define("gather_rows", NoParams, "x index", "y", "row")
def gather_rows(params: NoParams, x: TensorType, index: TensorType) -> Types:
    """Keep the row of each sequence whose logits are wanted.

    Formula: y[b] = x[max(index[b], 0)]
    Shapes: x [T, E]; index i32[B]; y [B, E].
    """
    expect_ints("gather_rows", index=(index, (d.B,)))
    return (x.with_shape(d.B, *x.shape[1:]),)


@dataclass(frozen=True)
class SplitParams:
    """`sizes` are the widths of the parts of the last axis."""

    sizes: tuple[int, ...]


@define("split", SplitParams, "x", "parts", "view")
def split(params: SplitParams, x: TensorType) -> Types:
    """Cut the last axis into parts of the given sizes.

    Shapes: x [T, sum(sizes)]; parts [T, size] each.
    """
    expect(
        x.shape[-1] == sum(params.sizes),
        "split",
        f"a last axis of {'+'.join(map(str, params.sizes))}",
        x,
    )
    return tuple(x.with_shape(*x.shape[:-1], size) for size in params.sizes)
