"""What the scheduler knows of a request from its arrival to its end.

Written by the scheduler only; read by the engine, and by those who write a step's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from treadle.runtime.pages import PageTable
from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.structure import TokenConstraint

NO_ROW = -1


class SequenceStatus(Enum):
    """Where a sequence stands.

    WAITING → RUNNING → FINISHED; RUNNING → (PREEMPTING →) WAITING when pages run out;
    any → FINISHED. PREEMPTING and FINISHED sequences keep row and pages while a step uses them.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    FINISHED = "finished"


class RowArrays:
    """What the scheduler knows of the sequence in each row, for one pass over all; i64[R] each.

    positions: where the sequence goes on, see `SequenceState.scheduled_tokens`.
    halts: the position that can't be decoded without a decision.
    capacities: the positions that its pages hold.
    last_positions: only positions before it are ever computed.
    looks_from: a token drawn at this position or later may be the last, or one too many, and must
      be looked at; one drawn before ends its sequence only as an end of sequence or a fault.
    last_steps: the last planned step that computes the sequence.
    """

    __slots__ = (
        "capacities",
        "halts",
        "last_positions",
        "last_steps",
        "looks_from",
        "positions",
    )

    def __init__(self, max_rows: int) -> None:
        self.positions = np.zeros(max_rows, np.int64)
        self.halts = np.zeros(max_rows, np.int64)
        self.capacities = np.zeros(max_rows, np.int64)
        self.last_positions = np.zeros(max_rows, np.int64)
        self.looks_from = np.zeros(max_rows, np.int64)
        self.last_steps = np.zeros(max_rows, np.int64)


@dataclass(eq=False, slots=True)
class SequenceState:
    """One request from `add` to its end. Read by the engine, written by the scheduler only.

    adjusted: what it asks of its logits, as bits; see `adjustments.find_adjustments`.
    constraint: decides before each token which ones may be drawn, so the token before must be
      known to the host: the sequence is never planned ahead.
    token_ids: prompt and generated tokens known to the host.
    last_position: only positions before it are ever computed; the last token is returned, not fed.
    prefill_stop: tokens that were known when the sequence got its row; those are fed by the host,
      every later one is the row's last sampled token, which the device has.
    cached_tokens: prompt tokens that were not computed, thanks to the prefix cache.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int  # prompt + generated, at most
    stop_ids: frozenset[int]
    table: PageTable
    arrival: int
    adjusted: int = 0
    constraint: TokenConstraint | None = None
    token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = NO_ROW
    prefill_stop: int = 0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    last_position: int = 0
    # The scheduler's own: where it keeps what changes with every step, and the positions of the
    # prompt whose log probabilities have been planned, where they are asked for.
    arrays: RowArrays | None = None
    num_scored: int = 0

    @property
    def scheduled_tokens(self) -> int:
        """Count the tokens whose K and V are in the cache, or will be once the planned steps ran.

        May be one more than `len(token_ids)`, when a step is planned ahead.
        """
        if self.row == NO_ROW or self.arrays is None:
            return 0
        return int(self.arrays.positions[self.row])

    @property
    def generated_ids(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_generated(self) -> int:
        """Count the tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_ids)
