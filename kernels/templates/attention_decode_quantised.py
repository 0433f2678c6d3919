"""Attend from one query token per sequence to its pages of a quantised KV cache (flash decoding).

Scales and zeros stay out of the inner loop. A score is s_k (q . n) + z_k sum(q): keys are
multiplied as the integers they are stored as, by integer tensor cores, for which q becomes two int8
parts of 15 bits together (fp8 keys are multiplied as f16). An output is sum(p s_v n) + sum(p z_v):
the scales of values go into the weights p; the codes of values become f16 by their bits alone, as
1024 plus the code, which the sum of the weights takes back out of each tile. Every byte is loaded
once.
Splits and their combination are those of `attention_decode`.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row,
N = D bytes of codes per token, D / 2 with int4):
  q, out        [T, H, D], [T, H * D]: contiguous, T >= num_seqs
  k_cache,      u8[P, G, S * (N + 4)]: contiguous; codes of keys [S, N], of values [N, S], then a
  v_cache       word for each of the S tokens: the scale in f32; with int4 the scale in f16 and,
                above it, the least value. int8: code + 128, e4m3 with fp8; int4: feature d in the
                low and d + D / 2 in the high half of a byte. Bit 7 of the keys' bytes is flipped,
                of int8 and int4. Codes of values are read up to the next multiple of 16 tokens
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  context_lens  i32[num_seqs]: tokens in the cache, the query's own included
  partial_out   f32, at least num_seqs * H * MAX_SPLITS * D elements of scratch
  partial_lse   f32, at least num_seqs * H * MAX_SPLITS elements of scratch
  counters      i32, at least num_seqs * G elements, zero before the first launch and after each

Grid: (KV head, sequence, split). A program without a split of its own leaves at once.
Bound by reading K and V once: 2 * context * G * (N + 4) bytes per sequence.
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
    BLOCK_TOKENS=64,
    MAX_SPLITS=8,
    MIN_CHUNK_TOKENS=256,
    USE_PTX=False,
    USE_PDL=False,
    TRIGGER_LATE=False,
    num_warps=2,
    num_stages=4,
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
    number = tl.floor(q / unit[:, None] + 0.5).to(tl.int32)  # [BLOCK_H, BLOCK_W]
    high = (number + 64) >> 7  # [BLOCK_H, BLOCK_W]
    return high.to(tl.int8), (number - high * 128).to(tl.int8), tl.sum(number, 1)


@triton.jit
def _add_splits(
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
def _combine_splits(
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
        acc, best, total = _add_splits(
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
            acc, best, total = _add_splits(
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
def attention_decode_quantised(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_rows_ptr,
    context_lens_ptr,
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
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    TRIGGER_LATE: tl.constexpr,
):
    # Grid: axis 0 = KV head, axis 1 = sequence, axis 2 = split of the sequence's tokens.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # The query heads of a KV head are the rows of the score tile; a dot wants 16 of everything.
    BLOCK_H: tl.constexpr = 16 if GROUP_HEADS < 16 else triton.next_power_of_2(GROUP_HEADS)
    # With int4 a tile of bytes is two planes of features: the first half of a head and the second.
    HAS_PLANES: tl.constexpr = KV_FORMAT == "int4"
    WIDTH: tl.constexpr = HEAD_DIM // 2 if HAS_PLANES else HEAD_DIM
    BLOCK_W: tl.constexpr = 32 if WIDTH < 32 else triton.next_power_of_2(WIDTH)
    # Scores are kept in units of log2: each exponential is then one exp2.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    # Scales of values are often too small for f16: a fixed factor goes in here and out at the end.
    LIFT: tl.constexpr = 64.0
    FP8_UNIT: tl.constexpr = 1.0 if USE_PTX else 256.0
    if USE_PDL and not TRIGGER_LATE:
        tl.extra.cuda.gdc_launch_dependents()

    # Rows, lengths and pages are older than the kernel before this one and can be read before the
    # wait for it; the queries and the newest keys and values can't.
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    chunk = tl.maximum(tl.cdiv(context, MAX_SPLITS), MIN_CHUNK_TOKENS)
    chunk = tl.cdiv(chunk, BLOCK_TOKENS) * BLOCK_TOKENS
    num_splits = tl.maximum(tl.cdiv(context, chunk), 1)
    if split >= num_splits:
        return
    start = split * chunk
    stop = tl.minimum(start + chunk, context)

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_W)
    mask = (heads < GROUP_HEADS)[:, None] & (dims < WIDTH)[None, :]  # [BLOCK_H, BLOCK_W]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_H, BLOCK_W]
    q_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    out_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = _load_page(pages_ptr, start, stop, PAGE_SIZE, BLOCK_TOKENS)
    if USE_PDL:
        # The first split of every sequence comes by here, so this kernel can't end before the
        # kernels it depends on.
        tl.extra.cuda.gdc_wait()

    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_W]
    largest = tl.max(tl.abs(q), 1)  # [BLOCK_H]
    if HAS_PLANES:
        second_q = tl.load(q_ptr + WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(second_q), 1))  # [BLOCK_H]
    unit = tl.where(largest > 0.0, largest / 16256.0, 1.0)  # [BLOCK_H]
    score_unit = unit * SCALE_LOG2  # [BLOCK_H]
    q_f16 = q.to(tl.float16)  # [BLOCK_H, BLOCK_W]
    high, low, q_sum = _part_query(q, unit)
    if HAS_PLANES:
        second_high, second_low, second_sum = _part_query(second_q, unit)
        q_sum = (q_sum + second_sum).to(tl.float32) * score_unit  # [BLOCK_H]
        eights = 8.0 * second_sum.to(tl.float32) * score_unit  # [BLOCK_H]

    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    least_sum = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    acc = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)  # [BLOCK_H, BLOCK_W]
    second_acc = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)  # [BLOCK_H, BLOCK_W]
    for tile_start in range(start, stop, BLOCK_TOKENS):
        live = tile_start + tl.arange(0, BLOCK_TOKENS) < stop  # [BLOCK_TOKENS]
        keys, key_words, values, value_words = _load_tile(
            k_cache_ptr, v_cache_ptr, page, tile_start, stop, kv_head,
            NUM_KV_HEADS, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
        )  # fmt: skip
        page = _load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)

        if KV_FORMAT == "int8":
            key_scale = key_words.to(tl.float32, bitcast=True)  # [BLOCK_TOKENS]
            codes = tl.trans(keys.to(tl.int8, bitcast=True))  # [BLOCK_W, BLOCK_TOKENS]
            products = tl.dot(high, codes, out_dtype=tl.int32) * 128
            products += tl.dot(low, codes, out_dtype=tl.int32)  # [BLOCK_H, BLOCK_TOKENS]
            scores = products.to(tl.float32) * score_unit[:, None] * key_scale[None, :]
        elif KV_FORMAT == "fp8":
            key_scale = key_words.to(tl.float32, bitcast=True) * (FP8_UNIT * SCALE_LOG2)
            numbers = tl.trans(_to_f16(keys, KV_FORMAT, USE_PTX))  # [BLOCK_W, BLOCK_TOKENS]
            scores = tl.dot(q_f16, numbers) * key_scale[None, :]  # [BLOCK_H, BLOCK_TOKENS]
        else:
            key_scale, key_least = _low_half(key_words), _high_half(key_words)  # [BLOCK_TOKENS]
            first, second = _to_i8_planes(keys, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
            first, second = tl.trans(first), tl.trans(second)  # [BLOCK_W, BLOCK_TOKENS]
            # The first plane holds n, the second 16 * (n - 8).
            highs = tl.dot(high, first, out_dtype=tl.int32) * 16
            highs += tl.dot(second_high, second, out_dtype=tl.int32)  # [BLOCK_H, BLOCK_TOKENS]
            lows = tl.dot(low, first, out_dtype=tl.int32) * 16
            lows += tl.dot(second_low, second, out_dtype=tl.int32)  # [BLOCK_H, BLOCK_TOKENS]
            products = (highs * 128 + lows).to(tl.float32) * (score_unit * 0.0625)[:, None]
            scores = (products + eights[:, None]) * key_scale[None, :]
            scores += q_sum[:, None] * key_least[None, :]  # [BLOCK_H, BLOCK_TOKENS]
        scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_H, BLOCK_TOKENS]
        new_best = tl.maximum(best, tl.max(scores, 1))  # [BLOCK_H]
        rescale = tl.exp2(best - new_best)  # [BLOCK_H]
        weights = tl.exp2(scores - new_best[:, None])  # [BLOCK_H, BLOCK_TOKENS]
        total = total * rescale + tl.sum(weights, 1)  # [BLOCK_H]
        best = new_best  # [BLOCK_H]

        if HAS_PLANES:
            value_scale, value_least = _low_half(value_words), _high_half(value_words)
            least_sum = least_sum * rescale + tl.sum(weights * value_least[None, :], 1)
        else:
            value_scale = value_words.to(tl.float32, bitcast=True)  # [BLOCK_TOKENS]
        scaled = (weights * (value_scale * LIFT)[None, :]).to(tl.float16)
        if KV_FORMAT == "fp8":
            numbers = tl.trans(_to_f16(values, KV_FORMAT, USE_PTX))  # [BLOCK_TOKENS, BLOCK_W]
            acc = tl.dot(scaled, numbers, acc * rescale[:, None])  # [BLOCK_H, BLOCK_W]
        else:
            # What the bits add to a code is taken back in the same tile: nothing large remains in
            # the sums, and it costs no instruction.
            scaled_sum = tl.sum(scaled.to(tl.float32), 1)[:, None]  # [BLOCK_H, 1]
            if HAS_PLANES:
                first, second = _to_f16_planes(values, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS]
                start_acc = second_acc * rescale[:, None] - 1024.0 * scaled_sum
                second_acc = tl.dot(scaled, tl.trans(second), start_acc)  # [BLOCK_H, BLOCK_W]
                start_acc = acc * rescale[:, None] - 1024.0 * scaled_sum
                acc = tl.dot(scaled, tl.trans(first), start_acc)  # [BLOCK_H, BLOCK_W]
            else:
                codes = tl.trans(_to_f16(values, KV_FORMAT, USE_PTX))  # [BLOCK_TOKENS, BLOCK_W]
                start_acc = acc * rescale[:, None] - 1152.0 * scaled_sum
                acc = tl.dot(scaled, codes, start_acc)  # [BLOCK_H, BLOCK_W]

    if USE_PDL and TRIGGER_LATE:
        # The dependents' weights would have come in the way of this kernel's keys and values.
        tl.extra.cuda.gdc_launch_dependents()
    # A padding sequence read nothing: its zeros are divided by one.
    divisor = tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_H, 1]
    UNLIFT: tl.constexpr = FP8_UNIT / LIFT if KV_FORMAT == "fp8" else 1.0 / LIFT
    acc = (acc * UNLIFT + least_sum[:, None]) / divisor  # [BLOCK_H, BLOCK_W]
    second_acc = (second_acc * (UNLIFT * 0.0625) + least_sum[:, None]) / divisor
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_PLANES:
            second_ptrs = out_ptr + WIDTH + offsets  # [BLOCK_H, BLOCK_W]
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
            _combine_splits(
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
    grid = (SHAPE["NUM_KV_HEADS"], num_seqs, SCHEDULE["MAX_SPLITS"])
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    attention_decode_quantised[grid](
        q,
        k_cache,
        v_cache,
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
        **pdl,
        enable_fp_fusion=True,
    )
