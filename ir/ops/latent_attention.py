"""Latent attention and its paged cache: one latent a token, which all heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir import dims as d
from treadle.ir.errors import SpecError
from treadle.ir.ops.attention import STEP, cached_token_bytes, expect_step
from treadle.ir.ops.checks import expect
from treadle.ir.ops.definition import Dims, Types, define
from treadle.ir.ops.params import NoParams, rare
from treadle.ir.types import TensorType


def _expect_latents(kind: str, latents: TensorType) -> None:
    is_one = latents.layout == "latent" and latents.size(1) == 1
    expect(is_one, kind, "a paged cache of latents", latents)


def _latent_write_bytes(_params: Any, inputs: Types, _outputs: Types, dims: Dims) -> int:
    appended = cached_token_bytes(inputs[-1]) * dims["T"]
    return inputs[0].num_bytes(dims) + inputs[1].num_bytes(dims) + appended


@define(
    "latent_write",
    NoParams,
    f"latent k_rope {STEP} latents",
    "",
    "anchor",
    bytes_=_latent_write_bytes,
    mutates="latents",
)
def latent_write(
    params: NoParams,
    latent: TensorType,
    k_rope: TensorType,
    positions: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    block_table: TensorType,
    latents: TensorType,
) -> Types:
    """Append the step's latents, one for all heads of a token, to the pages of their rows.

    Shapes: latent [T, R]; k_rope [T, r], the rotated part of the key; latents latent[P, 1, S, R+r].
    Position p of row r lies in page block_table[r, p // S], slot p % S. Tokens of a padding
    sequence (row -1) write nothing.
    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """
    expect_step(
        "latent_write",
        positions=positions,
        token_seq=token_seq,
        seq_rows=seq_rows,
        block_table=block_table,
    )
    _expect_latents("latent_write", latents)
    rope_dim = latents.size(3) - latent.size(-1)
    expect(
        rope_dim > 0 and k_rope == latent.with_shape(latent.shape[0], rope_dim),
        "latent_write",
        f"a latent and a k_rope of {latents.size(3)} features together",
        latent,
        k_rope,
    )
    return ()


def _expect_prompts(kind: str, whole_from: int, least: int) -> None:
    # A sequence of one token is decoded, be it its first.
    if whole_from == 1 or whole_from < least:
        raise SpecError(f"`{kind}` tells prompts by 2 tokens or more; found {whole_from}.")


@dataclass(frozen=True)
class LatentAttentionParams:
    """Heads of the queries; `scale` multiplies the scores.

    The first `value_dim` features of a latent are its value, all of them its key. With `whole_from`
    n > 0 sequences whose tokens, n or more, are all of this step are left out.
    """

    num_heads: int
    value_dim: int
    scale: float
    whole_from: int = rare(0)


def _latent_attention_flops(
    params: LatentAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    if params.whole_from:
        return 0
    width = inputs[2].size(3) + params.value_dim
    return 2 * dims["T"] * params.num_heads * width * dims["C"]


def _latent_attention_bytes(
    params: LatentAttentionParams, inputs: Types, outputs: Types, dims: Dims
) -> int:
    query = 2 * inputs[0].num_bytes(dims)
    rope_dim = inputs[2].size(3) - params.value_dim
    rotated = TensorType((d.T, params.num_heads * rope_dim), inputs[1].dtype).num_bytes(dims)
    return query + rotated + cached_token_bytes(inputs[2]) * dims["B"] * dims["C"]


@define(
    "latent_attention",
    LatentAttentionParams,
    "q q_rope latents block_table seq_rows query_start context_lens",
    "y",
    "anchor",
    flops=_latent_attention_flops,
    bytes_=_latent_attention_bytes,
)
def latent_attention(
    params: LatentAttentionParams,
    q: TensorType,
    q_rope: TensorType,
    latents: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
) -> Types:
    """Attend causally from each token to the latents of its row, which all heads share.

    Formula: y[t, h] = softmax(scale * (q[t, h] @ C.T + q_rope[t, h, -r:] @ K.T) + causal mask) @ C,
    where a row of the cache is a row of C, the latents, and one of K, the keys' rotated part; 0 for
    sequences that are left out
    Shapes: q [T, H*R]; q_rope [T, H*D], of whose heads the last r features count; latents
    latent[P, 1, S, R+r], R = value_dim; y [T, H*R]. A step's own tokens are in the cache already.
    Cost: counted for B sequences of context C; where some are left out operations are not counted,
    for it may be all of them.
    Source: DeepSeek-AI, DeepSeek-V2, 2024: latent attention with the projections up absorbed.
    """
    kind = "latent_attention"
    expect_step(
        kind,
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    _expect_latents(kind, latents)
    width = params.num_heads * params.value_dim
    rope_dim = latents.size(3) - params.value_dim
    expect(rope_dim > 0, kind, f"latents of more than {params.value_dim} features", latents)
    _expect_prompts(kind, params.whole_from, least=0)
    expect(q.shape[-1] == width, kind, f"q of width {width}", q)
    heads = params.num_heads
    is_whole = q_rope.size(-1) % heads == 0 and q_rope.size(-1) // heads >= rope_dim
    expect(is_whole, kind, f"{heads} heads of at least {rope_dim} features", q_rope)
    return (q,)


@dataclass(frozen=True)
class PromptAttentionParams:
    """Heads; of a head's q `nope_dim` features are not rotated; `value_dim` are of its value.

    `scale` multiplies the scores. Sequences whose tokens, `whole_from` or more, are all of this
    step are served.
    """

    num_heads: int
    nope_dim: int
    value_dim: int
    scale: float
    whole_from: int


def _prompt_attention_flops(
    params: PromptAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    features = inputs[0].size(-1) + params.num_heads * params.value_dim
    return 2 * dims["T"] * features * dims["C"]


def _prompt_attention_bytes(
    params: PromptAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    q, kv, latents, *_, y = inputs
    rope_dim = q.size(-1) // params.num_heads - params.nope_dim
    rotated = TensorType((d.T, rope_dim), latents.dtype).num_bytes(dims)
    return q.num_bytes(dims) + kv.num_bytes(dims) + rotated + y.num_bytes(dims)


@define(
    "prompt_attention",
    PromptAttentionParams,
    "q kv latents block_table seq_rows query_start context_lens y",
    "",
    "anchor",
    flops=_prompt_attention_flops,
    bytes_=_prompt_attention_bytes,
    mutates="y",
)
def prompt_attention(
    params: PromptAttentionParams,
    q: TensorType,
    kv: TensorType,
    latents: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
    y: TensorType,
) -> Types:
    """Attend causally within the prompts that begin in this step, to keys and values projected up.

    Formula: y[t, h] = softmax(scale * q[t, h] @ (k[h], K).T + causal mask) @ v[h], where k and v
    are the parts of kv, K the rotated part of the keys; for tokens of sequences that are whole,
    whole_from tokens or more; other rows of y stay
    Shapes: q [T, H*(n+r)], n = nope_dim; kv [T, H*(n+v)], v = value_dim; latents latent[P, 1, S,
    R+r], whose last r features are read; y [T, H*v].
    Cost: counted as if all tokens were of whole prompts, with C keys for each.
    Source: DeepSeek-AI, DeepSeek-V2, 2024: latent attention as it is described.
    """
    kind, heads = "prompt_attention", params.num_heads
    expect_step(
        kind,
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    _expect_latents(kind, latents)
    _expect_prompts(kind, params.whole_from, least=2)
    key_dim = q.size(-1) // heads
    fits = q.size(-1) % heads == 0 and params.nope_dim < key_dim
    expect(fits, kind, f"q of {heads} heads of more than {params.nope_dim}", q)
    expect(key_dim - params.nope_dim < latents.size(3), kind, "a rotated part in it", latents)
    own = q.with_shape(q.shape[0], heads * (params.nope_dim + params.value_dim))
    expect(kv == own, kind, f"kv of type {own}", kv)
    out = q.with_shape(q.shape[0], heads * params.value_dim)
    expect(y == out, kind, f"y of type {out}", y)
    return ()
