"""`linear__scale`: multiply each row by the transposed weight and add the bias; then Multiply by a
constant.

Covers:
  raw_logits: f32[B, 128256] = linear(normed, @lm_head; out_dtype='f32')
  logits: f32[B, 128256] = scale(raw_logits; factor=0.125)

Must move 525,336,576 bytes and 517,120 per token; must compute 525,464,832 operations per token.

Schedule: ROWS=1, BLOCK_N=16, BLOCK_K=256, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=128256, K=2048, N_OUT=128256)
SCHEDULE = dict(ROWS=1, BLOCK_N=16, BLOCK_K=256, USE_PDL=True, num_warps=4, num_stages=1)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


@triton.jit(do_not_specialize=["num_tokens"])
def linear__scale(
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
    for start in range(0, K, BLOCK_K):
        k = start + lane  # [BLOCK_K]
        for m in tl.static_range(ROWS):
            token = first_token + m
            x_end = tl.where(token < num_tokens, K, 0)
            x = tl.load(x_ptr + token * K + k, mask=k < x_end, other=0.0)
            x = x.to(tl.float32)  # [BLOCK_K]
            accs = accs[:m] + (accs[m] + w.to(tl.float32) * x[None, :],) + accs[m + 1 :]
        w_mask = row_mask & (k + BLOCK_K < K)[None, :]  # [BLOCK_N, BLOCK_K]
        next_ptrs = tile_ptrs + start + BLOCK_K  # [BLOCK_N, BLOCK_K]
        w = tl.load(next_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")

    for m in tl.static_range(ROWS):
        token = first_token + m
        acc = tl.sum(accs[m], axis=1)  # [BLOCK_N]
        # raw_logits = linear(normed, lm_head, out_dtype='f32')
        # logits = scale(raw_logits, factor=0.125)
        y = acc * 0.125
        column = feature
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
    linear__scale[grid](
        x,
        w,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
