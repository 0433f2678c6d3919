"""The meaning of ops that make a step's inputs from the rows' state."""

from __future__ import annotations

import torch


def advance(
    seq_rows: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Prepare a decode step, one token per sequence, from the rows' state; lengthen them in place.

    Formula: token = last_token[row], position = length[row], length[row] += 1, context = position +
      1.
    Shapes: seq_rows i32[B], last_token, length i32[R] -> token_ids i32[B], positions i32[B],
      token_seq i32[B], query_start i32[B + 1], context_lens i32[B], sample_index i32[B]. A padding
      sequence (row -1) gets token 0, position 0, context 0 and sample index -1.
    """
    live = seq_rows >= 0  # [B]
    rows = seq_rows.clamp(min=0)  # [B]
    one = live.to(torch.int32)  # [B]
    token_ids = last_token.index_select(0, rows) * one  # [B]
    positions = length.index_select(0, rows) * one  # [B]
    length.index_add_(0, rows, one)
    query_start = torch.arange(
        seq_rows.numel() + 1, dtype=torch.int32, device=seq_rows.device
    )  # [B + 1]
    token_seq = query_start[:-1].clone()  # [B]
    sample_index = torch.where(live, token_seq, -1)  # [B]
    return token_ids, positions, token_seq, query_start, positions + one, sample_index


def resolve_tokens(
    token_ids: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Replace each id of -1 by the last token of the row that it belongs to.

    Shapes: token_ids, token_seq i32[T], seq_rows i32[B], last_token i32[R] -> i32[T]. An id of -1
      in a padding sequence (row -1) becomes 0.
    """
    rows = seq_rows.index_select(0, token_seq)  # [T]
    latest = last_token.index_select(0, rows.clamp(min=0)) * (rows >= 0)  # [T]
    return torch.where(token_ids == -1, latest, token_ids)  # [T]
