"""Multiply many rows for each expert by its weight with tensor cores, rows of x on the left.

The choices of an expert, which `order` puts side by side, are cut into blocks of BLOCK_M rows: a
block has one expert, so that a tile of its weight serves all of them.

Shapes (T tokens, k = TOP_K, X = NUM_EXPERTS, N rows of a weight, K features in, N_OUT out):
  x       [T, K], or [kT, K] with ROW_PER_CHOICE: contiguous
  w       [X, N, K]: contiguous
  order   i32[kT]: the choices t * k + j, by expert
  starts  i32[X + 1]: where each expert's choices begin in `order`
  y       [kT, N_OUT]: contiguous, a row per choice

Grid: tiles of BLOCK_M choices by BLOCK_N features, features first. There are as many
blocks as any choice of experts can need; those past the last one end at once. Nothing of this is
known to the host, so that one launch serves every step of its size.
Bound by tensor cores: 2 * k * T * N * K operations.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.expert_blocks import find_block
from treadle.kernels.templates.parts.masks import below

SHAPE = dict(N=1536, K=2048, N_OUT=1536, NUM_EXPERTS=128, TOP_K=8, ROW_PER_CHOICE=False)
SCHEDULE = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)


@triton.jit
def EPILOGUE(acc, expert, feature):
    """Turn results f32[BLOCK_M, BLOCK_N] into outputs, and give the columns of y they belong to."""
    return acc, feature


@triton.jit(do_not_specialize=["num_tokens"])
def grouped_matmul(
    x_ptr,
    w_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROW_PER_CHOICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of BLOCK_M choices of one expert by BLOCK_N features."""
    # Grid: axis 0 tiles, all blocks of features of a block of choices before the next.
    NUM_N: tl.constexpr = triton.cdiv(N, BLOCK_N)
    pid_n = tl.program_id(0) % NUM_N
    block = tl.program_id(0) // NUM_N
    expert, first, stop = find_block(starts_ptr, block, NUM_EXPERTS, BLOCK_M)
    if expert < NUM_EXPERTS:
        place = first + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
        lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
        # Places past the last one read some row and are not stored: cheaper than a mask inside.
        choice = tl.load(order_ptr + place, mask=place < stop, other=0)  # [BLOCK_M, 1]
        x_row = choice if ROW_PER_CHOICE else choice // TOP_K  # [BLOCK_M, 1]
        x_ptrs = x_ptr + x_row.to(tl.int64) * K + lane[None, :]  # [BLOCK_M, BLOCK_K]
        w_tile_ptr = w_ptr + (expert.to(tl.int64) * N + pid_n * BLOCK_N) * K
        w_ptrs = w_tile_ptr + tl.arange(0, BLOCK_N)[None, :] * K + lane[:, None]
        w_mask = below(feature, N, BLOCK_N)  # [1, BLOCK_N]

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        for start in range(0, K, BLOCK_K):
            k_mask = below(start + lane, K, BLOCK_K)  # [BLOCK_K]
            x = tl.load(x_ptrs + start, mask=k_mask[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
            w = tl.load(w_ptrs + start, mask=k_mask[:, None] & w_mask, other=0.0)
            acc = tl.dot(x, w, acc)  # [BLOCK_M, BLOCK_N]

        y, column = EPILOGUE(acc, expert, feature)
        y = y.to(y_ptr.dtype.element_ty)
        mask = (place < stop) & (column < N_OUT)
        tl.store(y_ptr + choice.to(tl.int64) * N_OUT + column, y, mask=mask)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of the choices of `num_tokens` tokens."""
    num_choices = num_tokens * SHAPE["TOP_K"]
    # Each expert leaves at most one block unfilled, and each block holds one choice at least.
    num_blocks = min(num_choices, SHAPE["NUM_EXPERTS"] + num_choices // SCHEDULE["BLOCK_M"])
    num_n = triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"])
    grouped_matmul[(num_n * num_blocks,)](
        x,
        w,
        order,
        starts,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        enable_fp_fusion=True,
    )
