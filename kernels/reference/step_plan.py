"""Where tokens and contexts of a step lie in a paged cache: derived once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepPlan:
    """Hold what `kv_write` and `attention` derive from a step's inputs, the same in every layer.

    Passing one saves time only. Make it with `plan_step` in each step: it holds for its inputs and
    for caches of its `num_kv_heads` and `page_size`. Sequences with one query token are attended to
    as one batch (`decode_...`), the others one by one (`prefill`).
    Shapes (slots are indices of [D] rows of a cache seen as [P * G * S, D]): write_slots i64[N *
      G], one for each live token and head; live_tokens i64[N], or None where all T are live;
      decode_tokens i64[B'], or None where they are the first B'; decode_slots i64[B' * G * C];
      decode_mask f32[B', 1, 1, C], 0 up to each context's end and -inf beyond, or None where all
      contexts are equally long; prefill: start, stop, context, slots i32[G * context] each.
    """

    num_kv_heads: int
    page_size: int
    write_slots: torch.Tensor
    live_tokens: torch.Tensor | None
    num_decode: int
    decode_tokens: torch.Tensor | None
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor | None
    prefill: tuple[tuple[int, int, int, torch.Tensor], ...]


def plan_step(
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    page_size: int,
) -> StepPlan:
    """Derive a `StepPlan`; the shapes are those of `kv_write` and `attention`."""
    write_slots, live_tokens = plan_write(
        positions, token_seq, seq_rows, block_table, num_kv_heads, page_size
    )
    starts, contexts, rows = query_start.tolist(), context_lens.tolist(), seq_rows.tolist()
    decode: list[tuple[int, int, int]] = []  # (token, row, context)
    prefill: list[tuple[int, int, int, torch.Tensor]] = []
    for seq, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        start, stop = starts[seq], starts[seq + 1]
        if row < 0 or context == 0 or start == stop:
            continue
        if stop - start == 1:
            decode.append((start, row, context))
        else:
            pages_and_slots = _context_slots(block_table[row : row + 1], (context,), page_size)
            slots = _head_slots(pages_and_slots, num_kv_heads, page_size).flatten()  # [G * C]
            prefill.append((start, stop, context, slots))
    decode_tokens = decode_mask = None
    decode_slots = write_slots[:0]  # [0]
    if decode:
        tokens, decode_rows, lengths = zip(*decode, strict=True)
        if tokens != tuple(range(len(tokens))):
            decode_tokens = torch.tensor(tokens, device=block_table.device)  # [B']
        table = block_table[list(decode_rows)]  # [B', M]
        pages_and_slots = _context_slots(table, lengths, page_size)  # [B', C] each
        # In i64 a gather takes four fifths of the time (torch 2.13, Emerald Rapids).
        decode_slots = _head_slots(pages_and_slots, num_kv_heads, page_size).flatten().long()
        if min(lengths) < max(lengths):
            length = torch.tensor(lengths, device=block_table.device)[:, None]  # [B', 1]
            beyond = torch.arange(max(lengths), device=block_table.device) >= length  # [B', C]
            decode_mask = torch.zeros_like(beyond, dtype=torch.float32)  # [B', C]
            decode_mask = decode_mask.masked_fill_(beyond, -torch.inf)[
                :, None, None
            ]  # [B', 1, 1, C]
    return StepPlan(
        num_kv_heads,
        page_size,
        write_slots,
        live_tokens,
        len(decode),
        decode_tokens,
        decode_slots,
        decode_mask,
        tuple(prefill),
    )


def plan_write(
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Derive `write_slots` and `live_tokens` of a `StepPlan` alone."""
    rows = seq_rows.index_select(0, token_seq)  # [T]
    live_tokens = None
    if bool((rows < 0).any()):
        live_tokens = (rows >= 0).nonzero().flatten()  # [N]
        rows, positions = rows[live_tokens], positions[live_tokens]  # [N] each
    pages = block_table[rows, positions // page_size]  # [N]
    slots = pages * (num_kv_heads * page_size) + positions % page_size  # [N]
    heads = torch.arange(num_kv_heads, dtype=slots.dtype, device=slots.device) * page_size  # [G]
    return (slots[:, None] + heads).flatten().long(), live_tokens  # [N * G]


def _context_slots(
    table: torch.Tensor, lengths: Sequence[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pages and slots of each sequence's positions, [B', C] each.

    Beyond the sequence's end its last position is repeated: what lies in slots that nobody wrote
    must not be touched, not even to be masked (NaN times 0 is NaN).
    """
    position = torch.arange(max(lengths), dtype=torch.int32, device=table.device)  # [C]
    if min(lengths) < max(lengths):
        last = torch.tensor(lengths, dtype=torch.int32, device=table.device) - 1  # [B']
        position = torch.minimum(position, last[:, None])  # [B', C]
    position = position.expand(table.shape[0], -1)  # [B', C]
    pages = table.gather(1, (position // page_size).long())  # [B', C]
    return pages, position % page_size


def _head_slots(
    context_slots: tuple[torch.Tensor, torch.Tensor], num_kv_heads: int, page_size: int
) -> torch.Tensor:
    pages, slots = context_slots  # [B', C] each
    first = pages * (num_kv_heads * page_size) + slots  # [B', C]
    heads = torch.arange(num_kv_heads, dtype=first.dtype, device=first.device) * page_size  # [G]
    return first[:, None] + heads[:, None]  # [B', G, C]


def check_plan(plan: StepPlan, num_kv_heads: int, page_size: int) -> None:
    """Assert that a plan was made for caches of these sizes."""
    expected, found = (plan.num_kv_heads, plan.page_size), (num_kv_heads, page_size)
    assert expected == found, f"plan for (G, S) = {expected} used with a cache of {found}"


def live_sequences(
    seq_rows: torch.Tensor, query_start: torch.Tensor, context_lens: torch.Tensor
) -> Iterator[tuple[int, int, int, int]]:
    """Yield row, first token, the token after the last, and context of a step's live sequences."""
    starts = query_start.tolist()
    for seq, (row, context) in enumerate(
        zip(seq_rows.tolist(), context_lens.tolist(), strict=True)
    ):
        if row >= 0 and context > 0 and starts[seq] < starts[seq + 1]:
            yield row, starts[seq], starts[seq + 1], context
