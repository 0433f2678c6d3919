"""Which expert a block of sorted choices belongs to."""

import triton
import triton.language as tl


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
