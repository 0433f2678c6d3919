"""`attention_prefill_window_cap`: attend causally from each token to the tokens of its row, through
the pages.

Covers:
  attention: bf16[T, 4096] = attention(q, kv, block_table, seq_rows, query_start, context_lens,
    k, v; num_heads=32, num_kv_heads=8, head_dim=128, scale=0.0625, window=4096, soft_cap=50.0)

Must move 0 bytes and 16,384 per token; must compute 0 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_ROWS=64, BLOCK_TOKENS=64, PACK_HEADS=True, USE_PTX=True, num_warps=8,
  num_stages=2
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=32,
    NUM_KV_HEADS=8,
    HEAD_DIM=128,
    PAGE_SIZE=64,
    SCALE=0.0625,
    KV_FORMAT="int8",
)
SCHEDULE = dict(
    BLOCK_ROWS=64,
    BLOCK_TOKENS=64,
    PACK_HEADS=True,
    USE_PTX=True,
    num_warps=8,
    num_stages=2,
)


@triton.jit
def tile_page(pages_ptr, tile_start, stop, PAGE_SIZE: tl.constexpr):
    """Give the page id of a tile."""
    return tl.load(pages_ptr + tile_start // PAGE_SIZE, mask=tile_start < stop, other=0).to(
        tl.int64
    )


@triton.jit
def load_codes(
    k_cache_ptr,
    v_cache_ptr,
    page,
    tile_start,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Load a tile of a full page: codes, scales and zeros of keys, codes and words of values.

    Codes are [BLOCK_TOKENS, BLOCK_W] and [BLOCK_W, BLOCK_TOKENS]; scales and zeros of keys
    f16[BLOCK_W], of the first half of the features and of the second where a byte holds two; words
    of values [BLOCK_TOKENS].
    """
    HAS_PLANES: tl.constexpr = ROW_BYTES < HEAD_DIM
    byte = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    inside = byte < ROW_BYTES  # [BLOCK_W]
    block = page * NUM_KV_HEADS + kv_head
    k_block_ptr = k_cache_ptr + block * (PAGE_SIZE * ROW_BYTES + HEAD_DIM * 4)
    v_block_ptr = v_cache_ptr + block * (PAGE_SIZE * (ROW_BYTES + (4 if HAS_PLANES else 2)))
    # The tile begins at a multiple of its size, which makes wide loads legal.
    slot = tl.multiple_of(tile_start % PAGE_SIZE, BLOCK_TOKENS) + tl.arange(0, BLOCK_TOKENS)
    k_ptrs = k_block_ptr + (slot[:, None] * ROW_BYTES + byte[None, :])
    v_ptrs = v_block_ptr + (byte[:, None] * PAGE_SIZE + slot[None, :])
    keys = tl.load(k_ptrs, mask=inside[None, :], other=0)  # [BLOCK_TOKENS, BLOCK_W]
    values = tl.load(v_ptrs, mask=inside[:, None], other=0)  # [BLOCK_W, BLOCK_TOKENS]
    scale_ptrs = (k_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.float16)) + byte
    scales = tl.load(scale_ptrs, mask=inside, other=0.0)  # [BLOCK_W]
    zeros = tl.load(scale_ptrs + HEAD_DIM, mask=inside, other=0.0)  # [BLOCK_W]
    second_scales, second_zeros = scales, zeros
    if HAS_PLANES:
        second_scales = tl.load(scale_ptrs + ROW_BYTES, mask=inside, other=0.0)  # [BLOCK_W]
        second_zeros = tl.load(scale_ptrs + HEAD_DIM + ROW_BYTES, mask=inside, other=0.0)
        value_word_ptrs = (v_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.int32))
    else:
        value_word_ptrs = (v_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.float16))
    value_words = tl.load(value_word_ptrs + slot)  # [BLOCK_TOKENS]
    return keys, scales, zeros, second_scales, second_zeros, values, value_words


@triton.jit
def low_half(word):
    """Give the f16 in the low half of a word."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(word):
    """Give the f16 in the high half of a word."""
    return low_half(word >> 16)


@triton.jit
def to_f16(codes, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Give 1024 + code of int8, or the e4m3 number (over 256 without PTX), in f16."""
    if KV_FORMAT == "fp8":
        if USE_PTX:
            # The hardware's conversion is exact, and two numbers an instruction.
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }""",
                "=r,=r,r",
                [codes],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True)
    elif USE_PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 magic;
            mov.b32 magic, 0x64646464;
            prmt.b32 $0, $2, magic, 0x4140;
            prmt.b32 $1, $2, magic, 0x4342;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def to_f16_planes(codes, USE_PTX: tl.constexpr):
    """Give 1024 + low nibble and 1024 + 16 * high nibble of each byte, in f16."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 $0, first, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, second, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $2, first, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 $3, second, 0x00F000F0, 0x64006400, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint16)
        low = ((wide & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
        return low, ((wide & 0xF0) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def to_keys(codes, scales, zeros, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Give the keys of a tile in f16, [BLOCK_TOKENS, BLOCK_W], of one code a byte."""
    numbers = to_f16(codes, KV_FORMAT, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
    if KV_FORMAT == "fp8":
        # The hardware converts to numbers, other GPUs to numbers over 256, which the scales mean.
        if USE_PTX:
            scales = scales * (1.0 / 256.0)  # [BLOCK_W]
    else:
        numbers -= 1024.0  # [BLOCK_TOKENS, BLOCK_W]
    return numbers * scales[None, :] + zeros[None, :]


@triton.jit
def to_key_planes(codes, scales, zeros, second_scales, second_zeros, USE_PTX: tl.constexpr):
    """Give the keys of a tile of int4 in f16: the first half of their features, the second."""
    first, second = to_f16_planes(codes, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W] each
    first = (first - 1024.0) * scales[None, :] + zeros[None, :]
    second = (second - 1024.0) * (second_scales * 0.0625)[None, :]
    return first, second + second_zeros[None, :]


@triton.jit
def weigh_values(
    acc, second_acc, least_sum, weights, rescale, values, words,
    KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Add the values of a tile, by weights [rows, BLOCK_TOKENS], to sums [rows, BLOCK_W]."""
    acc = acc * rescale[:, None]  # [rows, BLOCK_W]
    if KV_FORMAT == "fp8":
        UNIT: tl.constexpr = LIFT / 256.0 if USE_PTX else LIFT
        scaled = (weights * (words.to(tl.float32) * UNIT)[None, :]).to(tl.float16)
        acc = tl.dot(scaled, tl.trans(to_f16(values, KV_FORMAT, USE_PTX)), acc)
    elif KV_FORMAT == "int8":
        # What the bits add to a code is taken back in the same tile: nothing large remains in the
        # sums, and it costs no instruction.
        scaled = (weights * (words.to(tl.float32) * LIFT)[None, :]).to(tl.float16)
        added = 1152.0 * tl.sum(scaled.to(tl.float32), 1)[:, None]  # [rows, 1]
        acc = tl.dot(scaled, tl.trans(to_f16(values, KV_FORMAT, USE_PTX)), acc - added)
    else:
        scale, least = low_half(words).to(tl.float32), high_half(words).to(tl.float32)
        least_sum = least_sum * rescale + tl.sum(weights * least[None, :], 1)  # [rows]
        scaled = (weights * (scale * LIFT)[None, :]).to(tl.float16)
        added = 1024.0 * tl.sum(scaled.to(tl.float32), 1)[:, None]  # [rows, 1]
        first, second = to_f16_planes(values, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS] each
        second_acc = tl.dot(scaled, tl.trans(second), second_acc * rescale[:, None] - added)
        acc = tl.dot(scaled, tl.trans(first), acc - added)  # [rows, BLOCK_W]
    return acc, second_acc, least_sum


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
    # a score s counts as 50.0 tanh(s / 50.0)
    scores = 800.0 - 1600.0 / (1.0 + tl.exp(scores * 0.0025))
    # Not infinite: a row may see nothing of its first tiles.
    seen = tokens[None, :] >= positions[:, None] + 1 - 4096
    scores = tl.where(seen, scores, -1.0e30)
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
def attention_prefill_window_cap(
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
    # Whole pages before the window of 4096 tokens are left out.
    skipped = tl.maximum(context - num_queries + first_query + 1 - 4096, 0) // PAGE_SIZE
    context -= skipped * PAGE_SIZE
    block_table_ptr += skipped

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
            # a score s counts as 50.0 tanh(s / 50.0)
            scores = 800.0 - 1600.0 / (1.0 + tl.exp(scores * 0.0025))
            # Not infinite: a row may see nothing of its first tiles.
            seen = tokens[None, :] >= positions[:, None] + 1 - 4096
            scores = tl.where(seen, scores, -1.0e30)
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
    first_own = tl.maximum(first_query + 1 - 4096, 0) // BLOCK_TOKENS * BLOCK_TOKENS
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
    attention_prefill_window_cap[grid](
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
