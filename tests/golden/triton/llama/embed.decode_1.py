"""`embed`: look up one row of the table per token.

Covers:
  embedded: bf16[T, 2048] = embed(token_ids, @embed; scale=1.0)

Must move 0 bytes and 8,196 per token; must compute 0 operations per token.

Schedule: BLOCK_E=1024, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(HIDDEN=2048, SCALE=1.0)
SCHEDULE = dict(BLOCK_E=1024, USE_PDL=True, num_warps=4, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def embed(
    token_ids_ptr,
    table_ptr,
    y_ptr,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of features.
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    mask = feature < HIDDEN  # [BLOCK_E]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_id = tl.load(token_ids_ptr + token).to(tl.int64)
    y = tl.load(table_ptr + token_id * HIDDEN + feature, mask=mask)  # [BLOCK_E]
    if SCALE != 1.0:
        y = (y.to(tl.float32) * SCALE).to(y_ptr.dtype.element_ty)  # [BLOCK_E]
    tl.store(y_ptr + token * HIDDEN + feature, y, mask=mask)


def launch(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Write the embeddings of the first `num_tokens` tokens to `y`."""
    grid = (num_tokens, triton.cdiv(SHAPE["HIDDEN"], SCHEDULE["BLOCK_E"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    embed[grid](
        token_ids,
        table,
        y,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
