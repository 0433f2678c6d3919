"""When a waiting request may start: the forecast alone, then the scheduler with it."""

from __future__ import annotations

import random
import statistics
from typing import Any

import numpy as np
import pytest

from treadle.bench.admission import (
    BF16,
    BF16_PAGES,
    INT8,
    INT8_PAGES,
    Played,
    Wanted,
    simulate,
)
from treadle.runtime.admission import Admission, Newcomer, Running, forecast_peak
from treadle.runtime.pages import PagePool
from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequences import SequenceStatus


def peak_of(requests: list[tuple[int, float, bool]], *, end_rate: float = 0.0) -> float:
    """Forecast for (steps left, pages held, end is known); pages have ten slots."""
    remaining, pages, known = zip(*requests, strict=True)
    return forecast_peak(
        np.array(remaining), np.array(pages), np.array(known), page_size=10, end_rate=end_rate
    )


# --- The forecast


def test_requests_that_end_together_need_all_at_the_end() -> None:
    assert peak_of([(100, 5.0, True)] * 3) == pytest.approx(3 * 15)


def test_pages_of_those_that_end_sooner_serve_those_that_go_on() -> None:
    assert peak_of([(100, 5.0, True), (10, 20.0, True)]) == pytest.approx(27)


def test_a_peak_may_be_now() -> None:
    assert peak_of([(1, 50.0, True), (20, 1.0, True), (30, 1.0, True)]) == pytest.approx(52.3)


def test_a_peak_is_that_of_every_step_looked_at(rng_seed: int) -> None:
    draw = random.Random(rng_seed)
    for _ in range(50):
        requests = [
            (draw.randint(0, 99), draw.uniform(1, 30), draw.random() < 0.5)
            for _ in range(draw.randint(1, 8))
        ]
        rate = draw.choice([0.0, 0.01, 0.1])
        by_step = max(
            sum(
                (pages + step / 10) * (1.0 if known else np.exp(-rate * step))
                for left, pages, known in requests
                if step <= left
            )
            for step in range(100)
        )
        found = peak_of(requests, end_rate=rate)
        # Where some grow and others shrink, a step between two ends may be a little above both.
        assert 0.93 * by_step <= found <= by_step + 1e-9 or found == pytest.approx(
            by_step, rel=0.01
        )


def test_without_a_known_end_the_limit_counts_for_little_where_answers_are_short() -> None:
    requests = [(4000, 10.0, False)] * 10
    assert peak_of(requests, end_rate=1 / 50) == pytest.approx(100)
    assert peak_of(requests, end_rate=1 / 1e6) > 4000


def test_what_shrinks_and_grows_has_its_peak_in_between() -> None:
    # exp(-t / 100) (1 + t / 10) is largest after 90 steps.
    assert peak_of([(1000, 1.0, False)], end_rate=0.01) == pytest.approx(10 * np.exp(-0.9))


def make_admission(**what: Any) -> Admission:
    return Admission(**{"max_rows": 8, "num_pages": 100, "page_size": 10, **what})


def find_wait(admission: Admission, newcomer: Newcomer, positions: list[int], **what: int) -> int:
    """Ask for a newcomer beside requests that run in the first rows, and go on to 1000."""
    count = len(positions)
    now = np.array(positions)
    running = Running(np.arange(count), now, -(-now // 10) * 10, np.full(count, 1000))
    known = {"claimed": 1000, "num_waiting": 1, "step": 0}
    return admission.find_wait(newcomer, running, **{**known, **what})


def test_shared_pages_are_nobody_s_to_give_back() -> None:
    newcomer = Newcomer(100, 200, 10, end_is_known=True)
    for new_pages, shared in ((50, False), (1, True)):
        admission = make_admission()
        running = Newcomer(500, 510, new_pages, end_is_known=True)
        admission.note_start(0, running, prompt_tokens=500, step=0)
        now = Running(np.array([0]), np.array([500]), np.array([500]), np.array([510]))
        wait = admission.find_wait(newcomer, now, available=16, claimed=101, num_waiting=1, step=0)
        # It needs 20 pages in the end: 16 are there, and the other one's may come back before.
        assert (wait > 0) == shared


def test_ends_before_the_limit_raise_the_rate_and_limits_reached_lower_it() -> None:
    newcomer = Newcomer(10, 1000, 1, end_is_known=False)

    def is_admitted(num_generated: int, *, is_early: bool) -> bool:
        admission = make_admission()
        for row in range(4):
            admission.note_start(row, newcomer, prompt_tokens=10, step=0)
        for _ in range(200):
            admission.note_end(0, num_generated, is_early=is_early)
        return find_wait(admission, newcomer, [20] * 4, available=90) == 0

    assert is_admitted(30, is_early=True)
    assert not is_admitted(990, is_early=False)


def test_known_ends_teach_nothing_about_others() -> None:
    newcomer = Newcomer(10, 300, 1, end_is_known=False)
    admission = make_admission()
    admission.note_start(0, newcomer._replace(end_is_known=True), prompt_tokens=10, step=0)
    before = find_wait(make_admission(), newcomer, [20], available=40)
    for _ in range(1000):
        admission.note_end(0, 1000, is_early=False)
    admission.note_start(0, newcomer, prompt_tokens=10, step=0)
    assert find_wait(admission, newcomer, [20], available=40) == before == 0


def test_a_preemption_makes_cautious_for_a_while() -> None:
    newcomer = Newcomer(10, 1000, 1, end_is_known=False)
    admission = make_admission()
    for row in range(4):
        admission.note_start(row, newcomer, prompt_tokens=10, step=0)
    room = 94
    assert find_wait(admission, newcomer, [20] * 4, available=room, step=100) == 0
    for _ in range(4):
        admission.note_preemption(100)
    assert find_wait(admission, newcomer, [20] * 4, available=room, step=100) > 0
    assert find_wait(admission, newcomer, [20] * 4, available=room, step=5000) == 0


def test_known_ends_that_would_fall_together_are_kept_a_turn_apart() -> None:
    admission = make_admission(num_pages=200)
    first = Newcomer(50, 100, 5, end_is_known=True)
    admission.note_start(0, first, prompt_tokens=50, step=0)
    now = Running(np.array([0]), np.array([50]), np.array([50]), np.array([100]))
    contended = {"available": 120, "claimed": 1000, "num_waiting": 1}
    turn = 50 * 7.5 / 200
    wait = admission.find_wait(first, now, step=0, **contended)
    assert 1 <= wait <= turn
    assert admission.find_wait(first, now, step=wait + 1, **contended) == 0
    # Nor where there is room for all that wait, or much of the pool is free.
    assert admission.find_wait(first, now, step=0, **{**contended, "claimed": 200}) == 0
    assert admission.find_wait(first, now, step=0, **{**contended, "available": 190}) == 0
    longer = first._replace(last_position=104)
    assert admission.find_wait(longer, now, step=0, **contended) == 0


def test_what_can_only_fit_starts_at_once() -> None:
    newcomer = Newcomer(100, 200, 10, end_is_known=True)
    # Five of 20 pages each in the end: a forecast allows for halves of pages and for chance.
    admission = make_admission()
    for row in range(4):
        admission.note_start(row, newcomer, prompt_tokens=100, step=0)
    now = Running(np.arange(4), *(np.full(4, tokens) for tokens in (100, 100, 200)))
    known = {"available": 60, "num_waiting": 1, "step": 0}
    assert admission.find_wait(newcomer, now, claimed=101, **known) > 0
    assert admission.find_wait(newcomer, now, claimed=100, **known) == 0


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "worthwhile", "starts"),
    [
        (4, 100, 8, False),  # there is room for 6 at most
        (4, 100, 6, True),
        (3, 100, 8, True),  # the program of 4 is not full
        (5, 100, 8, True),  # nor is that of 8
        (4, 2, 8, True),  # nobody is left waiting
        (4, 3, 8, False),
    ],
)
def test_a_full_program_stays_full_while_the_next_is_not_worth_it(
    num_running: int, num_waiting: int, worthwhile: int, starts: bool
) -> None:
    # 15 pages each in the end, which is not known to be theirs together; 100 pages hold 6 of them.
    newcomer = Newcomer(100, 150, 10, end_is_known=False)
    admission = make_admission(worthwhile_rows={2: 3, 4: worthwhile})
    for row in range(num_running):
        admission.note_start(row, newcomer, prompt_tokens=100, step=0)
    for _ in range(200):
        admission.note_end(0, 50, is_early=False)
    count = (np.full(num_running, tokens) for tokens in (100, 100, 150))
    wait = admission.find_wait(
        newcomer,
        Running(np.arange(num_running), *count),
        available=100 - 10 * num_running,
        claimed=1000,
        num_waiting=num_waiting,
        step=0,
    )
    assert (wait == 0) == starts


def test_ends_are_not_kept_apart_where_that_fills_no_larger_program() -> None:
    newcomer = Newcomer(50, 100, 5, end_is_known=True)
    now = Running(np.array([0]), np.array([50]), np.array([50]), np.array([100]))
    # 200 pages hold 20 requests that end together, and 27 of which no two do.
    for worthwhile, waits in (({16: 30}, False), ({16: 20}, True), ({24: 48}, True)):
        admission = make_admission(num_pages=200, max_rows=48, worthwhile_rows=worthwhile)
        admission.note_start(0, newcomer, prompt_tokens=50, step=0)
        wait = admission.find_wait(
            newcomer, now, available=120, claimed=1000, num_waiting=50, step=0
        )
        assert (wait > 0) == waits


# --- The scheduler with it


def make_scheduler(num_pages: int, *, max_rows: int = 8) -> Scheduler:
    return Scheduler(
        PagePool(num_pages, 4),
        max_rows=max_rows,
        max_step_tokens=64,
        max_model_len=256,
        eos_token_ids=[0],
        max_in_flight=1,
    )


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, [1] * len(plan.rows))


def test_with_nothing_running_whatever_fits_is_admitted() -> None:
    scheduler = make_scheduler(16)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    sequences = [scheduler.add(str(number), [1, 2, 3], params) for number in range(2)]
    step(scheduler)
    assert [s.status for s in sequences] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    scheduler.finish("0", FinishReason.ABORT)
    step(scheduler)
    assert sequences[1].status is SequenceStatus.RUNNING


def test_a_request_starts_as_soon_as_what_it_waits_for_comes_back() -> None:
    scheduler = make_scheduler(16)
    for name in "ab":
        scheduler.add(name, [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    waiting = scheduler.add("c", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(3):
        step(scheduler)
    assert waiting.status is SequenceStatus.WAITING
    scheduler.finish("b", FinishReason.ABORT)
    step(scheduler)
    assert waiting.status is SequenceStatus.RUNNING


def test_an_aborted_request_leaves_its_place_to_one_that_fits() -> None:
    scheduler = make_scheduler(16)
    scheduler.add("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    scheduler.add("b", [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    small = scheduler.add("c", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    step(scheduler)
    assert small.status is SequenceStatus.WAITING, "nobody overtakes"
    scheduler.finish("b", FinishReason.ABORT)
    step(scheduler)
    assert small.status is SequenceStatus.RUNNING


def test_requests_that_share_a_prefix_count_new_pages_only() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    admitted = []
    for shared in (True, False):
        scheduler = make_scheduler(20)
        for number in range(6):
            stem = range(100, 132) if shared else range(100 + 50 * number, 132 + 50 * number)
            scheduler.add(str(number), [*stem, number], params)
            step(scheduler)
        admitted.append(scheduler.prompt_tokens_total // 33)
    assert admitted == [6, 4]


def test_no_request_is_forgotten_whatever_is_asked_for(rng_seed: int) -> None:
    draw = random.Random(rng_seed)
    wanted = [
        Wanted(draw.randint(1, 3000), draw.randint(1, 3000), draw.choice([0, 0, 20, 1000]))
        for _ in range(60)
    ]
    played = simulate(wanted, num_pages=100)
    expected = [min(each.max_tokens, each.ends_at or each.max_tokens) for each in wanted]
    assert played.tokens == sum(expected)


@pytest.mark.parametrize("num_pages", [2560, 4927])
def test_equal_known_lengths_are_never_computed_again(num_pages: int) -> None:
    wanted = [Wanted(1024, 1024)] * 256
    before = simulate(wanted, num_pages=num_pages, looks_ahead=False)
    now = simulate(wanted, num_pages=num_pages)
    assert before.preemptions > 60
    assert (now.preemptions, now.recomputed) == (0, 0)
    assert now.seconds < 1.02 * before.seconds


def test_different_known_lengths_are_hardly_ever_computed_again(rng_seed: int) -> None:
    draw = random.Random(rng_seed)
    wanted = [Wanted(draw.randint(100, 1900), draw.randint(100, 1900)) for _ in range(300)]
    now = simulate(wanted, num_pages=2560)
    before = simulate(wanted, num_pages=2560, looks_ahead=False)
    assert now.preemptions <= max(2, before.preemptions // 4)
    assert now.mean_batch > 0.95 * before.mean_batch


def test_limits_that_are_reached_are_learned() -> None:
    wanted = [Wanted(1024, 1024, 2000)] * 512
    before = simulate(wanted, num_pages=2560, looks_ahead=False)
    now = simulate(wanted, num_pages=2560)
    first = simulate(wanted[:256], num_pages=2560)
    assert now.recomputed < 0.7 * before.recomputed
    assert now.preemptions - first.preemptions < 12, "only those that start first are too many"


def mean_of(played: Played, first: int, last: int) -> float:
    return statistics.mean(played.running[first:last])


def test_answers_that_end_early_lose_no_concurrency(rng_seed: int) -> None:
    draw = random.Random(rng_seed)
    wanted = [Wanted(200, 4096, draw.randint(20, 80)) for _ in range(1500)]
    before = simulate(wanted, num_pages=640, looks_ahead=False)
    now = simulate(wanted, num_pages=640)
    for first, last in ((20, 100), (100, 400)):
        assert mean_of(now, first, last) > 0.95 * mean_of(before, first, last)
    assert now.recomputed < 0.01 * sum(each.prompt_tokens for each in wanted)


def test_decodes_and_prompts_in_turns_take_less_time_by_what_their_steps_cost() -> None:
    wanted = [Wanted(1024, 1024)] * 512
    for num_pages, cost in ((2560, BF16), (4927, INT8)):
        sizes = {"num_pages": num_pages, "cost": cost, "stays_full": False}
        mixed = simulate(wanted, **sizes, takes_turns=False)
        in_turns = simulate(wanted, **sizes)
        assert in_turns.tokens == mixed.tokens
        assert in_turns.seconds < 0.95 * mixed.seconds


@pytest.mark.parametrize("count", [256, 512, 2048])
def test_full_programs_take_less_time_by_what_their_steps_cost(count: int) -> None:
    wanted = [Wanted(1024, 1024)] * count
    larger = simulate(wanted, num_pages=INT8_PAGES, cost=INT8, stays_full=False)
    full = simulate(wanted, num_pages=INT8_PAGES, cost=INT8)
    assert full.tokens == larger.tokens
    assert max(full.running) == 128 < max(larger.running)
    assert full.seconds < 0.99 * larger.seconds
    # In bf16 no program gets full, and nothing changes.
    few = simulate(wanted, num_pages=BF16_PAGES, cost=BF16, stays_full=False)
    assert simulate(wanted, num_pages=BF16_PAGES, cost=BF16) == few
