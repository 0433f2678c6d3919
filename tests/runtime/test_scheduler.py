"""The scheduler against a device that computes from pages: whatever happens, the same tokens.

The pretend device knows only what a plan tells it. It keeps an entry per slot that depends on all
tokens up to it, as K and V of a real model do, and draws the next token from all entries it reads
through the block table. So a page shared, freed or overwritten wrongly changes the tokens. Copies
between its pages and the host's are made when a plan is launched, which may be before the steps in
flight are run, or just before the plan's own step.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.ir.errors import ConfigError, QueueFullError, RequestError
from treadle.runtime.host_pages import HostPages, PageCopies
from treadle.runtime.pages import Namespace, PagePool, PageTable
from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequences import SequenceState, SequenceStatus
from treadle.runtime.steps import Slice, StepPlan

VOCABULARY = 29
EOS = 0
NOT_SAMPLED = -1
PAGE_BYTES = 1000


def make_entry(previous: int, token: int, adapter: int) -> int:
    return hash((previous, token, adapter))


def draw_token(entries: Sequence[int]) -> int:
    return hash(tuple(entries)) % VOCABULARY


def adapter_of(namespace: Namespace) -> int:
    """Give what the pretend weights depend on; a salt changes nothing but what is shared."""
    return int(dict(namespace).get("adapter", "0"))


@dataclass
class Answer:
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None


def answer_alone(
    prompt: Sequence[int], params: SamplingParams, room: int, namespace: Namespace = ()
) -> Answer:
    """Generate without batch, pages or scheduler, by the finishing rules as a user reads them."""
    entries: list[int] = []
    for token in prompt:
        entries.append(make_entry(entries[-1] if entries else 0, token, adapter_of(namespace)))
    answer: list[int] = []
    while True:
        token = draw_token(entries)
        answer.append(token)
        if len(answer) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return Answer(answer, FinishReason.STOP, None)
            if token in params.stop_token_ids:
                return Answer(answer, FinishReason.STOP, token)
        if len(answer) == (room if params.max_tokens is None else params.max_tokens):
            return Answer(answer, FinishReason.LENGTH, None)
        entries.append(make_entry(entries[-1], token, adapter_of(namespace)))


class PretendDevice:
    """Run plans in order, from nothing but their contents and the device's own state."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        *,
        num_host_pages: int = 0,
        copies_early: bool = False,
    ) -> None:
        self.page_size = page_size
        self.host: list[list[int | None] | None] = [None] * num_host_pages
        self.copies_early = copies_early
        self.slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.block_table = [[-1] * (num_pages + 1) for _ in range(max_rows)]
        self.last_token = [NOT_SAMPLED] * max_rows
        self.length = [0] * max_rows
        self.adapter = [0] * max_rows

    def prepare(self, plan: StepPlan) -> Callable[[], list[int]]:
        """Take what the host sends for a step now, and return the step, to be run later."""
        chunk_tokens = [c.sequence.token_ids[c.start : c.stop] for c in plan.chunks]
        adapters = {
            c.row: int(c.sequence.request_id.split("/adapter=")[1])
            for c in plan.chunks
            if c.row in plan.new_rows
        }
        if self.copies_early:
            self.copy(plan.page_copies)
        return lambda: self.run(plan, chunk_tokens, adapters)

    def copy(self, copies: PageCopies | None) -> None:
        """Copy all that leaves, then all that comes, as the copier does."""
        if copies is None:
            return
        for page, host_page in copies.pages_out:
            assert None not in self.slots[page], "a page that is not full leaves"
            self.host[host_page] = self.slots[page].copy()
        arrived = [page for page, _ in copies.pages_in]
        assert len(set(arrived)) == len(arrived), "two contents come to one page"
        for page, host_page in copies.pages_in:
            content = self.host[host_page]
            assert content is not None, "a host page is read before it was written"
            self.slots[page] = content.copy()

    def run(
        self, plan: StepPlan, chunk_tokens: list[list[int]], adapters: dict[int, int]
    ) -> list[int]:
        if not self.copies_early:
            self.copy(plan.page_copies)
        for row, index, page in plan.block_updates:
            self.block_table[row][index] = page
        for row in plan.new_rows:
            (chunk,) = (c for c in plan.chunks if c.row == row)
            self.length[row] = chunk.start
            self.last_token[row] = NOT_SAMPLED
            self.adapter[row] = adapters[row]
        writes: dict[tuple[int, int], int] = {}
        sampled = []
        inputs = [[self.last_token[row]] for row in plan.rows[: plan.num_decode]] + chunk_tokens
        for piece, tokens in zip(plan.slices, inputs, strict=True):
            row = piece.row
            assert NOT_SAMPLED not in tokens, "a row is fed a token that it never sampled"
            assert self.length[row] == piece.start, "device and plan disagree about the position"
            # Read before any write of this step: a slice may not depend on its neighbours.
            entries = []
            for position in range(piece.start):
                entry = self.slots[self.page(row, position)][position % self.page_size]
                assert entry is not None, "a slot is read before it was written"
                entries.append(entry)
            for position, token in enumerate(tokens, start=piece.start):
                entry = make_entry(entries[-1] if entries else 0, token, self.adapter[row])
                entries.append(entry)
                slot = (self.page(row, position), position % self.page_size)
                assert slot not in writes, "two sequences write to the same slot"
                writes[slot] = entry
            self.length[row] = piece.stop
            sampled.append(NOT_SAMPLED)
            if piece.samples:
                sampled[-1] = self.last_token[row] = draw_token(entries)
        for (page, offset), entry in writes.items():
            self.slots[page][offset] = entry
        return sampled

    def page(self, row: int, position: int) -> int:
        page = self.block_table[row][position // self.page_size]
        assert page >= 0, "a page is used that no plan told of"
        return page


@dataclass
class Client:
    """What a client sent and what it got."""

    sequence: SequenceState
    alone: Answer
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Bench:
    """A scheduler with its pretend device and clients; checks everything that must always hold."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 16,
        prefix_cache: bool = True,
        max_rows: int = 4,
        max_step_tokens: int = 64,
        max_model_len: int = 256,
        max_waiting: int = 64,
        max_in_flight: int = 2,
        runs_late: bool = True,
        num_host_pages: int = 0,
        copies_early: bool = False,
        is_worth_fetching: Callable[..., bool] = lambda *what: True,
        looks_ahead: bool = True,
        max_mixed_context_tokens: float = math.inf,
        rows_at_once: int = 1,
        worthwhile_rows: Mapping[int, int] | None = None,
    ) -> None:
        self.host: HostPages | None = None
        if num_host_pages:
            self.host = HostPages(num_host_pages, PAGE_BYTES)
            self.host.is_worth_fetching = is_worth_fetching  # type: ignore[method-assign]
        self.pool = PagePool(num_pages, page_size, prefix_cache=prefix_cache, host=self.host)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            max_in_flight=max_in_flight,
            eos_token_ids=[EOS],
            max_mixed_context_tokens=max_mixed_context_tokens,
            rows_at_once=rows_at_once,
            worthwhile_rows=worthwhile_rows,
        )
        if not looks_ahead:  # admit what has pages for its prompt, so that others are preempted
            self.scheduler.admission.find_wait = lambda *what, **more: 0  # type: ignore[method-assign]
        self.device = PretendDevice(
            num_pages,
            page_size,
            max_rows,
            num_host_pages=num_host_pages,
            copies_early=copies_early,
        )
        self.runs_late = runs_late
        self.clients: dict[str, Client] = {}
        # Steps in flight: plan, step or its result, and what each sequence held when planned.
        self.launched: deque[tuple[StepPlan, Callable[[], list[int]], list[list[int]]]] = deque()
        self.last_plan: StepPlan | None = None

    def add(
        self, prompt: Sequence[int], namespace: Namespace = (), **params: object
    ) -> SequenceState:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        # The name carries the adapter to the device, as the engine's own tables would.
        request_id = f"request {len(self.clients)}/adapter={adapter_of(namespace)}"
        sequence = self.scheduler.add(request_id, prompt, sampling, namespace=namespace)
        num_slots = self.pool.num_pages * self.pool.page_size
        room = min(self.scheduler.max_model_len, num_slots + 1) - len(prompt)
        alone = answer_alone(prompt, sampling, room, namespace)
        self.clients[request_id] = Client(sequence, alone)
        return sequence

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            run = self.device.prepare(plan)
            if not self.runs_late:
                result = run()
                run = lambda: result  # noqa: E731
            held = [list(piece.sequence.table.pages) for piece in plan.slices]
            self.launched.append((plan, run, held))
            self.last_plan = plan
        self.check()
        return plan

    def complete(self) -> list[SequenceState]:
        """Complete the oldest step and return the sequences that got a token."""
        plan, run, _ = self.launched.popleft()
        events = self.scheduler.complete(plan, run())
        for sequence, token, reason in events:
            client = self.clients[sequence.request_id]
            assert client.finish_reason is None, "a token came after the end"
            client.tokens.append(token)
            client.finish_reason = reason
            assert reason == sequence.finish_reason
        self.check()
        return [sequence for sequence, _, _ in events]

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        sequence = self.scheduler.finish(request_id, reason)
        assert sequence is not None
        self.clients[request_id].finish_reason = reason
        self.check()

    def step(self) -> None:
        """Plan as many steps as may be in flight, then complete the oldest."""
        while self.scheduler.num_in_flight < self.scheduler.max_in_flight:
            if self.schedule() is None:
                break
        self.complete()

    def run_until(self, holds: Callable[[], object]) -> None:
        """Plan and complete, one at a time, until the condition holds."""
        for _ in range(1000):
            if holds():
                return
            can_plan = self.scheduler.num_in_flight < self.scheduler.max_in_flight
            if can_plan and (self.schedule() is not None or holds()):
                continue
            self.complete()
        raise AssertionError("the condition never held")

    def run_until_idle(self) -> None:
        """Run to the end and check every answer."""
        tokens_left = sum(client.sequence.max_total_tokens for client in self.clients.values())
        steps_left = 20 + 20 * tokens_left
        while not self.scheduler.is_idle:
            self.step()
            steps_left -= 1
            assert steps_left > 0, "no progress"
        self.check_answers()
        self.check_all_returned()

    def check_plan(self, plan: StepPlan) -> None:
        slices = plan.slices
        assert plan.rows == tuple(piece.row for piece in slices)
        assert len(set(plan.rows)) == len(plan.rows) > 0
        assert plan.num_tokens == sum(piece.stop - piece.start for piece in slices)
        assert plan.num_tokens <= self.scheduler.max_step_tokens
        assert all(piece.stop > piece.start for piece in slices)
        for piece in slices:
            assert piece.sequence.row == piece.row
            assert piece.stop <= piece.sequence.last_position
            assert piece.stop <= len(piece.sequence.table.pages) * self.pool.page_size
        for index, piece in enumerate(slices):
            is_decode = piece.start >= piece.sequence.prefill_stop
            assert is_decode == (index < plan.num_decode), "decode slices do not come first"
        assert plan.is_decode_only == (plan.num_decode == len(slices))
        before = self.last_plan
        if before is not None and before.composition == plan.composition:
            assert plan.rows is before.rows
            assert plan.decodes is before.decodes
            assert plan.is_decode_only
            assert not plan.new_rows

    def check(self) -> None:
        self.scheduler.check_integrity()
        for plan, _, held in self.launched:
            for piece, pages in zip(plan.slices, held, strict=True):
                sequence = piece.sequence
                assert sequence.row == piece.row, "a row was taken from a step in flight"
                assert sequence.table.pages[: len(pages)] == pages, "so were its pages"
        for client in self.clients.values():
            assert client.sequence.generated_ids == client.tokens

    def check_answers(self) -> None:
        for client in self.clients.values():
            if client.sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert client.tokens == client.alone.token_ids[: len(client.tokens)]
                continue
            assert client.tokens == client.alone.token_ids
            assert client.finish_reason == client.alone.finish_reason
            assert client.sequence.stop_reason == client.alone.stop_reason

    def check_all_returned(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert self.pool.num_owned == 0
        assert self.pool.num_available == self.pool.num_pages
        assert scheduler.generation_tokens_total == sum(
            len(client.tokens) for client in self.clients.values()
        )
        admitted = [
            c.sequence for c in self.clients.values() if c.sequence.cached_tokens is not None
        ]
        assert scheduler.prompt_tokens_total == sum(len(s.prompt_ids) for s in admitted)
        assert scheduler.preemptions_total == sum(s.num_preemptions for s in admitted)
        if self.pool.prefix_cache:
            assert self.pool.query_tokens_total == scheduler.prompt_tokens_total
        assert self.pool.hit_tokens_total == sum(s.cached_tokens or 0 for s in admitted)
        if self.host is not None:
            assert self.host.num_free + self.host.num_kept == self.host.num_pages


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=num_tokens)


@pytest.fixture
def rng(rng_seed: int) -> random.Random:
    return random.Random(rng_seed)


in_flight = pytest.mark.parametrize("max_in_flight", [1, 2])
cached = pytest.mark.parametrize("prefix_cache", [False, True])


# --- Plans


def test_decodes_come_first_and_a_prompt_gets_what_the_budget_leaves(rng: random.Random) -> None:
    bench = Bench(max_step_tokens=10, max_in_flight=1)
    first = bench.add(random_prompt(rng, 10), max_tokens=9, ignore_eos=True)
    bench.step()
    second = bench.add(random_prompt(rng, 12), max_tokens=9, ignore_eos=True)
    plan = bench.schedule()
    assert plan is not None
    assert plan.slices == (Slice(first, 0, 10, 11, True), Slice(second, 1, 0, 9, False))
    assert (plan.num_tokens, plan.num_decode, plan.is_decode_only) == (10, 1, False)
    bench.complete()
    plan = bench.schedule()
    assert plan is not None
    assert plan.slices == (Slice(first, 0, 11, 12, True), Slice(second, 1, 9, 12, True))
    bench.complete()
    plan = bench.schedule()
    assert plan is not None
    assert plan.is_decode_only
    bench.complete()
    bench.run_until_idle()


def test_decodes_of_much_context_take_turns_with_prompts(rng: random.Random) -> None:
    bench = Bench(max_step_tokens=10, max_in_flight=1, max_mixed_context_tokens=20)
    first, second = (bench.add(random_prompt(rng, 5), max_tokens=40, ignore_eos=True) for _ in "ab")
    while first.scheduled_tokens < 10:
        bench.step()
    assert second.scheduled_tokens == 10
    late = bench.add(random_prompt(rng, 18), max_tokens=2, ignore_eos=True)
    shared = bench.schedule()
    assert shared is not None
    assert (shared.num_decode, len(shared.chunks)) == (2, 1), "20 tokens are not too many"
    bench.complete()
    planned = []
    while late.scheduled_tokens < 18:
        plan = bench.schedule()
        assert plan is not None
        planned.append((plan.num_decode, [(each.start, each.stop) for each in plan.chunks]))
        bench.complete()
    assert planned == [(0, [(8, 18)])]
    plan = bench.schedule()
    assert plan is not None
    assert (plan.num_decode, plan.chunks) == (3, ())
    bench.run_until_idle()


@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_one_long_decode_counts_as_all_that_are_read_at_a_time(
    rows_at_once: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=1, max_mixed_context_tokens=40, rows_at_once=rows_at_once)
    bench.add(random_prompt(rng, 20), max_tokens=9, ignore_eos=True)
    bench.step()
    bench.add(random_prompt(rng, 3), max_tokens=2, ignore_eos=True)
    plan = bench.schedule()
    assert plan is not None
    assert (plan.num_decode, len(plan.chunks)) == (0 if rows_at_once == 4 else 1, 1)
    bench.run_until_idle()


def test_neither_a_long_prompt_nor_decodes_of_much_context_wait_for_the_other(
    rng: random.Random,
) -> None:
    bench = Bench(max_step_tokens=8, max_in_flight=1, max_mixed_context_tokens=0)
    first = bench.add(random_prompt(rng, 8), max_tokens=20, ignore_eos=True)
    bench.step()
    late = bench.add(random_prompt(rng, 24), max_tokens=5, ignore_eos=True)
    kinds = []
    while late.scheduled_tokens < 24:
        plan = bench.schedule()
        assert plan is not None
        kinds.append("decode" if plan.is_decode_only else "prompt")
        assert plan.is_decode_only or not plan.num_decode
        bench.complete()
    assert kinds == ["prompt", "decode", "prompt", "decode", "prompt"]
    assert first.num_generated == 3
    bench.run_until_idle()


def test_a_decode_is_planned_before_its_token_is_known(rng: random.Random) -> None:
    bench = Bench(max_in_flight=2)
    sequence = bench.add(random_prompt(rng, 5), max_tokens=3, ignore_eos=True)
    bench.schedule()
    ahead = bench.schedule()
    assert ahead is not None
    assert ahead.slices == (Slice(sequence, 0, 5, 6, True),)
    assert len(sequence.token_ids) == 5
    bench.run_until_idle()


def test_no_more_steps_are_planned_than_may_be_in_flight(rng: random.Random) -> None:
    bench = Bench(max_in_flight=1)
    bench.add(random_prompt(rng, 5))
    bench.schedule()
    with pytest.raises(AssertionError, match="`max_in_flight` is 1"):
        bench.scheduler.schedule()


def test_steps_complete_in_order(rng: random.Random) -> None:
    bench = Bench(max_in_flight=2)
    bench.add(random_prompt(rng, 5), ignore_eos=True)
    bench.schedule()
    ahead = bench.schedule()
    assert ahead is not None
    with pytest.raises(AssertionError, match="completed out of order"):
        bench.scheduler.complete(ahead, [1])


def test_a_step_needs_a_token_per_slice(rng: random.Random) -> None:
    bench = Bench()
    bench.add(random_prompt(rng, 5))
    plan = bench.schedule()
    assert plan is not None
    with pytest.raises(AssertionError, match="has 1 slices but 2 sampled"):
        bench.scheduler.complete(plan, [1, 2])


def test_nothing_to_do_plans_nothing() -> None:
    assert Bench().schedule() is None


@in_flight
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_step_is_planned_past_max_tokens(
    max_in_flight: int, max_tokens: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    bench.add(random_prompt(rng, 7), max_tokens=max_tokens, ignore_eos=True)
    bench.run_until_idle()
    assert bench.scheduler.steps_total == max_tokens


def test_rows_are_given_lowest_first_and_kept_to_the_end(rng: random.Random) -> None:
    bench = Bench(max_rows=5, max_in_flight=1)
    sequences = [bench.add(random_prompt(rng, 4), max_tokens=90, ignore_eos=True) for _ in range(5)]
    bench.step()
    assert [s.row for s in sequences] == [0, 1, 2, 3, 4]
    for row in (3, 2, 0):
        bench.finish(sequences[row].request_id)
    bench.step()
    newcomers = [bench.add(random_prompt(rng, 4)) for _ in range(2)]
    plan = bench.schedule()
    assert plan is not None
    assert plan.new_rows == (0, 2)
    assert [s.row for s in (*newcomers, sequences[1], sequences[4])] == [0, 2, 1, 4]


def test_requests_are_admitted_in_the_order_of_arrival(rng: random.Random) -> None:
    # The second needs more pages than are free; the third would fit, but may not overtake it.
    bench = Bench(num_pages=8, page_size=4, prefix_cache=False, max_in_flight=1)
    bench.add(random_prompt(rng, 16), max_tokens=4, ignore_eos=True)
    second = bench.add(random_prompt(rng, 20), max_tokens=2, ignore_eos=True)
    third = bench.add(random_prompt(rng, 2), max_tokens=2, ignore_eos=True)
    bench.step()
    assert (second.status, third.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)
    bench.run_until_idle()


def test_a_plan_tells_each_block_table_entry_once(rng: random.Random) -> None:
    bench = Bench(page_size=4, max_rows=1, max_in_flight=2)
    sequence = bench.add(random_prompt(rng, 7), max_tokens=7, ignore_eos=True)
    updates = []
    while not bench.scheduler.is_idle:
        while bench.scheduler.num_in_flight < 2 and (plan := bench.schedule()):
            updates.append(plan.block_updates)
        pages = list(sequence.table.pages)
        bench.complete()
    assert updates[0] == ((0, 0, pages[0]), (0, 1, pages[1]))
    # Positions 8 and 12 open pages; they are fed in the third and the seventh step.
    assert updates[1:] == [(), ((0, 2, pages[2]),), (), (), (), ((0, 3, pages[3]),)]


def test_the_composition_stays_while_the_same_rows_decode(rng: random.Random) -> None:
    bench = Bench(page_size=4, max_in_flight=2)
    for num_tokens in (20, 20, 9):
        bench.add(random_prompt(rng, 5), max_tokens=num_tokens, ignore_eos=True)
    compositions = []
    while not bench.scheduler.is_idle:
        while bench.scheduler.num_in_flight < 2 and (plan := bench.schedule()):
            compositions.append(plan.composition)
        bench.complete()
    prompts, three_rows, two_rows = sorted(set(compositions))
    assert compositions == [prompts] + [three_rows] * 8 + [two_rows] * 11


# --- Ends


@in_flight
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 3, 60])
def test_answers_end_by_the_rules(
    max_in_flight: int, ignore_eos: bool, min_tokens: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    for _ in range(12):
        stops = tuple(rng.sample(range(VOCABULARY), rng.randrange(3)))
        bench.add(
            random_prompt(rng, rng.randint(1, 40)),
            max_tokens=rng.randint(1, 50),
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            stop_token_ids=stops,
        )
    bench.run_until_idle()


def find_prompt(rng: random.Random, matches: Callable[[list[int]], bool]) -> list[int]:
    """Search a prompt whose answer of eight tokens is as wanted."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    while True:
        prompt = random_prompt(rng, 6)
        if matches(answer_alone(prompt, params, 8).token_ids):
            return prompt


@in_flight
def test_the_token_after_an_end_is_thrown_away(max_in_flight: int, rng: random.Random) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    prompt = find_prompt(rng, lambda answer: answer.index(EOS) == 3 if EOS in answer else False)
    sequence = bench.add(prompt, max_tokens=8)
    bench.run_until_idle()
    assert sequence.num_generated == 4
    assert bench.scheduler.steps_total == 4 + (max_in_flight - 1)


def test_an_ended_sequence_keeps_row_and_pages_while_a_step_uses_them(rng: random.Random) -> None:
    bench = Bench(max_rows=1, max_in_flight=2)
    prompt = find_prompt(rng, lambda answer: answer[0] == EOS)
    sequence = bench.add(prompt, max_tokens=8)
    follower = bench.add(prompt, max_tokens=8)
    bench.schedule()
    bench.schedule()
    bench.complete()
    assert sequence.finish_reason is FinishReason.STOP
    assert (bench.scheduler.num_running, bench.pool.num_owned) == (0, 1)
    assert bench.schedule() is None  # the row is not free yet
    bench.complete()
    assert (sequence.row, bench.pool.num_owned) == (-1, 0)
    bench.schedule()
    assert follower.row == 0
    bench.run_until_idle()


def test_the_window_ends_an_answer_without_max_tokens(rng: random.Random) -> None:
    bench = Bench(max_model_len=40)
    sequence = bench.add(random_prompt(rng, 33), ignore_eos=True)
    bench.run_until_idle()
    assert len(sequence.token_ids) == 40
    assert sequence.finish_reason is FinishReason.LENGTH


def test_without_max_tokens_a_small_pool_bounds_the_answer(rng: random.Random) -> None:
    bench = Bench(num_pages=2, page_size=16, max_model_len=256)
    sequence = bench.add(random_prompt(rng, 20), ignore_eos=True)
    bench.run_until_idle()
    assert len(sequence.token_ids) == 33


def test_an_eos_also_listed_as_stop_token_is_an_eos(rng: random.Random) -> None:
    bench = Bench()
    sequence = bench.add(
        find_prompt(rng, lambda answer: EOS in answer), max_tokens=8, stop_token_ids=(EOS,)
    )
    bench.run_until_idle()
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, None)


@in_flight
def test_abort_returns_all_pages(max_in_flight: int, rng: random.Random) -> None:
    bench = Bench(max_rows=2, max_in_flight=max_in_flight, max_step_tokens=8)
    sequences = [bench.add(random_prompt(rng, 20), ignore_eos=True) for _ in range(4)]
    for _ in range(5):
        bench.step()
    for sequence in sequences:
        bench.finish(sequence.request_id)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 0)
    while bench.launched:
        bench.complete()
    bench.check_all_returned()
    assert bench.scheduler.is_idle


def test_abort_of_a_sequence_in_no_step_returns_its_pages_at_once(rng: random.Random) -> None:
    bench = Bench(max_in_flight=1)
    sequence = bench.add(random_prompt(rng, 20), ignore_eos=True)
    bench.step()
    assert bench.pool.num_owned == 2
    bench.finish(sequence.request_id)
    assert bench.pool.num_owned == 0


def test_abort_is_idempotent_and_ignores_strangers(rng: random.Random) -> None:
    bench = Bench()
    sequence = bench.add(random_prompt(rng, 3))
    assert bench.scheduler.abort(sequence.request_id) is sequence
    assert sequence.finish_reason is FinishReason.ABORT
    assert bench.scheduler.abort(sequence.request_id) is None
    assert bench.scheduler.abort("nobody") is None


def test_a_stop_found_in_the_text_ends_with_its_reason(rng: random.Random) -> None:
    bench = Bench()
    sequence = bench.add(random_prompt(rng, 3), ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.scheduler.finish(sequence.request_id, FinishReason.STOP, "\n\n")
    num_tokens = sequence.num_generated
    while bench.launched:
        assert bench.complete() == []
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, "\n\n")
    assert sequence.num_generated == num_tokens
    assert bench.scheduler.is_idle


def test_an_id_can_be_used_again_once_its_request_ended(rng: random.Random) -> None:
    bench = Bench(max_in_flight=2)
    sequence = bench.add(random_prompt(rng, 3), ignore_eos=True)
    bench.schedule()
    with pytest.raises(RequestError, match="Expected a new request id"):
        bench.scheduler.add(sequence.request_id, [1], SamplingParams())
    bench.scheduler.abort(sequence.request_id)
    again = bench.scheduler.add(sequence.request_id, [1], SamplingParams())
    bench.clients["ended"] = bench.clients.pop(sequence.request_id)
    bench.clients[sequence.request_id] = Client(again, answer_alone([1], SamplingParams(), 255))
    bench.complete()
    assert sequence.row == -1
    bench.run_until_idle()


@in_flight
def test_a_sequence_without_a_token_ends_in_error_and_leaves_nothing_to_share(
    max_in_flight: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    prompt = random_prompt(rng, 40)
    faulty = bench.add(prompt, max_tokens=8, ignore_eos=True)
    neighbour = bench.add(random_prompt(rng, 5), max_tokens=8, ignore_eos=True)
    bench.run_until(lambda: faulty.num_generated == 2)
    while bench.scheduler.num_in_flight < max_in_flight:
        bench.schedule()
    plan, run, _ = bench.launched.popleft()
    _, token = run()
    events = bench.scheduler.complete(plan, [-2, token])
    assert list(events) == [(faulty, -2, FinishReason.ERROR), (neighbour, token, None)]
    bench.clients[neighbour.request_id].tokens.append(token)
    assert faulty.num_generated == 2
    again = bench.add(prompt, max_tokens=8, ignore_eos=True)
    bench.run_until_idle()
    assert again.cached_tokens == 0


# --- Page edges


@in_flight
@cached
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 126, 127])
def test_prompts_at_page_edges_give_the_same_answer_twice(
    max_in_flight: int, prefix_cache: bool, num_tokens: int, rng: random.Random
) -> None:
    bench = Bench(
        num_pages=24,
        max_model_len=128,
        prefix_cache=prefix_cache,
        max_in_flight=max_in_flight,
    )
    prompt = random_prompt(rng, num_tokens)
    first = bench.add(prompt, ignore_eos=True)
    bench.run_until_idle()
    second = bench.add(prompt, ignore_eos=True)
    bench.run_until_idle()
    assert first.generated_ids == second.generated_ids
    assert len(second.token_ids) == 128
    assert first.cached_tokens == 0
    assert second.cached_tokens == ((num_tokens - 1) // 16 * 16 if prefix_cache else 0)


@in_flight
@pytest.mark.parametrize("num_shared", [16, 17, 31, 32])
def test_prompts_that_share_a_prefix_with_a_cached_one(
    max_in_flight: int, num_shared: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    prompt = random_prompt(rng, 50)
    bench.add(prompt, max_tokens=4)
    bench.run_until_idle()
    other = bench.add(prompt[:num_shared] + [VOCABULARY] * 5, max_tokens=20, ignore_eos=True)
    bench.run_until_idle()
    assert other.cached_tokens == num_shared // 16 * 16


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(127, 1), (126, 2)])
def test_an_answer_may_end_on_the_last_position_of_the_window(
    num_tokens: int, max_tokens: int, rng: random.Random
) -> None:
    bench = Bench(num_pages=8, max_model_len=128)
    sequence = bench.add(random_prompt(rng, num_tokens), max_tokens=max_tokens, ignore_eos=True)
    bench.run_until_idle()
    assert len(sequence.token_ids) == 128


@in_flight
def test_a_conversation_reuses_the_pages_of_its_own_answer(
    max_in_flight: int, rng: random.Random
) -> None:
    bench = Bench(max_in_flight=max_in_flight)
    first = bench.add(random_prompt(rng, 10), max_tokens=40, ignore_eos=True)
    bench.run_until_idle()
    second = bench.add([*first.token_ids, 1, 2, 3], max_tokens=3)
    bench.run_until_idle()
    # 49 of the 50 tokens were computed: the last one was returned, never fed.
    assert second.cached_tokens == 48


def test_a_request_planned_later_shares_pages_of_a_step_in_flight(rng: random.Random) -> None:
    bench = Bench(max_in_flight=2)
    prompt = random_prompt(rng, 40)
    bench.add(prompt, max_tokens=3)
    bench.schedule()
    second = bench.add(prompt, max_tokens=3)
    bench.schedule()
    assert second.cached_tokens == 32
    bench.run_until_idle()


def test_case_31_adapters_and_salts_share_no_pages(rng: random.Random) -> None:
    bench = Bench()
    prompt = random_prompt(rng, 33)
    namespaces: list[Namespace] = [
        (),
        (("adapter", "1"),),
        (("salt", "1"),),
        (("salt", "2"),),
        (("adapter", "1"), ("salt", "1")),
    ]
    for num_cached in (0, 32):
        for namespace in namespaces:
            sequence = bench.add(prompt, namespace, max_tokens=8, ignore_eos=True)
            bench.run_until_idle()
            assert sequence.cached_tokens == num_cached


def test_case_31_an_adapter_loaded_again_under_its_name_finds_no_old_pages(
    rng: random.Random,
) -> None:
    bench = Bench()
    prompt = random_prompt(rng, 33)
    cached = []
    for is_loaded_again in (False, False, True):
        if is_loaded_again:
            bench.pool.clear_cache()
        sequence = bench.add(prompt, (("adapter", "1"),), max_tokens=8, ignore_eos=True)
        bench.run_until_idle()
        cached.append(sequence.cached_tokens)
    assert cached == [0, 32, 0]


# --- Preemption


@in_flight
@cached
@pytest.mark.parametrize("num_requests", [2, 4])
def test_preemption_changes_no_answer(
    max_in_flight: int, prefix_cache: bool, num_requests: int, rng: random.Random
) -> None:
    bench = Bench(
        num_pages=10, prefix_cache=prefix_cache, max_in_flight=max_in_flight, looks_ahead=False
    )
    sequences = [
        bench.add(random_prompt(rng, 20), max_tokens=90, ignore_eos=True)
        for _ in range(num_requests)
    ]
    bench.run_until_idle()
    assert bench.scheduler.preemptions_total > 0
    assert sequences[0].num_preemptions == 0, "the oldest is never preempted"
    assert [s.cached_tokens for s in sequences] == [0] * num_requests


def test_the_youngest_is_preempted_and_returns_before_others(rng: random.Random) -> None:
    bench = Bench(
        num_pages=4, page_size=4, prefix_cache=False, max_rows=2, max_in_flight=1, looks_ahead=False
    )
    oldest = bench.add(random_prompt(rng, 7), max_tokens=8, ignore_eos=True)
    youngest = bench.add(random_prompt(rng, 3), max_tokens=10, ignore_eos=True)
    waiting = bench.add(random_prompt(rng, 3), max_tokens=2, ignore_eos=True)
    bench.run_until(lambda: youngest.num_preemptions == 1)
    assert (oldest.num_preemptions, oldest.status) == (0, SequenceStatus.RUNNING)
    assert youngest.status is SequenceStatus.WAITING
    assert bench.scheduler.num_waiting == 2
    bench.run_until(lambda: waiting.status is not SequenceStatus.WAITING)
    assert youngest.status is not SequenceStatus.WAITING
    bench.run_until_idle()


def test_a_sequence_preempted_in_flight_keeps_the_token_of_that_step(rng: random.Random) -> None:
    bench = Bench(
        num_pages=4, page_size=4, prefix_cache=False, max_rows=2, max_in_flight=2, looks_ahead=False
    )
    bench.add(random_prompt(rng, 7), max_tokens=8, ignore_eos=True)
    youngest = bench.add(random_prompt(rng, 3), max_tokens=10, ignore_eos=True)
    bench.run_until(lambda: youngest.status is SequenceStatus.PREEMPTING)
    num_tokens = youngest.num_generated
    assert youngest.row == 1
    bench.complete()
    assert youngest.num_generated == num_tokens + 1
    bench.run_until_idle()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_sequence_may_end_while_it_is_being_preempted(
    reason: FinishReason, rng: random.Random
) -> None:
    bench = Bench(num_pages=4, page_size=4, max_rows=2, max_in_flight=2, looks_ahead=False)
    bench.add(random_prompt(rng, 7), max_tokens=8, ignore_eos=True)
    youngest = bench.add(random_prompt(rng, 3), max_tokens=10, ignore_eos=True)
    bench.run_until(lambda: youngest.status is SequenceStatus.PREEMPTING)
    bench.finish(youngest.request_id, reason)
    assert bench.scheduler.num_waiting == 0
    bench.run_until_idle()


def test_a_preempted_sequence_finds_its_own_pages_in_the_cache(rng: random.Random) -> None:
    bench = Bench(num_pages=10, page_size=4, max_rows=2, max_in_flight=1, looks_ahead=False)
    bench.add(random_prompt(rng, 9), max_tokens=20, ignore_eos=True)
    youngest = bench.add(random_prompt(rng, 9), max_tokens=20, ignore_eos=True)
    bench.run_until(lambda: youngest.status is SequenceStatus.WAITING and youngest.num_preemptions)
    bench.run_until(lambda: youngest.status is SequenceStatus.RUNNING)
    assert bench.last_plan is not None
    (chunk,) = bench.last_plan.chunks
    assert chunk.sequence is youngest
    assert chunk.start > 0
    assert youngest.cached_tokens == 0, "usage counts the first look-up only"
    bench.run_until_idle()


def test_pages_about_to_come_back_are_awaited_rather_than_taken(rng: random.Random) -> None:
    bench = Bench(num_pages=6, page_size=4, max_rows=2, max_in_flight=2, looks_ahead=False)
    long = bench.add(random_prompt(rng, 10), max_tokens=9, ignore_eos=True)
    bench.run_until(lambda: long.scheduled_tokens == 11)
    short = bench.add(random_prompt(rng, 1), max_tokens=5, ignore_eos=True)
    # Position 16 of the long one needs a page when the short one's last token is in flight.
    bench.run_until(lambda: long.scheduled_tokens == 16)
    assert short.scheduled_tokens == short.last_position
    assert (bench.pool.num_available, short.finish_reason) == (0, None)
    bench.run_until_idle()
    assert bench.scheduler.preemptions_total == 0


def test_a_newcomer_does_not_take_the_page_that_a_running_one_will_need(
    rng: random.Random,
) -> None:
    bench = Bench(num_pages=3, page_size=4, max_rows=2, max_in_flight=1)
    bench.add(random_prompt(rng, 7), max_tokens=5, ignore_eos=True)
    newcomer = bench.add(random_prompt(rng, 3), max_tokens=2, ignore_eos=True)
    bench.step()
    assert (newcomer.status, bench.pool.num_free) == (SequenceStatus.WAITING, 1)
    bench.run_until_idle()
    assert bench.scheduler.preemptions_total == 0


def test_nobody_overtakes_a_sequence_that_is_being_preempted(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(page_size=4, prefix_cache=False, max_rows=5, max_in_flight=3)
    first, second = (bench.add(random_prompt(rng, 3), max_tokens=6, ignore_eos=True) for _ in "12")
    ended, youngest = (
        bench.add(random_prompt(rng, 1), max_tokens=8, ignore_eos=True) for _ in "34"
    )
    bench.schedule()
    with monkeypatch.context() as patch:
        patch.setattr(bench, "check", lambda: None)  # it would find the owner that is not ours
        other = PageTable("takes all that is free")
        bench.pool.allocate(other, [1] * 4 * bench.pool.num_available)
        newcomer = bench.add(random_prompt(rng, 1), max_tokens=2, ignore_eos=True)
        bench.finish(ended.request_id)
        bench.schedule()
        bench.schedule()  # the first and the second wait for the page of the ended one
        bench.complete()
        bench.schedule()  # the first gets it, for the second the youngest is preempted
        assert (first.scheduled_tokens, second.scheduled_tokens) == (5, 4)
        assert youngest.status is SequenceStatus.PREEMPTING
        bench.finish(second.request_id)
        bench.complete()  # now there is a page, but the youngest is still in flight
        bench.schedule()
        assert (bench.pool.num_available, newcomer.status) == (1, SequenceStatus.WAITING)
        assert youngest.status is SequenceStatus.PREEMPTING
        bench.pool.free(other)
    bench.run_until_idle()


# --- Refusals


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message", "param", "code"),
    [
        (0, 4, "at least 1 token, found 0", "prompt", "empty_prompt"),
        (4, 0, "`max_tokens` of at least 1, found 0", "max_tokens", "invalid_max_tokens"),
        (128, None, "at most 127 tokens.*found 128", "prompt", "context_length_exceeded"),
        (200, 1, "at most 127 tokens.*found 200", "prompt", "context_length_exceeded"),
        (100, 29, r"128 tokens, found 100 \+ 29 = 129", "max_tokens", "context_length_exceeded"),
        (20, 62, "of 5 pages.*needs 6 pages", "max_tokens", "kv_cache_exceeded"),
        (81, None, "of 5 pages.*needs 6 pages", "prompt", "kv_cache_exceeded"),
        (127, None, "of 5 pages.*needs 8 pages", "prompt", "kv_cache_exceeded"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_both_numbers(
    num_prompt: int, max_tokens: int | None, message: str, param: str, code: str
) -> None:
    bench = Bench(num_pages=5, page_size=16, max_model_len=128)
    with pytest.raises(RequestError, match=message) as caught:
        bench.add([1] * num_prompt, max_tokens=max_tokens)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert bench.scheduler.is_idle


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(127, 1), (20, 61), (80, 1), (1, 80)])
def test_a_request_that_just_fits_is_served(
    num_prompt: int, max_tokens: int, rng: random.Random
) -> None:
    num_pages = 8 if num_prompt == 127 else 5
    bench = Bench(num_pages=num_pages, page_size=16, max_model_len=128)
    bench.add(random_prompt(rng, num_prompt), max_tokens=max_tokens, ignore_eos=True)
    bench.run_until_idle()


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_token_id_that_no_model_has_is_refused(token: int) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=f"found {token} in the prompt"):
        bench.add([3, token, 4])


def test_a_full_queue_refuses_and_recovers(rng: random.Random) -> None:
    bench = Bench(max_rows=2, max_waiting=3)
    # Two of these five are for the rows, so they are no backlog.
    sequences = [bench.add(random_prompt(rng, 3), ignore_eos=True) for _ in range(5)]
    with pytest.raises(QueueFullError, match=r"at most 5 .*found 5 already") as caught:
        bench.add(random_prompt(rng, 3))
    assert caught.value.retry_after_s > 0
    bench.schedule()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)
    with pytest.raises(QueueFullError):
        bench.add(random_prompt(rng, 3))
    bench.finish(sequences[4].request_id)
    bench.add(random_prompt(rng, 3), max_tokens=3)
    for sequence in sequences[:4]:
        bench.finish(sequence.request_id)
    bench.run_until_idle()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_rows": 0},
        {"max_rows": 8, "max_step_tokens": 7},
        {"max_model_len": 1},
        {"max_waiting": 0},
        {"max_in_flight": 0},
        {"rows_at_once": 0},
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"Expected `{list(limits)[-1]}` of at least"):
        Bench(**limits)  # type: ignore[arg-type]


# --- Host memory


def alternate(bench: Bench, prompts: Sequence[list[int]], namespace: Namespace = ()) -> list[int]:
    """Answer prompts one after another; give what each found in a cache."""
    found = []
    for prompt in prompts:
        sequence = bench.add(prompt, namespace, max_tokens=2, ignore_eos=True)
        bench.run_until_idle()
        found.append(sequence.cached_tokens or 0)
    return found


@pytest.mark.parametrize("copies_early", [False, True])
@in_flight
def test_an_evicted_prefix_is_fetched_from_host_memory(
    max_in_flight: int, copies_early: bool, rng: random.Random
) -> None:
    bench = Bench(
        num_pages=4,
        page_size=4,
        num_host_pages=8,
        copies_early=copies_early,
        max_in_flight=max_in_flight,
    )
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    assert alternate(bench, [first, second, first, second]) == [0, 0, 12, 12]
    assert bench.host is not None
    assert bench.host.hit_tokens_total == 24
    assert bench.host.pages_in_total == 6


def test_what_was_fetched_costs_no_copy_when_it_is_evicted_again(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4, num_host_pages=16)
    prompts = [random_prompt(rng, 13) for _ in range(2)]
    alternate(bench, prompts * 2)
    assert bench.host is not None
    pages_out = bench.host.pages_out_total
    alternate(bench, prompts * 3)
    assert bench.host.pages_out_total == pages_out


def test_without_host_memory_an_evicted_prefix_is_computed_again(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    assert alternate(bench, [first, second, first]) == [0, 0, 0]


def test_a_prefix_that_is_slow_to_fetch_is_computed_again(rng: random.Random) -> None:
    asked = []

    def is_worth_fetching(num_pages: int, num_tokens: int) -> bool:
        asked.append((num_pages, num_tokens))
        return False

    bench = Bench(num_pages=4, page_size=4, num_host_pages=8, is_worth_fetching=is_worth_fetching)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    assert alternate(bench, [first, second, first]) == [0, 0, 0]
    assert set(asked) == {(3, 12)}
    assert bench.host is not None
    assert (bench.host.pages_in_total, bench.host.hit_tokens_total) == (0, 0)


def test_a_prefix_may_be_in_the_cache_and_its_rest_in_host_memory(rng: random.Random) -> None:
    asked = []

    def is_worth_fetching(num_pages: int, num_tokens: int) -> bool:
        asked.append((num_pages, num_tokens))
        return True

    bench = Bench(num_pages=6, page_size=4, num_host_pages=8, is_worth_fetching=is_worth_fetching)
    first = random_prompt(rng, 17)
    # Two pages are free after the first; the second takes two more, the last ones of its prefix.
    found = alternate(bench, [first, random_prompt(rng, 13), first])
    assert (found, asked) == ([0, 0, 16], [(2, 8)])


def test_salts_keep_pages_of_host_memory_apart(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4, num_host_pages=32)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    salted = (("salt", "x"),)
    assert alternate(bench, [first, second], salted) == [0, 0]
    assert alternate(bench, [first, second]) == [0, 0]
    assert alternate(bench, [first, second], (("adapter", "1"),)) == [0, 0]
    assert alternate(bench, [first, second], salted) == [12, 12]
    assert bench.host is not None
    assert bench.host.hit_tokens_total == 24


def test_an_abort_leaves_fetched_pages_to_the_next(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4, num_host_pages=8)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    alternate(bench, [first, second])
    sequence = bench.add(first, max_tokens=2)
    bench.schedule()
    assert sequence.cached_tokens == 12
    bench.finish(sequence.request_id)
    while bench.launched:
        bench.complete()
    assert alternate(bench, [second, first]) == [12, 12]


def test_a_preempted_sequence_finds_evicted_pages_in_host_memory(rng: random.Random) -> None:
    bench = Bench(num_pages=8, page_size=4, num_host_pages=32, max_rows=2, looks_ahead=False)
    for _ in range(2):
        bench.add(random_prompt(rng, 12), max_tokens=18, ignore_eos=True)
    bench.run_until_idle()
    assert bench.scheduler.preemptions_total > 0
    assert bench.host is not None
    assert bench.host.pages_in_total > 0 == bench.host.hit_tokens_total


def test_what_a_fault_may_have_spoilt_is_gone_from_host_memory_too(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4, num_host_pages=8)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    alternate(bench, [first, second])
    sequence = bench.add(first, max_tokens=2)
    bench.schedule()
    bench.finish(sequence.request_id, FinishReason.ERROR)
    assert alternate(bench, [second, first]) == [12, 0]


def test_new_weights_find_nothing_in_host_memory(rng: random.Random) -> None:
    bench = Bench(num_pages=4, page_size=4, num_host_pages=8)
    first, second = random_prompt(rng, 13), random_prompt(rng, 13)
    alternate(bench, [first, second])
    bench.pool.clear_cache()
    assert bench.host is not None
    assert bench.host.num_free == 8
    assert alternate(bench, [first]) == [0]


# --- Everything at once


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts and stops on a pool of at most ten pages."""

    @initialize(
        num_pages=st.integers(3, 10),
        page_size=st.sampled_from([1, 2, 4]),
        prefix_cache=st.booleans(),
        max_rows=st.integers(1, 5),
        more_tokens=st.integers(0, 8),
        max_model_len=st.integers(2, 40),
        max_waiting=st.integers(1, 8),
        max_in_flight=st.integers(1, 3),
        runs_late=st.booleans(),
        num_host_pages=st.integers(0, 8),
        copies_early=st.booleans(),
        fetches=st.sampled_from(["always", "at times", "never"]),
        looks_ahead=st.booleans(),
        max_mixed_context_tokens=st.sampled_from([0, 15, math.inf]),
        worthwhile_rows=st.sampled_from([{}, {1: 3, 2: 4}]),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        max_rows: int,
        more_tokens: int,
        max_model_len: int,
        max_waiting: int,
        max_in_flight: int,
        runs_late: bool,
        num_host_pages: int,
        copies_early: bool,
        fetches: str,
        looks_ahead: bool,
        max_mixed_context_tokens: float,
        worthwhile_rows: dict[int, int],
        seed: int,
    ) -> None:
        rng = random.Random(seed)
        self.bench = Bench(
            num_pages=num_pages,
            page_size=page_size,
            prefix_cache=prefix_cache,
            max_rows=max_rows,
            max_step_tokens=max_rows + more_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            max_in_flight=max_in_flight,
            runs_late=runs_late,
            num_host_pages=num_host_pages if prefix_cache else 0,
            copies_early=copies_early,
            is_worth_fetching=lambda *what: (
                fetches == "always" or (fetches == "at times" and rng.random() < 0.5)
            ),
            looks_ahead=looks_ahead,
            max_mixed_context_tokens=max_mixed_context_tokens,
            worthwhile_rows=worthwhile_rows,
        )
        self.prompts = [random_prompt(rng, 40) for _ in range(2)]

    @rule(
        base=st.integers(0, 1),
        num_shared=st.integers(0, 24),
        tail=st.lists(st.integers(0, 3), max_size=3),
        max_tokens=st.none() | st.integers(1, 20),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.sampled_from([(), (1,), (2, 3, 4, 5)]),
        namespace=st.sampled_from([(), (), (), (("adapter", "1"),), (("salt", "1"),)]),
    )
    def add(
        self,
        base: int,
        num_shared: int,
        tail: list[int],
        namespace: Namespace,
        max_tokens: int | None,
        **params: object,
    ) -> None:
        bench = self.bench
        prompt = self.prompts[base][:num_shared] + tail
        num_total = len(prompt) + (1 if max_tokens is None else max_tokens)
        num_slots = bench.pool.num_pages * bench.pool.page_size
        fits = 0 < len(prompt) < num_total <= min(bench.scheduler.max_model_len, num_slots + 1)
        scheduler = bench.scheduler
        num_waiting = scheduler.num_waiting
        try:
            bench.add(prompt, namespace, max_tokens=max_tokens, **params)
        except QueueFullError:
            assert num_waiting >= scheduler.max_waiting
        except RequestError:
            assert not fits
        else:
            assert fits

    @precondition(
        lambda self: self.bench.scheduler.num_in_flight < self.bench.scheduler.max_in_flight
    )
    @rule()
    def schedule(self) -> None:
        has_work = not self.bench.scheduler.is_idle
        if self.bench.schedule() is None and has_work:
            assert self.bench.launched, "there is work, but nothing to wait for"

    @precondition(lambda self: self.bench.launched)
    @rule()
    def complete(self) -> None:
        self.bench.complete()

    @precondition(lambda self: not self.bench.scheduler.is_idle)
    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.bench.scheduler.is_idle:
                self.bench.step()

    @precondition(lambda self: self.bench.scheduler.live_request_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_ids = self.bench.scheduler.live_request_ids
        reason = data.draw(st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
        self.bench.finish(data.draw(st.sampled_from(request_ids)), reason)

    @rule(num_pages=st.integers(1, 10))
    def evict(self, num_pages: int) -> None:
        """Let another take pages that are cached, and give them back unused."""
        pool = self.bench.pool
        count = min(num_pages, pool.num_available)
        if count:
            stranger = PageTable("stranger", (("salt", "stranger"),))
            pool.allocate(stranger, [0] * (count * pool.page_size), count=False)
            pool.free(stranger)
            self.bench.check()

    @precondition(lambda self: self.bench.scheduler.num_running)
    @rule(data=st.data())
    def change_weights(self, data: st.DataObject) -> None:
        self.bench.pool.clear_cache()

    @invariant()
    def the_queue_is_bounded(self) -> None:
        if hasattr(self, "bench"):
            scheduler = self.bench.scheduler
            assert scheduler.num_waiting <= scheduler.max_waiting + 2 * scheduler.max_rows

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run_until_idle()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None
)
TestRandomUse = SchedulerMachine.TestCase
