"""Attend causally with a quantised KV cache, for whole prompts by specialised warps.

For Hopper alone, two kernels. Sequences that begin in the step see the step's own tokens only, as
they were computed: warps that fetch and warps that attend share them as in
`attention_prefill_gluon`, but keys and values come from rows of k and v, not from pages. All other
sequences, and padding, are attended as in `attention_prefill_quantised`.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row):
  q, out        [T, H, D], [T, H * D]: contiguous, 16-bit
  k, v          [T, G * D]: contiguous, 16-bit; the step's own keys and values
  k_cache,      u8[P, G, block bytes]: contiguous, as `attention_decode_quantised` describes them;
  v_cache       only full pages of earlier tokens are read
  k_open,       f16[R, S, G, D]: contiguous; the page of each row that is not full, with the step's
  v_open        own tokens: only earlier ones are read
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  query_start   i32[num_seqs + 1]: first token of each sequence, counted from the start of `q`; the
                arrays of sequences may be slices that start at any sequence of the step
  context_lens  i32[num_seqs]: tokens of the sequence, the queries' own included
  counters      i32[2]: blocks taken but for the first ones, programs that are done; zero before and
                after every launch

Grid: of the first kernel as in `attention_prefill_quantised`, of the second as in
`attention_prefill_gluon`. BLOCK_TOKENS divides S.
Bound by the two dots: 4 * H * D operations per pair of a query and a key it sees.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from treadle.kernels.templates.parts.attention_warps import attend_by_warps, describe
from treadle.kernels.templates.parts.quantised_prefill import attention_prefill_quantised

SHAPE = dict(
    NUM_HEADS=8,
    NUM_KV_HEADS=2,
    HEAD_DIM=64,
    PAGE_SIZE=64,
    SCALE=0.125,
    KV_FORMAT="int8",
)
SCHEDULE = dict(
    BLOCK_ROWS=64,
    BLOCK_TOKENS=64,
    USE_PTX=False,
    OWN_TOKENS=64,
    STAGES=2,
    QUERY_STAGES=2,
    PACK_HEADS=True,
    PING_PONG=False,
    NUM_PROGRAMS=132,
    num_warps=4,
    num_stages=3,
)


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@gluon.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_blocks"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def attend_whole_prompts(
    q_desc,
    k_desc,
    v_desc,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    counters_ptr,
    table_stride,
    num_seqs,
    num_blocks,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SCALE: gl.constexpr,
    OWN_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Attend from blocks of 128 rows of sequences that begin in the step, until all are taken."""
    # Grid: axis 0 programs; each takes the next block when it has room for one.
    attend_by_warps(
        q_desc, k_desc, v_desc, block_table_ptr, seq_rows_ptr, query_start_ptr, context_lens_ptr,
        out_ptr, counters_ptr, table_stride, num_seqs, num_blocks, NUM_HEADS, NUM_KV_HEADS,
        HEAD_DIM, PAGE_SIZE, SCALE, OWN_TOKENS, STAGES, QUERY_STAGES, PACK_HEADS, PING_PONG,
        True,
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_open: torch.Tensor,
    v_open: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the attention output of `num_seqs` sequences of at most `num_tokens` tokens in all."""
    num_heads, num_kv_heads = SHAPE["NUM_HEADS"], SHAPE["NUM_KV_HEADS"]
    head_dim, group_heads = SHAPE["HEAD_DIM"], num_heads // num_kv_heads
    pack_heads = SCHEDULE["PACK_HEADS"]
    packed, heads = (group_heads, num_kv_heads) if pack_heads else (1, num_heads)
    block_q = SCHEDULE["BLOCK_ROWS"] // packed
    attention_prefill_quantised[(heads, num_tokens // block_q + num_seqs)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        k_open,
        v_open,
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        block_table.stride(0),
        num_seqs,
        **SHAPE,
        BLOCK_ROWS=SCHEDULE["BLOCK_ROWS"],
        BLOCK_TOKENS=SCHEDULE["BLOCK_TOKENS"],
        PACK_HEADS=pack_heads,
        USE_PTX=SCHEDULE["USE_PTX"],
        LEAVES_WHOLE=True,
        num_warps=SCHEDULE["num_warps"],
        num_stages=SCHEDULE["num_stages"],
        enable_fp_fusion=True,
    )
    rows = 64 // packed  # of each of two consumers
    num_blocks = num_tokens // (2 * rows) + num_seqs
    tile = [SCHEDULE["OWN_TOKENS"], head_dim]
    # Descriptors go with the launch: none has to be kept.
    attend_whole_prompts[(min(num_blocks * heads, SCHEDULE["NUM_PROGRAMS"]),)](
        describe(q.view(-1, num_heads, head_dim), [rows, packed, head_dim]),
        describe(k.view(-1, num_kv_heads * head_dim), tile),
        describe(v.view(-1, num_kv_heads * head_dim), tile),
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        counters,
        block_table.stride(0),
        num_seqs,
        num_blocks,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=SHAPE["PAGE_SIZE"],
        SCALE=SHAPE["SCALE"],
        OWN_TOKENS=SCHEDULE["OWN_TOKENS"],
        STAGES=SCHEDULE["STAGES"],
        QUERY_STAGES=SCHEDULE["QUERY_STAGES"],
        PACK_HEADS=pack_heads,
        PING_PONG=SCHEDULE["PING_PONG"],
        num_warps=4,
        enable_fp_fusion=True,
    )
