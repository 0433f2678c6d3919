"""Prepare a decode step, one token per sequence, from the state that lives on the device.

token = last_token[row], position = length[row], length[row] += 1, context = position + 1. A padding
sequence (row -1) gets token 0, position 0, context 0 and sample index -1, and changes no state.

Shapes (B = num_seqs sequences, R rows of the persistent batch):
  seq_rows      i32[B]: row of each sequence, no row twice; -1 for padding
  last_token    i32[R]
  length        i32[R]: tokens scheduled so far; counted up in place
  token_ids, positions, token_seq, context_lens, sample_index  i32[B]: results
  query_start   i32[B + 1]: result

Grid: block of BLOCK_B sequences.
Bound by latency: a few bytes per sequence.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict()
SCHEDULE = dict(BLOCK_B=256, USE_PDL=False, num_warps=1, num_stages=1)


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
def step_inputs(
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
    step_inputs[grid](
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
