"""`rope_kv_write`: rotate each head's halves by the angle of the token's position; then Append the
step's keys and values to the pages of their rows.

Covers:
  q: bf16[T, 2048], k: bf16[T, 512], v: bf16[T, 512] = split(qkv; sizes=(2048, 512, 512))
  q_rope: bf16[T, 2048] = rope(q, positions, @rope; head_dim=64)
  k_rope: bf16[T, 512] = rope(k, positions, @rope; head_dim=64)
  kv_write(k_rope, v, positions, token_seq, seq_rows, block_table, kv)

Must move 0 bytes and 12,556 per token; must compute 15,360 operations per token.

Schedule: BLOCK_HEADS=4, USE_PDL=True, num_warps=1, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=32,
    NUM_KV_HEADS=8,
    HEAD_DIM=64,
    ROTARY_DIM=64,
    PAGE_SIZE=64,
    HEAD_NORM=False,
    EPS=0.0,
    OFFSET=0.0,
)
SCHEDULE = dict(BLOCK_HEADS=4, USE_PDL=True, num_warps=1, num_stages=1)


@triton.jit
def store_heads(
    q_ptr,
    k_ptr,
    v_ptr,
    values,
    head,
    feature,
    mask,
    num_written,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Store some features of a block of heads: queries to q, `num_written` keys and values each."""
    k_head = (head - NUM_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    v_head = k_head - NUM_KV_HEADS  # [BLOCK_HEADS, 1]
    is_query = k_head < 0  # [BLOCK_HEADS, 1]
    is_key = (k_head >= 0) & (k_head < num_written)  # [BLOCK_HEADS, 1]
    is_value = (v_head >= 0) & (v_head < num_written)  # [BLOCK_HEADS, 1]
    k_offsets = k_head * (PAGE_SIZE * HEAD_DIM) + feature[None, :]  # [BLOCK_HEADS, features]
    v_offsets = v_head * (PAGE_SIZE * HEAD_DIM) + feature[None, :]  # [BLOCK_HEADS, features]
    q_offsets = head[:, None] * HEAD_DIM + feature[None, :]  # [BLOCK_HEADS, features]
    tl.store(q_ptr + q_offsets, values.to(q_ptr.dtype.element_ty), mask=mask & is_query)
    tl.store(k_ptr + k_offsets, values.to(k_ptr.dtype.element_ty), mask=mask & is_key)
    tl.store(v_ptr + v_offsets, values.to(v_ptr.dtype.element_ty), mask=mask & is_value)


@triton.jit
def normalise_heads(
    values,
    scale,
    q_weight_ptr,
    k_weight_ptr,
    head,
    feature,
    inside,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Scale some features of a block of heads by the heads' scales and a weight; leave values."""
    is_query = (head < NUM_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    q_weight = tl.load(q_weight_ptr + feature, mask=inside, other=0.0)[None, :]  # [1, features]
    k_weight = tl.load(k_weight_ptr + feature, mask=inside, other=0.0)[None, :]  # [1, features]
    weight = tl.where(is_query, q_weight, k_weight).to(tl.float32)  # [BLOCK_HEADS, features]
    return tl.where(is_value, values, values * scale[:, None] * (weight + OFFSET))


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
def rope_kv_write(
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
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of heads (queries, then keys, then values).
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    pair = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    mask = (head < ALL_HEADS)[:, None] & (pair < HALF)[None, :]  # [BLOCK_HEADS, BLOCK_HALF]
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
    slot_offset = (page * (NUM_KV_HEADS * PAGE_SIZE) + position % PAGE_SIZE) * HEAD_DIM
    k_ptr = k_cache_ptr + slot_offset
    v_ptr = v_cache_ptr + slot_offset
    qkv_ptr += token.to(tl.int64) * (ALL_HEADS * HEAD_DIM)
    q_ptr += token.to(tl.int64) * (NUM_HEADS * HEAD_DIM)

    angle_ptr = cos_sin_ptr + position.to(tl.int64) * ROTARY_DIM
    cos = tl.load(angle_ptr + pair, mask=pair < HALF, other=0.0)[None, :]  # [1, BLOCK_HALF]
    sin = tl.load(angle_ptr + HALF + pair, mask=pair < HALF, other=0.0)[None, :]  # [1, BLOCK_HALF]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    head_ptr = qkv_ptr + head[:, None] * HEAD_DIM  # [BLOCK_HEADS, 1]
    a = tl.load(head_ptr + pair[None, :], mask=mask, other=0.0)  # [BLOCK_HEADS, BLOCK_HALF]
    b = tl.load(head_ptr + HALF + pair[None, :], mask=mask, other=0.0)  # [BLOCK_HEADS, BLOCK_HALF]
    a = a.to(tl.float32)  # [BLOCK_HEADS, BLOCK_HALF]
    b = b.to(tl.float32)  # [BLOCK_HEADS, BLOCK_HALF]
    if REST > 0:
        BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
        feature = ROTARY_DIM + tl.arange(0, BLOCK_REST)  # [BLOCK_REST]
        rest_inside = feature < HEAD_DIM  # [BLOCK_REST]
        rest_mask = (head < ALL_HEADS)[:, None] & rest_inside[None, :]  # [BLOCK_HEADS, BLOCK_REST]
        rest = tl.load(head_ptr + feature[None, :], mask=rest_mask)  # [BLOCK_HEADS, BLOCK_REST]
    if HEAD_NORM:
        squares = tl.sum(a * a + b * b, axis=1)  # [BLOCK_HEADS]
        if REST > 0:
            rest = tl.where(rest_mask, rest, 0.0).to(tl.float32)  # [BLOCK_HEADS, BLOCK_REST]
            squares += tl.sum(rest * rest, axis=1)  # [BLOCK_HEADS]
        scale = 1.0 / tl.sqrt(squares / HEAD_DIM + EPS)  # [BLOCK_HEADS]
        a = normalise_heads(
            a, scale, q_weight_ptr, k_weight_ptr, head, pair, pair < HALF,
            NUM_HEADS, NUM_KV_HEADS, OFFSET,
        )  # fmt: skip
        b = normalise_heads(
            b, scale, q_weight_ptr, k_weight_ptr, head, HALF + pair, pair < HALF,
            NUM_HEADS, NUM_KV_HEADS, OFFSET,
        )  # fmt: skip
        if REST > 0:
            rest = normalise_heads(
                rest, scale, q_weight_ptr, k_weight_ptr, head, feature, rest_inside,
                NUM_HEADS, NUM_KV_HEADS, OFFSET,
            )  # fmt: skip
    rotates = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    rotated_a = tl.where(rotates, a * cos - b * sin, a)  # [BLOCK_HEADS, BLOCK_HALF]
    rotated_b = tl.where(rotates, b * cos + a * sin, b)  # [BLOCK_HEADS, BLOCK_HALF]
    store_heads(
        q_ptr,
        k_ptr,
        v_ptr,
        rotated_a,
        head,
        pair,
        mask,
        num_written,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
    )
    store_heads(
        q_ptr,
        k_ptr,
        v_ptr,
        rotated_b,
        head,
        HALF + pair,
        mask,
        num_written,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
    )
    if REST > 0:
        store_heads(
            q_ptr,
            k_ptr,
            v_ptr,
            rest,
            head,
            feature,
            rest_mask,
            num_written,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
        )


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
    num_tokens: int,
) -> None:
    """Write the first `num_tokens` tokens: rotated queries to `q`, keys and values to the cache."""
    num_heads = SHAPE["NUM_HEADS"] + 2 * SHAPE["NUM_KV_HEADS"]
    grid = (num_tokens, triton.cdiv(num_heads, SCHEDULE["BLOCK_HEADS"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    rope_kv_write[grid](
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
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
