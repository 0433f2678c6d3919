"""`gather_rows`: keep the row of each sequence whose logits are wanted.

Covers:
  after_mlp_picked: bf16[B, 2048] = gather_rows(after_mlp, sample_index)

Must move 0 bytes and 8,196 per token; must compute 0 operations per token.

Schedule: BLOCK_F=1024, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(WIDTH=2048)
SCHEDULE = dict(BLOCK_F=1024, USE_PDL=True, num_warps=4, num_stages=1)


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
