"""`grouped_linear__glu`: multiply rows by the weights of the experts chosen for their token, expert
by expert; then Gate one half of the features with the activated other half.

Covers:
  experts_gate_up: bf16[8T, 1536] = grouped_linear(post_attention_layernorm, @experts_gate_up,
    experts_order, experts_starts)
  experts_gated: bf16[8T, 768] = glu(experts_gate_up; act='silu', interleave=8)

Must move 516 bytes and 50,347,548 per token; must compute 50,368,512 operations per token.
Tokens that choose the same experts move their weights once.

Schedule: BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, USE_PDL=True, num_warps=4, num_stages=4
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=1536, K=2048, N_OUT=768, NUM_EXPERTS=128, TOP_K=8, ROW_PER_CHOICE=False)
SCHEDULE = dict(BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, USE_PDL=True, num_warps=4, num_stages=4)


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
def grouped_linear__glu(
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
    USE_PDL: tl.constexpr,
):
    """Compute one tile of BLOCK_N features by BLOCK_M choices of one expert."""
    # Grid: axis 0 blocks of features, axis 1 blocks of choices.
    pid_n = tl.program_id(0)
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    if USE_PDL:
        # Which weights to read is a producer's to say: nothing can be fetched before.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, stop = find_block(starts_ptr, tl.program_id(1), NUM_EXPERTS, BLOCK_M)
    if expert < NUM_EXPERTS:
        place = first + tl.arange(0, BLOCK_M)[None, :]  # [1, BLOCK_M]
        choice = tl.load(order_ptr + place, mask=place < stop, other=0)  # [1, BLOCK_M]
        x_row = choice if ROW_PER_CHOICE else choice // TOP_K  # [1, BLOCK_M]
        x_ptrs = x_ptr + x_row.to(tl.int64) * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
        w_tile_ptr = w_ptr + (expert.to(tl.int64) * N + pid_n * BLOCK_N) * K
        w_ptrs = w_tile_ptr + tl.arange(0, BLOCK_N)[:, None] * K + lane[None, :]
        row_mask = below(feature, N, BLOCK_N)  # [BLOCK_N, 1]

        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # [BLOCK_N, BLOCK_M]
        for start in range(0, K, BLOCK_K):
            k_mask = below(start + lane, K, BLOCK_K)  # [BLOCK_K]
            w_mask = row_mask & k_mask[None, :]  # [BLOCK_N, BLOCK_K]
            w = tl.load(w_ptrs + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=k_mask[:, None], other=0.0)  # [BLOCK_K, BLOCK_M]
            acc = tl.dot(w, x, acc)  # [BLOCK_N, BLOCK_M]

        # experts_gate_up = grouped_linear(post_attention_layernorm, experts_gate_up,
        #   experts_order, experts_starts)
        # experts_gated = glu(experts_gate_up, act='silu', interleave=8)
        pairs = tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        gate = gate / (1.0 + tl.exp(-gate))
        y = tl.reshape(gate * up, (BLOCK_N // 2, BLOCK_M))  # [BLOCK_N // 2, BLOCK_M]
        column = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
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
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    grouped_linear__glu[(num_n, num_blocks)](
        x,
        w,
        order,
        starts,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
