"""`resolve_tokens`: fill in the tokens the host does not know yet: the step before is still
running.

Covers:
  resolve_tokens: i32[T] = resolve_tokens(token_ids, token_seq, seq_rows, last_token)

Must move 0 bytes and 16 per token; must compute 0 operations per token.

Schedule: BLOCK_T=256, USE_PDL=True, num_warps=1, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict()
SCHEDULE = dict(BLOCK_T=256, USE_PDL=True, num_warps=1, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "token_seq_ptr",
        "seq_rows_ptr",
        "last_token_ptr",
        "y_ptr",
    ],
)
def resolve_tokens(
    token_ids_ptr,
    token_seq_ptr,
    seq_rows_ptr,
    last_token_ptr,
    y_ptr,
    num_tokens,
    BLOCK_T: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of tokens.
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    inside = token < num_tokens  # [BLOCK_T]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_id = tl.load(token_ids_ptr + token, mask=inside, other=0)  # [BLOCK_T]
    unknown = token_id == -1  # [BLOCK_T]
    seq = tl.load(token_seq_ptr + token, mask=unknown, other=0)  # [BLOCK_T]
    row = tl.load(seq_rows_ptr + seq, mask=unknown, other=-1)  # [BLOCK_T]
    latest = tl.load(last_token_ptr + row, mask=row >= 0, other=0)  # [BLOCK_T]
    tl.store(y_ptr + token, tl.where(unknown, latest, token_id), mask=inside)


def launch(
    token_ids: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    last_token: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Write the complete ids of the first `num_tokens` tokens to `y`."""
    grid = (triton.cdiv(num_tokens, SCHEDULE["BLOCK_T"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    resolve_tokens[grid](
        token_ids,
        token_seq,
        seq_rows,
        last_token,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
