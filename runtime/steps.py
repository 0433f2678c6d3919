"""What a step computes, as the scheduler plans it, and the tokens that come of it.

Made by the scheduler; the executor runs plans and the engine hands events on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.runtime.host_pages import PageCopies
from treadle.runtime.request import FinishReason
from treadle.runtime.sequences import SequenceState


class Slice(NamedTuple):
    """What one step computes for one sequence: positions start to stop, and perhaps a new token.

    `scores`: no new token is wanted, only how likely the model finds the next one of the prompt.
    """

    sequence: SequenceState
    row: int
    start: int
    stop: int
    samples: bool
    scores: bool = False


class Decodes:
    """Sequences that decode together, and what stays the same while they do. Immutable.

    rows: the row of each, i64[N].
    token_ids: the list of tokens of each. A step adds to it without a look at the sequence, which
      lies in another core's cache: the event loop has just handed over its last token.
    """

    __slots__ = ("rows", "sequences", "token_ids")

    def __init__(self, sequences: tuple[SequenceState, ...], rows: np.ndarray) -> None:
        self.sequences = sequences
        self.rows = rows
        self.token_ids = [sequence.token_ids for sequence in sequences]


NO_DECODES = Decodes((), np.zeros(0, np.int64))


class StepPlan:
    """One step: decode slices first, then chunks of prompts. Immutable; made by the scheduler.

    decodes, starts: the sequences that are fed their row's last sampled token (the host may not
      know it yet), and its position, i64[N].
    chunks: the slices whose tokens are `sequence.token_ids[start:stop]`.
    group: the decodes with what was derived from them.
    rows: the row of every slice.
    composition: while it stays the same, so do `rows` and the slices' sequences (and the step is
      decode only), so what was derived from them can be kept.
    new_rows: rows that got a (new) sequence; its slice is among `chunks`, and row state must be
      set from it before the step runs.
    block_updates: entries (row, index, page) to write to the block table before the step runs.
    page_copies: what is to be copied between device and host before the step runs, if anything.
      No step in flight uses these pages, so the copies need not wait for one.
    """

    __slots__ = (
        "_slices",
        "block_updates",
        "chunks",
        "composition",
        "decodes",
        "group",
        "new_rows",
        "num_tokens",
        "page_copies",
        "rows",
        "starts",
        "step",
    )

    def __init__(
        self,
        step: int,
        composition: int,
        group: Decodes,
        starts: np.ndarray,
        chunks: tuple[Slice, ...],
        rows: tuple[int, ...],
        new_rows: tuple[int, ...],
        block_updates: tuple[tuple[int, int, int], ...],
        page_copies: PageCopies | None = None,
    ) -> None:
        self.step = step
        self.composition = composition
        self.group = group
        self.decodes = group.sequences
        self.starts = starts
        self.chunks = chunks
        self.rows = rows
        self.new_rows = new_rows
        self.block_updates = block_updates
        self.page_copies = page_copies
        self.num_tokens = len(starts) + sum(chunk.stop - chunk.start for chunk in chunks)
        self._slices: tuple[Slice, ...] | None = None

    @property
    def num_decode(self) -> int:
        """Count the decode slices, which come first."""
        return len(self.decodes)

    @property
    def is_decode_only(self) -> bool:
        """Say whether every slice is a decode."""
        return not self.chunks

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Return all slices, in the order of `rows`. Built on first use: a decode step on the
        device's own row state does not need them."""
        if self._slices is None:
            decodes = (
                Slice(sequence, row, start, start + 1, True)
                for sequence, row, start in zip(
                    self.decodes, self.rows, self.starts.tolist(), strict=False
                )
            )
            self._slices = (*decodes, *self.chunks)
        return self._slices


TokenEvent = tuple[SequenceState, int, FinishReason | None]
"""A new token of a sequence, and why the sequence ended with it, if it did."""


@dataclass(frozen=True, slots=True)
class TokenEvents:
    """Hold the events of a step, in the order of its slices; in columns, as there are hundreds."""

    sequences: Sequence[SequenceState] = ()
    tokens: Sequence[int] = ()
    reasons: Sequence[FinishReason | None] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[TokenEvent]:
        return zip(self.sequences, self.tokens, self.reasons, strict=True)
