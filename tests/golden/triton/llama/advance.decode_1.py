"""`advance`: prepare a decode step from the rows' state: one token per sequence, one longer each.

Covers:
  token_ids: i32[T], positions: i32[T], token_seq: i32[T], query_start: i32[B+1], context_lens:
    i32[B], sample_index: i32[B] = advance(seq_rows, last_token, length)

Must move 4 bytes and 28 per token; must compute 0 operations per token.

Schedule: BLOCK_B=256, USE_PDL=True, num_warps=1, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict()
SCHEDULE = dict(BLOCK_B=256, USE_PDL=True, num_warps=1, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=[
        "seq_rows_ptr",
        "last_token_ptr",
        "length_ptr",
        "token_ids_ptr",
        "positions_ptr",
        "token_seq_ptr",
        "query_start_ptr",
        "context_lens_ptr",
        "sample_index_ptr",
    ],
)
def advance(
    seq_rows_ptr,
    last_token_ptr,
    length_ptr,
    token_ids_ptr,
    positions_ptr,
    token_seq_ptr,
    query_start_ptr,
    context_lens_ptr,
    sample_index_ptr,
    num_seqs,
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
    live = row >= 0  # [BLOCK_B]
    token = tl.load(last_token_ptr + row, mask=live, other=0)  # [BLOCK_B]
    position = tl.load(length_ptr + row, mask=live, other=0)  # [BLOCK_B]
    tl.store(length_ptr + row, position + 1, mask=live)
    tl.store(token_ids_ptr + seq, token, mask=inside)
    tl.store(positions_ptr + seq, position, mask=inside)
    tl.store(token_seq_ptr + seq, seq, mask=inside)
    tl.store(query_start_ptr + seq, seq, mask=seq <= num_seqs)
    tl.store(context_lens_ptr + seq, tl.where(live, position + 1, 0), mask=inside)
    tl.store(sample_index_ptr + seq, tl.where(live, seq, -1), mask=inside)


def launch(
    seq_rows: torch.Tensor,
    last_token: torch.Tensor,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sample_index: torch.Tensor,
    num_seqs: int,
) -> None:
    """Write the inputs of a decode step of `num_seqs` sequences, and count up `length`."""
    grid = (triton.cdiv(num_seqs + 1, SCHEDULE["BLOCK_B"]),)
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    advance[grid](
        seq_rows,
        last_token,
        length,
        token_ids,
        positions,
        token_seq,
        query_start,
        context_lens,
        sample_index,
        num_seqs,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
