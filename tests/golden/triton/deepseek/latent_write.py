"""`latent_write`: scale each row to unit root mean square, then by the weight; then Rotate each
head's halves by the angle of the token's position; then Append the step's latents, one for all
heads of a token, to the pages of their rows.

Covers:
  q: bf16[T, 3072], latent: bf16[T, 512], key: bf16[T, 64] = split(qkv; sizes=(3072, 512, 64))
  kv_a_layernorm: bf16[T, 512] = rms_norm(latent, @kv_a_layernorm; eps=1e-06, offset=0.0)
  k_rope: bf16[T, 64] = rope(key, positions, @rope; head_dim=64, interleaved=True)
  q_rope: bf16[T, 3072] = rope(q, positions, @rope; head_dim=192, interleaved=True, start=128)
  latent_write(kv_a_layernorm, k_rope, positions, token_seq, seq_rows, block_table, kv)

Must move 1,024 bytes and 14,860 per token; must compute 20,864 operations per token.

Schedule: BLOCK_HEADS=4, USE_PDL=True, num_warps=2, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=16,
    HEAD_DIM=192,
    Q_START=128,
    Q_STRIDE=3648,
    Q_OFFSET=0,
    KV_STRIDE=3648,
    KV_OFFSET=3072,
    LATENT_DIM=512,
    ROTARY_DIM=64,
    INTERLEAVED=True,
    STORE_LATENT=False,
    PAGE_SIZE=64,
    EPS=1e-06,
    OFFSET=0.0,
)
SCHEDULE = dict(BLOCK_HEADS=4, USE_PDL=True, num_warps=2, num_stages=1)


@triton.jit
def _copy(source_ptr, target_ptr, is_head, FIRST: tl.constexpr, STOP: tl.constexpr):
    """Copy the features FIRST to STOP of a block of heads, whose pointers are [BLOCK_HEADS, 1]."""
    if FIRST < STOP:
        feature = FIRST + tl.arange(0, triton.next_power_of_2(STOP - FIRST))[None, :]
        mask = is_head & (feature < STOP)  # [BLOCK_HEADS, features]
        tl.store(target_ptr + feature, tl.load(source_ptr + feature, mask=mask), mask=mask)


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
def latent_write(
    q_in_ptr,
    kv_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    token_seq_ptr,
    seq_rows_ptr,
    block_table_ptr,
    latents_ptr,
    q_ptr,
    latent_out_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_START: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_OFFSET: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    KV_OFFSET: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORE_LATENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of query heads, the last one the latent.
    HALF: tl.constexpr = ROTARY_DIM // 2
    WIDTH: tl.constexpr = LATENT_DIM + ROTARY_DIM
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, triton.next_power_of_2(HALF))  # [BLOCK_HALF]
    inside = pair < HALF  # [BLOCK_HALF]
    # Where the two features of a pair lie, counted from the first that is rotated.
    first = 2 * pair if INTERLEAVED else pair  # [BLOCK_HALF]
    second = first + 1 if INTERLEAVED else first + HALF  # [BLOCK_HALF]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    position = tl.load(positions_ptr + token)
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * ROTARY_DIM
    cos = tl.load(angle_ptr + pair, mask=inside, other=0.0)  # [BLOCK_HALF]
    sin = tl.load(angle_ptr + HALF + pair, mask=inside, other=0.0)  # [BLOCK_HALF]
    if block < tl.cdiv(NUM_HEADS, BLOCK_HEADS):
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]  # [BLOCK_HEADS, 1]
        is_head = head < NUM_HEADS  # [BLOCK_HEADS, 1]
        mask = is_head & inside[None, :]  # [BLOCK_HEADS, BLOCK_HALF]
        source_ptr = q_in_ptr + token * Q_STRIDE + Q_OFFSET + head * HEAD_DIM  # [BLOCK_HEADS, 1]
        target_ptr = q_ptr + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM  # [BLOCK_HEADS, 1]
        _copy(source_ptr, target_ptr, is_head, 0, Q_START)
        _copy(source_ptr, target_ptr, is_head, Q_START + ROTARY_DIM, HEAD_DIM)
        a_features, b_features = (Q_START + first)[None, :], (Q_START + second)[None, :]
        a = tl.load(source_ptr + a_features, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source_ptr + b_features, mask=mask, other=0.0).to(tl.float32)
        new_a = (a * cos[None, :] - b * sin[None, :]).to(q_ptr.dtype.element_ty)
        new_b = (b * cos[None, :] + a * sin[None, :]).to(q_ptr.dtype.element_ty)
        tl.store(target_ptr + a_features, new_a, mask=mask)
        tl.store(target_ptr + b_features, new_b, mask=mask)
    else:
        row = tl.load(seq_rows_ptr + tl.load(token_seq_ptr + token))
        # A token of padding owns no page: nothing of its latent is written.
        written = tl.where(row >= 0, LATENT_DIM, 0)
        written_pairs = tl.where(row >= 0, HALF, 0)
        table_offset = tl.maximum(row, 0).to(tl.int64) * table_stride + position // PAGE_SIZE
        page = tl.load(block_table_ptr + table_offset, mask=row >= 0, other=0).to(tl.int64)
        slot_ptr = latents_ptr + (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH
        latent_ptr = kv_ptr + token * KV_STRIDE + KV_OFFSET
        feature = tl.arange(0, triton.next_power_of_2(LATENT_DIM))  # [BLOCK_L]
        is_latent = feature < LATENT_DIM  # [BLOCK_L]
        weight = tl.load(weight_ptr + feature, mask=is_latent, other=0.0).to(tl.float32)
        latent = tl.load(latent_ptr + feature, mask=is_latent, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / LATENT_DIM + EPS)
        latent = latent * scale * (weight + OFFSET)  # [BLOCK_L]
        latent = latent.to(latents_ptr.dtype.element_ty)  # [BLOCK_L]
        tl.store(slot_ptr + feature, latent, mask=feature < written)
        if STORE_LATENT:
            tl.store(latent_out_ptr + token * LATENT_DIM + feature, latent, mask=is_latent)
        key_a = tl.load(latent_ptr + LATENT_DIM + first, mask=inside, other=0.0).to(tl.float32)
        key_b = tl.load(latent_ptr + LATENT_DIM + second, mask=inside, other=0.0).to(tl.float32)
        rotated_a = (key_a * cos - key_b * sin).to(latents_ptr.dtype.element_ty)  # [BLOCK_HALF]
        rotated_b = (key_b * cos + key_a * sin).to(latents_ptr.dtype.element_ty)  # [BLOCK_HALF]
        tl.store(slot_ptr + LATENT_DIM + first, rotated_a, mask=pair < written_pairs)
        tl.store(slot_ptr + LATENT_DIM + second, rotated_b, mask=pair < written_pairs)


def launch(
    q_in: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    latents: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor | None,
    num_tokens: int,
) -> None:
    """Write the first `num_tokens` tokens: rotated queries to `q`, latents to the cache."""
    grid = (num_tokens, triton.cdiv(SHAPE["NUM_HEADS"], SCHEDULE["BLOCK_HEADS"]) + 1)
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    latent_write[grid](
        q_in,
        kv,
        weight,
        positions,
        cos_sin,
        token_seq,
        seq_rows,
        block_table,
        latents,
        q,
        latent,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
