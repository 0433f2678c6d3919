"""`expert_linear__glu`: multiply rows by the weights of the experts chosen for their token; then
Gate one half of the features with the activated other half.

Covers:
  experts_gate_up: bf16[4T, 5760] = expert_linear(post_attention_layernorm, @experts_gate_up,
    experts, @experts_gate_up_bias)
  experts_gated: bf16[4T, 2880] = glu(experts_gate_up; act='silu', interleave=8, limit=7.0,
    sharpness=1.702, up_offset=1.0)

Must move 0 bytes and 132,739,216 per token; must compute 132,779,520 operations per token.
Tokens that choose the same experts move their weights once.

Schedule: BLOCK_N=16, BLOCK_K=1024, USE_PDL=True, num_warps=8, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=5760, K=2880, N_OUT=2880, TOP_K=4, ROW_PER_CHOICE=False)
SCHEDULE = dict(BLOCK_N=16, BLOCK_K=1024, USE_PDL=True, num_warps=8, num_stages=1)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


@triton.jit(do_not_specialize=["num_tokens"])
def expert_linear__glu(
    x_ptr,
    w_ptr,
    experts_ptr,
    bias_ptr,
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
    # experts_gate_up = expert_linear(post_attention_layernorm, experts_gate_up,
    #   experts, experts_gate_up_bias)
    bias = tl.load(bias_ptr + expert * N + feature, mask=feature < N, other=0.0).to(tl.float32)
    experts_gate_up = acc + bias
    # experts_gated = glu(experts_gate_up, act='silu', interleave=8, limit=7.0,
    #   sharpness=1.702, up_offset=1.0)
    pairs = tl.reshape(experts_gate_up, (BLOCK_N // 16, 2, 8))
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    gate = gate * 1.702
    gate = gate / (1.0 + tl.exp(-gate))
    gate = gate * 0.5875440658049353
    up = up + 1.0
    y = tl.reshape(gate * up, (BLOCK_N // 2,))  # [BLOCK_N // 2]
    column = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + choice.to(tl.int64) * N_OUT + column, y, mask=column < N_OUT)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    experts: torch.Tensor,
    bias: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of the choices of `num_tokens` tokens."""
    grid = (triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]), num_tokens * SHAPE["TOP_K"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    expert_linear__glu[grid](
        x,
        w,
        experts,
        bias,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
