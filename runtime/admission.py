"""Decide when a waiting request may start: as soon as what runs leaves it room until its end.

A running request takes pages as it grows and gives all of them back when it ends. So what it needs
of a pool is a forecast: the most that the running ones and the newcomer will hold at any time to
come, each growing by a token a step. Where nothing but its limit ends a request, its end is known.
The others end at a rate that is learned: ends before the limit per generated token, of all that ran
lately. The rate starts optimistic; a preemption says that it was too much so, and lowers it for a
while.

Requests of one length that started together also end together: their pool is half empty at first,
and all of it is needed at the end. Where more is asked for than the pool holds, known ends that
would fall together are therefore kept a turn apart, which lets a quarter more run at once.

A few requests more than fill a decode program cost the steps of all a larger one. While more wait
than the pool can take, and it can't take enough to be worth that, the program stays full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Before anything has ended: as if so many answers had ended, after so many tokens each.
_PRIOR_ENDS, _PRIOR_TOKENS = 32.0, 512.0
_KEPT_PER_END = 1 - 1 / 64  # of what is known, at each end: some hundred ends count
_CAUTION_PER_PREEMPTION, _CAUTION_KEPT_PER_STEP = 0.25, 0.999
# Of the pool: while no more of it is held, known ends may fall together.
_UNPACED_SHARE = 0.25
_REACHED_SHARE = 0.9  # of the requests that a pool holds if no two of them end together
_LEAST_PACED = 8  # that the pool holds; fewer would wait long, and there is little to gain
# A page is taken as a whole: half of one more than tokens fill, on average.
_ROUNDING_PAGES, _CHANCE_PAGES = 0.5, 0.5
_STEPS_TO_NEXT_LOOK = 8  # while nothing has changed but that everyone has grown


class Newcomer(NamedTuple):
    """A request that wants to start.

    num_tokens: that it has, and whose pages it takes at once.
    last_position: it ends when all positions before this one are computed, or sooner.
    new_pages: how many of its pages nobody holds yet.
    end_is_known: nothing else ends it.
    """

    num_tokens: int
    last_position: int
    new_pages: int
    end_is_known: bool


class Running(NamedTuple):
    """The requests that run, i64[N] each: their rows, and see `sequences.RowArrays`."""

    rows: np.ndarray
    positions: np.ndarray
    capacities: np.ndarray
    last_positions: np.ndarray


class Admission:
    """Forecast the pages that running requests will need; one per scheduler, told of what happens.

    A look costs some array operations over the rows, and is taken only while a request waits that
    has a row. Nothing is kept up to date in between.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_pages: int,
        page_size: int,
        worthwhile_rows: Mapping[int, int] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._worthwhile_rows = worthwhile_rows or {}
        self._shared_pages = np.zeros(max_rows, np.int64)  # found in the cache held by others
        self._first_positions = np.zeros(max_rows, np.int64)  # of the answer
        self._end_is_known = np.zeros(max_rows, np.bool_)
        self._ends = _PRIOR_ENDS
        self._tokens = _PRIOR_ENDS * _PRIOR_TOKENS
        self._caution = 0.0
        self._cautious_since = 0
        self._last_known_end = -1  # the step in which the last one to start will end

    def note_start(self, row: int, newcomer: Newcomer, *, prompt_tokens: int, step: int) -> None:
        """Take note that a request starts in a row."""
        num_pages = -(-newcomer.num_tokens // self.page_size)
        self._shared_pages[row] = num_pages - newcomer.new_pages
        self._first_positions[row] = prompt_tokens
        self._end_is_known[row] = newcomer.end_is_known
        if newcomer.end_is_known:
            self._last_known_end = step + newcomer.last_position - newcomer.num_tokens

    def note_end(self, row: int, num_generated: int, *, is_early: bool) -> None:
        """Learn from the end of a running request, which came before its limit or with it."""
        if not self._end_is_known[row]:
            self._ends = self._ends * _KEPT_PER_END + is_early
            self._tokens = self._tokens * _KEPT_PER_END + num_generated

    def note_preemption(self, step: int) -> None:
        """Learn that there was not room enough."""
        caution = self._find_caution(step)
        self._caution = caution + (1 - caution) * _CAUTION_PER_PREEMPTION
        self._cautious_since = step

    def find_wait(
        self,
        newcomer: Newcomer,
        running: Running,
        *,
        available: int,
        claimed: int,
        num_waiting: int,
        step: int,
    ) -> int:
        """Give the steps after which to ask again, or 0 where the newcomer may start now.

        `available`: pages that can be handed out. `claimed`: those that all unfinished requests,
        waiting ones too, would have if each went on to its limit. `num_waiting`: the newcomer and
        those behind it.
        """
        if claimed <= self.num_pages:
            return 0  # no forecast can be more than that: those that end give their pages back
        if newcomer.end_is_known:
            held = self.num_pages - available + newcomer.new_pages
            turn = self._find_turn(newcomer, len(running.rows), step)
            if turn and held > self.num_pages * _UNPACED_SHARE:
                return turn
        page_size, rows = self.page_size, running.rows
        # What is still to be computed of a prompt has its pages already.
        positions = np.maximum(running.positions, running.capacities - page_size)
        known = self._end_is_known[rows]
        answered = np.maximum(positions - self._first_positions[rows], 0)
        tokens = self._tokens + float(answered @ ~known)
        # In pages and parts of one: held, less what is still free of the last one.
        own = running.capacities // page_size - self._shared_pages[rows]
        filled = own - (running.capacities - positions) / page_size
        last_filled = newcomer.new_pages - (-newcomer.num_tokens % page_size) / page_size
        peak = forecast_peak(
            _append(
                running.last_positions - positions, newcomer.last_position - newcomer.num_tokens
            ),
            _append(filled, last_filled) + _ROUNDING_PAGES,
            _append(known, newcomer.end_is_known),
            page_size=page_size,
            end_rate=self._ends / tokens * (1 - self._find_caution(step)),
        )
        # What is rounded is off by chance, by more pages the more requests there are.
        peak += _CHANCE_PAGES * len(rows) ** 0.5
        room = available + int(own.sum())
        must_wait = peak > room or not self._is_worth_more(len(rows), num_waiting, room / peak)
        return _STEPS_TO_NEXT_LOOK if must_wait else 0

    def _is_worth_more(self, num_running: int, num_waiting: int, room: float) -> bool:
        """Say whether to run more than `num_running`, which may just fill a decode program.

        `room`: for how many times as many as these and the newcomer there are pages. Fewer than are
        worthwhile may start all the same where nobody is left waiting then.
        """
        can_run = int((num_running + 1) * room)
        worthwhile = self._worthwhile_rows.get(num_running, 0)
        return can_run >= min(worthwhile, num_running + num_waiting)

    def _find_turn(self, newcomer: Newcomer, num_running: int, step: int) -> int:
        """Give the steps until a newcomer's end is far enough from that of the last to start.

        As far as the pool can bear again and again: by the share of it that the newcomer takes, for
        as long as it takes it. None where such requests fill a program even if they end together,
        and are too few for the next one even if they don't.
        """
        num_steps = newcomer.last_position - newcomer.num_tokens
        mean_pages = newcomer.new_pages + num_steps / self.page_size / 2
        if self.num_pages < _LEAST_PACED * mean_pages:
            return 0
        filled = min((rows for rows in self._worthwhile_rows if rows > num_running), default=0)
        last_pages = newcomer.new_pages + num_steps / self.page_size
        if filled and filled * last_pages <= self.num_pages:
            most = _REACHED_SHARE * self.num_pages / mean_pages
            if most < self._worthwhile_rows[filled]:
                return 0
        turn = num_steps * mean_pages / self.num_pages
        ahead = step + num_steps - self._last_known_end
        return 0 if abs(ahead) >= turn else max(1, int(turn - ahead))

    def _find_caution(self, step: int) -> float:
        return self._caution * _CAUTION_KEPT_PER_STEP ** (step - self._cautious_since)


def _append(values: np.ndarray, last: float) -> np.ndarray:
    """Do what `np.append` does in a fifth of its time."""
    joined = np.empty(len(values) + 1, values.dtype)
    joined[:-1] = values
    joined[-1] = last
    return joined


def forecast_peak(
    remaining: np.ndarray,
    pages: np.ndarray,
    end_is_known: np.ndarray,
    *,
    page_size: int,
    end_rate: float,
) -> float:
    """Give the most pages that some requests are expected to hold at any time to come.

    remaining: the steps until each one's limit, i64[N]; a step takes one slot of a page.
    pages: what each holds now, f64[N].
    end_is_known: whether it goes on to its limit, bool[N]; the others are still there after t steps
      with a probability of exp(-end_rate x t).
    """
    order = np.argsort(-remaining)
    remaining, known, pages = remaining[order], end_is_known[order], pages[order]
    # Of the k + 1 with the most left: pages and number of known ends, then of the others.
    parts = np.empty((4, len(order)))
    np.multiply(pages, known, out=parts[0])
    np.subtract(pages, parts[0], out=parts[2])
    parts[1], parts[3] = known, ~known
    sums = np.cumsum(parts, axis=1)

    def expect(there: np.ndarray, steps: np.ndarray | float) -> np.ndarray:
        known_pages, num_known, other_pages, num_others = there
        grown = steps / page_size
        survive = np.exp(-end_rate * steps)
        return known_pages + num_known * grown + survive * (other_pages + num_others * grown)

    # Pages come back when somebody ends, so the peak is just before an end, or now ...
    most = max(float(pages.sum()), float(expect(sums, remaining).max()))
    num_others = float(sums[3, -1])
    if num_others and end_rate > 0:
        # ... or where the others shrink as fast as they grow.
        turning = max(0.0, 1 / end_rate - float(sums[2, -1]) * page_size / num_others)
        num_there = int(np.searchsorted(-remaining, -turning, side="right"))
        if num_there:
            most = max(most, float(expect(sums[:, num_there - 1], turning)))
    return most
