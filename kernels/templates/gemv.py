"""Multiply 1 to 8 rows by a weight without tensor cores: y = x @ w.T.

Shapes (T tokens, N rows of the weight, K features in, N_OUT features out):
  x  [T, K]: contiguous
  w  [N, K]: contiguous
  y  [T, N_OUT]: contiguous

Grid: (block of BLOCK_N features, block of ROWS tokens).
Bound by reading w once. Its first tile, which depends on nothing, is in flight before the kernel
waits for the producer of x.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below

SHAPE = dict(N=4096, K=4096, N_OUT=4096)
SCHEDULE = dict(ROWS=1, BLOCK_N=16, BLOCK_K=1024, USE_PDL=False, num_warps=8, num_stages=1)


@triton.jit
def PROLOGUE_BEGIN():
    """Prepare what the prologue carries through the loop."""


@triton.jit
def PROLOGUE(x, m, k):
    """Change features k of the m-th row, f32[BLOCK_K], before they are multiplied."""
    return x


@triton.jit
def ROW_SCALE(acc, m):
    """Scale the m-th row's results, f32[BLOCK_N], by what the prologue has found."""
    return acc


@triton.jit
def EPILOGUE(acc, token, feature):
    """Turn results f32[BLOCK_N] into outputs, and give the columns of y they belong to."""
    return acc, feature


@triton.jit(do_not_specialize=["num_tokens"])
def gemv(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute BLOCK_N features of ROWS tokens."""
    # Grid: axis 0 blocks of features, axis 1 blocks of tokens.
    pid_n = tl.program_id(0)
    first_token = tl.program_id(1) * ROWS
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    tile_ptr = w_ptr + (pid_n * BLOCK_N).to(tl.int64) * K
    tile_ptrs = tile_ptr + tl.arange(0, BLOCK_N)[:, None] * K + lane[None, :]  # [BLOCK_N, BLOCK_K]
    row_mask = below(feature, N, BLOCK_N)[:, None]  # [BLOCK_N, 1]

    w_mask = row_mask & (lane < K)[None, :]  # [BLOCK_N, BLOCK_K]
    w = tl.load(tile_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    accs = (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),) * ROWS  # ROWS of [BLOCK_N, BLOCK_K]
    PROLOGUE_BEGIN()
    for start in range(0, K, BLOCK_K):
        k = start + lane  # [BLOCK_K]
        for m in tl.static_range(ROWS):
            token = first_token + m
            x_end = tl.where(token < num_tokens, K, 0)
            x = tl.load(x_ptr + token * K + k, mask=k < x_end, other=0.0)
            x = x.to(tl.float32)  # [BLOCK_K]
            x = PROLOGUE(x, m, k)
            accs = accs[:m] + (accs[m] + w.to(tl.float32) * x[None, :],) + accs[m + 1 :]
        w_mask = row_mask & (k + BLOCK_K < K)[None, :]  # [BLOCK_N, BLOCK_K]
        next_ptrs = tile_ptrs + start + BLOCK_K  # [BLOCK_N, BLOCK_K]
        w = tl.load(next_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")

    for m in tl.static_range(ROWS):
        token = first_token + m
        acc = tl.sum(accs[m], axis=1)  # [BLOCK_N]
        acc = ROW_SCALE(acc, m)
        y, column = EPILOGUE(acc, token, feature)
        y = y.to(y_ptr.dtype.element_ty)
        mask = column < tl.where(token < num_tokens, N_OUT, 0)  # [BLOCK_N]
        tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=mask)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows."""
    grid = (
        triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]),
        triton.cdiv(num_tokens, SCHEDULE["ROWS"]),
    )
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    gemv[grid](
        x,
        w,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
