"""Multiply each head of each row by the head's own rows of a weight: y[t, h] = x[t, h] @ w[h].T.

With TRANSPOSED it is y[t, h] = x[t, h] @ w[h]. w[h] are ROWS rows of the weight, from row FIRST of
the WEIGHT_ROWS that belong to head h on.

Shapes (T tokens, H heads, K columns of the weight):
  x  [T, H * X_DIM]: contiguous; of a head the first K features count, TRANSPOSED the first ROWS
  w  [H * WEIGHT_ROWS, K]: contiguous
  y  [T, H * ROWS], TRANSPOSED [T, H * K]: contiguous

Grid: (block of BLOCK_N features of a head, head, block of BLOCK_M tokens).
Bound by reading w once for few tokens, by moving x and y for many. With USE_PDL and PREFETCH a
program asks for its part of w before it waits for x.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.masks import below
from treadle.kernels.templates.parts.prefetch import prefetch_tiles

SHAPE = dict(
    NUM_HEADS=16,
    X_DIM=192,
    WEIGHT_ROWS=256,
    FIRST=0,
    ROWS=128,
    K=512,
    TRANSPOSED=True,
)
SCHEDULE = dict(
    BLOCK_M=16,
    BLOCK_N=128,
    BLOCK_K=64,
    USE_PDL=False,
    PREFETCH=False,
    num_warps=4,
    num_stages=3,
)


@triton.jit(do_not_specialize=["num_tokens"])
def head_linear(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    X_DIM: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    # Grid: axis 0 = block of features, axis 1 = head, axis 2 = block of tokens.
    NUM_INPUTS: tl.constexpr = ROWS if TRANSPOSED else K
    NUM_OUTPUTS: tl.constexpr = K if TRANSPOSED else ROWS
    head = tl.program_id(1)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_token = (token < num_tokens)[:, None]  # [BLOCK_M, 1]
    is_feature = below(feature, NUM_OUTPUTS, BLOCK_N)  # [BLOCK_N]
    x_offsets = token.to(tl.int64)[:, None] * (NUM_HEADS * X_DIM) + lane[None, :]
    x_ptrs = x_ptr + head * X_DIM + x_offsets  # [BLOCK_M, BLOCK_K]
    w_ptr += (head * WEIGHT_ROWS + FIRST).to(tl.int64) * K
    if USE_PDL and PREFETCH:
        # Weights depend on nothing: they are on their way before the wait for the producer of x.
        first_feature = tl.program_id(0) * BLOCK_N
        BLOCK_ROWS: tl.constexpr = triton.next_power_of_2(ROWS)
        if TRANSPOSED:
            prefetch_tiles(w_ptr, 0, first_feature, K, ROWS, K, BLOCK_ROWS, BLOCK_N, 1)
        else:
            COLUMNS: tl.constexpr = triton.next_power_of_2(K)
            prefetch_tiles(w_ptr, first_feature, 0, K, ROWS, K, BLOCK_N, COLUMNS, 1)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in range(0, NUM_INPUTS, BLOCK_K):
        is_input = below(start + lane, NUM_INPUTS, BLOCK_K)  # [BLOCK_K]
        x = tl.load(x_ptrs + start, mask=is_token & is_input[None, :], other=0.0)
        if TRANSPOSED:
            w_ptrs = w_ptr + (start + lane)[:, None] * K + feature[None, :]  # [BLOCK_K, BLOCK_N]
            w = tl.load(w_ptrs, mask=is_input[:, None] & is_feature[None, :], other=0.0)
        else:
            w_ptrs = w_ptr + feature[:, None] * K + (start + lane)[None, :]  # [BLOCK_N, BLOCK_K]
            w = tl.load(w_ptrs, mask=is_feature[:, None] & is_input[None, :], other=0.0)
            w = tl.trans(w)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, w, acc)  # [BLOCK_M, BLOCK_N]

    y_offsets = token.to(tl.int64)[:, None] * (NUM_HEADS * NUM_OUTPUTS) + feature[None, :]
    y_ptrs = y_ptr + head * NUM_OUTPUTS + y_offsets  # [BLOCK_M, BLOCK_N]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_token & is_feature[None, :])


def launch(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, num_tokens: int) -> None:
    """Write the products of the first `num_tokens` tokens to `y`."""
    num_outputs = SHAPE["K"] if SHAPE["TRANSPOSED"] else SHAPE["ROWS"]
    grid = (
        triton.cdiv(num_outputs, SCHEDULE["BLOCK_N"]),
        SHAPE["NUM_HEADS"],
        triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"]),
    )
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    head_linear[grid](
        x,
        w,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
