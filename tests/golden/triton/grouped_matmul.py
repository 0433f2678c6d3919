"""`grouped_matmul`: a product of a test.

Covers:
  product = expert_linear(x, w)

Schedule: BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=1536, K=2048, N_OUT=1536, NUM_EXPERTS=128, TOP_K=8, ROW_PER_CHOICE=False)
SCHEDULE = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)


@triton.jit
def find_block(starts_ptr, block, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Give a block's expert, and where in `order` its choices begin and those of the expert end.

    The expert of a block past the last one is NUM_EXPERTS.
    """
    BLOCK_X: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    lane = tl.arange(0, BLOCK_X)  # [BLOCK_X]
    is_expert = lane < NUM_EXPERTS  # [BLOCK_X]
    starts = tl.load(starts_ptr + lane, mask=is_expert, other=0)  # [BLOCK_X]
    stops = tl.load(starts_ptr + lane + 1, mask=is_expert, other=0)  # [BLOCK_X]
    ends = tl.cumsum((stops - starts + (BLOCK_M - 1)) // BLOCK_M, axis=0)  # [BLOCK_X]
    is_past = is_expert & (ends <= block)  # [BLOCK_X]
    expert = tl.sum(is_past.to(tl.int32), axis=0)
    index = block - tl.max(tl.where(is_past, ends, 0), axis=0)
    first = tl.sum(tl.where(lane == expert, starts, 0), axis=0) + index * BLOCK_M
    return expert, first, tl.sum(tl.where(lane == expert, stops, 0), axis=0)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


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

        # product = grouped_linear(x, w, order, starts)
        y = acc
        column = feature
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
