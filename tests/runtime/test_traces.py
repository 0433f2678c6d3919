"""Random mixed traces on real tokens: no prefix cache, small pool or host memory changes an answer.

A trace is a handful of requests that share beginnings, sent at once, of which some are given up
half way. `test_scheduler.py` has the same with a pretend device, checked after every action.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.runtime.serving import compile_tiny, serving
from treadle.runtime import host_pages
from treadle.runtime.engine import Engine
from treadle.runtime.request import SamplingParams

PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # K and V in f32 of two layers with two heads of 16


@dataclass(frozen=True)
class Sizes:
    """Say how long traces are, and how many pages of 16 tokens the engines without room have.

    `stems`: how much of a common beginning a prompt has, if not any length up to `longest_stem`;
    `tails`: the most tokens that follow.
    """

    requests: tuple[int, int]
    stems: tuple[int, ...]
    longest_stem: int
    tails: int
    new_tokens: int
    num_pages: int


LONG = Sizes((4, 8), (0, 15, 16, 17, 32, 33), 60, 8, 60, 10)
# For the interpreter, which takes a tenth of a second for a sequence of a step.
SHORT = Sizes((3, 4), (12, 15, 16, 17), 18, 2, 6, 3)


@dataclass(frozen=True)
class Sent:
    """A request of a trace, and how many of its tokens are waited for (-1: all)."""

    prompt: list[int]
    params: dict[str, Any]
    wanted_tokens: int


def draw_trace(seed: int, sizes: Sizes) -> list[Sent]:
    draw = random.Random(seed)
    stems = [[draw.randrange(320) for _ in range(sizes.longest_stem)] for _ in range(2)]
    trace = []
    for _ in range(draw.randint(*sizes.requests)):
        stem = draw.choice(stems)
        prompt = stem[: draw.choice([*sizes.stems, draw.randint(1, sizes.longest_stem)])]
        prompt = prompt + [draw.randrange(320) for _ in range(draw.randint(1, sizes.tails))]
        params: dict[str, Any] = {
            "temperature": 0.0,
            "logprobs": 0,
            "max_tokens": draw.randint(1, sizes.new_tokens),
            "ignore_eos": draw.random() < 0.7,
        }
        wanted = draw.randint(1, 8) if draw.random() < 0.2 else -1
        trace.append(Sent(prompt, params, wanted))
    return trace


Answer = list[tuple[int, float]]  # tokens and their log probabilities


async def send(engine: Engine, sent: Sent) -> Answer:
    """Give the tokens that were waited for."""
    generation = engine.submit(sent.prompt, SamplingParams(**sent.params))
    tokens: Answer = []
    async for delta in generation:
        tokens += [(each.token_id, each.logprob) for each in delta.logprobs]
        if 0 <= sent.wanted_tokens <= len(tokens):
            generation.abort()
            return tokens[: sent.wanted_tokens]
    return tokens


def is_same_up_to_a_tie(found: Answer, expected: Answer, where: object) -> bool:
    """Compare two answers; say whether they part at a tie, from where they answer other texts.

    How f32 sums are rounded depends on a step's other rows, by some 1e-6 of a log probability.
    """
    for (token, logprob), (other, expected_logprob) in zip(found, expected, strict=False):
        assert logprob == pytest.approx(expected_logprob, abs=5e-5), where
        if token != other:
            return False
    assert len(found) == len(expected), where
    return True


@asynccontextmanager
async def engines(artifact: Path, num_pages: int) -> AsyncIterator[dict[str, Engine]]:
    """Serve with room and no prefix cache, with room and one, and with few pages and one.

    Of the two with few pages one admits whatever has pages for its prompt, so that others are
    preempted; the other one has host memory too, for many more pages.
    """
    async with AsyncExitStack() as stack:
        made = {
            name: await stack.enter_async_context(serving(artifact, **options))
            for name, options in {
                "plain": {"num_pages": 64, "prefix_cache": False},
                "cached": {"num_pages": 64},
                "tight": {"num_pages": num_pages},
                "hosted": {"num_pages": num_pages, "kv_host_bytes": 96 * PAGE_BYTES},
            }.items()
        }
        made["tight"].model.scheduler.admission.find_wait = lambda *what, **more: 0  # type: ignore[method-assign]
        yield made


async def play(artifact: Path, seeds: range, sizes: Sizes = LONG) -> dict[str, int]:
    """Compare the answers to each trace; give what the engines counted, and check the gauges."""
    ties = 0
    played: list[tuple[list[Sent], list[Answer]]] = []
    async with engines(artifact, sizes.num_pages) as found:
        for seed in seeds:
            trace = draw_trace(seed, sizes)
            alone = [await send(found["plain"], sent) for sent in trace]
            # Triton's interpreter can't run two steps at once, so nobody starts before all is idle.
            await engine_is_idle(found["plain"])
            played.append((trace, alone))
            for name, engine in found.items():
                together = await asyncio.gather(*(send(engine, sent) for sent in trace))
                await engine_is_idle(engine)
                engine.model.scheduler.check_integrity()
                for index, (mine, theirs) in enumerate(zip(together, alone, strict=True)):
                    same = is_same_up_to_a_tie(mine, theirs, (seed, name, index))
                    ties += not same
        # What was asked before and evicted since comes from host memory.
        for trace, alone in reversed(played[-8:]):
            for index, (sent, theirs) in enumerate(zip(trace, alone, strict=True)):
                again = await send(found["hosted"], sent)
                ties += not is_same_up_to_a_tie(again, theirs, ("hosted again", index))
        await engine_is_idle(found["hosted"])
        found["hosted"].model.scheduler.check_integrity()
        assert ties <= len(seeds) // 2, "ties are rare: one in some ten thousand tokens"
        tight, cached, hosted = (
            found[name].model.scheduler for name in ("tight", "cached", "hosted")
        )
        assert hosted.pool.host is not None
        return {
            "preemptions": tight.preemptions_total,
            "evictions": tight.pool.evictions_total,
            "hit tokens": cached.pool.hit_tokens_total,
            "fetched pages": hosted.pool.host.pages_in_total,
        }


async def engine_is_idle(engine: Engine) -> None:
    """Wait for the end of what was given up, and check that nothing is held then."""
    scheduler = engine.model.scheduler
    for _ in range(1000):
        if scheduler.is_idle:
            break
        await asyncio.sleep(0.005)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
    assert scheduler.pool.num_owned == 0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(tmp_path_factory.mktemp("checkpoint") / "model", seed=11, window=128)
    return compile_tiny(model, tmp_path_factory.mktemp("made") / "artifact")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(
        tmp_path_factory.mktemp("checkpoint") / "model",
        seed=11,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        hidden_size=32,
        intermediate_size=32,
    )
    out = tmp_path_factory.mktemp("made") / "artifact"
    return compile_tiny(model, out, target="interpret", max_rows=3, max_step_tokens=24)


@pytest.fixture
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch whatever is there: how fast this machine is while it tests, nobody knows."""
    monkeypatch.setattr(host_pages, "is_fetch_faster", lambda *what, **rates: True)


def test_random_traces_have_the_same_answers_with_a_cache_and_in_ten_pages(
    artifact: Path, rng_seed: int, always_fetch: None
) -> None:
    counted = asyncio.run(play(artifact, range(rng_seed, rng_seed + 8)))
    assert min(counted[name] for name in ("evictions", "hit tokens", "fetched pages")) > 0, counted


@pytest.mark.slow
def test_200_random_traces_have_the_same_answers_with_a_cache_and_in_ten_pages(
    artifact: Path, rng_seed: int, always_fetch: None
) -> None:
    counted = asyncio.run(play(artifact, range(rng_seed, rng_seed + 200)))
    assert min(counted.values()) > 20, counted


@pytest.mark.interpreted
def test_short_random_traces_have_the_same_answers_by_emitted_kernels(
    interpreted: Path, rng_seed: int, always_fetch: None
) -> None:
    asyncio.run(play(interpreted, range(rng_seed, rng_seed + 2), SHORT))


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_200_short_random_traces_have_the_same_answers_by_emitted_kernels(
    interpreted: Path, rng_seed: int, always_fetch: None, part: int
) -> None:
    first = rng_seed + 25 * part
    counted = asyncio.run(play(interpreted, range(first, first + 25), SHORT))
    assert min(counted["preemptions"], counted["evictions"]) > 0, counted
