"""`sort_by_expert`: sort the choices of all tokens by expert, those of one expert in the order of
tokens.

Covers:
  experts_order: i32[4T], experts_starts: i32[33] = sort_by_expert(experts; num_experts=32)

Must move 132 bytes and 32 per token; must compute 0 operations per token.

Schedule: BLOCK_CHOICES=16, CHUNK=16, ONE_BLOCK=True, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(NUM_EXPERTS=32, TOP_K=4)
SCHEDULE = dict(BLOCK_CHOICES=16, CHUNK=16, ONE_BLOCK=True, USE_PDL=True, num_warps=4, num_stages=1)


@triton.jit
def find_experts(experts_ptr, choice, num_choices, lane):
    """Tell which expert each choice is of: i32[CHUNK, BLOCK_X], one 1 a row, none past the end."""
    expert = tl.load(experts_ptr + choice, mask=choice < num_choices, other=-1)  # [CHUNK]
    return (expert[:, None] == lane[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_choices"])
def sort_by_expert_count(
    experts_ptr,
    counts_ptr,
    num_choices,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Count the choices of each expert in one block."""
    # Grid: axis 0 = block of choices.
    BLOCK_X: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_X)  # [BLOCK_X]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_X,), tl.int32)  # [BLOCK_X]
    for start in range(0, BLOCK_CHOICES, CHUNK):
        choice = block * BLOCK_CHOICES + start + tl.arange(0, CHUNK)  # [CHUNK]
        total += tl.sum(find_experts(experts_ptr, choice, num_choices, lane), axis=0)
    tl.store(counts_ptr + block * NUM_EXPERTS + lane, total, mask=lane < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_choices"])
def sort_by_expert_place(
    experts_ptr,
    order_ptr,
    starts_ptr,
    counts_ptr,
    num_choices,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write the choices of one block to their places."""
    # Grid: axis 0 = block of choices.
    BLOCK_X: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_X)  # [BLOCK_X]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_X,), tl.int32)  # [BLOCK_X]
    before = tl.zeros((BLOCK_X,), tl.int32)  # [BLOCK_X]
    if ONE_BLOCK:
        for start in range(0, num_choices, CHUNK):
            choice = start + tl.arange(0, CHUNK)  # [CHUNK]
            total += tl.sum(find_experts(experts_ptr, choice, num_choices, lane), axis=0)
    else:
        for other in range(tl.num_programs(0)):
            other_ptrs = counts_ptr + other * NUM_EXPERTS + lane  # [BLOCK_X]
            count = tl.load(other_ptrs, mask=lane < NUM_EXPERTS, other=0)  # [BLOCK_X]
            total += count
            before += tl.where(other < block, count, 0)
    starts = tl.cumsum(total, axis=0) - total  # [BLOCK_X]
    if block == 0:
        tl.store(starts_ptr + lane, starts, mask=lane < NUM_EXPERTS)
        tl.store(starts_ptr + NUM_EXPERTS, num_choices)

    place = starts + before  # [BLOCK_X]
    first = block * BLOCK_CHOICES
    for start in range(first, tl.minimum(first + BLOCK_CHOICES, num_choices), CHUNK):
        choice = start + tl.arange(0, CHUNK)  # [CHUNK]
        is_of = find_experts(experts_ptr, choice, num_choices, lane)  # [CHUNK, BLOCK_X]
        # Each choice comes after those of its expert that stand above it in the chunk.
        place_here = place[None, :] + tl.cumsum(is_of, axis=0) - 1  # [CHUNK, BLOCK_X]
        target = tl.sum(is_of * place_here, axis=1)  # [CHUNK]
        tl.store(order_ptr + target, choice, mask=choice < num_choices)
        place += tl.sum(is_of, axis=0)


def launch(
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    num_tokens: int,
) -> None:
    """Sort the choices of `num_tokens` tokens."""
    num_choices = num_tokens * SHAPE["TOP_K"]
    num_blocks = 1 if SCHEDULE["ONE_BLOCK"] else triton.cdiv(num_choices, SCHEDULE["BLOCK_CHOICES"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    if not SCHEDULE["ONE_BLOCK"]:
        sort_by_expert_count[(num_blocks,)](
            experts,
            counts,
            num_choices,
            **SHAPE,
            **SCHEDULE,
            **options,
            enable_fp_fusion=True,
        )
    sort_by_expert_place[(num_blocks,)](
        experts,
        order,
        starts,
        counts,
        num_choices,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
