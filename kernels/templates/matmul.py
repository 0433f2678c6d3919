"""Multiply many rows by a weight with tensor cores: y = x @ w.T, rows of x as the left operand.

Shapes (T tokens, N rows of the weight, K features in, N_OUT features out):
  x  [T, K]: contiguous
  w  [N, K]: contiguous
  y  [T, N_OUT]: contiguous

Grid: tiles of BLOCK_M tokens by BLOCK_N features, GROUP_M tiles of tokens at a time, so that tiles
that run together share rows of x and w in L2.
Bound by tensor cores: 2 * T * N * K operations.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below

SHAPE = dict(N=4096, K=4096, N_OUT=4096)
SCHEDULE = dict(
    BLOCK_M=128,
    BLOCK_N=128,
    BLOCK_K=64,
    GROUP_M=8,
    USE_PDL=False,
    num_warps=8,
    num_stages=3,
)


@triton.jit
def EPILOGUE(acc, token, feature):
    """Turn results f32[BLOCK_M, BLOCK_N] into outputs, and give the columns of y they belong to."""
    return acc, feature


@triton.jit(do_not_specialize=["num_tokens"])
def matmul(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute one tile of BLOCK_M tokens by BLOCK_N features."""
    # Grid: axis 0 tiles, down GROUP_M tiles of tokens before the next block of features.
    NUM_N: tl.constexpr = triton.cdiv(N, BLOCK_N)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * NUM_N) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * NUM_N) % group_m
    pid_n = pid % (GROUP_M * NUM_N) // group_m

    token = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # Rows past the last token read it again and are not stored: cheaper than a mask in the loop.
    x_row = tl.minimum(token, num_tokens - 1).to(tl.int64)  # [BLOCK_M, 1]
    x_ptrs = x_ptr + x_row * K + lane[None, :]  # [BLOCK_M, BLOCK_K]
    w_tile_ptr = w_ptr + (pid_n * BLOCK_N).to(tl.int64) * K
    w_ptrs = w_tile_ptr + tl.arange(0, BLOCK_N)[None, :] * K + lane[:, None]  # [BLOCK_K, BLOCK_N]
    w_mask = below(feature, N, BLOCK_N)  # [1, BLOCK_N]

    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in range(0, K, BLOCK_K):
        k_mask = below(start + lane, K, BLOCK_K)  # [BLOCK_K]
        x = tl.load(x_ptrs + start, mask=k_mask[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_ptrs + start, mask=k_mask[:, None] & w_mask, other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, w, acc)  # [BLOCK_M, BLOCK_N]

    y, column = EPILOGUE(acc, token, feature)
    y = y.to(y_ptr.dtype.element_ty)
    mask = (token < num_tokens) & (column < N_OUT)
    tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=mask)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows."""
    num_m = triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"])
    num_n = triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul[(num_m * num_n,)](
        x,
        w,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
