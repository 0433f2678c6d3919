"""Attend from one query token per sequence to the latents of its pages, which all heads share.

Token i is the query of sequence i. A row of the cache is the value of all heads in its first part,
and their key as a whole: each tile is read once for a block of heads and multiplied twice. The
tokens of a sequence are cut into splits on the device, by its length alone; one split writes the
output itself, several write partial results that the last of them to arrive combines in the order
of the splits, so the result does not depend on timing.

Shapes (H query heads, S tokens per page, P pages, R rows, M pages per row):
  q, out        [T, H * VALUE_DIM]: contiguous, T >= num_seqs
  q_rope        [T, H * Q_DIM]: contiguous; of a head the last ROPE_DIM features count
  latents       [P, 1, S, VALUE_DIM + ROPE_DIM]: contiguous; slots at and beyond the sequence's
                length are never read
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  context_lens  i32[num_seqs]: tokens in the cache, the query's own included
  partial_out   f32, at least num_seqs * H' * MAX_SPLITS * VALUE_DIM elements of scratch, H' the
                heads in whole blocks of BLOCK_HEADS
  partial_lse   f32, at least num_seqs * H' * MAX_SPLITS elements of scratch
  counters      i32, at least num_seqs * H' / BLOCK_HEADS elements, zero before the first launch and
                after each

Grid: (block of heads, sequence, split). A program without a split of its own leaves at once.
Bound by reading the latents once: context * (VALUE_DIM + ROPE_DIM) elements per sequence.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below
from treadle.kernels.templates.parts.pages import load_page

SHAPE = dict(
    NUM_HEADS=16,
    VALUE_DIM=512,
    ROPE_DIM=64,
    Q_DIM=192,
    PAGE_SIZE=64,
    SCALE=0.07216878364870322,
)
SCHEDULE = dict(
    BLOCK_HEADS=16,
    BLOCK_TOKENS=32,
    MAX_SPLITS=8,
    MIN_CHUNK_TOKENS=128,
    USE_PDL=False,
    num_warps=4,
    num_stages=2,
)


@triton.jit
def _combine_splits(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the partial results of one sequence and block of heads, in the order of the splits."""
    BLOCK_SPLITS: tl.constexpr = triton.next_power_of_2(MAX_SPLITS)
    # A part of the features at a time, so that registers hold the tiles of several splits.
    BLOCK_D: tl.constexpr = min(128, triton.next_power_of_2(VALUE_DIM))
    ROUND: tl.constexpr = max(1, min(BLOCK_SPLITS, 8192 // (BLOCK_HEADS * BLOCK_D)))
    heads = tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    splits = tl.arange(0, BLOCK_SPLITS)  # [BLOCK_SPLITS]
    # Other programs wrote these: `.cg` reads from L2, not from this multiprocessor's own cache.
    lse = tl.load(
        partial_lse_ptr + splits[:, None] * BLOCK_HEADS + heads[None, :],
        mask=(splits < num_splits)[:, None],
        other=float("-inf"),
        cache_modifier=".cg",
    )  # [BLOCK_SPLITS, BLOCK_HEADS]
    best = tl.max(lse, 0)  # [BLOCK_HEADS]
    total = tl.sum(tl.exp2(lse - best[None, :]), 0)  # [BLOCK_HEADS]
    for first_dim in range(0, VALUE_DIM, BLOCK_D):
        dims = first_dim + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        offsets = heads[:, None] * VALUE_DIM + dims[None, :]  # [BLOCK_HEADS, BLOCK_D]
        acc = tl.zeros((BLOCK_HEADS, BLOCK_D), tl.float32)  # [BLOCK_HEADS, BLOCK_D]
        for first in range(0, num_splits, ROUND):
            some = first + tl.arange(0, ROUND)  # [ROUND]
            live = (some < num_splits)[:, None]  # [ROUND, 1]
            some_lse = tl.load(
                partial_lse_ptr + some[:, None] * BLOCK_HEADS + heads[None, :],
                mask=live,
                other=float("-inf"),
                cache_modifier=".cg",
            )  # [ROUND, BLOCK_HEADS]
            partial = tl.load(
                partial_out_ptr
                + some[:, None, None] * (BLOCK_HEADS * VALUE_DIM)
                + offsets[None, :, :],
                mask=live[:, :, None] & (dims < VALUE_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [ROUND, BLOCK_HEADS, BLOCK_D]
            weights = tl.exp2(some_lse - best[None, :]) / total[None, :]  # [ROUND, BLOCK_HEADS]
            acc += tl.sum(partial * weights[:, :, None], 0)  # [BLOCK_HEADS, BLOCK_D]
        mask = (heads < num_heads)[:, None] & (dims < VALUE_DIM)[None, :]  # [BLOCK_HEADS, BLOCK_D]
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_rows_ptr", "context_lens_ptr"],
)
def latent_attention_decode(
    q_ptr,
    q_rope_ptr,
    latents_ptr,
    block_table_ptr,
    seq_rows_ptr,
    context_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counters_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    Q_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_CHUNK_TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of heads, axis 1 = sequence, axis 2 = split of the sequence's tokens.
    block = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    WIDTH: tl.constexpr = VALUE_DIM + ROPE_DIM
    # A dot wants 16 of everything.
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE_DIM))
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634

    # Rows, lengths and pages are older than the kernel before this one and can be read before the
    # wait for it; the queries and the newest latent can't.
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    chunk = tl.maximum(tl.cdiv(context, MAX_SPLITS), MIN_CHUNK_TOKENS)
    chunk = tl.cdiv(chunk, BLOCK_TOKENS) * BLOCK_TOKENS
    num_splits = tl.maximum(tl.cdiv(context, chunk), 1)
    if split >= num_splits:
        return
    start = split * chunk
    stop = tl.minimum(start + chunk, context)

    heads = tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    first_head = block * BLOCK_HEADS
    num_heads = tl.minimum(NUM_HEADS - first_head, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    rope_dims = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    is_head = (heads < num_heads)[:, None]  # [BLOCK_HEADS, 1]
    is_value = below(dims, VALUE_DIM, BLOCK_V)[None, :]  # [1, BLOCK_V]
    is_rope = below(rope_dims, ROPE_DIM, BLOCK_R)[None, :]  # [1, BLOCK_R]
    row = seq * NUM_HEADS + first_head
    q_ptr += row.to(tl.int64) * VALUE_DIM
    out_ptr += row.to(tl.int64) * VALUE_DIM
    q_rope_ptr += row.to(tl.int64) * Q_DIM + (Q_DIM - ROPE_DIM)
    offsets = heads[:, None] * VALUE_DIM + dims[None, :]  # [BLOCK_HEADS, BLOCK_V]
    rope_offsets = heads[:, None] * Q_DIM + rope_dims[None, :]  # [BLOCK_HEADS, BLOCK_R]
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = load_page(pages_ptr, start, stop, PAGE_SIZE, BLOCK_TOKENS)
    if USE_PDL:
        # The first split of every sequence comes by here, so this kernel can't end before the
        # kernels it depends on.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q = tl.load(q_ptr + offsets, mask=is_head & is_value, other=0.0)  # [BLOCK_HEADS, BLOCK_V]
    q_rope = tl.load(q_rope_ptr + rope_offsets, mask=is_head & is_rope, other=0.0)

    best = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)  # [BLOCK_HEADS]
    total = tl.zeros((BLOCK_HEADS,), tl.float32)  # [BLOCK_HEADS]
    acc = tl.zeros((BLOCK_HEADS, BLOCK_V), tl.float32)  # [BLOCK_HEADS, BLOCK_V]
    for tile_start in range(start, stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        live = tokens < stop  # [BLOCK_TOKENS]
        row_offsets = page * (PAGE_SIZE * WIDTH) + (tokens % PAGE_SIZE)[:, None] * WIDTH
        row_ptrs = latents_ptr + row_offsets  # [BLOCK_TOKENS, 1]
        # Slots that hold no token of the sequence are not read: they may hold anything, NaN too.
        latent = tl.load(row_ptrs + dims[None, :], mask=live[:, None] & is_value, other=0.0)
        k_rope = tl.load(
            row_ptrs + VALUE_DIM + rope_dims[None, :], mask=live[:, None] & is_rope, other=0.0
        )  # [BLOCK_TOKENS, BLOCK_R]
        page = load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)

        scores = tl.dot(q, tl.trans(latent))  # [BLOCK_HEADS, BLOCK_TOKENS]
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)  # [BLOCK_HEADS, BLOCK_TOKENS]
        scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_HEADS, BLOCK_TOKENS]
        new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_HEADS]
        rescale = tl.exp2(best - new_best)  # [BLOCK_HEADS]
        weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_HEADS, BLOCK_TOKENS]
        total = total * rescale + tl.sum(weights, 1)  # [BLOCK_HEADS]
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None])
        best = new_best  # [BLOCK_HEADS]

    # A padding sequence read nothing: its zeros are divided by one.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_HEADS, BLOCK_V]
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_head & is_value)
    else:
        group = seq * tl.num_programs(0) + block
        partial_out_ptr += group.to(tl.int64) * (MAX_SPLITS * BLOCK_HEADS * VALUE_DIM)
        partial_lse_ptr += group * (MAX_SPLITS * BLOCK_HEADS)
        own_out_ptr = partial_out_ptr + split * (BLOCK_HEADS * VALUE_DIM)
        tl.store(own_out_ptr + offsets, acc, mask=is_value)
        tl.store(partial_lse_ptr + split * BLOCK_HEADS + heads, best + tl.log2(total))
        # All threads have stored before one of them announces the split; acq_rel then shows the
        # stores of every split to the program that arrives last.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.debug_barrier()
            _combine_splits(
                partial_out_ptr,
                partial_lse_ptr,
                out_ptr,
                num_splits,
                num_heads,
                VALUE_DIM,
                BLOCK_HEADS,
                MAX_SPLITS,
            )
            tl.store(counters_ptr + group, 0)


def launch(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    num_seqs: int,
) -> None:
    """Write the attention output of the first `num_seqs` sequences to `out`."""
    blocks = triton.cdiv(SHAPE["NUM_HEADS"], SCHEDULE["BLOCK_HEADS"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    latent_attention_decode[(blocks, num_seqs, SCHEDULE["MAX_SPLITS"])](
        q,
        q_rope,
        latents,
        block_table,
        seq_rows,
        context_lens,
        out,
        partial_out,
        partial_lse,
        counters,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
