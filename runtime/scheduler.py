"""Decide what each step computes: which sequences, which of their tokens, in which rows and pages.

State in, plan out: no tensors, no clock, no text. Called by the engine, from one thread.
Steps must run on the device in the order in which they were planned, and every plan must be run.

Of hundreds of sequences that decode few need a decision in a step. What all of them need is kept in
arrays with an entry per row, so that one pass over these finds the few.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter

import numpy as np

from treadle.ir.errors import ConfigError, QueueFullError, RequestError
from treadle.runtime.adjustments import find_adjustments
from treadle.runtime.admission import Admission, Newcomer, Running
from treadle.runtime.pages import Namespace, PagePool, PageTable
from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.sequences import NO_ROW, RowArrays, SequenceState, SequenceStatus
from treadle.runtime.steps import NO_DECODES, Decodes, Slice, StepPlan, TokenEvents
from treadle.runtime.structure import TokenConstraint

_MAX_TOKEN_ID = 2**31 - 1
_NO_TOKENS = frozenset({-1, -2})  # what the device gives where it draws none; see `StepResult`


class Scheduler:
    """Fill a persistent batch of rows, first come first served, one step at a time.

    A sequence keeps its row from admission to its end or preemption. Sequences that decode come
    first in each step, prompts are computed in chunks with what is left of `max_step_tokens`.
    All pages of a prompt are taken at admission, those of generated tokens one at a time.

    `max_in_flight` is the number of steps that may be planned and not completed: 1 is synchronous,
    2 plans one step ahead. A sequence found to have ended while a later step computes it gets no
    token from that step, and its row and pages come back when that step is complete.

    A waiting sequence starts when `admission` finds room for what the running ones and it are
    expected to need yet; with nothing running, when its prompt has pages. When pages run out all
    the same the youngest sequence loses its pages, returns to the front of the queue with the
    tokens it has, and is computed again later; the oldest always advances.

    Rows that decode share a step with prompts while they have at most `max_mixed_context_tokens` of
    context together, or would have if `rows_at_once` were as long as the longest. With more, steps
    of prompts alone and of decodes alone take turns: kernels for prompts read the contexts of so
    many rows at a time, and each of them slower than kernels for decodes do.

    While more wait than there are pages for, decode programs stay full: `worthwhile_rows` says for
    the rows of a program how many are worth running the next one, see `worthwhile_rows.py`.

    With `quantises_pages` the token of a scored prompt that fills a page has a step without others
    of its prompt: it makes codes of those before it and leaves the row's open page to those after.

    Raises: ConfigError: when a limit is impossible.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        max_waiting: int = 1024,
        max_in_flight: int = 2,
        quantises_pages: bool = False,
        max_mixed_context_tokens: float = math.inf,
        rows_at_once: int = 1,
        worthwhile_rows: Mapping[int, int] | None = None,
    ) -> None:
        limits = {
            "max_rows": (max_rows, 1),
            # Every row may decode in one step; fewer tokens would starve some of them.
            "max_step_tokens": (max_step_tokens, max_rows),
            "max_model_len": (max_model_len, 2),
            "max_waiting": (max_waiting, 1),
            "max_in_flight": (max_in_flight, 1),
            "rows_at_once": (rows_at_once, 1),
        }
        for name, (value, least) in limits.items():
            if value < least:
                because = " (`max_rows`)" if name == "max_step_tokens" else ""
                raise ConfigError(
                    f"Expected `{name}` of at least {least}{because}, found {value}.",
                    remedy=f"Raise `{name}`.",
                )
        self.pool = pool
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.max_in_flight = max_in_flight
        self.quantises_pages = quantises_pages
        self.max_mixed_context_tokens = max_mixed_context_tokens
        self.rows_at_once = rows_at_once
        self.eos_token_ids = frozenset(eos_token_ids)
        self._ends = self.eos_token_ids | _NO_TOKENS
        self.steps_total = 0
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self._live: dict[str, SequenceState] = {}
        self._waiting: deque[SequenceState] = deque()  # by arrival, as is `_running`
        self._running: list[SequenceState] = []
        self._leaving: list[SequenceState] = []  # PREEMPTING or FINISHED, used by a step in flight
        self._free_rows = list(range(max_rows))  # a heap: the lowest row first
        self._in_flight: deque[StepPlan] = deque()
        self._next_arrival = 0
        self.admission = Admission(
            max_rows=max_rows,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            worthwhile_rows=worthwhile_rows,
        )
        self._claimed_pages = 0  # that all unfinished sequences would have at their limits
        self._next_look = 0  # the step to see again whether the first that waits may start
        self._spare_slices = 0  # that a step has beyond one for each running sequence
        self._arrays = RowArrays(max_rows)
        self._running_rows: np.ndarray | None = None  # None: `_running` has changed
        self._composition = 0
        self._decodes = NO_DECODES  # the last plan's
        self._rows: tuple[int, ...] = ()  # the last plan's
        self._is_steady = False  # whether the last plan was decode only
        self._left_decodes_out = False  # whether it had prompts in place of decodes

    @property
    def num_running(self) -> int:
        """Count the unfinished sequences that have a row and will keep it."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Count the unfinished sequences that wait for a row, preempted ones included."""
        return len(self._live) - len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Count the steps that are planned and not completed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Say whether there is nothing to plan and nothing to complete."""
        return not self._live and not self._in_flight

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """Return the ids of all unfinished requests, in order of arrival."""
        return tuple(self._live)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = (),
        constraint: TokenConstraint | None = None,
    ) -> SequenceState:
        """Queue a request. `namespace`: what else decides its K and V, see `pages.Namespace`.

        `params.max_tokens` of None means: as many as fit.

        Raises: RequestError: when the request can never run. QueueFullError: when too many wait.
        """
        prompt = tuple(prompt_ids)
        max_tokens = self.check_request(request_id, prompt, params)
        # As many as the rows hold are no backlog: a burst on an idle engine is accepted.
        most = self.max_rows + self.max_waiting
        if len(self._live) >= most:
            raise QueueFullError(
                f"Expected at most {most} unfinished requests (`max_rows` {self.max_rows} + "
                f"`max_waiting` {self.max_waiting}), found {len(self._live)} already.",
                remedy="Retry later.",
            )
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids = stop_ids | self.eos_token_ids if stop_ids else self.eos_token_ids
        sequence = SequenceState(
            request_id=request_id,
            prompt_ids=prompt,
            params=params,
            max_total_tokens=len(prompt) + max_tokens,
            stop_ids=stop_ids,
            # Cached positions have no logits; a namespace of its own finds none.
            table=PageTable(
                request_id,
                namespace
                if params.prompt_logprobs is None
                else (*namespace, ("scored", str(self._next_arrival))),
            ),
            arrival=self._next_arrival,
            adjusted=find_adjustments(params, stop_ids, constraint is not None),
            constraint=constraint,
            token_ids=list(prompt),
            # The last token is returned, never fed.
            last_position=len(prompt) + max_tokens - 1,
        )
        self._next_arrival += 1
        self._claimed_pages += self.pool.count_pages(sequence.last_position)
        self._live[request_id] = sequence
        self._waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> SequenceState | None:
        """End a request that nobody waits for any more; see `finish`."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None
    ) -> SequenceState | None:
        """End a request from outside and return it, or None if it has ended already.

        It gets no further token, and leaves nothing in the prefix cache if the reason is ERROR. Row
        and pages come back at once, or when the steps in flight that use them are complete.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, reason, stop_reason)
        return sequence

    def schedule(self) -> StepPlan | None:
        """Plan one step, or return None if no sequence can advance before a step completes."""
        assert len(self._in_flight) < self.max_in_flight, (
            f"{len(self._in_flight)} steps are in flight, `max_in_flight` is {self.max_in_flight}"
        )
        step = self.steps_total
        updates: list[tuple[int, int, int]] = []
        prefills: list[SequenceState] = []
        skipped: list[int] = []  # indices in `_running`, which preemption shortens from its end
        arrays, running_rows = self._arrays, self._find_running_rows()
        positions = arrays.positions[running_rows]
        undecided = (positions == arrays.halts[running_rows]).nonzero()[0]
        for index, position in zip(undecided.tolist(), positions[undecided].tolist(), strict=True):
            if index >= len(self._running):
                break  # it was preempted, as were all after it
            sequence = self._running[index]
            if position < sequence.prefill_stop:
                prefills.append(sequence)
            elif (
                position != sequence.last_position
                and not _awaits_token(sequence, position)
                and self._grow(sequence, position, updates)
            ):
                continue
            skipped.append(index)  # it has no token for now, or its last is being computed
        decodes = self._group_decodes(skipped)
        starts = arrays.positions[decodes.rows]
        chunks: list[Slice] = []
        new_rows: list[int] = []
        takes_turns = self._takes_turns(starts, prefills)
        if takes_turns and not self._left_decodes_out:
            self._plan_prompts(self.max_step_tokens, prefills, chunks, new_rows, updates)
            if chunks:
                decodes, starts = NO_DECODES, starts[:0]
        arrays.positions[decodes.rows] = starts + 1
        arrays.last_steps[decodes.rows] = step
        if not takes_turns:
            budget = self.max_step_tokens - len(starts)
            self._plan_prompts(budget, prefills, chunks, new_rows, updates)
        if not decodes.sequences and not chunks:
            return None
        self._left_decodes_out = takes_turns and bool(chunks)
        # Only now, so that no slice of this step reads what another one is to write.
        for chunk in chunks:
            arrays.last_steps[chunk.row] = step
            self.pool.publish(chunk.sequence.table, chunk.sequence.token_ids, chunk.stop)
        plan = self._make_plan(step, decodes, starts, chunks, new_rows, updates)
        self.steps_total += 1
        self._in_flight.append(plan)
        return plan

    def complete(self, plan: StepPlan, sampled: Sequence[int]) -> TokenEvents:
        """Take the sampled tokens of the oldest step in flight, one per slice of the plan.

        Those of slices that do not sample are ignored. One of -1 or -2 says that the device could
        draw none: the sequence ends with ERROR and does not keep it. Returns the new tokens of
        sequences that had not ended before, in the order of the slices.
        """
        assert self._in_flight and plan is self._in_flight[0], (
            f"step {plan.step} is completed out of order"
        )
        assert len(sampled) == len(plan.rows), (
            f"step {plan.step} has {len(plan.rows)} slices but {len(sampled)} sampled tokens"
        )
        self._in_flight.popleft()
        num_decode = plan.num_decode
        events = self._take_decoded(plan, sampled[:num_decode] if plan.chunks else sampled)
        if plan.chunks:
            events = self._take_first(plan, sampled[num_decode:], events)
        if self._leaving:
            self._release_leaving()
        return events

    def _take_decoded(self, plan: StepPlan, tokens: Sequence[int]) -> TokenEvents:
        """Give the decodes their tokens: to most of them without a look at anything else."""
        may_end = self._find_possible_ends(plan, tokens)
        looked_at = may_end.nonzero()[0].tolist()
        pairs: Iterable[tuple[list[int], int]] = zip(plan.group.token_ids, tokens, strict=True)
        for token_ids, token in compress(pairs, (~may_end).tolist()) if looked_at else pairs:
            token_ids.append(token)
        self.generation_tokens_total += len(tokens) - len(looked_at)
        reasons: list[FinishReason | None] = [None] * len(tokens)
        over = []  # ended while this step was computing one token too many
        for index in looked_at:
            sequence = plan.decodes[index]
            if sequence.finish_reason is not None:
                over.append(index)
            else:
                reasons[index] = self._take(sequence, tokens[index])
        if not over:
            return TokenEvents(plan.decodes, tokens, reasons)
        sequences, tokens = [*plan.decodes], [*tokens]
        for index in reversed(over):
            del sequences[index], tokens[index], reasons[index]
        return TokenEvents(sequences, tokens, reasons)

    def _take_first(
        self, plan: StepPlan, tokens: Sequence[int], decoded: TokenEvents
    ) -> TokenEvents:
        """Give chunks that sample their tokens; join their events to those of the decodes."""
        pairs = [
            (chunk.sequence, token)
            for chunk, token in zip(plan.chunks, tokens, strict=True)
            if chunk.samples and chunk.sequence.finish_reason is None
        ]
        return TokenEvents(
            [*decoded.sequences, *(sequence for sequence, _ in pairs)],
            [*decoded.tokens, *(token for _, token in pairs)],
            [*decoded.reasons, *(self._take(sequence, token) for sequence, token in pairs)],
        )

    def _find_possible_ends(self, plan: StepPlan, tokens: Sequence[int]) -> np.ndarray:
        """Say of each decode whether its token may end it, bool[N]; the others simply go on."""
        may_end: np.ndarray = plan.starts >= self._arrays.looks_from[plan.group.rows]
        if not self._ends.isdisjoint(tokens):
            may_end |= [token in self._ends for token in tokens]
        return may_end

    def _take(self, sequence: SequenceState, token: int) -> FinishReason | None:
        """Give a sequence a token that may be its last; return why it is."""
        if token < 0:
            self._end(sequence, FinishReason.ERROR, None)
            return FinishReason.ERROR
        sequence.token_ids.append(token)
        self.generation_tokens_total += 1
        reason = None if sequence.constraint is None else sequence.constraint.accept(token)
        if reason is not None:
            self._end(sequence, reason, None)
        elif token in sequence.stop_ids or len(sequence.token_ids) == sequence.max_total_tokens:
            reason = self._end_by_token(sequence, token)
        return reason

    def check_integrity(self) -> None:
        """Verify the pool, the rows and the queues against each other; costs a walk over all.

        Raises: AssertionError: naming what does not fit; always a fault of our own.
        """
        holders = [*self._running, *self._leaving]
        self.pool.check_integrity(sequence.table for sequence in holders)
        rows = [sequence.row for sequence in holders]
        _check(
            sorted([*rows, *self._free_rows]) == list(range(self.max_rows)),
            f"rows {rows} and free rows {self._free_rows} are not {self.max_rows} different ones",
        )
        preempting = [s for s in self._leaving if s.status is SequenceStatus.PREEMPTING]
        live = [*self._waiting, *self._running, *preempting]
        _check(
            sorted(s.arrival for s in live) == [s.arrival for s in self._live.values()],
            "the queues do not hold each unfinished sequence once",
        )
        for queue, status in (
            (self._waiting, SequenceStatus.WAITING),
            (self._running, SequenceStatus.RUNNING),
        ):
            arrivals = [sequence.arrival for sequence in queue]
            _check(arrivals == sorted(arrivals), f"{status.value} is out of order: {arrivals}")
            _check(all(s.status is status for s in queue), f"{status.value} holds another status")
        for sequence in self._waiting:
            _check(sequence.row == NO_ROW, f"`{sequence.request_id}` waits in row {sequence.row}")
        for sequence in holders:
            capacity = len(sequence.table.pages) * self.pool.page_size
            _check(
                self._arrays.capacities[sequence.row] == capacity,
                f"`{sequence.request_id}` has slots for {capacity}, its row says otherwise",
            )
            _check(
                sequence.scheduled_tokens <= min(capacity, sequence.last_position),
                f"`{sequence.request_id}` has {sequence.scheduled_tokens} tokens scheduled, "
                f"slots for {capacity} and needs {sequence.last_position}",
            )
        for sequence in self._leaving:
            _check(self._is_in_flight(sequence), f"`{sequence.request_id}` leaves, but is unused")

    def check_request(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams
    ) -> int:
        """Check that a request can run, and return how many tokens it may generate.

        Reads only what never changes, and the ids of live requests: any thread may call it.

        Raises: RequestError: when the request can never run.
        """
        if request_id in self._live:
            raise RequestError(
                f"Expected a new request id, found `{request_id}`, which is running.",
                remedy="Use another id.",
                code="duplicate_request_id",
            )
        if not prompt:
            raise RequestError(
                "Expected a prompt of at least 1 token, found 0.",
                remedy="Send a prompt.",
                param="prompt",
                code="empty_prompt",
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token <= _MAX_TOKEN_ID:
                raise RequestError(
                    f"Expected token ids of 0 to {_MAX_TOKEN_ID}, found {token} in the prompt.",
                    remedy="Use ids of the model's own tokenizer.",
                    param="prompt",
                    code="invalid_token_id",
                )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"Expected a prompt of at most {self.max_model_len - 1} tokens, which leaves room "
                f"for one more in the model's window of {self.max_model_len}, "
                f"found {len(prompt)}.",
                remedy="Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        # The last token needs no slot, hence one token more than the pool has slots.
        room = min(self.max_model_len, self.pool.num_pages * self.pool.page_size + 1) - len(prompt)
        if params.max_tokens is not None and params.max_tokens < 1:
            raise RequestError(
                f"Expected `max_tokens` of at least 1, found {params.max_tokens}.",
                remedy="Ask for at least one token.",
                param="max_tokens",
                code="invalid_max_tokens",
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        num_total = len(prompt) + max_tokens
        if num_total > self.max_model_len:
            raise RequestError(
                f"Expected prompt and `max_tokens` to fit the model's window of "
                f"{self.max_model_len} tokens, found {len(prompt)} + {max_tokens} = {num_total}.",
                remedy="Shorten the prompt, or ask for at most "
                f"{self.max_model_len - len(prompt)} tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        num_pages = self.pool.count_pages(max(num_total - 1, len(prompt)))
        if num_pages > self.pool.num_pages:
            raise RequestError(
                f"Expected a request that fits the KV cache of {self.pool.num_pages} pages "
                f"({self.pool.num_pages * self.pool.page_size} tokens), "
                f"found one that needs {num_pages} pages.",
                remedy="Shorten the prompt, lower `max_tokens`, or enlarge the KV cache.",
                param="max_tokens" if room > 0 else "prompt",
                code="kv_cache_exceeded",
            )
        return max_tokens

    def _find_running_rows(self) -> np.ndarray:
        """Give the rows of `_running`, i64[N]."""
        if self._running_rows is None:
            self._running_rows = np.array([s.row for s in self._running], np.int64)
        return self._running_rows

    def _group_decodes(self, skipped: list[int]) -> Decodes:
        """Give the running sequences less the skipped ones; the same object while they stay."""
        last, rows = self._decodes, self._find_running_rows()
        if not skipped and last.rows is rows:
            return last
        sequences = tuple(self._running)
        if skipped:
            decodes = np.ones(len(rows), np.bool_)
            # The last one is gone if it was skipped because it preempted itself.
            decodes[[index for index in skipped if index < len(rows)]] = False
            sequences, rows = tuple(compress(sequences, decodes.tolist())), rows[decodes]
        if sequences != last.sequences:
            return Decodes(sequences, rows)
        if not skipped:
            self._running_rows = last.rows  # the same rows: next time they are known as such
        return last

    def _grow(
        self, sequence: SequenceState, position: int, updates: list[tuple[int, int, int]]
    ) -> bool:
        """Get the page of the next position; say whether the sequence can decode in this step."""
        table = sequence.table
        if position < len(table.pages) * self.pool.page_size:
            self._set_decode_halt(sequence, position + 1)
            return True
        self.pool.publish(table, sequence.token_ids, min(position, len(sequence.token_ids)))
        while (page := self.pool.append(table)) is None:
            # Skip a step rather than evict another sequence, when pages are about to come back.
            if self._leaving or self._computes_a_last():
                return False
            # Not yet in this plan: rows are visited from the oldest to the youngest sequence.
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        updates.append((sequence.row, len(table.pages) - 1, page))
        self._arrays.capacities[sequence.row] += self.pool.page_size
        self._set_decode_halt(sequence, position + 1)
        return True

    def _computes_a_last(self) -> bool:
        """Say whether the last position of a sequence is in a step, or will be in this one."""
        arrays, rows = self._arrays, self._find_running_rows()
        last = arrays.last_positions[rows]
        return bool(np.any((arrays.halts[rows] == last) & (arrays.positions[rows] >= last - 1)))

    def _set_decode_halt(self, sequence: SequenceState, decided: int) -> None:
        """Let positions from `decided` on be decoded without a look until something is lacking."""
        capacity = len(sequence.table.pages) * self.pool.page_size
        halt = min(capacity, sequence.last_position)
        if sequence.constraint is not None:
            halt = min(halt, decided)
        self._arrays.halts[sequence.row] = halt

    def _takes_turns(self, starts: np.ndarray, prefills: list[SequenceState]) -> bool:
        """Say whether these decodes are too much to share a step with the prompts there are."""
        if not len(starts) or not (prefills or self._waiting):
            return False
        tokens = max(starts.sum(), starts.max() * self.rows_at_once)
        return bool(tokens > self.max_mixed_context_tokens)

    def _plan_prompts(
        self,
        budget: int,
        prefills: list[SequenceState],
        chunks: list[Slice],
        new_rows: list[int],
        updates: list[tuple[int, int, int]],
    ) -> None:
        """Plan pieces of prompts, those that run first, of `budget` tokens in all."""
        self._spare_slices = self.max_rows - len(self._running)
        for sequence in prefills:
            if budget > 0:
                budget -= self._plan_chunk(sequence, budget, chunks)
        if self._waiting:
            self._admit_waiting(budget, chunks, new_rows, updates)

    def _plan_chunk(self, sequence: SequenceState, budget: int, chunks: list[Slice]) -> int:
        start = sequence.scheduled_tokens
        stop = min(sequence.prefill_stop, start + budget)
        last = len(sequence.prompt_ids) - 1
        if sequence.params.prompt_logprobs is not None and start < last:
            # A step gives one row of logits per slice, so a scored token is a slice of its own;
            # what was scored before a preemption is computed again without.
            if start >= sequence.num_scored:
                return self._plan_scores(sequence, min(budget, last - start), chunks)
            stop = min(stop, sequence.num_scored)
        samples = stop == sequence.prefill_stop
        self._arrays.positions[sequence.row] = stop
        if samples:
            self._set_decode_halt(sequence, stop)
        else:
            self._arrays.halts[sequence.row] = stop
        chunks.append(Slice(sequence, sequence.row, start, stop, samples))
        return stop - start

    def _plan_scores(self, sequence: SequenceState, count: int, chunks: list[Slice]) -> int:
        """Score the next tokens of a prompt, as many as the step has room for slices.

        Never with the slice that draws its first token: both would write the row's last token.
        """
        start, page_size = sequence.scheduled_tokens, self.pool.page_size
        count = min(count, 1 + self._spare_slices)
        if self.quantises_pages:
            count = min(count, max(1, page_size - 1 - start % page_size))
        self._spare_slices -= count - 1
        for position in range(start, start + count):
            chunks.append(Slice(sequence, sequence.row, position, position + 1, False, True))
        sequence.num_scored = start + count
        self._arrays.positions[sequence.row] = self._arrays.halts[sequence.row] = start + count
        return count

    def _admit_waiting(
        self,
        budget: int,
        chunks: list[Slice],
        new_rows: list[int],
        updates: list[tuple[int, int, int]],
    ) -> None:
        if any(s.status is SequenceStatus.PREEMPTING for s in self._leaving):
            return  # it goes to the front of the queue; nobody may overtake it
        if self._running and self.steps_total < self._next_look:
            return
        while budget > 0 and self._waiting and self._free_rows and self._spare_slices > 0:
            sequence = self._waiting[0]
            prefix = self.pool.find_prefix(sequence.table, sequence.token_ids)
            newcomer = Newcomer(
                len(sequence.token_ids),
                sequence.last_position,
                prefix.num_new_pages,
                end_is_known=not sequence.stop_ids
                and not sequence.params.stop
                and sequence.constraint is None,
            )
            if self._running and not self._has_room(newcomer):
                return
            num_cached = self.pool.allocate(
                sequence.table, sequence.token_ids, prefix, count=sequence.cached_tokens is None
            )
            if num_cached is None:
                return
            self._waiting.popleft()
            self._running.append(sequence)
            self._running_rows = None
            if sequence.cached_tokens is None:  # not when it comes back from preemption
                sequence.cached_tokens = num_cached
                self.prompt_tokens_total += len(sequence.prompt_ids)
            sequence.status = SequenceStatus.RUNNING
            self._enter_row(sequence, num_cached)
            self.admission.note_start(
                sequence.row,
                newcomer,
                prompt_tokens=len(sequence.prompt_ids),
                step=self.steps_total,
            )
            sequence.prefill_stop = len(sequence.token_ids)
            new_rows.append(sequence.row)
            self._spare_slices -= 1
            pages = sequence.table.pages
            updates.extend((sequence.row, index, page) for index, page in enumerate(pages))
            budget -= self._plan_chunk(sequence, budget, chunks)

    def _has_room(self, newcomer: Newcomer) -> bool:
        """Say whether the pool has room for the first that waits beside those that run."""
        arrays, rows = self._arrays, self._find_running_rows()
        wait = self.admission.find_wait(
            newcomer,
            Running(
                rows, arrays.positions[rows], arrays.capacities[rows], arrays.last_positions[rows]
            ),
            available=self.pool.num_available,
            claimed=self._claimed_pages,
            num_waiting=len(self._waiting),
            step=self.steps_total,
        )
        self._next_look = self.steps_total + wait
        return wait == 0

    def _enter_row(self, sequence: SequenceState, num_cached: int) -> None:
        row = sequence.row = heapq.heappop(self._free_rows)
        arrays = sequence.arrays = self._arrays
        arrays.positions[row] = num_cached
        arrays.capacities[row] = len(sequence.table.pages) * self.pool.page_size
        arrays.last_positions[row] = sequence.last_position
        has_own_end = sequence.constraint is not None or not sequence.stop_ids <= self.eos_token_ids
        arrays.looks_from[row] = 0 if has_own_end else sequence.last_position - 1

    def _make_plan(
        self,
        step: int,
        decodes: Decodes,
        starts: np.ndarray,
        chunks: list[Slice],
        new_rows: list[int],
        updates: list[tuple[int, int, int]],
    ) -> StepPlan:
        if chunks or not self._is_steady or decodes is not self._decodes:
            self._composition += 1
            self._rows = (*decodes.rows.tolist(), *(chunk.row for chunk in chunks))
        self._decodes, self._is_steady = decodes, not chunks
        return StepPlan(
            step=step,
            composition=self._composition,
            group=decodes,
            starts=starts,
            chunks=tuple(chunks),
            rows=self._rows,
            new_rows=tuple(new_rows),
            block_updates=tuple(updates),
            page_copies=self.pool.take_copies(),
        )

    def _is_in_flight(self, sequence: SequenceState) -> bool:
        """Say whether a step in flight computes a sequence, which has a row."""
        in_flight = self._in_flight
        return bool(in_flight) and bool(self._arrays.last_steps[sequence.row] >= in_flight[0].step)

    def _stop_running(self, sequence: SequenceState) -> None:
        # Found by arrival: `list.remove` compares it with all that are older.
        index = bisect_left(self._running, sequence.arrival, key=attrgetter("arrival"))
        del self._running[index]
        self._running_rows = None

    def _end_by_token(self, sequence: SequenceState, token: int) -> FinishReason | None:
        """Apply the finishing rules to a token that may be the last one; return why it is."""
        params = sequence.params
        if token in sequence.stop_ids and sequence.num_generated >= params.min_tokens:
            is_eos = token in self.eos_token_ids and not params.ignore_eos
            self._end(sequence, FinishReason.STOP, None if is_eos else token)
        elif len(sequence.token_ids) == sequence.max_total_tokens:
            self._end(sequence, FinishReason.LENGTH, None)
        return sequence.finish_reason

    def _end(
        self, sequence: SequenceState, reason: FinishReason, stop_reason: str | int | None
    ) -> None:
        del self._live[sequence.request_id]
        self._claimed_pages -= self.pool.count_pages(sequence.last_position)
        status = sequence.status
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if reason is FinishReason.ERROR:
            self.pool.withdraw(sequence.table)
        if sequence.row != NO_ROW:
            self._arrays.looks_from[sequence.row] = 0  # its tokens of steps in flight are too many
            is_early = len(sequence.token_ids) < sequence.max_total_tokens
            self.admission.note_end(sequence.row, sequence.num_generated, is_early=is_early)
        if status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._next_look = 0  # it may have been the first
        elif status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
            if self._is_in_flight(sequence):
                self._leaving.append(sequence)
            else:
                self._release(sequence)
        # A preempting sequence is among the leaving ones already.

    def _preempt(self, sequence: SequenceState) -> None:
        self.preemptions_total += 1
        self.admission.note_preemption(self.steps_total)
        sequence.num_preemptions += 1
        self._stop_running(sequence)
        if self._is_in_flight(sequence):
            sequence.status = SequenceStatus.PREEMPTING
            self._leaving.append(sequence)
        else:
            self._release(sequence)
            self._requeue(sequence)

    def _requeue(self, sequence: SequenceState) -> None:
        sequence.status = SequenceStatus.WAITING
        # All that wait are younger: it had a row, and nobody overtakes.
        self._waiting.appendleft(sequence)

    def _release(self, sequence: SequenceState) -> None:
        """Give back row and pages; what was computed stays in the prefix cache while it can."""
        known = min(sequence.scheduled_tokens, len(sequence.token_ids))
        self.pool.publish(sequence.table, sequence.token_ids, known)
        self.pool.free(sequence.table)
        self._next_look = 0
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = NO_ROW

    def _release_leaving(self) -> None:
        still_leaving = []
        for sequence in self._leaving:
            if self._is_in_flight(sequence):
                still_leaving.append(sequence)
                continue
            self._release(sequence)
            if sequence.status is SequenceStatus.PREEMPTING:
                self._requeue(sequence)
        self._leaving = still_leaving


def _awaits_token(sequence: SequenceState, position: int) -> bool:
    """Say whether what may follow depends on a token that is still being drawn."""
    return sequence.constraint is not None and position == len(sequence.token_ids)


def _check(holds: bool, message: str) -> None:
    # Not an `assert` statement: the check must also run under `python -O`.
    if not holds:
        raise AssertionError(f"scheduler: {message}")
