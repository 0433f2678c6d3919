"""Attend causally from any number of query tokens per sequence, with a quantised KV cache.

A sequence's earlier tokens are read from its pages, and from its open page, as
`attention_decode_quantised` reads them. The step's own tokens are read as they were computed, from
k and v; only what a later step reads has been through quantisation. Programs find their sequence
and query block on the device, as in `attention_prefill`.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row):
  q, out        [T, H, D], [T, H * D]: contiguous
  k, v          [T, G * D]: contiguous; the step's own keys and values
  k_cache,      u8[P, G, block bytes]: contiguous, as `attention_decode_quantised` describes them;
  v_cache       only full pages of earlier tokens are read
  k_open,       f16[R, S, G, D]: contiguous; the page of each row that is not full, with the step's
  v_open        own tokens: only earlier ones are read
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  query_start   i32[num_seqs + 1]: first token of each sequence, counted from the start of `q`; the
                arrays of sequences may be slices that start at any sequence of the step
  context_lens  i32[num_seqs]: tokens of the sequence, the queries' own included

Grid: (head, query block), where head is a KV head if PACK_HEADS, else a query head; sequence i owns
the query blocks from (query_start[i] - query_start[0]) // BLOCK_Q + i on. Surplus programs leave.
BLOCK_TOKENS divides S.
Bound by the two dots: 4 * H * D operations per pair of a query and a key it sees.
"""

import torch

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
    PACK_HEADS=True,
    USE_PTX=False,
    num_warps=4,
    num_stages=3,
)


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
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the attention output of `num_seqs` sequences of at most `num_tokens` tokens in all."""
    group_heads = SHAPE["NUM_HEADS"] // SHAPE["NUM_KV_HEADS"]
    block_q = SCHEDULE["BLOCK_ROWS"] // (group_heads if SCHEDULE["PACK_HEADS"] else 1)
    num_heads = SHAPE["NUM_KV_HEADS"] if SCHEDULE["PACK_HEADS"] else SHAPE["NUM_HEADS"]
    grid = (num_heads, num_tokens // block_q + num_seqs)
    attention_prefill_quantised[grid](
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
        **SCHEDULE,
        LEAVES_WHOLE=False,
        enable_fp_fusion=True,
    )
