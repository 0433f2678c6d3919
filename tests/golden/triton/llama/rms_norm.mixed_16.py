"""`rms_norm`: scale each row to unit root mean square, then by the weight.

Covers:
  post_attention_layernorm: bf16[B, 2048] = rms_norm(after_attention, @post_attention_layernorm;
    eps=1e-05, offset=0.0)

Must move 4,096 bytes and 8,192 per token; must compute 8,192 operations per token.

Schedule: BLOCK_T=1, USE_PDL=True, num_warps=8, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(HIDDEN=2048, EPS=1e-05, OFFSET=0.0, ADD_RESIDUAL=False, GATHER=False)
SCHEDULE = dict(BLOCK_T=1, USE_PDL=True, num_warps=8, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index_ptr"])
def rms_norm(
    x_ptr,
    weight_ptr,
    residual_ptr,
    index_ptr,
    y_ptr,
    stream_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
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
    # The weight depends on nothing: it is on its way before the wait for the producer of x.
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_E]
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
    if ADD_RESIDUAL:
        residual = tl.load(residual_ptr + source_offsets, mask=mask, other=0.0)
        stream = (x + residual.to(tl.float32)).to(stream_ptr.dtype.element_ty)  # [BLOCK_T, BLOCK_E]
        tl.store(stream_ptr + offsets, stream, mask=mask)
        x = stream.to(tl.float32)  # [BLOCK_T, BLOCK_E]

    mean_square = tl.sum(x * x, axis=1) / HIDDEN  # [BLOCK_T]
    scale = 1.0 / tl.sqrt(mean_square + EPS)  # [BLOCK_T]
    y = x * scale[:, None] * (weight + OFFSET)[None, :]  # [BLOCK_T, BLOCK_E]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor | None,
    y: torch.Tensor,
    stream: torch.Tensor | None,
    num_rows: int,
) -> None:
    """Write `num_rows` normalised rows to `y`, with ADD_RESIDUAL the sums to `stream`."""
    grid = (triton.cdiv(num_rows, SCHEDULE["BLOCK_T"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    rms_norm[grid](
        x,
        weight,
        residual,
        index,
        y,
        stream,
        num_rows,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
