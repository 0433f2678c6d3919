"""Rotate the queries and keys of a fused projection and append to a quantised KV cache.

Rotation, and the norms of heads before it, are those of `rope_kv_write`. Keys and values are
quantised on their way into the cache, one token and head at a time, and never read again for it:
  int8: round(x / s), s = max |x| / 127; fp8: e4m3(x / s), s = max |x| / 448;
  int4: round((x - m) / s), m = min x, s = (max x - m) / 15, m and s in f16.

Shapes (T tokens, H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages
per row, C positions, N = D bytes of codes per token, D / 2 with int4):
  qkv          [T, (H + 2G) * D]: contiguous; q, then k, then v
  positions    i32[T]: position of each token in its sequence
  cos_sin      f32[C, r]: cosines in the first half, sines in the second
  token_seq    i32[T]: sequence of each token
  seq_rows     i32[B]: row of each sequence; tokens of padding (row -1) write nothing to the cache
  block_table  i32[R, M]: page of positions m * S .. (m + 1) * S of a row; rows may be strided
  q_weight,    [D]: weights of the norms; unused (None or any tensor) without HEAD_NORM
  k_weight
  k_cache,     u8[P, G, S * (N + 4)]: contiguous, as `attention_decode_quantised` describes them
  v_cache
  q            [T, H * D]: contiguous; rotated queries, those of padding too
  k, v         [T, G * D]: contiguous; keys and values as they are before they are quantised; unused
               (None or any tensor) unless STORE_OWN

Grid: (token, block of BLOCK_HEADS of the H + 2G heads).
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
def _store_codes(
    k_ptr, v_ptr, codes, head_offset, byte, slot, k_mask, v_mask,
    ROW_BYTES: tl.constexpr, PAGE_SIZE: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Store some bytes of each head: of keys token by token, of values feature by feature."""
    k_ptrs = k_ptr + head_offset + slot * ROW_BYTES + byte[None, :]  # [BLOCK_HEADS, bytes]
    tl.store(k_ptrs, (codes ^ FLIP).to(tl.uint8), mask=k_mask)
    v_ptrs = v_ptr + head_offset + byte[None, :] * PAGE_SIZE + slot  # [BLOCK_HEADS, bytes]
    tl.store(v_ptrs, codes.to(tl.uint8), mask=v_mask)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr",
        "token_seq_ptr",
        "seq_rows_ptr",
        "block_table_ptr",
    ],
)
def rope_kv_write_quantised(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    token_seq_ptr,
    seq_rows_ptr,
    block_table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    STORE_OWN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of heads (queries, then keys, then values).
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    ROTARY_HALF: tl.constexpr = ROTARY_DIM // 2
    ROW_BYTES: tl.constexpr = HEAD_DIM // 2 if KV_FORMAT == "int4" else HEAD_DIM
    BLOCK_BYTES: tl.constexpr = PAGE_SIZE * (ROW_BYTES + 4)
    # Every head is handled in halves: feature d shares a byte of int4 codes with d + D / 2.
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

    # Positions, rows and pages are older than the kernel before this one, which lets no dependent
    # start before what it depends on has ended: they are read before the wait for qkv.
    position = tl.load(positions_ptr + token)
    row = tl.load(seq_rows_ptr + tl.load(token_seq_ptr + token))
    # A token of padding owns no page: none of its keys and values is written.
    num_written = tl.where(row >= 0, NUM_KV_HEADS, 0)
    table_offset = tl.maximum(row, 0).to(tl.int64) * table_stride + position // PAGE_SIZE
    page = tl.load(block_table_ptr + table_offset, mask=row >= 0, other=0).to(tl.int64)
    slot = position % PAGE_SIZE
    k_cache_ptr += page * (NUM_KV_HEADS * BLOCK_BYTES)
    v_cache_ptr += page * (NUM_KV_HEADS * BLOCK_BYTES)
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
    if STORE_OWN:
        own_offset = token.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
        is_key = (k_head >= 0) & (k_head < NUM_KV_HEADS)  # [BLOCK_HEADS, 1]
        k_ptrs = k_ptr + own_offset + k_head * HEAD_DIM  # [BLOCK_HEADS, 1]
        v_ptrs = v_ptr + own_offset + v_head * HEAD_DIM  # [BLOCK_HEADS, 1]
        tl.store(k_ptrs + first[None, :], x.to(dtype), mask=mask & is_key)
        tl.store(k_ptrs + second[None, :], y.to(dtype), mask=mask & is_key)
        tl.store(v_ptrs + first[None, :], x.to(dtype), mask=mask & is_value)
        tl.store(v_ptrs + second[None, :], y.to(dtype), mask=mask & is_value)

    writes_key = (k_head >= 0) & (k_head < num_written)  # [BLOCK_HEADS, 1]
    writes_value = (v_head >= 0) & (v_head < num_written)  # [BLOCK_HEADS, 1]
    k_mask, v_mask = mask & writes_key, mask & writes_value  # [BLOCK_HEADS, BLOCK_HALF]
    head_offset = tl.where(is_value, v_head, k_head) * BLOCK_BYTES  # [BLOCK_HEADS, 1]
    if KV_FORMAT == "int4":
        high = tl.maximum(
            tl.max(tl.where(mask, x, float("-inf")), 1), tl.max(tl.where(mask, y, float("-inf")), 1)
        )  # [BLOCK_HEADS]
        low = tl.minimum(
            tl.min(tl.where(mask, x, float("inf")), 1), tl.min(tl.where(mask, y, float("inf")), 1)
        )  # [BLOCK_HEADS]
        low = low.to(tl.float16)  # [BLOCK_HEADS]
        scale = ((high - low.to(tl.float32)) * (1.0 / 15.0)).to(tl.float16)  # [BLOCK_HEADS]
        wide = scale.to(tl.float32)  # [BLOCK_HEADS]
        inverse = tl.where(wide > 0.0, 1.0 / wide, 0.0)[:, None]  # [BLOCK_HEADS, 1]
        least = low.to(tl.float32)[:, None]  # [BLOCK_HEADS, 1]
        x = tl.minimum(tl.maximum(tl.floor((x - least) * inverse + 0.5), 0.0), 15.0)
        y = tl.minimum(tl.maximum(tl.floor((y - least) * inverse + 0.5), 0.0), 15.0)
        codes = x.to(tl.int32) | (y.to(tl.int32) << 4)  # [BLOCK_HEADS, BLOCK_HALF]
        _store_codes(
            k_cache_ptr, v_cache_ptr, codes, head_offset, first, slot, k_mask, v_mask,
            ROW_BYTES, PAGE_SIZE, 0x80,
        )  # fmt: skip
        word = scale.to(tl.uint16, bitcast=True).to(tl.int32)  # [BLOCK_HEADS]
        word |= low.to(tl.uint16, bitcast=True).to(tl.int32) << 16  # [BLOCK_HEADS]
    else:
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))  # [BLOCK_HEADS]
        if KV_FORMAT == "int8":
            scale = largest * (1.0 / 127.0)  # [BLOCK_HEADS]
        else:
            scale = largest * (1.0 / 448.0)  # [BLOCK_HEADS]
        inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None]  # [BLOCK_HEADS, 1]
        if KV_FORMAT == "int8":
            x = tl.minimum(tl.maximum(tl.floor(x * inverse + 0.5), -127.0), 127.0).to(tl.int32)
            y = tl.minimum(tl.maximum(tl.floor(y * inverse + 0.5), -127.0), 127.0).to(tl.int32)
            x, y = x + 128, y + 128  # [BLOCK_HEADS, BLOCK_HALF]
        else:
            x, y = _to_e4m3(x * inverse), _to_e4m3(y * inverse)  # [BLOCK_HEADS, BLOCK_HALF]
        FLIP: tl.constexpr = 0x80 if KV_FORMAT == "int8" else 0
        _store_codes(
            k_cache_ptr, v_cache_ptr, x, head_offset, first, slot, k_mask, v_mask,
            ROW_BYTES, PAGE_SIZE, FLIP,
        )  # fmt: skip
        _store_codes(
            k_cache_ptr, v_cache_ptr, y, head_offset, second, slot, k_mask, v_mask,
            ROW_BYTES, PAGE_SIZE, FLIP,
        )  # fmt: skip
        word = scale.to(tl.int32, bitcast=True)  # [BLOCK_HEADS]
    word_offset = head_offset + PAGE_SIZE * ROW_BYTES + slot * 4  # [BLOCK_HEADS, 1]
    k_words = (k_cache_ptr + word_offset).to(tl.pointer_type(tl.int32))  # [BLOCK_HEADS, 1]
    v_words = (v_cache_ptr + word_offset).to(tl.pointer_type(tl.int32))  # [BLOCK_HEADS, 1]
    tl.store(k_words, word[:, None], mask=writes_key)
    tl.store(v_words, word[:, None], mask=writes_value)


def launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    num_tokens: int,
) -> None:
    """Write the first `num_tokens` tokens: queries, quantised keys and values, and their own."""
    num_heads = SHAPE["NUM_HEADS"] + 2 * SHAPE["NUM_KV_HEADS"]
    grid = (num_tokens, triton.cdiv(num_heads, SCHEDULE["BLOCK_HEADS"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    rope_kv_write_quantised[grid](
        qkv,
        positions,
        cos_sin,
        token_seq,
        seq_rows,
        block_table,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        q,
        k,
        v,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
