"""Count the tokens that were drawn, in the rows whose penalties need the counts.

token_counts[row, token] += 2, up to the most that i16 holds, unless row or token is negative or
bit 1 of `adjusted` is unset.

Shapes (B = num_seqs sequences, V = VOCAB, R rows of the persistent batch):
  tokens        i32[B]: the tokens drawn; negative: none
  seq_rows      i32[B]: row of each sequence, no row twice; -1 for padding
  adjusted      i32[R]
  token_counts  i16[R, V]: twice the times a token was generated, plus 1 if the prompt has it

Grid: block of BLOCK_B sequences.
Bound by latency: a few bytes per sequence.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(VOCAB=49152)
SCHEDULE = dict(BLOCK_B=256, USE_PDL=False, num_warps=1, num_stages=1)


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
