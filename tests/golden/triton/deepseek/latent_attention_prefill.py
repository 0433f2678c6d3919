"""`latent_attention_prefill`: attend causally from each token to the latents of its row, which all
heads share.

Covers:
  attended_latent: bf16[T, 8192] = latent_attention(q_latent, q_rope, kv, block_table, seq_rows,
    query_start, context_lens; num_heads=16, value_dim=512, scale=0.07216878364870322,
    whole_from=32)

Must move 0 bytes and 34,816 per token; must compute 0 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_ROWS=32, BLOCK_TOKENS=64, num_warps=8, num_stages=2
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=16,
    VALUE_DIM=512,
    ROPE_DIM=64,
    Q_DIM=192,
    WHOLE_FROM=32,
    PAGE_SIZE=64,
    SCALE=0.07216878364870322,
)
SCHEDULE = dict(BLOCK_ROWS=32, BLOCK_TOKENS=64, num_warps=8, num_stages=2)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


@triton.jit
def load_page(pages_ptr, tile_start, stop, PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Give the page id of a tile: one number, or one per token if the tile spans pages."""
    if PAGE_SIZE % BLOCK_TOKENS == 0:
        page = tl.load(pages_ptr + tile_start // PAGE_SIZE, mask=tile_start < stop, other=0)
        return page.to(tl.int64)
    else:
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        page = tl.load(pages_ptr + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
        return page.to(tl.int64)[:, None]  # [BLOCK_TOKENS, 1]


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride", "num_seqs"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def latent_attention_prefill(
    q_ptr,
    q_rope_ptr,
    latents_ptr,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    table_stride,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    Q_DIM: tl.constexpr,
    WHOLE_FROM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    # Grid: axis 0 = block of rows, last one first: late blocks of a sequence see the most keys and
    # should not be the ones that run alone.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    WIDTH: tl.constexpr = VALUE_DIM + ROPE_DIM
    # A dot wants 16 of everything.
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE_DIM))
    SEARCH_WIDTH: tl.constexpr = 256
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634

    # Sequence i owns the blocks from first_blocks[i] on, which grow strictly with i: the last one
    # at or below `block` is ours. Counting takes one load where bisecting takes many.
    launch_start = tl.load(query_start_ptr)
    num_starts = 0
    for first in range(0, num_seqs, SEARCH_WIDTH):
        seqs = first + tl.arange(0, SEARCH_WIDTH)  # [SEARCH_WIDTH]
        starts = tl.load(query_start_ptr + seqs, mask=seqs < num_seqs, other=0)  # [SEARCH_WIDTH]
        first_blocks = (starts - launch_start) * NUM_HEADS // BLOCK_ROWS + seqs  # [SEARCH_WIDTH]
        is_start = (first_blocks <= block) & (seqs < num_seqs)  # [SEARCH_WIDTH]
        num_starts += tl.sum(is_start.to(tl.int32), 0)
    seq = num_starts - 1
    start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - start
    first_row = (block - (start - launch_start) * NUM_HEADS // BLOCK_ROWS - seq) * BLOCK_ROWS
    if first_row >= num_queries * NUM_HEADS:
        return
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    if WHOLE_FROM > 0:
        is_left_out = (context == num_queries) & (num_queries >= WHOLE_FROM)
        context = tl.where(is_left_out, 0, context)

    rows = first_row + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    dims = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    rope_dims = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    is_row = (rows < num_queries * NUM_HEADS)[:, None]  # [BLOCK_ROWS, 1]
    is_value = below(dims, VALUE_DIM, BLOCK_V)[None, :]  # [1, BLOCK_V]
    is_rope = below(rope_dims, ROPE_DIM, BLOCK_R)[None, :]  # [1, BLOCK_R]
    rows_before = start.to(tl.int64) * NUM_HEADS
    q_ptr += rows_before * VALUE_DIM
    out_ptr += rows_before * VALUE_DIM
    q_rope_ptr += rows_before * Q_DIM + (Q_DIM - ROPE_DIM)
    offsets = rows[:, None] * VALUE_DIM + dims[None, :]  # [BLOCK_ROWS, BLOCK_V]
    rope_offsets = rows[:, None] * Q_DIM + rope_dims[None, :]  # [BLOCK_ROWS, BLOCK_R]
    q = tl.load(q_ptr + offsets, mask=is_row & is_value, other=0.0)  # [BLOCK_ROWS, BLOCK_V]
    q_rope = tl.load(q_rope_ptr + rope_offsets, mask=is_row & is_rope, other=0.0)

    # Query j stands at position prior + j and sees the keys up to and including its own.
    prior = context - num_queries
    positions = prior + rows // NUM_HEADS  # [BLOCK_ROWS]
    stop = prior + tl.minimum((first_row + BLOCK_ROWS - 1) // NUM_HEADS + 1, num_queries)

    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)  # [BLOCK_ROWS]
    total = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)  # [BLOCK_ROWS, BLOCK_V]
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = load_page(pages_ptr, 0, stop, PAGE_SIZE, BLOCK_TOKENS)
    for tile_start in range(0, stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        live = (tokens < stop)[:, None]  # [BLOCK_TOKENS, 1]
        row_offsets = page * (PAGE_SIZE * WIDTH) + (tokens % PAGE_SIZE)[:, None] * WIDTH
        row_ptrs = latents_ptr + row_offsets  # [BLOCK_TOKENS, 1]
        # Slots that hold no token of the sequence are not read: they may hold anything, NaN too.
        latent = tl.load(row_ptrs + dims[None, :], mask=live & is_value, other=0.0)
        k_rope = tl.load(
            row_ptrs + VALUE_DIM + rope_dims[None, :], mask=live & is_rope, other=0.0
        )  # [BLOCK_TOKENS, BLOCK_R]
        page = load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)

        scores = tl.dot(q, tl.trans(latent))  # [BLOCK_ROWS, BLOCK_TOKENS]
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)  # [BLOCK_ROWS, BLOCK_TOKENS]
        visible = tokens[None, :] <= positions[:, None]  # [BLOCK_ROWS, BLOCK_TOKENS]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
        new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
        rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
        weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_ROWS, BLOCK_TOKENS]
        total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None])
        best = new_best  # [BLOCK_ROWS]

    # A padding sequence read nothing: its zeros are divided by one.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_ROWS, BLOCK_V]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_value)


def launch(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the attention output of `num_seqs` sequences of at most `num_tokens` tokens in all."""
    blocks = num_tokens * SHAPE["NUM_HEADS"] // SCHEDULE["BLOCK_ROWS"] + num_seqs
    latent_attention_prefill[(blocks,)](
        q,
        q_rope,
        latents,
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        block_table.stride(0),
        num_seqs,
        **SHAPE,
        **SCHEDULE,
        enable_fp_fusion=True,
    )
