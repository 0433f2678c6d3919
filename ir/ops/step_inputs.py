"""Ops that make a step's inputs from the rows' state, where the host need not know it."""

from __future__ import annotations

from treadle.ir import dims as d
from treadle.ir.ops.checks import expect_ints
from treadle.ir.ops.definition import Types, define
from treadle.ir.ops.params import NoParams
from treadle.ir.types import TensorType


@define(
    "advance",
    NoParams,
    "seq_rows last_token length",
    "token_ids positions token_seq query_start context_lens sample_index",
    "anchor",
    mutates="length",
)
def advance(
    params: NoParams, seq_rows: TensorType, last_token: TensorType, length: TensorType
) -> Types:
    """Prepare a decode step from the rows' state: one token per sequence, one longer each.

    Formula: position = length[row]; length[row] += 1; token = last_token[row];
    context = position + 1
    Shapes: seq_rows i32[B], -1 for padding; last_token, length i32[R]. A padding sequence gets
    token 0, position 0, context 0 and sample index -1.
    """
    expect_ints(
        "advance",
        seq_rows=(seq_rows, (d.B,)),
        last_token=(last_token, (d.R,)),
        length=(length, (d.R,)),
    )
    per_token, per_seq = TensorType((d.T,), "i32"), TensorType((d.B,), "i32")
    return (per_token, per_token, per_token, TensorType((d.B + 1,), "i32"), per_seq, per_seq)


@define("resolve_tokens", NoParams, "token_ids token_seq seq_rows last_token", "resolved", "anchor")
def resolve_tokens(
    params: NoParams,
    token_ids: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    last_token: TensorType,
) -> Types:
    """Fill in the tokens the host does not know yet: the step before is still running.

    Formula: resolved[t] = token_ids[t] if it is >= 0 else last_token[row of t]
    Shapes: token_ids, token_seq i32[T]; seq_rows i32[B]; last_token i32[R].
    """
    expect_ints(
        "resolve_tokens",
        token_ids=(token_ids, (d.T,)),
        token_seq=(token_seq, (d.T,)),
        seq_rows=(seq_rows, (d.B,)),
        last_token=(last_token, (d.R,)),
    )
    return (token_ids,)
