"""`combine`: add up the results of each token's experts, scaled.

Covers:
  routed: bf16[T, 2048] = combine(experts_down, scales)

Must move 0 bytes and 28,696 per token; must compute 0 operations per token.

Schedule: BLOCK_T=1, BLOCK_E=1024, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(WIDTH=2048, TOP_K=6, ADD_RESIDUAL=False)
SCHEDULE = dict(BLOCK_T=1, BLOCK_E=1024, USE_PDL=True, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["num_tokens"])
def combine(
    rows_ptr,
    scales_ptr,
    residual_ptr,
    y_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of tokens, axis 1 = block of features.
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    feature = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]  # [1, BLOCK_E]
    mask = (token < num_tokens) & (feature < WIDTH)  # [BLOCK_T, BLOCK_E]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)  # [BLOCK_T, BLOCK_E]
    for j in tl.static_range(TOP_K):
        choice = token.to(tl.int64) * TOP_K + j  # [BLOCK_T, 1]
        scale = tl.load(scales_ptr + choice, mask=token < num_tokens, other=0.0)  # [BLOCK_T, 1]
        row = tl.load(rows_ptr + choice * WIDTH + feature, mask=mask, other=0.0)
        y += scale * row.to(tl.float32)
    offsets = token.to(tl.int64) * WIDTH + feature  # [BLOCK_T, BLOCK_E]
    if ADD_RESIDUAL:
        y += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    rows: torch.Tensor,
    scales: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Add up the rows of `num_tokens` tokens."""
    grid = (
        triton.cdiv(num_tokens, SCHEDULE["BLOCK_T"]),
        triton.cdiv(SHAPE["WIDTH"], SCHEDULE["BLOCK_E"]),
    )
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    combine[grid](
        rows,
        scales,
        residual,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
