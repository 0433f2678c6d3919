"""Attend causally from any number of query tokens per sequence to its pages, specialised warps.

As `attention_prefill_tma`, for Hopper alone. Programs stay, one a multiprocessor, and divide their
warps: one takes blocks of queries, heaviest first, off a counter that all programs share; one
fetches queries, keys and values with the bulk copy engine (TMA) into rings; two groups of four, the
consumers, attend, 64 rows each (a row: a query and a head of it). A consumer asks for the scores of
a tile before it asks for the weighted sum of the tile before, and takes exponentials while that one
is computed (FlashAttention-3, Shah et al., 2024); weights stay in registers. With PING_PONG the
consumers take turns at the tensor cores. Tiles come last one first: masks are needed in the first
one or two only, and the rest see whole tiles.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row):
  q, out        [T, H, D], [T, H * D]: contiguous, 16-bit
  k_cache,      [P, G, S, D]: contiguous, 16-bit; slots at and beyond the sequence's length are
  v_cache       fetched with their tile and never used: they may hold anything
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  query_start   i32[num_seqs + 1]: first token of each sequence, counted from the start of `q`; the
                arrays of sequences may be slices that start at any sequence of the step
  context_lens  i32[num_seqs]: tokens in the cache, the queries' own included
  counters      i32[2]: blocks taken but for the first ones, programs that are done; zero before and
                after every launch

Grid: programs that stay. Block n of them all is head n % heads (KV heads if PACK_HEADS, else query
heads) of the n // heads-th query block from the end; sequence i owns the query blocks from
(query_start[i] - query_start[0]) // BLOCK_Q + i on. Surplus blocks are left out.
Bound by the two products: 4 * H * D operations per pair of a query and a key it sees.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from treadle.kernels.templates.parts.attention_warps import attend_by_warps, describe

SHAPE = dict(
    NUM_HEADS=8,
    NUM_KV_HEADS=2,
    HEAD_DIM=64,
    PAGE_SIZE=64,
    SCALE=0.125,
)
SCHEDULE = dict(
    BLOCK_TOKENS=64,
    STAGES=2,
    QUERY_STAGES=2,
    PACK_HEADS=True,
    PING_PONG=False,
    NUM_PROGRAMS=132,
    num_warps=4,
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
def attention_prefill_gluon(
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
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    PING_PONG: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):
    """Attend from blocks of 128 rows until all are taken."""
    # Grid: axis 0 programs; each takes the next block when it has room for one.
    attend_by_warps(
        q_desc, k_desc, v_desc, block_table_ptr, seq_rows_ptr, query_start_ptr, context_lens_ptr,
        out_ptr, counters_ptr, table_stride, num_seqs, num_blocks, NUM_HEADS, NUM_KV_HEADS,
        HEAD_DIM, PAGE_SIZE, SCALE, BLOCK_TOKENS, STAGES, QUERY_STAGES, PACK_HEADS, PING_PONG,
        False,
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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
    num_heads, head_dim = SHAPE["NUM_HEADS"], SHAPE["HEAD_DIM"]
    packed = num_heads // SHAPE["NUM_KV_HEADS"] if SCHEDULE["PACK_HEADS"] else 1
    block_q = 64 // packed  # of each of two consumers
    num_blocks = num_tokens // (2 * block_q) + num_seqs
    num_programs = min(num_blocks * (num_heads // packed), SCHEDULE["NUM_PROGRAMS"])
    # Descriptors go with the launch: none has to be kept.
    tile = [min(SCHEDULE["BLOCK_TOKENS"], SHAPE["PAGE_SIZE"]), head_dim]
    attention_prefill_gluon[(num_programs,)](
        describe(q.view(-1, num_heads, head_dim), [block_q, packed, head_dim]),
        describe(k_cache.view(-1, head_dim), tile),
        describe(v_cache.view(-1, head_dim), tile),
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        counters,
        block_table.stride(0),
        num_seqs,
        num_blocks,
        **SHAPE,
        **SCHEDULE,
        enable_fp_fusion=True,
    )
