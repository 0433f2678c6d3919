"""Multiply a token's rows by the weights of its experts and add them up, scaled.

y[t] = sum over j of scales[t, j] * (x[t * k + j] @ w[experts[t, j]].T), in the order of j.

Shapes (T tokens, k = TOP_K, X experts, N rows of a weight, K features in):
  x        [kT, K]: contiguous
  w        [X, N, K]: contiguous
  experts  i32[T, k]
  scales   f32[T, k]
  y        [T, N]: contiguous

Grid: (block of BLOCK_N features, token). A program reads its rows of the weights of all experts.
Bound by reading the chosen weights once. The first tile is in flight before the kernel waits for
the producer of x, which must itself come after the producer of `experts`.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below

SHAPE = dict(N=2048, K=768, N_OUT=2048, TOP_K=8)
SCHEDULE = dict(BLOCK_N=8, BLOCK_K=1024, USE_PDL=False, num_warps=8, num_stages=1)


@triton.jit
def EXPERT_BIAS(acc, feature):
    """Add the biases of the token's experts, scaled, to its results f32[BLOCK_N]."""
    return acc


@triton.jit
def EPILOGUE(acc, token, feature):
    """Turn results f32[BLOCK_N] into outputs, and give the columns of y they belong to."""
    return acc, feature


@triton.jit(do_not_specialize=["num_tokens"])
def expert_gemv_combine(
    x_ptr,
    w_ptr,
    experts_ptr,
    scales_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute BLOCK_N features of one token."""
    # Grid: axis 0 blocks of features, axis 1 tokens.
    NUM_TILES: tl.constexpr = triton.cdiv(K, BLOCK_K)
    pid_n = tl.program_id(0)
    token = tl.program_id(1)
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    tile = feature[:, None] * K + lane[None, :]  # [BLOCK_N, BLOCK_K]
    row_mask = below(feature, N, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    token_experts_ptr = experts_ptr + token * TOP_K
    token_scales_ptr = scales_ptr + token * TOP_K

    expert = tl.load(token_experts_ptr).to(tl.int64)
    w_mask = row_mask & below(lane, K, BLOCK_K)[None, :]  # [BLOCK_N, BLOCK_K]
    w_ptrs = w_ptr + expert * (N * K) + tile  # [BLOCK_N, BLOCK_K]
    w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)  # [BLOCK_N, BLOCK_K]
    # One loop over the tiles of all experts: while one is multiplied, the next is on its way.
    for step in range(TOP_K * NUM_TILES):
        j = step // NUM_TILES
        k = step % NUM_TILES * BLOCK_K + lane  # [BLOCK_K]
        scale = tl.load(token_scales_ptr + j)
        x_row_ptr = x_ptr + (token * TOP_K + j).to(tl.int64) * K
        x = tl.load(x_row_ptr + k, mask=below(k, K, BLOCK_K), other=0.0)  # [BLOCK_K]
        acc += w.to(tl.float32) * (scale * x.to(tl.float32))[None, :]
        next_step = tl.minimum(step + 1, TOP_K * NUM_TILES - 1)
        next_k = next_step % NUM_TILES * BLOCK_K
        expert = tl.load(token_experts_ptr + next_step // NUM_TILES).to(tl.int64)
        w_mask = row_mask & (lane < tl.where(step == next_step, 0, K - next_k))[None, :]
        w_ptrs = w_ptr + expert * (N * K) + tile + next_k  # [BLOCK_N, BLOCK_K]
        w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")

    acc = tl.sum(acc, axis=1)  # [BLOCK_N]
    acc = EXPERT_BIAS(acc, feature)
    y, column = EPILOGUE(acc, token, feature)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=column < N_OUT)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` tokens."""
    grid = (triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]), num_tokens)
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    expert_gemv_combine[grid](
        x,
        w,
        experts,
        scales,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
