"""`attention_decode_window_sinks`: attend causally from each token to the tokens of its row,
through the pages.

Covers:
  attention: bf16[T, 4096] = attention(q, kv, block_table, seq_rows, query_start, context_lens,
    @sinks; num_heads=32, num_kv_heads=8, head_dim=128, scale=0.0625, window=4096)

Must move 64 bytes and 16,384 per token; must compute 0 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_TOKENS=64, MAX_SPLITS=8, MIN_CHUNK_TOKENS=128, LEAST_HEADS=8, USE_PTX=True,
  USE_PDL=True, TRIGGER_LATE=False, num_warps=4, num_stages=3
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
    BLOCK_TOKENS=64,
    MAX_SPLITS=8,
    MIN_CHUNK_TOKENS=128,
    LEAST_HEADS=8,
    USE_PTX=True,
    USE_PDL=True,
    TRIGGER_LATE=False,
    num_warps=4,
    num_stages=3,
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
def scale_weights(
    weights, words, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr, LIFT: tl.constexpr
):
    """Give weights [BLOCK_TOKENS, heads] times the scales of their values, in f16; and with int4
    the tokens' least values [BLOCK_TOKENS]."""
    least = words
    if KV_FORMAT == "fp8":
        UNIT: tl.constexpr = LIFT / 256.0 if USE_PTX else LIFT
        scale = words.to(tl.float32) * UNIT  # [BLOCK_TOKENS]
    elif KV_FORMAT == "int8":
        scale = words.to(tl.float32) * LIFT  # [BLOCK_TOKENS]
    else:
        scale = low_half(words).to(tl.float32) * LIFT  # [BLOCK_TOKENS]
        least = high_half(words).to(tl.float32)  # [BLOCK_TOKENS]
    return (weights * scale[:, None]).to(tl.float16), least


@triton.jit
def add_splits(
    acc,
    best,
    total,
    partial_out_ptr,
    partial_lse_ptr,
    first,
    num_splits,
    GROUP_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the partial results of BLOCK_SPLITS splits into those of the splits before them."""
    splits = first + tl.arange(0, BLOCK_SPLITS)  # [BLOCK_SPLITS]
    heads = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, acc.shape[1])
    live = (splits < num_splits)[:, None]  # [BLOCK_SPLITS, 1]
    mask = (heads < GROUP_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    rows = splits[:, None] * GROUP_HEADS + heads[None, :]  # [BLOCK_SPLITS, BLOCK_H]
    # Other programs wrote these: `.cg` reads from L2, not from this multiprocessor's own cache.
    lse = tl.load(
        partial_lse_ptr + rows,
        mask=live & (heads < GROUP_HEADS)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )  # [BLOCK_SPLITS, BLOCK_H]
    lse = tl.where(live, lse, float("-inf"))  # [BLOCK_SPLITS, BLOCK_H]
    partial = tl.load(
        partial_out_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=live[:, :, None] & mask[None, :, :],
        other=0.0,
        cache_modifier=".cg",
    )  # [BLOCK_SPLITS, BLOCK_H, BLOCK_D]
    new_best = tl.maximum(best, tl.max(lse, 0))  # [BLOCK_H]
    rescale = tl.exp2(best - new_best)  # [BLOCK_H]
    weights = tl.exp2(lse - new_best[None, :])  # [BLOCK_SPLITS, BLOCK_H]
    total = total * rescale + tl.sum(weights, 0)  # [BLOCK_H]
    update = tl.sum(partial * weights[:, :, None], 0)  # [BLOCK_H, BLOCK_D]
    return acc * rescale[:, None] + update, new_best, total


@triton.jit
def combine_splits(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    GROUP_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the partial results of one sequence and KV head, in the order of the splits."""
    BLOCK_H: tl.constexpr = triton.next_power_of_2(GROUP_HEADS)
    # One program merges while the others are done: what counts is latency, not bandwidth. All
    # splits are read at once where registers hold them, else 2048 values at a time, three of these
    # tiles in flight.
    TILE_SIZE: tl.constexpr = BLOCK_H * BLOCK_D
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)  # [BLOCK_H, BLOCK_D]
    if MAX_SPLITS * TILE_SIZE <= 8192:
        acc, best, total = add_splits(
            acc,
            best,
            total,
            partial_out_ptr,
            partial_lse_ptr,
            0,
            num_splits,
            GROUP_HEADS,
            HEAD_DIM,
            triton.next_power_of_2(MAX_SPLITS),
        )
    else:
        BLOCK_SPLITS: tl.constexpr = 2048 // TILE_SIZE if TILE_SIZE < 2048 else 1
        for first in tl.range(0, num_splits, BLOCK_SPLITS, num_stages=4):
            acc, best, total = add_splits(
                acc,
                best,
                total,
                partial_out_ptr,
                partial_lse_ptr,
                first,
                num_splits,
                GROUP_HEADS,
                HEAD_DIM,
                BLOCK_SPLITS,
            )
    acc = acc / total[:, None]  # [BLOCK_H, BLOCK_D]
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < GROUP_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_H, BLOCK_D]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_rows_ptr", "context_lens_ptr"],
)
def attention_decode_window_sinks(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_open_ptr,
    v_open_ptr,
    block_table_ptr,
    seq_rows_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counters_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_CHUNK_TOKENS: tl.constexpr,
    LEAST_HEADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    TRIGGER_LATE: tl.constexpr,
):
    # Grid: axis 0 = KV head, axis 1 = sequence, axis 2 = split of the sequence's tokens.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # The query heads of a KV head are the columns of the score tile, tokens its rows: codes become
    # the left operand where they are, and few heads waste less than they would as rows.
    BLOCK_H: tl.constexpr = (
        LEAST_HEADS if GROUP_HEADS < LEAST_HEADS else triton.next_power_of_2(GROUP_HEADS)
    )
    # With int4 a tile of bytes is two planes of features: the first half of a head and the second.
    HAS_PLANES: tl.constexpr = KV_FORMAT == "int4"
    WIDTH: tl.constexpr = HEAD_DIM // 2 if HAS_PLANES else HEAD_DIM
    BLOCK_W: tl.constexpr = 32 if WIDTH < 32 else triton.next_power_of_2(WIDTH)
    # Scores are kept in units of log2: each exponential is then one exp2.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    # Scales of values are often too small for f16: a fixed factor goes in here and out at the end.
    LIFT: tl.constexpr = 1.0 if KV_FORMAT == "fp8" and not USE_PTX else 64.0
    if USE_PDL and not TRIGGER_LATE:
        tl.extra.cuda.gdc_launch_dependents()

    # Rows, lengths and pages are older than the kernel before this one and can be read before the
    # wait for it; the queries and the newest keys and values can't.
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    # Whole pages before the window of 4096 tokens are left out.
    skipped = tl.maximum(context - 4096, 0) // PAGE_SIZE
    context -= skipped * PAGE_SIZE
    block_table_ptr += skipped
    chunk = tl.maximum(tl.cdiv(context, MAX_SPLITS), MIN_CHUNK_TOKENS)
    chunk = tl.cdiv(chunk, BLOCK_TOKENS) * BLOCK_TOKENS
    num_splits = tl.maximum(tl.cdiv(context, chunk), 1)
    if split >= num_splits:
        return
    start = split * chunk
    stop = tl.minimum(start + chunk, context)

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_W)
    mask = (heads < GROUP_HEADS)[None, :] & (dims < WIDTH)[:, None]  # [BLOCK_W, BLOCK_H]
    offsets = heads[None, :] * HEAD_DIM + dims[:, None]  # [BLOCK_W, BLOCK_H]
    q_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    out_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    full_stop = tl.minimum(stop, context // PAGE_SIZE * PAGE_SIZE)
    page = tile_page(pages_ptr, start, full_stop, PAGE_SIZE)
    if USE_PDL:
        # The first split of every sequence comes by here, so this kernel can't end before the
        # kernels it depends on.
        tl.extra.cuda.gdc_wait()

    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * SCALE_LOG2
    q = q.to(tl.float16)  # [BLOCK_W, BLOCK_H]
    second_q = q  # [BLOCK_W, BLOCK_H]
    if HAS_PLANES:
        second_q = tl.load(q_ptr + WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)
        second_q = (second_q * SCALE_LOG2).to(tl.float16)  # [BLOCK_W, BLOCK_H]

    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    # The sink is one more score, whose value is zero.
    sink = tl.load(sinks_ptr + kv_head * GROUP_HEADS + heads, mask=heads < GROUP_HEADS, other=0.0)
    sink = sink.to(tl.float32) * 1.4426950408889634
    best = tl.where(split == 0, sink, best)  # [BLOCK_H]
    total += tl.where(split == 0, 1.0, 0.0)  # [BLOCK_H]
    # Sums over tokens stay apart by the token's place in its tile, and are added up at the end:
    # adding across threads in every tile would take longer than multiplying.
    weight_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    scaled_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    least_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    acc = tl.zeros((BLOCK_W, BLOCK_H), tl.float32)  # [BLOCK_W, BLOCK_H]
    second_acc = tl.zeros((BLOCK_W, BLOCK_H), tl.float32)  # [BLOCK_W, BLOCK_H]
    for tile_start in range(start, full_stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        keys, scales, zeros, second_scales, second_zeros, values, value_words = load_codes(
            k_cache_ptr, v_cache_ptr, page, tile_start, kv_head,
            NUM_KV_HEADS, HEAD_DIM, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
        )  # fmt: skip
        page = tile_page(pages_ptr, tile_start + BLOCK_TOKENS, full_stop, PAGE_SIZE)
        if HAS_PLANES:
            k, second_k = to_key_planes(
                keys, scales, zeros, second_scales, second_zeros, USE_PTX
            )  # [BLOCK_TOKENS, BLOCK_W] each
            scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
            scores = tl.dot(second_k, second_q, scores)  # [BLOCK_TOKENS, BLOCK_H]
        else:
            k = to_keys(keys, scales, zeros, KV_FORMAT, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
            scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.trans(scores)  # [BLOCK_H, BLOCK_TOKENS]
        # Not infinite: a row may see nothing of its first tiles.
        seen = tokens[None, :] >= context - 4096
        scores = tl.where(seen, scores, -1.0e30)
        scores = tl.trans(scores)  # [BLOCK_TOKENS, BLOCK_H]
        new_best = tl.maximum(best, tl.max(scores, 0))  # [BLOCK_H]
        rescale = tl.exp2(best - new_best)  # [BLOCK_H]
        weights = tl.exp2(scores - new_best[None, :])  # [BLOCK_TOKENS, BLOCK_H]
        weight_sums = weight_sums * rescale[None, :] + weights  # [BLOCK_TOKENS, BLOCK_H]
        total = total * rescale  # [BLOCK_H]
        best = new_best  # [BLOCK_H]
        scaled, least = scale_weights(weights, value_words, KV_FORMAT, USE_PTX, LIFT)
        acc = acc * rescale[None, :]  # [BLOCK_W, BLOCK_H]
        if HAS_PLANES:
            first, second = to_f16_planes(values, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS] each
            acc = tl.dot(first, scaled, acc)  # [BLOCK_W, BLOCK_H]
            second_acc = tl.dot(second, scaled, second_acc * rescale[None, :])
            least_sums = least_sums * rescale[None, :] + weights * least[:, None]
        else:
            numbers = to_f16(values, KV_FORMAT, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS]
            acc = tl.dot(numbers, scaled, acc)  # [BLOCK_W, BLOCK_H]
        scaled_sums = scaled_sums * rescale[None, :] + scaled.to(tl.float32)
    total += tl.sum(weight_sums, 0)  # [BLOCK_H]
    least_sum = tl.sum(least_sums, 0)  # [BLOCK_H]
    # What the bits add to a code is taken back.
    ADDED: tl.constexpr = 0.0 if KV_FORMAT == "fp8" else 1152.0 if KV_FORMAT == "int8" else 1024.0
    added = ADDED * tl.sum(scaled_sums, 0)[None, :]  # [1, BLOCK_H]
    acc -= added  # [BLOCK_W, BLOCK_H]
    second_acc -= added  # [BLOCK_W, BLOCK_H]

    # What is left of the split lies in the open page.
    open_offset = tl.maximum(table_row, 0).to(tl.int64) * PAGE_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    open_offset += kv_head * HEAD_DIM
    for tile_start in tl.range(tl.maximum(start, full_stop), stop, BLOCK_TOKENS, num_stages=1):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        live = tokens < stop  # [BLOCK_TOKENS]
        rows = (tokens % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)  # [BLOCK_TOKENS]
        loaded = live[:, None] & (dims < WIDTH)[None, :]  # [BLOCK_TOKENS, BLOCK_W]
        open_offsets = open_offset + rows[:, None] + dims[None, :]  # [BLOCK_TOKENS, BLOCK_W]
        k = tl.load(k_open_ptr + open_offsets, mask=loaded, other=0.0)
        v = tl.load(v_open_ptr + open_offsets, mask=loaded, other=0.0)
        scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
        if HAS_PLANES:
            second_k = tl.load(k_open_ptr + WIDTH + open_offsets, mask=loaded, other=0.0)
            scores = tl.dot(second_k, second_q, scores)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.trans(scores)  # [BLOCK_H, BLOCK_TOKENS]
        # Not infinite: a row may see nothing of its first tiles.
        seen = tokens[None, :] >= context - 4096
        scores = tl.where(seen, scores, -1.0e30)
        scores = tl.trans(scores)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.where(live[:, None], scores, float("-inf"))  # [BLOCK_TOKENS, BLOCK_H]
        new_best = tl.maximum(best, tl.max(scores, 0))  # [BLOCK_H]
        rescale = tl.exp2(best - new_best)  # [BLOCK_H]
        weights = tl.exp2(scores - new_best[None, :])  # [BLOCK_TOKENS, BLOCK_H]
        total = total * rescale + tl.sum(weights, 0)  # [BLOCK_H]
        best = new_best  # [BLOCK_H]
        least_sum = least_sum * rescale  # [BLOCK_H]
        lifted = (weights * LIFT).to(tl.float16)  # [BLOCK_TOKENS, BLOCK_H]
        acc = tl.dot(tl.trans(v), lifted, acc * rescale[None, :])  # [BLOCK_W, BLOCK_H]
        if HAS_PLANES:
            second_v = tl.load(v_open_ptr + WIDTH + open_offsets, mask=loaded, other=0.0)
            lifted = (weights * (16.0 * LIFT)).to(tl.float16)  # as large as the codes
            second_acc = tl.dot(tl.trans(second_v), lifted, second_acc * rescale[None, :])

    if USE_PDL and TRIGGER_LATE:
        # The dependents' weights would have come in the way of this kernel's keys and values.
        tl.extra.cuda.gdc_launch_dependents()
    # A padding sequence read nothing: its zeros are divided by one.
    divisor = tl.where(total > 0.0, total, 1.0)[None, :]  # [1, BLOCK_H]
    UNLIFT: tl.constexpr = 1.0 / LIFT
    acc = (acc * UNLIFT + least_sum[None, :]) / divisor  # [BLOCK_W, BLOCK_H]
    second_acc = (second_acc * (UNLIFT * 0.0625) + least_sum[None, :]) / divisor
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_PLANES:
            second_ptrs = out_ptr + WIDTH + offsets  # [BLOCK_W, BLOCK_H]
            tl.store(second_ptrs, second_acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        group = seq * NUM_KV_HEADS + kv_head
        partial_out_ptr += group.to(tl.int64) * (MAX_SPLITS * GROUP_HEADS * HEAD_DIM)
        partial_lse_ptr += group * (MAX_SPLITS * GROUP_HEADS)
        partial_ptrs = partial_out_ptr + split * (GROUP_HEADS * HEAD_DIM) + offsets
        tl.store(partial_ptrs, acc, mask=mask)
        if HAS_PLANES:
            tl.store(partial_ptrs + WIDTH, second_acc, mask=mask)
        lse = best + tl.log2(total)  # [BLOCK_H]
        tl.store(partial_lse_ptr + split * GROUP_HEADS + heads, lse, mask=heads < GROUP_HEADS)
        # All threads have stored before one of them announces the split; acq_rel then shows the
        # stores of every split to the program that arrives last.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.debug_barrier()
            BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
            combine_splits(
                partial_out_ptr,
                partial_lse_ptr,
                out_ptr,
                num_splits,
                GROUP_HEADS,
                HEAD_DIM,
                BLOCK_D,
                MAX_SPLITS,
            )
            tl.store(counters_ptr + group, 0)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_open: torch.Tensor,
    v_open: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    num_seqs: int,
) -> None:
    """Write the attention output of the first `num_seqs` sequences to `out`."""
    grid = (SHAPE["NUM_KV_HEADS"], num_seqs, SCHEDULE["MAX_SPLITS"])
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    attention_decode_window_sinks[grid](
        q,
        k_cache,
        v_cache,
        k_open,
        v_open,
        block_table,
        seq_rows,
        context_lens,
        sinks,
        out,
        partial_out,
        partial_lse,
        counters,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
