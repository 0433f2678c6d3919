"""`expert_linear__combine__add`: multiply rows by the weights of the experts chosen for their
token; then Add up the results of each token's experts, scaled; then Add two tensors of one
shape: the residual connection.

Covers:
  experts_down: bf16[8T, 2048] = expert_linear(experts_gated, @experts_down, experts)
  routed: bf16[T, 2048] = combine(experts_down, scales)
  after_mlp: bf16[T, 2048] = add(after_attention, routed)

Must move 0 bytes and 25,186,368 per token; must compute 25,167,872 operations per token.
Tokens that choose the same experts move their weights once.

Schedule: BLOCK_N=8, BLOCK_K=512, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=2048, K=768, N_OUT=2048, TOP_K=8)
SCHEDULE = dict(BLOCK_N=8, BLOCK_K=512, USE_PDL=True, num_warps=4, num_stages=1)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


@triton.jit(do_not_specialize=["num_tokens"])
def expert_linear__combine__add(
    x_ptr,
    w_ptr,
    experts_ptr,
    scales_ptr,
    residual_ptr,
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
    # experts_down = expert_linear(experts_gated, experts_down, experts)
    # routed = combine(experts_down, scales)
    routed = acc
    # after_mlp = add(after_attention, routed)
    inside = feature < tl.where(token < num_tokens, N_OUT, 0)
    residual_ptrs = residual_ptr + token.to(tl.int64) * N_OUT + feature
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    y = routed + residual
    column = feature
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=column < N_OUT)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    scales: torch.Tensor,
    residual: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` tokens."""
    grid = (triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]), num_tokens)
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    expert_linear__combine__add[grid](
        x,
        w,
        experts,
        scales,
        residual,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
