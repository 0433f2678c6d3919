"""`count_tokens`: count the tokens that were drawn, in the rows whose penalties need the counts.

Covers:
  count_tokens(tokens, seq_rows, adjusted, token_counts)

Must move 0 bytes and 8 per token; must compute 0 operations per token.

Schedule: BLOCK_B=256, USE_PDL=True, num_warps=1, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(VOCAB=128256)
SCHEDULE = dict(BLOCK_B=256, USE_PDL=True, num_warps=1, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["tokens_ptr", "seq_rows_ptr", "adjusted_ptr"],
)
def count_tokens(
    tokens_ptr,
    seq_rows_ptr,
    adjusted_ptr,
    token_counts_ptr,
    num_seqs,
    VOCAB: tl.constexpr,
    BLOCK_B: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = block of sequences.
    seq = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)  # [BLOCK_B]
    inside = seq < num_seqs  # [BLOCK_B]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(seq_rows_ptr + seq, mask=inside, other=-1)  # [BLOCK_B]
    token = tl.load(tokens_ptr + seq, mask=inside, other=-1)  # [BLOCK_B]
    live = (row >= 0) & (token >= 0)  # [BLOCK_B]
    adjusted = tl.load(adjusted_ptr + row, mask=live, other=0)  # [BLOCK_B]
    live = live & ((adjusted & 1) != 0)  # [BLOCK_B]
    place = token_counts_ptr + row.to(tl.int64) * VOCAB + token  # [BLOCK_B]
    code = tl.load(place, mask=live, other=0).to(tl.int32)  # [BLOCK_B]
    code = tl.where(code < 32766, code + 2, code)  # [BLOCK_B]
    tl.store(place, code.to(tl.int16), mask=live)


def launch(
    tokens: torch.Tensor,
    seq_rows: torch.Tensor,
    adjusted: torch.Tensor,
    token_counts: torch.Tensor,
    num_seqs: int,
) -> None:
    """Count the tokens of the first `num_seqs` sequences."""
    grid = (triton.cdiv(num_seqs, SCHEDULE["BLOCK_B"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    count_tokens[grid](
        tokens,
        seq_rows,
        adjusted,
        token_counts,
        num_seqs,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
