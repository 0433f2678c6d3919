"""Attend causally from any number of query tokens per sequence, with a quantised KV cache.

A sequence's earlier tokens are read from its pages, as `attention_decode_quantised` reads them: no
scale and no zero in the inner loop. The step's own tokens are read as they were computed, from k
and v; only what a later step reads has been through quantisation. Programs find their sequence and
query block on the device, as in `attention_prefill`.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row,
N = D bytes of codes per token, D / 2 with int4):
  q, out        [T, H, D], [T, H * D]: contiguous
  k, v          [T, G * D]: contiguous; the step's own keys and values
  k_cache,      u8[P, G, S * (N + 4)]: contiguous, as `attention_decode_quantised` describes them;
  v_cache       only slots of earlier tokens are read
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  query_start   i32[num_seqs + 1]: first token of each sequence, counted from the start of `q`; the
                arrays of sequences may be slices that start at any sequence of the step
  context_lens  i32[num_seqs]: tokens of the sequence, the queries' own included

Grid: (head, query block), where head is a KV head if PACK_HEADS, else a query head; sequence i owns
the query blocks from (query_start[i] - query_start[0]) // BLOCK_Q + i on. Surplus programs leave.
Bound by the two dots: 4 * H * D operations per pair of a query and a key it sees.
"""

import torch
import triton
import triton.language as tl

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


@triton.jit
def _load_page(pages_ptr, tile_start, stop, PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Give the page id of a tile: one number, or one per token if the tile spans pages."""
    if PAGE_SIZE % BLOCK_TOKENS == 0:
        page = tl.load(pages_ptr + tile_start // PAGE_SIZE, mask=tile_start < stop, other=0)
    else:
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        page = tl.load(pages_ptr + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
    return page.to(tl.int64)


@triton.jit
def _load_tile(
    k_cache_ptr,
    v_cache_ptr,
    page,
    tile_start,
    stop,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Load a tile: codes of keys [BLOCK_TOKENS, BLOCK_W], of values [BLOCK_W, BLOCK_TOKENS], words.

    Words from `stop` on are zero.
    """
    ALIGNED: tl.constexpr = 16 if PAGE_SIZE % 16 == 0 else 8
    offset = tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    byte = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    live = tile_start + offset < stop  # [BLOCK_TOKENS]
    block = (page * NUM_KV_HEADS + kv_head) * (PAGE_SIZE * (ROW_BYTES + 4))
    if PAGE_SIZE % BLOCK_TOKENS == 0:
        # One page: the tile begins at a multiple of its size, which makes wide loads legal.
        slot = tl.multiple_of(tile_start % PAGE_SIZE, BLOCK_TOKENS) + offset  # [BLOCK_TOKENS]
        k_ptrs = (k_cache_ptr + block) + (slot[:, None] * ROW_BYTES + byte[None, :])
        v_ptrs = (v_cache_ptr + block) + (byte[:, None] * PAGE_SIZE + slot[None, :])
    else:
        slot = (tile_start + offset) % PAGE_SIZE  # [BLOCK_TOKENS]
        k_ptrs = k_cache_ptr + (block[:, None] + slot[:, None] * ROW_BYTES + byte[None, :])
        v_ptrs = v_cache_ptr + (block[None, :] + byte[:, None] * PAGE_SIZE + slot[None, :])
    inside = byte < ROW_BYTES  # [BLOCK_W]
    keys = tl.load(k_ptrs, mask=live[:, None] & inside[None, :], other=0)
    # Values lie token by token: a mask that changes within 16 of them would forbid wide loads. What
    # is read too much gets the weight zero.
    readable = tile_start + offset < tl.cdiv(stop, ALIGNED) * ALIGNED  # [BLOCK_TOKENS]
    values = tl.load(v_ptrs, mask=inside[:, None] & readable[None, :], other=0)
    words = block + PAGE_SIZE * ROW_BYTES + slot * 4  # [BLOCK_TOKENS]
    key_words = tl.load((k_cache_ptr + words).to(tl.pointer_type(tl.int32)), mask=live, other=0)
    value_words = tl.load((v_cache_ptr + words).to(tl.pointer_type(tl.int32)), mask=live, other=0)
    return keys, key_words, values, value_words


@triton.jit
def _low_half(word):
    """Give the f16 in the low half of a word as f32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(word):
    """Give the f16 in the high half of a word as f32."""
    return _low_half(word >> 16)


@triton.jit
def _to_f16(codes, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr):
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
def _to_f16_planes(codes, USE_PTX: tl.constexpr):
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
def _to_i8_planes(codes, USE_PTX: tl.constexpr):
    """Give the low nibble, and 16 * (high nibble - 8), of each byte of keys."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; and.b32 $1, $2, 0xF0F0F0F0;",
            "=r,=r,r",
            [codes],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (codes & 0x0F).to(tl.int8, bitcast=True), (codes & 0xF0).to(tl.int8, bitcast=True)


@triton.jit
def _part_query(q, unit):
    """Give q over `unit` as whole numbers of at most 127 * 128, in parts: 128 * high + low."""
    number = tl.floor(q / unit[:, None] + 0.5).to(tl.int32)  # [BLOCK_ROWS, BLOCK_W]
    high = (number + 64) >> 7  # [BLOCK_ROWS, BLOCK_W]
    return high.to(tl.int8), (number - high * 128).to(tl.int8), tl.sum(number, 1)


@triton.jit
def _attend_own(
    acc,
    second_acc,
    best,
    total,
    q,
    second_q,
    queries,
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
    """Add one tile of the step's own keys and values to the running softmax; MASKED: causal."""
    tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    dims = tl.arange(0, BLOCK_W)
    mask = (dims < WIDTH)[None, :]  # [1, BLOCK_W]
    if MASKED:
        mask = (tokens < stop)[:, None] & mask  # [BLOCK_TOKENS, BLOCK_W]
    offsets = tokens[:, None].to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)  # [BLOCK_TOKENS, BLOCK_W]
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)  # [BLOCK_TOKENS, BLOCK_W]
    scores = tl.dot(q, tl.trans(k))  # [BLOCK_ROWS, BLOCK_TOKENS]
    if WIDTH < HEAD_DIM:
        second_k = tl.load(k_ptr + WIDTH + offsets, mask=mask, other=0.0)
        second_v = tl.load(v_ptr + WIDTH + offsets, mask=mask, other=0.0)
        scores = tl.dot(second_q, tl.trans(second_k), scores)  # [BLOCK_ROWS, BLOCK_TOKENS]
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
    LIFT: tl.constexpr = 64.0
    FP8_UNIT: tl.constexpr = 1.0 if USE_PTX else 256.0

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
    stop = tl.where(context > 0, tl.minimum(first_query + BLOCK_Q, num_queries), 0)
    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)  # [BLOCK_ROWS]
    total = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    least_sum = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    second_acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    if prior > 0:
        wide_q = q.to(tl.float32)  # [BLOCK_ROWS, BLOCK_W]
        largest = tl.max(tl.abs(wide_q), 1)  # [BLOCK_ROWS]
        if HAS_PLANES:
            second_wide_q = second_q.to(tl.float32)  # [BLOCK_ROWS, BLOCK_W]
            largest = tl.maximum(largest, tl.max(tl.abs(second_wide_q), 1))  # [BLOCK_ROWS]
        unit = tl.where(largest > 0.0, largest / 16256.0, 1.0)  # [BLOCK_ROWS]
        score_unit = unit * SCALE_LOG2  # [BLOCK_ROWS]
        q_f16 = q.to(tl.float16)  # [BLOCK_ROWS, BLOCK_W]
        high, low, q_sum = _part_query(wide_q, unit)
        if HAS_PLANES:
            second_high, second_low, second_sum = _part_query(second_wide_q, unit)
            q_sum = (q_sum + second_sum).to(tl.float32) * score_unit  # [BLOCK_ROWS]
            eights = 8.0 * second_sum.to(tl.float32) * score_unit  # [BLOCK_ROWS]
        pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
        page = _load_page(pages_ptr, 0, prior, PAGE_SIZE, BLOCK_TOKENS)
        # Every row sees every earlier key.
        for tile_start in range(0, prior, BLOCK_TOKENS):
            live = tile_start + tl.arange(0, BLOCK_TOKENS) < prior  # [BLOCK_TOKENS]
            keys, key_words, values, value_words = _load_tile(
                k_cache_ptr, v_cache_ptr, page, tile_start, prior, kv_head,
                NUM_KV_HEADS, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
            )  # fmt: skip
            page = _load_page(pages_ptr, tile_start + BLOCK_TOKENS, prior, PAGE_SIZE, BLOCK_TOKENS)

            if KV_FORMAT == "int8":
                key_scale = key_words.to(tl.float32, bitcast=True)  # [BLOCK_TOKENS]
                codes = tl.trans(keys.to(tl.int8, bitcast=True))  # [BLOCK_W, BLOCK_TOKENS]
                products = tl.dot(high, codes, out_dtype=tl.int32) * 128
                products += tl.dot(low, codes, out_dtype=tl.int32)  # [BLOCK_ROWS, BLOCK_TOKENS]
                scores = products.to(tl.float32) * score_unit[:, None] * key_scale[None, :]
            elif KV_FORMAT == "fp8":
                key_scale = key_words.to(tl.float32, bitcast=True) * (FP8_UNIT * SCALE_LOG2)
                numbers = tl.trans(_to_f16(keys, KV_FORMAT, USE_PTX))  # [BLOCK_W, BLOCK_TOKENS]
                scores = tl.dot(q_f16, numbers) * key_scale[None, :]  # [BLOCK_ROWS, BLOCK_TOKENS]
            else:
                key_scale, key_least = _low_half(key_words), _high_half(key_words)  # [BLOCK_TOKENS]
                first_plane, second_plane = _to_i8_planes(keys, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
                first_plane, second_plane = (
                    tl.trans(first_plane),
                    tl.trans(second_plane),
                )  # [BLOCK_W, BLOCK_TOKENS]
                # The first plane holds n, the second 16 * (n - 8).
                highs = tl.dot(high, first_plane, out_dtype=tl.int32) * 16
                highs += tl.dot(
                    second_high, second_plane, out_dtype=tl.int32
                )  # [BLOCK_ROWS, BLOCK_TOKENS]
                lows = tl.dot(low, first_plane, out_dtype=tl.int32) * 16
                lows += tl.dot(
                    second_low, second_plane, out_dtype=tl.int32
                )  # [BLOCK_ROWS, BLOCK_TOKENS]
                products = (highs * 128 + lows).to(tl.float32) * (score_unit * 0.0625)[:, None]
                scores = (products + eights[:, None]) * key_scale[None, :]
                scores += q_sum[:, None] * key_least[None, :]  # [BLOCK_ROWS, BLOCK_TOKENS]
            scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
            new_best = tl.maximum(best, tl.max(scores, 1))  # [BLOCK_ROWS]
            rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
            weights = tl.exp2(scores - new_best[:, None])  # [BLOCK_ROWS, BLOCK_TOKENS]
            total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
            best = new_best  # [BLOCK_ROWS]

            if HAS_PLANES:
                value_scale, value_least = _low_half(value_words), _high_half(value_words)
                least_sum = least_sum * rescale + tl.sum(weights * value_least[None, :], 1)
            else:
                value_scale = value_words.to(tl.float32, bitcast=True)  # [BLOCK_TOKENS]
            scaled = (weights * (value_scale * LIFT)[None, :]).to(tl.float16)
            if KV_FORMAT == "fp8":
                numbers = tl.trans(_to_f16(values, KV_FORMAT, USE_PTX))  # [BLOCK_TOKENS, BLOCK_W]
                acc = tl.dot(scaled, numbers, acc * rescale[:, None])  # [BLOCK_ROWS, BLOCK_W]
            else:
                # What the bits add to a code is taken back in the same tile: nothing large remains
                # in the sums, and it costs no instruction.
                scaled_sum = tl.sum(scaled.to(tl.float32), 1)[:, None]  # [BLOCK_ROWS, 1]
                if HAS_PLANES:
                    first_plane, second_plane = _to_f16_planes(
                        values, USE_PTX
                    )  # [BLOCK_W, BLOCK_TOKENS]
                    start_acc = second_acc * rescale[:, None] - 1024.0 * scaled_sum
                    second_acc = tl.dot(
                        scaled, tl.trans(second_plane), start_acc
                    )  # [BLOCK_ROWS, BLOCK_W]
                    start_acc = acc * rescale[:, None] - 1024.0 * scaled_sum
                    acc = tl.dot(scaled, tl.trans(first_plane), start_acc)  # [BLOCK_ROWS, BLOCK_W]
                else:
                    codes = tl.trans(_to_f16(values, KV_FORMAT, USE_PTX))  # [BLOCK_TOKENS, BLOCK_W]
                    start_acc = acc * rescale[:, None] - 1152.0 * scaled_sum
                    acc = tl.dot(scaled, codes, start_acc)  # [BLOCK_ROWS, BLOCK_W]
        UNLIFT: tl.constexpr = FP8_UNIT / LIFT if KV_FORMAT == "fp8" else 1.0 / LIFT
        acc = acc * UNLIFT + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]
        second_acc = second_acc * (UNLIFT * 0.0625) + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]

    own_offset = start.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    # Every row sees every key of the full tiles: no mask.
    full_stop = tl.minimum((first_query + 1) // BLOCK_TOKENS * BLOCK_TOKENS, stop)
    for tile_start in range(0, full_stop, BLOCK_TOKENS):
        acc, second_acc, best, total = _attend_own(
            acc, second_acc, best, total, q, second_q, queries, k_ptr + own_offset,
            v_ptr + own_offset, tile_start, stop, NUM_KV_HEADS, HEAD_DIM, WIDTH, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_W, False,
        )  # fmt: skip
    for tile_start in range(full_stop, stop, BLOCK_TOKENS):
        acc, second_acc, best, total = _attend_own(
            acc, second_acc, best, total, q, second_q, queries, k_ptr + own_offset,
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
