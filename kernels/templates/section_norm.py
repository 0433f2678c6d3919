"""Normalise two sections of each row, each by its own root mean square, and copy the rest.

y = x / sqrt(mean(x^2) + EPS) * (weight + OFFSET), the mean over the section: the first FIRST
features of a row, then the SECOND (0 for none) after them. Features beyond both are copied.

Shapes (N rows, W = WIDTH features):
  x       [N, W]: contiguous
  weight  [FIRST + SECOND]
  y       [N, W]: contiguous

Grid: block of BLOCK_T rows.
Bound by moving the rows in and out, at few rows by the latency of one section's sum.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(FIRST=576, SECOND=192, WIDTH=960, EPS=1e-05, OFFSET=0.0)
SCHEDULE = dict(BLOCK_T=1, USE_PDL=False, num_warps=4, num_stages=1)


@triton.jit
def write_section(
    x_ptr,
    weight_ptr,
    y_ptr,
    row,
    num_rows,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Normalise, or copy, features START to START + SIZE of a block of rows."""
    BLOCK: tl.constexpr = triton.next_power_of_2(SIZE)
    feature = tl.arange(0, BLOCK)  # [BLOCK]
    inside = feature < SIZE  # [BLOCK]
    mask = (row < num_rows)[:, None] & inside[None, :]  # [BLOCK_T, BLOCK]
    offsets = row.to(tl.int64)[:, None] * WIDTH + START + feature[None, :]  # [BLOCK_T, BLOCK]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK]
    if NORMALISED:
        mean_square = tl.sum(x * x, axis=1) / SIZE  # [BLOCK_T]
        scale = 1.0 / tl.sqrt(mean_square + EPS)  # [BLOCK_T]
        weight_ptrs = weight_ptr + START + feature  # [BLOCK]
        weight = tl.load(weight_ptrs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        x = x * scale[:, None] * (weight + OFFSET)[None, :]  # [BLOCK_T, BLOCK]
    tl.store(y_ptr + offsets, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def section_norm(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of rows.
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    REST: tl.constexpr = WIDTH - FIRST - SECOND
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    write_section(x_ptr, weight_ptr, y_ptr, row, num_rows, 0, FIRST, WIDTH, EPS, OFFSET, True)
    if SECOND > 0:
        write_section(
            x_ptr, weight_ptr, y_ptr, row, num_rows, FIRST, SECOND, WIDTH, EPS, OFFSET, True
        )
    if REST > 0:
        write_section(
            x_ptr, weight_ptr, y_ptr, row, num_rows, FIRST + SECOND, REST, WIDTH, EPS, OFFSET, False
        )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    num_rows: int,
) -> None:
    """Write `num_rows` rows with normalised sections to `y`."""
    grid = (triton.cdiv(num_rows, SCHEDULE["BLOCK_T"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    section_norm[grid](
        x,
        weight,
        y,
        num_rows,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
