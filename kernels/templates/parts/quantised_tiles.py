"""Tiles of full pages of a quantised KV cache: their codes, and what these mean."""

import triton
import triton.language as tl


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
