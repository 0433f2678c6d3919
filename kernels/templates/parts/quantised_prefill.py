"""Prefill attention with a quantised cache for what came before: the kernel, and its hooks."""

import triton
import triton.language as tl

from treadle.kernels.templates.parts.quantised_tiles import (
    load_codes,
    tile_page,
    to_key_planes,
    to_keys,
    weigh_values,
)


@triton.jit
def FIRST_PAGE(context, num_queries, first_query, block_table_ptr):
    """Leave out whole pages that nobody sees: give the length, and the table, without them."""
    return context, block_table_ptr


@triton.jit
def FIRST_OWN(first_own, first_query):
    """Leave out whole tiles of the step's own tokens that nobody sees."""
    return first_own


@triton.jit
def SCORES(scores, tokens, positions):
    """Change the scores of a tile before they are masked."""
    return scores


@triton.jit
def SINKS(best, total, heads):
    """Begin the softmax of each row with its head's sink: a score whose value is zero."""
    return best, total


@triton.jit
def attend_own(
    acc,
    second_acc,
    best,
    total,
    q,
    second_q,
    queries,
    positions,
    k_ptr,
    v_ptr,
    tile_start,
    stop,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys and values that are no codes to the running softmax; MASKED: causal.

    A row sees the tokens up to `queries`; it stands at `positions` itself, counted like the tokens.
    """
    tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    dims = tl.arange(0, BLOCK_W)
    mask = (dims < WIDTH)[None, :]  # [1, BLOCK_W]
    if MASKED:
        mask = (tokens < stop)[:, None] & mask  # [BLOCK_TOKENS, BLOCK_W]
    offsets = tokens[:, None].to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_TOKENS, BLOCK_W]
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_TOKENS, BLOCK_W]
    scores = tl.dot(q, tl.trans(k))  # [BLOCK_ROWS, BLOCK_TOKENS]
    if WIDTH < HEAD_DIM:
        second_k = tl.load(k_ptr + WIDTH + offsets, mask=mask, other=0.0).to(q.dtype)
        second_v = tl.load(v_ptr + WIDTH + offsets, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(second_q, tl.trans(second_k), scores)  # [BLOCK_ROWS, BLOCK_TOKENS]
    scores = SCORES(scores, tokens, positions)
    if MASKED:
        visible = tokens[None, :] <= queries[:, None]  # [BLOCK_ROWS, BLOCK_TOKENS]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
    # The scale joins the exponent as one multiply-add.
    new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
    rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
    weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_ROWS, BLOCK_TOKENS]
    total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])  # [BLOCK_ROWS, BLOCK_W]
    if WIDTH < HEAD_DIM:
        second_acc = second_acc * rescale[:, None]  # [BLOCK_ROWS, BLOCK_W]
        second_acc = tl.dot(weights.to(v.dtype), second_v, second_acc)
    return acc, second_acc, new_best, total


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
def attention_prefill_quantised(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_open_ptr,
    v_open_ptr,
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
    KV_FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACK_HEADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    LEAVES_WHOLE: tl.constexpr,
):
    # Grid: axis 0 = KV head (PACK_HEADS) or query head, axis 1 = query block, last one first:
    # late blocks of a sequence see the most keys and should not be the ones that run alone.
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_ROWS // GROUP_HEADS if PACK_HEADS else BLOCK_ROWS
    # With int4 a tile of bytes is two planes of features: the first half of a head and the second.
    HAS_PLANES: tl.constexpr = KV_FORMAT == "int4"
    WIDTH: tl.constexpr = HEAD_DIM // 2 if HAS_PLANES else HEAD_DIM
    BLOCK_W: tl.constexpr = 32 if WIDTH < 32 else triton.next_power_of_2(WIDTH)
    SEARCH_WIDTH: tl.constexpr = 256
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    # Scales of values are often too small for f16: a fixed factor goes in here and out at the end.
    LIFT: tl.constexpr = 1.0 if KV_FORMAT == "fp8" and not USE_PTX else 64.0

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
    # Sequences that begin in this step may have a kernel of their own.
    if LEAVES_WHOLE & (context == num_queries):
        return
    context, block_table_ptr = FIRST_PAGE(context, num_queries, first_query, block_table_ptr)

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_W)
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
    mask = row_mask[:, None] & (dims < WIDTH)[None, :]  # [BLOCK_ROWS, BLOCK_W]
    row_offsets = (queries * NUM_HEADS + heads) * HEAD_DIM  # [BLOCK_ROWS]
    offsets = row_offsets[:, None] + dims[None, :]  # [BLOCK_ROWS, BLOCK_W]
    start_offset = start.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    q = tl.load(q_ptr + start_offset + offsets, mask=mask, other=0.0)  # [BLOCK_ROWS, BLOCK_W]

    if HAS_PLANES:
        second_q = tl.load(q_ptr + start_offset + WIDTH + offsets, mask=mask, other=0.0)
    else:
        second_q = q

    # Query j stands at position prior + j and sees the keys up to and including its own. Padding
    # has no context: no keys, earlier or own.
    prior = tl.maximum(context - num_queries, 0)
    positions = prior + queries  # [BLOCK_ROWS]
    stop = tl.where(context > 0, tl.minimum(first_query + BLOCK_Q, num_queries), 0)
    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)  # [BLOCK_ROWS]
    total = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    least_sum = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    second_acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    best, total = SINKS(best, total, heads)
    # Pages that this step has filled hold what came before it too.
    full_stop = tl.minimum(prior, context // PAGE_SIZE * PAGE_SIZE)
    if full_stop > 0:
        pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
        page = tile_page(pages_ptr, 0, full_stop, PAGE_SIZE)
        # Every row sees every earlier key.
        for tile_start in range(0, full_stop, BLOCK_TOKENS):
            keys, scales, zeros, second_scales, second_zeros, values, value_words = load_codes(
                k_cache_ptr, v_cache_ptr, page, tile_start, kv_head,
                NUM_KV_HEADS, HEAD_DIM, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
            )  # fmt: skip
            page = tile_page(pages_ptr, tile_start + BLOCK_TOKENS, full_stop, PAGE_SIZE)
            if HAS_PLANES:
                earlier_k, second_k = to_key_planes(
                    keys, scales, zeros, second_scales, second_zeros, USE_PTX
                )
                scores = tl.dot(q.to(tl.float16), tl.trans(earlier_k))
                scores = tl.dot(second_q.to(tl.float16), tl.trans(second_k), scores)
            else:
                earlier_k = to_keys(keys, scales, zeros, KV_FORMAT, USE_PTX)
                scores = tl.dot(q.to(tl.float16), tl.trans(earlier_k))
            tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
            scores = SCORES(scores, tokens, positions)
            # The step's own tokens may lie in the last of these pages.
            live = tokens < prior  # [BLOCK_TOKENS]
            scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
            new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
            rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
            weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])
            total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
            best = new_best  # [BLOCK_ROWS]
            acc, second_acc, least_sum = weigh_values(
                acc, second_acc, least_sum, weights, rescale, values, value_words,
                KV_FORMAT, USE_PTX, LIFT,
            )  # fmt: skip
        acc = acc * (1.0 / LIFT) + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]
        second_acc = second_acc * (0.0625 / LIFT) + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]

    # Earlier tokens in the open page: every row sees them all.
    open_offset = tl.maximum(table_row, 0).to(tl.int64) * PAGE_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    open_offset += kv_head * HEAD_DIM
    num_open = prior - full_stop
    newest = tl.zeros((BLOCK_ROWS,), tl.int32) + num_open - 1  # [BLOCK_ROWS]
    for tile_start in range(0, num_open, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, newest, num_open + queries,
            k_open_ptr + open_offset, v_open_ptr + open_offset, tile_start, num_open, NUM_KV_HEADS,
            HEAD_DIM, WIDTH, SCALE_LOG2, BLOCK_TOKENS, BLOCK_W, True,
        )  # fmt: skip

    own_offset = start.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    # Every row sees every key of the full tiles: no mask.
    full_stop = tl.minimum((first_query + 1) // BLOCK_TOKENS * BLOCK_TOKENS, stop)
    first_own = 0
    first_own = FIRST_OWN(first_own, first_query)
    for tile_start in range(first_own, full_stop, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, queries, queries, k_ptr + own_offset,
            v_ptr + own_offset, tile_start, stop, NUM_KV_HEADS, HEAD_DIM, WIDTH, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_W, False,
        )  # fmt: skip
    for tile_start in range(full_stop, stop, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, queries, queries, k_ptr + own_offset,
            v_ptr + own_offset, tile_start, stop, NUM_KV_HEADS, HEAD_DIM, WIDTH, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_W, True,
        )  # fmt: skip

    # A padding sequence read nothing: its zeros are divided by one.
    divisor = tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_ROWS, 1]
    out_ptrs = out_ptr + start_offset + offsets  # [BLOCK_ROWS, BLOCK_W]
    tl.store(out_ptrs, (acc / divisor).to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_PLANES:
        second_out = (second_acc / divisor).to(out_ptr.dtype.element_ty)  # [BLOCK_ROWS, BLOCK_W]
        tl.store(out_ptrs + WIDTH, second_out, mask=mask)
