"""Normalise rows by their mean and variance: y = (x - mean) / sqrt(variance + EPS) * weight + bias.

With GATHER row i is row index[i] of x; an index of -1 reads row 0.

Shapes (N rows, T rows of x, E = HIDDEN features):
  x       [T, E]: contiguous; T = N without GATHER
  weight  [E]
  bias    [E]; unused (None or any tensor) without HAS_BIAS
  index   i32[N]; unused without GATHER
  y       [N, E]: contiguous

Grid: block of BLOCK_T rows.
Bound by moving the rows in and out, at few rows by the latency of one row's sums.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(HIDDEN=576, EPS=1e-05, HAS_BIAS=False, GATHER=False)
SCHEDULE = dict(BLOCK_T=1, USE_PDL=False, num_warps=4, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index_ptr"])
def layer_norm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    index_ptr,
    y_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of rows.
    BLOCK_E: tl.constexpr = triton.next_power_of_2(HIDDEN)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    feature = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    inside = feature < HIDDEN  # [BLOCK_E]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Weight and bias depend on nothing: they are on their way before the wait for x.
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_E]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_E]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    mask = (row < num_rows)[:, None] & inside[None, :]  # [BLOCK_T, BLOCK_E]
    if GATHER:
        source = tl.load(index_ptr + row, mask=row < num_rows, other=0)  # [BLOCK_T]
        source = tl.maximum(source, 0).to(tl.int64)  # [BLOCK_T]
    else:
        source = row.to(tl.int64)  # [BLOCK_T]
    source_offsets = source[:, None] * HIDDEN + feature[None, :]  # [BLOCK_T, BLOCK_E]
    offsets = row.to(tl.int64)[:, None] * HIDDEN + feature[None, :]  # [BLOCK_T, BLOCK_E]
    x = tl.load(x_ptr + source_offsets, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_E]

    # In two passes over registers: a large mean takes no digits from the variance.
    mean = tl.sum(x, axis=1) / HIDDEN  # [BLOCK_T]
    x = tl.where(mask, x - mean[:, None], 0.0)  # [BLOCK_T, BLOCK_E]
    variance = tl.sum(x * x, axis=1) / HIDDEN  # [BLOCK_T]
    scale = 1.0 / tl.sqrt(variance + EPS)  # [BLOCK_T]
    y = x * scale[:, None] * weight[None, :]  # [BLOCK_T, BLOCK_E]
    if HAS_BIAS:
        y += bias[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    y: torch.Tensor,
    num_rows: int,
) -> None:
    """Write `num_rows` normalised rows to `y`."""
    grid = (triton.cdiv(num_rows, SCHEDULE["BLOCK_T"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    layer_norm[grid](
        x,
        weight,
        bias,
        index,
        y,
        num_rows,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
