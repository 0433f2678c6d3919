"""Copy the rows that are wanted: y[b] = x[max(index[b], 0)].

Shapes (B rows, WIDTH features):
  x      [T, WIDTH]: contiguous
  index  i32[B]: the row of x; row 0 where it is negative
  y      [B, WIDTH]: contiguous

Grid: (row, block of BLOCK_F features).
Bound by moving B rows in and out: 2 * B * WIDTH elements.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(WIDTH=576)
SCHEDULE = dict(BLOCK_F=1024, USE_PDL=False, num_warps=4, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["index_ptr"])
def gather_rows(
    x_ptr,
    index_ptr,
    y_ptr,
    WIDTH: tl.constexpr,
    BLOCK_F: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = row, axis 1 = block of features.
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = feature < WIDTH  # [BLOCK_F]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = tl.maximum(tl.load(index_ptr + row), 0).to(tl.int64)
    x = tl.load(x_ptr + source * WIDTH + feature, mask=mask)  # [BLOCK_F]
    tl.store(y_ptr + row * WIDTH + feature, x, mask=mask)


def launch(
    x: torch.Tensor,
    index: torch.Tensor,
    y: torch.Tensor,
    num_rows: int,
) -> None:
    """Write the first `num_rows` of the rows that are wanted to `y`."""
    grid = (num_rows, triton.cdiv(SHAPE["WIDTH"], SCHEDULE["BLOCK_F"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    gather_rows[grid](
        x,
        index,
        y,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
