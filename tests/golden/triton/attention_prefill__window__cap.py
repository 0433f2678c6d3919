"""`attention_prefill_window_cap`: attend causally from each token to the tokens of its row, through
the pages.

Covers:
  attention: bf16[T, 4096] = attention(q, kv, block_table, seq_rows, query_start, context_lens;
    num_heads=32, num_kv_heads=8, head_dim=128, scale=0.0625, window=4096, soft_cap=50.0)

Must move 0 bytes and 16,384 per token; must compute 0 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_ROWS=64, BLOCK_TOKENS=32, PACK_HEADS=True, num_warps=4, num_stages=3
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(NUM_HEADS=32, NUM_KV_HEADS=8, HEAD_DIM=128, PAGE_SIZE=64, SCALE=0.0625)
SCHEDULE = dict(BLOCK_ROWS=64, BLOCK_TOKENS=32, PACK_HEADS=True, num_warps=4, num_stages=3)


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


@triton.jit
def _attend_tile(
    acc,
    best,
    total,
    page,
    q,
    positions,
    k_cache_ptr,
    v_cache_ptr,
    pages_ptr,
    tile_start,
    stop,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys and values to the running softmax; MASKED: causal, ragged."""
    tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    dims = tl.arange(0, BLOCK_D)
    page_offset = (page * NUM_KV_HEADS + kv_head) * (PAGE_SIZE * HEAD_DIM)
    slot_offsets = (tokens % PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :]
    kv_mask = (dims < HEAD_DIM)[None, :]  # [1, BLOCK_D]
    if MASKED:
        # Slots that hold no token of the sequence are not read: they may hold anything, NaN too.
        kv_mask = (tokens < stop)[:, None] & kv_mask  # [BLOCK_TOKENS, BLOCK_D]
    k_ptrs = k_cache_ptr + page_offset + slot_offsets  # [BLOCK_TOKENS, BLOCK_D]
    v_ptrs = v_cache_ptr + page_offset + slot_offsets  # [BLOCK_TOKENS, BLOCK_D]
    k = tl.load(k_ptrs, mask=kv_mask, other=0.0)  # [BLOCK_TOKENS, BLOCK_D]
    v = tl.load(v_ptrs, mask=kv_mask, other=0.0)  # [BLOCK_TOKENS, BLOCK_D]
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)

    scores = tl.dot(q, tl.trans(k))  # [BLOCK_ROWS, BLOCK_TOKENS]
    # a score s counts as 50.0 tanh(s / 50.0)
    scores = 800.0 - 1600.0 / (1.0 + tl.exp(scores * 0.0025))
    # Not infinite: a row may see nothing of its first tiles.
    seen = tokens[None, :] >= positions[:, None] + 1 - 4096
    scores = tl.where(seen, scores, -1.0e30)
    if MASKED:
        visible = tokens[None, :] <= positions[:, None]  # [BLOCK_ROWS, BLOCK_TOKENS]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
    # The scale joins the exponent as one multiply-add; scaling q first was slower on H200.
    new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
    rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
    weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_ROWS, BLOCK_TOKENS]
    total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])  # [BLOCK_ROWS, BLOCK_D]
    return acc, new_best, total, page


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
def attention_prefill_window_cap(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    table_stride,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACK_HEADS: tl.constexpr,
):
    # Grid: axis 0 = KV head (PACK_HEADS) or query head, axis 1 = query block, last one first:
    # late blocks of a sequence see the most keys and should not be the ones that run alone.
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_ROWS // GROUP_HEADS if PACK_HEADS else BLOCK_ROWS
    BLOCK_D: tl.constexpr = 16 if HEAD_DIM < 16 else triton.next_power_of_2(HEAD_DIM)
    SEARCH_WIDTH: tl.constexpr = 256
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634

    # Sequence i owns the query blocks from first_blocks[i] on, which grow strictly with i: the
    # last one at or below `block` is ours. Counting takes one load where bisecting takes many.
    launch_start = tl.load(query_start_ptr)
    num_starts = 0
    for first in range(0, num_seqs, SEARCH_WIDTH):
        seqs = first + tl.arange(0, SEARCH_WIDTH)  # [SEARCH_WIDTH]
        starts = tl.load(query_start_ptr + seqs, mask=seqs < num_seqs, other=0)  # [SEARCH_WIDTH]
        first_blocks = (starts - launch_start) // BLOCK_Q + seqs  # [SEARCH_WIDTH]
        is_start = (first_blocks <= block) & (seqs < num_seqs)  # [SEARCH_WIDTH]
        num_starts += tl.sum(is_start.to(tl.int32), 0)
    seq = num_starts - 1
    start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - start
    first_query = (block - (start - launch_start) // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= num_queries:
        return
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    # Whole pages before the window of 4096 tokens are left out.
    skipped = tl.maximum(context - num_queries + first_query + 1 - 4096, 0) // PAGE_SIZE
    context -= skipped * PAGE_SIZE
    block_table_ptr += skipped

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    if PACK_HEADS:
        kv_head = head
        queries = first_query + rows // GROUP_HEADS  # [BLOCK_ROWS]
        heads = kv_head * GROUP_HEADS + rows % GROUP_HEADS  # [BLOCK_ROWS]
        row_mask = (queries < num_queries) & (rows < BLOCK_Q * GROUP_HEADS)  # [BLOCK_ROWS]
    else:
        kv_head = head // GROUP_HEADS
        queries = first_query + rows  # [BLOCK_ROWS]
        heads = head
        row_mask = queries < num_queries  # [BLOCK_ROWS]
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_ROWS, BLOCK_D]
    row_offsets = (queries * NUM_HEADS + heads) * HEAD_DIM  # [BLOCK_ROWS]
    offsets = row_offsets[:, None] + dims[None, :]  # [BLOCK_ROWS, BLOCK_D]
    start_offset = start.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    q = tl.load(q_ptr + start_offset + offsets, mask=mask, other=0.0)  # [BLOCK_ROWS, BLOCK_D]

    # Query j stands at position prior + j and sees the keys up to and including its own.
    prior = context - num_queries
    positions = prior + queries  # [BLOCK_ROWS]
    stop = prior + tl.minimum(first_query + BLOCK_Q, num_queries)
    full_stop = tl.maximum(prior + first_query + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS

    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)  # [BLOCK_ROWS]
    total = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)  # [BLOCK_ROWS, BLOCK_D]
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    page = load_page(pages_ptr, 0, stop, PAGE_SIZE, BLOCK_TOKENS)
    # Every row sees every key of the full tiles: no mask.
    for tile_start in range(0, full_stop, BLOCK_TOKENS):
        acc, best, total, page = _attend_tile(
            acc, best, total, page, q, positions, k_cache_ptr, v_cache_ptr, pages_ptr,
            tile_start, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_D, False,
        )  # fmt: skip
    for tile_start in range(full_stop, stop, BLOCK_TOKENS):
        acc, best, total, page = _attend_tile(
            acc, best, total, page, q, positions, k_cache_ptr, v_cache_ptr, pages_ptr,
            tile_start, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_D, True,
        )  # fmt: skip

    # A padding sequence read nothing: its zeros are divided by one.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_ROWS, BLOCK_D]
    tl.store(out_ptr + start_offset + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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
    attention_prefill_window_cap[grid](
        q,
        k_cache,
        v_cache,
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
