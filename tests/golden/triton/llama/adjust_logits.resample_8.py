"""`adjust_logits`: change the logits as their rows ask: biases, then penalties, then the allowed
tokens.

Covers:
  adjust_logits(logits, seq_rows, sample_index, length, adjusted, num_biases, bias_tokens,
    bias_values, bias_stops, repetition_penalty, presence_penalty, frequency_penalty,
    token_counts, allowed)

Must move 0 bytes and 513,032 per token; must compute 0 operations per token.

Schedule: BLOCK_V=1024, BLOCK_K=8, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(VOCAB=128256, MAX_BIASES=1024)
SCHEDULE = dict(BLOCK_V=1024, BLOCK_K=8, USE_PDL=True, num_warps=4, num_stages=1)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "seq_rows_ptr",
        "sample_index_ptr",
        "length_ptr",
        "adjusted_ptr",
        "num_biases_ptr",
        "repetition_penalty_ptr",
        "presence_penalty_ptr",
        "frequency_penalty_ptr",
    ],
)
def adjust_logits(
    logits_ptr,
    seq_rows_ptr,
    sample_index_ptr,
    length_ptr,
    adjusted_ptr,
    num_biases_ptr,
    bias_tokens_ptr,
    bias_values_ptr,
    bias_stops_ptr,
    repetition_penalty_ptr,
    presence_penalty_ptr,
    frequency_penalty_ptr,
    token_counts_ptr,
    allowed_ptr,
    VOCAB: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = sequence, axis 1 = block of tokens.
    seq = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(seq_rows_ptr + seq).to(tl.int64)
    if (row < 0) | (tl.load(sample_index_ptr + seq) < 0):
        return
    adjusted = tl.load(adjusted_ptr + row)
    if adjusted == 0:
        return

    index = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = index < VOCAB  # [BLOCK_V]
    place = logits_ptr + seq.to(tl.int64) * VOCAB + index  # [BLOCK_V]
    x = tl.load(place, mask=inside, other=0.0)  # [BLOCK_V]
    if (adjusted & 2) != 0:
        position = tl.load(length_ptr + row)
        num_biases = tl.load(num_biases_ptr + row)
        for start in range(0, num_biases, BLOCK_K):
            entry = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            live = entry < num_biases  # [BLOCK_K]
            entry_place = row * MAX_BIASES + entry  # [BLOCK_K]
            token = tl.load(bias_tokens_ptr + entry_place, mask=live, other=-1)  # [BLOCK_K]
            value = tl.load(bias_values_ptr + entry_place, mask=live, other=0.0)  # [BLOCK_K]
            stop = tl.load(bias_stops_ptr + entry_place, mask=live, other=0)  # [BLOCK_K]
            value = tl.where(position < stop, value, 0.0)  # [BLOCK_K]
            is_token = token[:, None] == index[None, :]  # [BLOCK_K, BLOCK_V]
            x += tl.sum(tl.where(is_token, value[:, None], 0.0), axis=0)  # [BLOCK_V]
    if (adjusted & 1) != 0:
        code = tl.load(token_counts_ptr + row * VOCAB + index, mask=inside, other=0)  # [BLOCK_V]
        code = code.to(tl.int32)  # [BLOCK_V]
        repetition = tl.load(repetition_penalty_ptr + row)
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)  # [BLOCK_V]
        x = tl.where(code > 0, repeated, x)  # [BLOCK_V]
        generated = tl.load(frequency_penalty_ptr + row) * (code >> 1).to(tl.float32)  # [BLOCK_V]
        at_all = tl.where(code > 1, tl.load(presence_penalty_ptr + row), 0.0)  # [BLOCK_V]
        x -= generated + at_all  # [BLOCK_V]
    if (adjusted & 4) != 0:
        word_place = row * ((VOCAB + 31) // 32) + (index >> 5)  # [BLOCK_V]
        word = tl.load(allowed_ptr + word_place, mask=inside, other=0)  # [BLOCK_V]
        x = tl.where(((word >> (index & 31)) & 1) != 0, x, float("-inf"))  # [BLOCK_V]
    tl.store(place, x, mask=inside)


def launch(
    logits: torch.Tensor,
    seq_rows: torch.Tensor,
    sample_index: torch.Tensor,
    length: torch.Tensor,
    adjusted: torch.Tensor,
    num_biases: torch.Tensor,
    bias_tokens: torch.Tensor,
    bias_values: torch.Tensor,
    bias_stops: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    token_counts: torch.Tensor,
    allowed: torch.Tensor,
    num_seqs: int,
) -> None:
    """Adjust the logits of the first `num_seqs` sequences."""
    grid = (num_seqs, triton.cdiv(SHAPE["VOCAB"], SCHEDULE["BLOCK_V"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    adjust_logits[grid](
        logits,
        seq_rows,
        sample_index,
        length,
        adjusted,
        num_biases,
        bias_tokens,
        bias_values,
        bias_stops,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        token_counts,
        allowed,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
