"""`prompt_attention`: attend causally within the prompts that begin in this step, to keys and
values projected up.

Covers:
  prompt_attention(q_rope, own_kv, kv, block_table, seq_rows, query_start, context_lens,
    attended; num_heads=16, nope_dim=128, value_dim=128, scale=0.07216878364870322,
    whole_from=32)

Must move 0 bytes and 18,560 per token; must compute 0 operations per token.

Schedule: BLOCK_QUERIES=128, BLOCK_TOKENS=64, num_warps=8, num_stages=2
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=16,
    NOPE_DIM=128,
    ROPE_DIM=64,
    VALUE_DIM=128,
    LATENT_DIM=512,
    WHOLE_FROM=32,
    PAGE_SIZE=64,
    SCALE=0.07216878364870322,
)
SCHEDULE = dict(BLOCK_QUERIES=128, BLOCK_TOKENS=64, num_warps=8, num_stages=2)


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
def prompt_attention(
    q_ptr,
    kv_ptr,
    latents_ptr,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    table_stride,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    WHOLE_FROM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    # Grid: axis 0 = head, axis 1 = block of queries, last one first: late blocks of a sequence see
    # the most keys and should not be the ones that run alone.
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    Q_DIM: tl.constexpr = NOPE_DIM + ROPE_DIM
    KV_DIM: tl.constexpr = NOPE_DIM + VALUE_DIM
    WIDTH: tl.constexpr = LATENT_DIM + ROPE_DIM
    # A dot wants 16 of everything.
    BLOCK_N: tl.constexpr = max(16, triton.next_power_of_2(NOPE_DIM))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE_DIM))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
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
        first_blocks = (starts - launch_start) // BLOCK_QUERIES + seqs  # [SEARCH_WIDTH]
        is_start = (first_blocks <= block) & (seqs < num_seqs)  # [SEARCH_WIDTH]
        num_starts += tl.sum(is_start.to(tl.int32), 0)
    seq = num_starts - 1
    start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - start
    first_query = (block - (start - launch_start) // BLOCK_QUERIES - seq) * BLOCK_QUERIES
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    if (first_query >= num_queries) | (context != num_queries) | (num_queries < WHOLE_FROM):
        return

    queries = first_query + tl.arange(0, BLOCK_QUERIES)  # [BLOCK_QUERIES]
    nope_dims = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    rope_dims = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    dims = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    is_query = (queries < num_queries)[:, None]  # [BLOCK_QUERIES, 1]
    is_nope = below(nope_dims, NOPE_DIM, BLOCK_N)[None, :]  # [1, BLOCK_N]
    is_rope = below(rope_dims, ROPE_DIM, BLOCK_R)[None, :]  # [1, BLOCK_R]
    is_value = below(dims, VALUE_DIM, BLOCK_V)[None, :]  # [1, BLOCK_V]
    q_ptr += start.to(tl.int64) * (NUM_HEADS * Q_DIM) + head * Q_DIM
    kv_ptr += start.to(tl.int64) * (NUM_HEADS * KV_DIM) + head * KV_DIM
    out_ptr += start.to(tl.int64) * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM
    q_ptrs = q_ptr + queries[:, None] * (NUM_HEADS * Q_DIM)  # [BLOCK_QUERIES, 1]
    q_nope = tl.load(q_ptrs + nope_dims[None, :], mask=is_query & is_nope, other=0.0)
    q_rope = tl.load(q_ptrs + NOPE_DIM + rope_dims[None, :], mask=is_query & is_rope, other=0.0)

    best = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)  # [BLOCK_QUERIES]
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)  # [BLOCK_QUERIES]
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_V), tl.float32)  # [BLOCK_QUERIES, BLOCK_V]
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # Query j sees the keys up to and including its own.
    stop = tl.minimum(first_query + BLOCK_QUERIES, num_queries)
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = load_page(pages_ptr, 0, stop, PAGE_SIZE, BLOCK_TOKENS)
    for tile_start in range(0, stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        live = (tokens < stop)[:, None]  # [BLOCK_TOKENS, 1]
        kv_ptrs = kv_ptr + tokens[:, None] * (NUM_HEADS * KV_DIM)  # [BLOCK_TOKENS, 1]
        row_offsets = page * (PAGE_SIZE * WIDTH) + (tokens % PAGE_SIZE)[:, None] * WIDTH
        rope_ptrs = latents_ptr + row_offsets + LATENT_DIM + rope_dims[None, :]
        k_nope = tl.load(kv_ptrs + nope_dims[None, :], mask=live & is_nope, other=0.0)
        k_rope = tl.load(rope_ptrs, mask=live & is_rope, other=0.0)  # [BLOCK_TOKENS, BLOCK_R]
        v = tl.load(kv_ptrs + NOPE_DIM + dims[None, :], mask=live & is_value, other=0.0)
        page = load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)

        scores = tl.dot(q_nope, tl.trans(k_nope))  # [BLOCK_QUERIES, BLOCK_TOKENS]
        scores = tl.dot(q_rope, tl.trans(k_rope), scores)  # [BLOCK_QUERIES, BLOCK_TOKENS]
        visible = tokens[None, :] <= queries[:, None]  # [BLOCK_QUERIES, BLOCK_TOKENS]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_QUERIES, BLOCK_TOKENS]
        new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_QUERIES]
        rescale = tl.exp2(best - new_best)  # [BLOCK_QUERIES]
        weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_QUERIES, BLOCK_TOKENS]
        total = total * rescale + tl.sum(weights, 1)  # [BLOCK_QUERIES]
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])  # [BLOCK_QUERIES, BLOCK_V]
        best = new_best  # [BLOCK_QUERIES]

    out_ptrs = out_ptr + queries[:, None] * (NUM_HEADS * VALUE_DIM) + dims[None, :]
    acc = acc / total[:, None]  # [BLOCK_QUERIES, BLOCK_V]: a query sees itself at least
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_query & is_value)


def launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the output of whole prompts, of `num_seqs` sequences of `num_tokens` tokens in all."""
    grid = (SHAPE["NUM_HEADS"], num_tokens // SCHEDULE["BLOCK_QUERIES"] + num_seqs)
    prompt_attention[grid](
        q,
        kv,
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
