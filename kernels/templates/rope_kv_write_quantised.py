"""Rotate the queries and keys of a fused projection and append to a quantised KV cache.

Rotation, and the norms of heads before it, are those of `rope_kv_write`. A row's last page is open
until it is full: its keys and values stay as they are, in f16. The kernel that follows quantises
the pages that the step fills, keys by channel and values by token, and leaves the rest open.
  keys, of a page and channel: int8, int4: round((x - m) / s), m = min x, s = (max x - m) / 255 or
    15; fp8: e4m3(256 (x - m) / s), m midway from min x to max x, s = 256 / 448 max |x - m|
  values, of a token and head: int8: round(x / s) + 128, s = max |x| / 127; int4 and fp8 as for
    keys, but m = 0 with fp8
  s and m are f16.

Shapes (T tokens, H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages
per row, C positions, N = D bytes of codes per token, D / 2 with int4):
  qkv           [T, (H + 2G) * D]: contiguous; q, then k, then v
  positions     i32[T]: position of each token in its sequence
  cos_sin       f32[C, r]: cosines in the first half, sines in the second
  token_seq     i32[T]: sequence of each token
  seq_rows      i32[B]: row of each sequence; tokens of padding (row -1) write nothing to the cache
  block_table   i32[R, M]: page of positions m * S .. (m + 1) * S of a row; rows may be strided
  query_start   i32[B + 1]: first token of each sequence; read only if STORE_OWN
  context_lens  i32[B]: tokens of each sequence, the step's own included
  q_weight,     [D]: weights of the norms; unused (None or any tensor) without HEAD_NORM
  k_weight
  k_cache,      u8[P, G, block bytes]: contiguous, as `attention_decode_quantised` describes them
  v_cache
  k_open,       f16[R, S, G, D]: contiguous; the page of each row that is not full
  v_open
  q             [T, H * D]: contiguous; rotated queries, those of padding too
  k, v          [T, G * D]: contiguous; the step's keys and values. Without STORE_OWN unused (None
                or any tensor): then each sequence adds one token, which goes to its open page

Grid: (token, block of BLOCK_HEADS of the H + 2G heads); then (KV head, page that may be full), a
sequence has as many programs of the second kernel as it can fill pages, and one at least.
Bound by moving qkv in and out: at most 2 * T * (H + 2G) * D elements.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=9,
    NUM_KV_HEADS=3,
    HEAD_DIM=64,
    ROTARY_DIM=64,
    PAGE_SIZE=64,
    HEAD_NORM=False,
    EPS=1e-06,
    OFFSET=0.0,
    KV_FORMAT="int8",
    STORE_OWN=False,
)
SCHEDULE = dict(BLOCK_HEADS=4, USE_PDL=False, num_warps=1, num_stages=1)


@triton.jit
def _weight_of(q_weight_ptr, k_weight_ptr, feature, inside, is_query, OFFSET: tl.constexpr):
    """Give the norms' weights of some features, [BLOCK_HEADS, features]."""
    q_weight = tl.load(q_weight_ptr + feature, mask=inside, other=0.0)[None, :]  # [1, features]
    k_weight = tl.load(k_weight_ptr + feature, mask=inside, other=0.0)[None, :]  # [1, features]
    return tl.where(is_query, q_weight, k_weight).to(tl.float32) + OFFSET


@triton.jit
def _rotate(
    x,
    other,
    feature,
    angle_ptr,
    is_value,
    ROTARY_DIM: tl.constexpr,
):
    """Turn features with their partners: x * cos + other * (-sin in the first half, else sin)."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    turns = feature < ROTARY_DIM  # [features]; what is beyond is copied: cos 1, sin 0
    cos = tl.load(angle_ptr + feature % HALF, mask=turns, other=1.0)  # [features]
    sin = tl.load(angle_ptr + HALF + feature % HALF, mask=turns, other=0.0)  # [features]
    sin = tl.where(feature < HALF, -sin, sin)  # [features]
    return tl.where(is_value, x, x * cos[None, :] + other * sin[None, :])


@triton.jit
def _to_e4m3(x):
    """Round numbers of at most 448 in size to e4m3, i32 codes; halves away from zero."""
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)  # subnormals too
    inverse_step = ((130 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (3 - exponent)
    mantissa = tl.floor(size * inverse_step + 0.5).to(tl.int32)  # 0 to 16; 16 carries
    code = tl.minimum((exponent + 6) * 8 + mantissa, 0x7E)
    return tl.where(x < 0.0, code | 0x80, code)


@triton.jit
def _load_page(
    own_ptr, open_ptr, first_token, num_tokens, feature, position, prior,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FEATURES: tl.constexpr, STORE_OWN: tl.constexpr,
):  # fmt: skip
    """Load tokens of a page as f32 [BLOCK_TOKENS, features], those before FEATURES.

    The page begins at `position`; tokens before `prior` lie in the open page.
    """
    WIDTH: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    slot = first_token + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    inside = (slot < num_tokens)[:, None] & (feature < FEATURES)[None, :]
    is_open = (position + slot < prior)[:, None]  # [BLOCK_TOKENS, 1]
    open_ptrs = open_ptr + slot[:, None] * WIDTH + feature[None, :]
    x = tl.load(open_ptrs, mask=inside & is_open, other=0.0).to(tl.float32)
    if STORE_OWN:
        own = (position + slot - prior).to(tl.int64)  # [BLOCK_TOKENS]
        own_ptrs = own_ptr + own[:, None] * WIDTH + feature[None, :]
        new = tl.load(own_ptrs, mask=inside & (is_open == 0), other=0.0).to(tl.float32)
        # As it would have come from the open page.
        new = tl.minimum(tl.maximum(new, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
        x = tl.where(is_open, x, new)
    return x


@triton.jit
def _to_codes(x, zero, spread, KV_FORMAT: tl.constexpr):
    """Give the codes of numbers and their scale f16; `zero` and `spread` broadcast over x."""
    if KV_FORMAT == "fp8":
        scale = (spread * (256.0 / 448.0)).to(tl.float16)
    elif KV_FORMAT == "int8":
        scale = (spread * (1.0 / 255.0)).to(tl.float16)
    else:
        scale = (spread * (1.0 / 15.0)).to(tl.float16)
    wide = scale.to(tl.float32)
    steps = (x - zero) * tl.where(wide > 0.0, 1.0 / wide, 0.0)
    if KV_FORMAT == "fp8":
        return _to_e4m3(steps * 256.0), scale
    LEVELS: tl.constexpr = 255.0 if KV_FORMAT == "int8" else 15.0
    steps = tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), LEVELS)
    return steps.to(tl.int32), scale


@triton.jit
def _word_of(scale, zero):
    """Give a word of two f16 numbers, the scale in its low half."""
    word = scale.to(tl.uint16, bitcast=True).to(tl.int32)
    return word | (zero.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _key_codes(x, live, KV_FORMAT: tl.constexpr):
    """Quantise the channels of a page, [tokens, channels]; give codes, scales and zeros."""
    least = tl.min(tl.where(live, x, float("inf")), 0)  # [channels]
    largest = tl.max(tl.where(live, x, float("-inf")), 0)  # [channels]
    if KV_FORMAT == "fp8":
        zero = ((largest + least) * 0.5).to(tl.float16)  # [channels]
        wide = zero.to(tl.float32)  # [channels]
        # Rounding is symmetric: the largest distance is that of one of the two ends.
        spread = tl.maximum(tl.abs(largest - wide), tl.abs(least - wide))  # [channels]
    else:
        zero = least.to(tl.float16)  # [channels]
        wide = zero.to(tl.float32)  # [channels]
        spread = largest - wide  # [channels]
    codes, scale = _to_codes(x, wide[None, :], spread[None, :], KV_FORMAT)
    return codes, scale, zero[None, :]  # [tokens, channels], [1, channels] twice


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "token_seq_ptr", "seq_rows_ptr"])
def rope_kv_write_quantised(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    token_seq_ptr,
    seq_rows_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_open_ptr,
    v_open_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    STORE_OWN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of heads (queries, then keys, then values).
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    ROTARY_HALF: tl.constexpr = ROTARY_DIM // 2
    # Every head is handled in halves, which rotation exchanges.
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    first = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    second = HALF + first  # [BLOCK_HALF]
    inside = first < HALF  # [BLOCK_HALF]
    mask = (head < ALL_HEADS)[:, None] & inside[None, :]  # [BLOCK_HEADS, BLOCK_HALF]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()

    # Positions and rows are older than the kernel before this one, which lets no dependent start
    # before what it depends on has ended: they are read before the wait for qkv.
    position = tl.load(positions_ptr + token)
    row = tl.load(seq_rows_ptr + tl.load(token_seq_ptr + token))
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * ROTARY_DIM
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    is_query = (head < NUM_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    head_ptr = qkv_ptr + token.to(tl.int64) * (ALL_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
    # Feature i is turned with its partner, half the rotated features away.
    first_partner = tl.where(first < ROTARY_DIM, (first + ROTARY_HALF) % ROTARY_DIM, first)
    second_partner = tl.where(second < ROTARY_DIM, (second + ROTARY_HALF) % ROTARY_DIM, second)
    x = tl.load(head_ptr + first[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptr + second[None, :], mask=mask, other=0.0).to(tl.float32)
    x_other = tl.load(head_ptr + first_partner[None, :], mask=mask, other=0.0).to(tl.float32)
    y_other = tl.load(head_ptr + second_partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HEAD_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + EPS)  # [BLOCK_HEADS]
        scale = tl.where(is_value, 1.0, scale[:, None])  # [BLOCK_HEADS, 1]
        normed = (
            x * scale * _weight_of(q_weight_ptr, k_weight_ptr, first, inside, is_query, OFFSET)
        )  # [BLOCK_HEADS, BLOCK_HALF]
        x = tl.where(is_value, x, normed)
        x_other = (
            x_other
            * scale
            * _weight_of(q_weight_ptr, k_weight_ptr, first_partner, inside, is_query, OFFSET)
        )  # [BLOCK_HEADS, BLOCK_HALF]
        normed = (
            y * scale * _weight_of(q_weight_ptr, k_weight_ptr, second, inside, is_query, OFFSET)
        )  # [BLOCK_HEADS, BLOCK_HALF]
        y = tl.where(is_value, y, normed)
        y_other = (
            y_other
            * scale
            * _weight_of(q_weight_ptr, k_weight_ptr, second_partner, inside, is_query, OFFSET)
        )  # [BLOCK_HEADS, BLOCK_HALF]
    x = _rotate(x, x_other, first, angle_ptr, is_value, ROTARY_DIM)  # [BLOCK_HEADS, BLOCK_HALF]
    y = _rotate(y, y_other, second, angle_ptr, is_value, ROTARY_DIM)  # [BLOCK_HEADS, BLOCK_HALF]

    k_head = (head - NUM_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    v_head = k_head - NUM_KV_HEADS  # [BLOCK_HEADS, 1]
    dtype = q_ptr.dtype.element_ty
    q_ptrs = q_ptr + token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
    tl.store(q_ptrs + first[None, :], x.to(dtype), mask=mask & is_query)
    tl.store(q_ptrs + second[None, :], y.to(dtype), mask=mask & is_query)
    num_written = NUM_KV_HEADS
    if STORE_OWN:
        offset = token.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
    else:
        # To the open page; a token of padding has none.
        num_written = tl.where(row >= 0, NUM_KV_HEADS, 0)
        slot = tl.maximum(row, 0).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        offset = slot * (NUM_KV_HEADS * HEAD_DIM)
        k_ptr, v_ptr = k_open_ptr, v_open_ptr
        dtype = k_open_ptr.dtype.element_ty
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)  # [BLOCK_HEADS, BLOCK_HALF]
        y = tl.minimum(tl.maximum(y, -65504.0), 65504.0)  # [BLOCK_HEADS, BLOCK_HALF]
    is_key = (k_head >= 0) & (k_head < num_written)  # [BLOCK_HEADS, 1]
    is_value = (v_head >= 0) & (v_head < num_written)  # [BLOCK_HEADS, 1]
    k_ptrs = k_ptr + offset + k_head * HEAD_DIM  # [BLOCK_HEADS, 1]
    v_ptrs = v_ptr + offset + v_head * HEAD_DIM  # [BLOCK_HEADS, 1]
    tl.store(k_ptrs + first[None, :], x.to(dtype), mask=mask & is_key)
    tl.store(k_ptrs + second[None, :], y.to(dtype), mask=mask & is_key)
    tl.store(v_ptrs + first[None, :], x.to(dtype), mask=mask & is_value)
    tl.store(v_ptrs + second[None, :], y.to(dtype), mask=mask & is_value)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs"],
    do_not_specialize_on_alignment=[
        "seq_rows_ptr",
        "block_table_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def rope_kv_write_quantised_close(
    k_ptr,
    v_ptr,
    seq_rows_ptr,
    block_table_ptr,
    query_start_ptr,
    context_lens_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_open_ptr,
    v_open_ptr,
    table_stride,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    STORE_OWN: tl.constexpr,
    TILE_NUMBERS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = KV head, axis 1 = page: of sequence i the programs from query_start[i] //
    # PAGE_SIZE + i on, of which the first also writes what stays open.
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    WIDTH: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    ROW_BYTES: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == "int4" else HEAD_DIM
    K_BLOCK: tl.constexpr = PAGE_SIZE * ROW_BYTES + HEAD_DIM * 4
    V_WORD: tl.constexpr = 4 if KV_FORMAT == "int4" else 2
    V_BLOCK: tl.constexpr = PAGE_SIZE * (ROW_BYTES + V_WORD)
    # Every head is handled in halves: feature d shares a byte of int4 codes with d + D / 2.
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    BLOCK_PAGE: tl.constexpr = triton.next_power_of_2(PAGE_SIZE)
    # Registers hold some TILE_NUMBERS of each half at a time: channels of keys, tokens of values.
    BLOCK_C: tl.constexpr = max(1, min(BLOCK_HALF, TILE_NUMBERS // BLOCK_PAGE))
    BLOCK_T: tl.constexpr = max(16, min(BLOCK_PAGE, TILE_NUMBERS // BLOCK_HALF))
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if STORE_OWN:
        # Counting takes one load where bisecting takes many.
        launch_start = tl.load(query_start_ptr)
        num_starts = 0
        for first in range(0, num_seqs, 256):
            seqs = first + tl.arange(0, 256)  # [256]
            starts = tl.load(query_start_ptr + seqs, mask=seqs < num_seqs, other=0)  # [256]
            first_blocks = (starts - launch_start) // PAGE_SIZE + seqs  # [256]
            is_start = (first_blocks <= block) & (seqs < num_seqs)  # [256]
            num_starts += tl.sum(is_start.to(tl.int32), 0)
        seq = num_starts - 1
        start = tl.load(query_start_ptr + seq)
        num_own = tl.load(query_start_ptr + seq + 1) - start
        number = block - (start - launch_start) // PAGE_SIZE - seq
    else:
        seq = block
        start = 0
        num_own = 1
        number = 0
    row = tl.load(seq_rows_ptr + seq).to(tl.int64)
    context = tl.load(context_lens_ptr + seq)
    if (row < 0) | (context < num_own) | (num_own == 0):
        return
    # What came before the step, or before its one token, lies in the open page.
    earlier = context - num_own
    page_number = earlier // PAGE_SIZE + number
    prior = context
    if STORE_OWN:
        prior = earlier
        k_ptr += start.to(tl.int64) * WIDTH + kv_head * HEAD_DIM
        v_ptr += start.to(tl.int64) * WIDTH + kv_head * HEAD_DIM
    k_open_ptr += row * (PAGE_SIZE * WIDTH) + kv_head * HEAD_DIM
    v_open_ptr += row * (PAGE_SIZE * WIDTH) + kv_head * HEAD_DIM
    position = page_number * PAGE_SIZE
    if position + PAGE_SIZE <= context:
        page = tl.load(block_table_ptr + row * table_stride + page_number).to(tl.int64)
        k_cache_ptr += (page * NUM_KV_HEADS + kv_head) * K_BLOCK
        v_cache_ptr += (page * NUM_KV_HEADS + kv_head) * V_BLOCK
        page_slot = tl.arange(0, BLOCK_PAGE)  # [BLOCK_PAGE]
        for first in range(0, HALF, BLOCK_C):
            feature = first + tl.arange(0, BLOCK_C)  # [BLOCK_C]
            live = (page_slot < PAGE_SIZE)[:, None] & (feature < HALF)[
                None, :
            ]  # [BLOCK_PAGE, BLOCK_C]
            x = _load_page(
                k_ptr, k_open_ptr, 0, PAGE_SIZE, feature, position, prior,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_PAGE, HALF, STORE_OWN,
            )  # fmt: skip
            y = _load_page(
                k_ptr, k_open_ptr, 0, PAGE_SIZE, HALF + feature, position, prior,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_PAGE, HEAD_DIM, STORE_OWN,
            )  # fmt: skip
            x, x_scale, x_zero = _key_codes(x, live, KV_FORMAT)
            y, y_scale, y_zero = _key_codes(y, live, KV_FORMAT)
            code_ptrs = k_cache_ptr + page_slot[:, None] * ROW_BYTES + feature[None, :]
            if KV_FORMAT == "int4":
                tl.store(code_ptrs, (x | (y << 4)).to(tl.uint8), mask=live)
            else:
                tl.store(code_ptrs, x.to(tl.uint8), mask=live)
                tl.store(code_ptrs + HALF, y.to(tl.uint8), mask=live)
            scale_ptrs = (k_cache_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.float16))
            scale_ptrs += feature[None, :]  # [1, BLOCK_C]
            inside = (feature < HALF)[None, :]  # [1, BLOCK_C]
            tl.store(scale_ptrs, x_scale, mask=inside)
            tl.store(scale_ptrs + HALF, y_scale, mask=inside)
            tl.store(scale_ptrs + HEAD_DIM, x_zero, mask=inside)
            tl.store(scale_ptrs + HEAD_DIM + HALF, y_zero, mask=inside)
        feature = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
        inside = (feature < HALF)[None, :]  # [1, BLOCK_HALF]
        for first in range(0, PAGE_SIZE, BLOCK_T):
            slot = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
            x = _load_page(
                v_ptr, v_open_ptr, first, PAGE_SIZE, feature, position, prior,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_T, HALF, STORE_OWN,
            )  # fmt: skip
            y = _load_page(
                v_ptr, v_open_ptr, first, PAGE_SIZE, HALF + feature, position, prior,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_T, HEAD_DIM, STORE_OWN,
            )  # fmt: skip
            low = tl.min(tl.where(inside, tl.minimum(x, y), float("inf")), 1)  # [BLOCK_T]
            high = tl.max(tl.where(inside, tl.maximum(x, y), float("-inf")), 1)  # [BLOCK_T]
            largest = tl.maximum(high, -low)  # [BLOCK_T]
            code_ptrs = v_cache_ptr + feature[None, :] * PAGE_SIZE + slot[:, None]
            words = v_cache_ptr + PAGE_SIZE * ROW_BYTES + slot[:, None] * V_WORD  # [BLOCK_T, 1]
            is_slot = (slot < PAGE_SIZE)[:, None]  # [BLOCK_T, 1]
            mask = inside & is_slot  # [BLOCK_T, BLOCK_HALF]
            if KV_FORMAT == "int4":
                zero = low.to(tl.float16)[:, None]  # [BLOCK_T, 1]
                wide = zero.to(tl.float32)  # [BLOCK_T, 1]
                x, scale = _to_codes(x, wide, high[:, None] - wide, KV_FORMAT)
                y, scale = _to_codes(y, wide, high[:, None] - wide, KV_FORMAT)
                tl.store(code_ptrs, (x | (y << 4)).to(tl.uint8), mask=mask)
                words = words.to(tl.pointer_type(tl.int32))  # [BLOCK_T, 1]
                tl.store(words, _word_of(scale, zero), mask=is_slot)
            else:
                if KV_FORMAT == "int8":
                    scale = (largest * (1.0 / 127.0)).to(tl.float16)[:, None]  # [BLOCK_T, 1]
                    wide = scale.to(tl.float32)  # [BLOCK_T, 1]
                    inverse = tl.where(wide > 0.0, 1.0 / wide, 0.0)  # [BLOCK_T, 1]
                    x = tl.minimum(tl.maximum(tl.floor(x * inverse + 0.5), -127.0), 127.0)
                    y = tl.minimum(tl.maximum(tl.floor(y * inverse + 0.5), -127.0), 127.0)
                    x, y = x.to(tl.int32) + 128, y.to(tl.int32) + 128  # [BLOCK_T, BLOCK_HALF]
                else:
                    x, scale = _to_codes(x, 0.0, largest[:, None], KV_FORMAT)
                    y, scale = _to_codes(y, 0.0, largest[:, None], KV_FORMAT)
                tl.store(code_ptrs, x.to(tl.uint8), mask=mask)
                tl.store(code_ptrs + HALF * PAGE_SIZE, y.to(tl.uint8), mask=mask)
                tl.store(words.to(tl.pointer_type(tl.float16)), scale, mask=is_slot)

    if STORE_OWN and number == 0:
        # All threads have read what was open before one of them writes over it.
        tl.debug_barrier()
        open_start = (context - 1) // PAGE_SIZE * PAGE_SIZE  # full or not
        feature = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
        for first in range(tl.maximum(open_start, earlier), context, BLOCK_T):
            tokens = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
            mask = (tokens < context)[:, None] & (feature < HALF)[None, :]
            own = (tokens - earlier).to(tl.int64)[:, None] * WIDTH + feature[None, :]
            opened = (tokens - open_start)[:, None] * WIDTH + feature[None, :]
            for half in tl.static_range(2):
                x = tl.load(k_ptr + own + half * HALF, mask=mask, other=0.0).to(tl.float32)
                x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
                tl.store(k_open_ptr + opened + half * HALF, x.to(tl.float16), mask=mask)
                x = tl.load(v_ptr + own + half * HALF, mask=mask, other=0.0).to(tl.float32)
                x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
                tl.store(v_open_ptr + opened + half * HALF, x.to(tl.float16), mask=mask)


def launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_open: torch.Tensor,
    v_open: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the first `num_tokens` tokens, of `num_seqs` sequences: queries, own, cache."""
    num_heads = SHAPE["NUM_HEADS"] + 2 * SHAPE["NUM_KV_HEADS"]
    grid = (num_tokens, triton.cdiv(num_heads, SCHEDULE["BLOCK_HEADS"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    shape = {name: value for name, value in SHAPE.items() if name != "KV_FORMAT"}
    rope_kv_write_quantised[grid](
        qkv,
        positions,
        cos_sin,
        token_seq,
        seq_rows,
        q_weight,
        k_weight,
        k_open,
        v_open,
        q,
        k,
        v,
        **shape,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
    num_pages = num_tokens // SHAPE["PAGE_SIZE"] + num_seqs if SHAPE["STORE_OWN"] else num_seqs
    rope_kv_write_quantised_close[(SHAPE["NUM_KV_HEADS"], num_pages)](
        k,
        v,
        seq_rows,
        block_table,
        query_start,
        context_lens,
        k_cache,
        v_cache,
        k_open,
        v_open,
        block_table.stride(0),
        num_seqs,
        NUM_KV_HEADS=SHAPE["NUM_KV_HEADS"],
        HEAD_DIM=SHAPE["HEAD_DIM"],
        PAGE_SIZE=SHAPE["PAGE_SIZE"],
        KV_FORMAT=SHAPE["KV_FORMAT"],
        STORE_OWN=SHAPE["STORE_OWN"],
        # Prompts fill most of the pages that programs look at, single tokens few.
        TILE_NUMBERS=4096 if SHAPE["STORE_OWN"] else 1024,
        USE_PDL=SCHEDULE["USE_PDL"],
        **pdl,
        num_warps=4,
        enable_fp_fusion=True,
    )
