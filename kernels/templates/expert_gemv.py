"""Multiply one row for each chosen expert by that expert's weight: y[c] = x[c] @ w[experts[c]].T.

For steps of so few tokens that they hardly share experts; each choice reads its weight by itself.

Shapes (T tokens, k = TOP_K, X experts, N rows of a weight, K features in, N_OUT features out):
  x        [T, K], or [kT, K] with ROW_PER_CHOICE: contiguous
  w        [X, N, K]: contiguous
  experts  i32[T, k]
  y        [kT, N_OUT]: contiguous

Grid: (block of BLOCK_N features, choice).
Bound by reading the chosen weights once.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below

SHAPE = dict(N=1536, K=2048, N_OUT=1536, TOP_K=8, ROW_PER_CHOICE=False)
SCHEDULE = dict(BLOCK_N=16, BLOCK_K=1024, USE_PDL=False, num_warps=8, num_stages=1)


@triton.jit
def EPILOGUE(acc, expert, feature):
    """Turn results f32[BLOCK_N] into outputs, and give the columns of y they belong to."""
    return acc, feature


@triton.jit(do_not_specialize=["num_tokens"])
def expert_gemv(
    x_ptr,
    w_ptr,
    experts_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW_PER_CHOICE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute BLOCK_N features of one choice."""
    # Grid: axis 0 blocks of features, axis 1 choices.
    pid_n = tl.program_id(0)
    choice = tl.program_id(1)
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    tile = feature[:, None] * K + lane[None, :]  # [BLOCK_N, BLOCK_K]
    row_mask = below(feature, N, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    if USE_PDL:
        # Which weights to read is the producer's to say: nothing can be fetched before.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    tile_ptrs = w_ptr + expert * (N * K) + tile  # [BLOCK_N, BLOCK_K]
    x_row_ptr = x_ptr + (choice if ROW_PER_CHOICE else choice // TOP_K).to(tl.int64) * K

    w_mask = row_mask & below(lane, K, BLOCK_K)[None, :]  # [BLOCK_N, BLOCK_K]
    w = tl.load(tile_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)  # [BLOCK_N, BLOCK_K]
    for start in range(0, K, BLOCK_K):
        k = start + lane  # [BLOCK_K]
        x = tl.load(x_row_ptr + k, mask=below(k, K, BLOCK_K), other=0.0)  # [BLOCK_K]
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        w_mask = row_mask & (k + BLOCK_K < K)[None, :]  # [BLOCK_N, BLOCK_K]
        next_ptrs = tile_ptrs + start + BLOCK_K  # [BLOCK_N, BLOCK_K]
        w = tl.load(next_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")

    acc = tl.sum(acc, axis=1)  # [BLOCK_N]
    y, column = EPILOGUE(acc, expert, feature)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + choice.to(tl.int64) * N_OUT + column, y, mask=column < N_OUT)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of the choices of `num_tokens` tokens."""
    grid = (triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]), num_tokens * SHAPE["TOP_K"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    expert_gemv[grid](
        x,
        w,
        experts,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
