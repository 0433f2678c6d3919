"""Attention and its paged cache of keys and values; what latent attention shares with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir import dims as d
from treadle.ir.errors import ShapeError
from treadle.ir.ops.checks import expect, expect_ints
from treadle.ir.ops.definition import Dims, Types, define
from treadle.ir.ops.params import NoParams, rare
from treadle.ir.types import FLOATS, TensorType

# Operands of the ops that append to a cache.
STEP = "positions token_seq seq_rows block_table"


def expect_step(kind: str, **operands: TensorType) -> None:
    """Refuse a step input that lacks the type which all steps have. Raises: ShapeError."""
    shapes: dict[str, tuple[d.Dim, ...]] = {
        "positions": (d.T,),
        "token_seq": (d.T,),
        "seq_rows": (d.B,),
        "query_start": (d.B + 1,),
        "context_lens": (d.B,),
        "block_table": (d.R, d.M),
    }
    expect_ints(kind, **{name: (type_, shapes[name]) for name, type_ in operands.items()})


def cached_token_bytes(cache: TensorType) -> int:
    """Count what one token of one layer takes in a paged cache."""
    return cache.num_bytes({"P": 1}) // cache.size(2)


def _kv_write_bytes(_params: Any, inputs: Types, _outputs: Types, dims: Dims) -> int:
    appended = cached_token_bytes(inputs[6]) * dims["T"]
    return inputs[0].num_bytes(dims) + inputs[1].num_bytes(dims) + appended


@define(
    "kv_write",
    NoParams,
    f"k v {STEP} cache query_start+context_lens?",
    "",
    "anchor",
    bytes_=_kv_write_bytes,
    mutates="cache",
)
def kv_write(
    params: NoParams,
    k: TensorType,
    v: TensorType,
    positions: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    block_table: TensorType,
    cache: TensorType,
    query_start: TensorType | None = None,
    context_lens: TensorType | None = None,
) -> Types:
    """Append the step's keys and values to the pages of their rows.

    Shapes: k, v [T, G*D]; cache kv[P, G, S, D]. Position p of row r lies in page
    block_table[r, p // S], slot p % S. Tokens of a padding sequence (row -1) write nothing.
    Numerics: a quantised cache (docs/kv-cache.md) takes a page's codes when the page is full; it
    needs query_start and context_lens to know the pages that the step fills.
    """
    expect_step(
        "kv_write",
        positions=positions,
        token_seq=token_seq,
        seq_rows=seq_rows,
        block_table=block_table,
    )
    expect(cache.layout == "kv", "kv_write", "a paged cache", cache)
    if query_start is not None and context_lens is not None:
        expect_step("kv_write", query_start=query_start, context_lens=context_lens)
    elif cache.kv_format:
        expected = "query_start and context_lens with a quantised cache"
        expect(False, "kv_write", expected, cache)
    width = cache.size(1) * cache.size(3)
    expect(k == v and k.shape[-1] == width, "kv_write", f"k and v of width {width}", k, v)
    return ()


@dataclass(frozen=True)
class AttentionParams:
    """Heads of the queries and of the cache; `scale` multiplies the scores.

    With a `window` W > 0 a token sees itself and the W - 1 tokens before it. With `soft_cap` c > 0
    a score s counts as c tanh(s/c).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = rare(0)
    soft_cap: float = rare(0.0)


def _attention_flops(params: AttentionParams, _inputs: Types, _outputs: Types, dims: Dims) -> int:
    seen = min(dims["C"], params.window) if params.window else dims["C"]
    return 4 * dims["T"] * params.num_heads * params.head_dim * seen


def _attention_bytes(params: AttentionParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    seen = min(dims["C"], params.window) if params.window else dims["C"]
    query = inputs[0].num_bytes(dims) + outputs[0].num_bytes(dims)
    if "sinks" in attention.present(len(inputs)):
        query += inputs[-1].num_bytes(dims)
    return query + cached_token_bytes(inputs[1]) * dims["B"] * seen


@define(
    "attention",
    AttentionParams,
    "q cache block_table seq_rows query_start context_lens k+v? sinks?",
    "y",
    "anchor",
    flops=_attention_flops,
    bytes_=_attention_bytes,
)
def attention(
    params: AttentionParams,
    q: TensorType,
    cache: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
    k: TensorType | None = None,
    v: TensorType | None = None,
    sinks: TensorType | None = None,
) -> Types:
    """Attend causally from each token to the tokens of its row, through the pages.

    Formula: y = softmax(scale * q @ K.T + causal mask) @ V per head; query heads share H/G KV
    heads; with a window the mask hides older tokens too, with a soft cap scores are bent first;
    with sinks the softmax of head h has one more score, sinks[h], whose value is zero
    Shapes: q [T, H*D]; cache kv[P, G, S, D]; k, v [T, G*D]; sinks [H]; y [T, H*D]. A step's own
    tokens are already in the cache; with k and v they are read from there, as they were before
    quantisation.
    Cost: counted for B sequences of context C, or of the window where that is shorter.
    """
    expect_step(
        "attention",
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    width = params.num_heads * params.head_dim
    expect(q.shape[-1] == width, "attention", f"q of width {width}", q)
    if k is not None or v is not None:
        own_width = params.num_kv_heads * params.head_dim
        both = [own for own in (k, v) if own is not None]
        fits = k == v and both[0] == q.with_shape(q.shape[0], own_width)
        expect(fits, "attention", f"k and v, both, of width {own_width}", *both)
    if sinks is not None:
        fits = sinks.shape == (params.num_heads,) and sinks.dtype in FLOATS
        expect(fits, "attention", f"sinks [{params.num_heads}]", sinks)
    expect(
        cache.layout == "kv"
        and (cache.shape[1], cache.shape[3]) == (params.num_kv_heads, params.head_dim),
        "attention",
        f"a cache of {params.num_kv_heads} heads of {params.head_dim}",
        cache,
    )
    if params.num_heads % params.num_kv_heads:
        raise ShapeError(
            "`attention` expects query heads in whole groups per KV head; found "
            f"{params.num_heads} over {params.num_kv_heads}."
        )
    return (q,)
