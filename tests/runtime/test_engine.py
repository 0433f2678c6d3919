"""The engine on tiny random models: its tokens are those of transformers, however batched."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import load_oracle, make_llama, oracle_answers, oracle_greedy
from tests.runtime.serving import answer, answers, compile_tiny, serving
from treadle.ir.errors import QueueFullError, RequestError
from treadle.runtime.engine import Engine, check_token_ids
from treadle.runtime.executor import StepResult
from treadle.runtime.request import Delta, FinishReason, SamplingParams, collect

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "tied": {"tie": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "ratio 3, head 24": {"hidden_size": 72, "num_heads": 3, "num_kv_heads": 1, "head_dim": 24},
    "mistral": {"architecture": "mistral"},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}
NUM_TOKENS = 64


def _prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, rng_seed: int, variant: str
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, **VARIANTS[variant])
    artifact = compile_tiny(model, tmp_path / "artifact")
    oracle = load_oracle(model)
    drawn = _prompts(rng_seed, (1, 15, 16, 17, 40, 5))
    prompts, expected = oracle_answers(oracle, drawn, NUM_TOKENS)

    async def run() -> list[list[int]]:
        async with serving(artifact) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=NUM_TOKENS)
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected


def test_a_chunked_prompt_gives_the_tokens_of_a_whole_one(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    oracle = load_oracle(model)
    prompts, expected = oracle_answers(oracle, _prompts(rng_seed, (60, 33, 90)), 16)
    artifact = compile_tiny(model, tmp_path / "artifact", max_step_tokens=8)

    async def run() -> list[list[int]]:
        async with serving(artifact, prefix_cache=False) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=16)
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected


def test_case_32_lengths_at_page_edges_twice_and_with_shared_prefixes(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    oracle = load_oracle(model)
    (longest,) = _prompts(rng_seed, (127,))
    prompts = [longest[:length] for length in (1, 15, 16, 17, 31, 32, 33, 126, 127)]
    prompts += [[*longest[:length], 7, 8, 9] for length in (16, 17, 31, 32)]
    artifact = compile_tiny(model, tmp_path / "artifact", max_context_tokens=128)

    async def run() -> None:
        async with serving(artifact) as engine:
            for prompt in prompts:
                count = min(2, 128 - len(prompt))
                expected = oracle_greedy(oracle, prompt, count)
                params = {"temperature": 0.0, "max_tokens": count}
                first = await answer(engine, prompt, **params)
                second = await answer(engine, prompt, **params)
                assert list(first.token_ids) == list(second.token_ids) == expected, len(prompt)
                assert second.usage.cached_tokens <= len(prompt) - 1
                assert second.usage.cached_tokens == (len(prompt) - 1) // 16 * 16

    asyncio.run(run())


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_34_preemption_changes_no_token(
    tmp_path: Path, rng_seed: int, prefix_cache: bool
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, window=256)
    artifact = compile_tiny(model, tmp_path / "artifact")
    prompts = _prompts(rng_seed, (20, 20, 20, 20))
    choices = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "seed": 6},
        {"temperature": 1.0, "top_k": 20, "seed": 7, "logprobs": 2},
    ]

    async def run(num_pages: int) -> tuple[list[Delta], int]:
        async with serving(artifact, num_pages=num_pages, prefix_cache=prefix_cache) as engine:
            found = await asyncio.gather(
                *(
                    answer(engine, prompt, max_tokens=90, ignore_eos=True, **choice)
                    for prompt, choice in zip(prompts, choices, strict=True)
                )
            )
            return list(found), engine.stats().preemptions_total

    roomy, no_preemptions = asyncio.run(run(64))
    tight, preemptions = asyncio.run(run(10))
    assert no_preemptions == 0 < preemptions
    for mine, theirs in zip(tight, roomy, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason
        assert mine.usage.completion_tokens == theirs.usage.completion_tokens == 90
        assert [each.token_id for each in mine.logprobs] == [
            each.token_id for each in theirs.logprobs
        ]
        for each, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert each.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("num_requests", [2, 4])
def test_case_34_preempted_streams_bring_each_piece_once_and_end_at_their_stop(
    tmp_path: Path, rng_seed: int, num_requests: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, window=256)
    artifact = compile_tiny(model, tmp_path / "artifact")
    prompts = _prompts(rng_seed, (20,) * num_requests)
    wishes: dict[str, Any] = {"seed": 8, "max_tokens": 90, "ignore_eos": True}

    async def stream(engine: Engine, prompt: list[int], stop: tuple[str, ...]) -> list[Delta]:
        return [delta async for delta in engine.submit(prompt, SamplingParams(stop=stop, **wishes))]

    async def run(num_pages: int, stop: tuple[str, ...]) -> tuple[list[list[Delta]], int]:
        async with serving(artifact, num_pages=num_pages) as engine:
            # The last one, which is preempted, is also the one with a stop.
            stops = [()] * (num_requests - 1) + [stop]
            found = await asyncio.gather(*map(stream, [engine] * num_requests, prompts, stops))
            return list(found), engine.stats().preemptions_total

    whole, _ = asyncio.run(run(64, ()))
    text = "".join(delta.text for delta in whole[-1])
    # A text of whole characters that comes late for the first time.
    pieces = {text[start : start + 3]: start for start in range(len(text) - 3, 0, -1)}
    late = [piece for piece, start in pieces.items() if start > 0.7 * len(text)]
    stop = tuple(piece for piece in late if "\ufffd" not in piece)[-1:]
    roomy, _ = asyncio.run(run(64, stop))
    tight, preemptions = asyncio.run(run(8, stop))
    assert preemptions > 0
    for mine, theirs in zip(tight, roomy, strict=True):
        assert [delta.token_ids for delta in mine] == [delta.token_ids for delta in theirs]
        assert [delta.text for delta in mine] == [delta.text for delta in theirs]
        assert mine[-1].finish_reason == theirs[-1].finish_reason
        assert mine[-1].stop_reason == theirs[-1].stop_reason
        assert mine[-1].usage.completion_tokens == theirs[-1].usage.completion_tokens
    if stop:
        assert tight[-1][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("count", [3, 5, 7])
def test_case_35_copies_of_a_prompt_in_padded_batches_answer_alike(
    tmp_path: Path, rng_seed: int, count: int
) -> None:
    """Programs are for 1, 2, 4 and 8 rows; the pool is full at the end."""
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    (prompt,) = _prompts(rng_seed, (17,))
    pages = -(-(17 + NUM_TOKENS - 1) // 16)

    async def run() -> list[tuple[int, ...]]:
        async with serving(artifact, num_pages=count * pages, prefix_cache=False) as engine:
            (alone,) = await answers(engine, [prompt], temperature=0.0, max_tokens=NUM_TOKENS)
            found = await answers(
                engine, [prompt] * count, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            return [alone.token_ids, *(delta.token_ids for delta in found)]

    alone, first, *others = asyncio.run(run())
    assert first[: len(alone)] == alone
    assert len(first) == NUM_TOKENS
    assert others == [first] * (count - 1)


def test_case_35_a_batch_that_shrinks_goes_on_with_the_same_tokens(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    oracle = load_oracle(model)
    prompts = _prompts(rng_seed, (1, 9, 15, 16, 17, 20, 31, 33))
    lengths = (60, 5, 40, 8, 50, 3, 12, 7)  # eight rows, then seven, six, ..., three and fewer

    async def run() -> list[tuple[int, ...]]:
        async with serving(artifact, prefix_cache=False) as engine:
            found = await asyncio.gather(
                *(
                    answer(engine, prompt, temperature=0.0, max_tokens=length, ignore_eos=True)
                    for prompt, length in zip(prompts, lengths, strict=True)
                )
            )
            return [delta.token_ids for delta in found]

    for prompt, length, found in zip(prompts, lengths, asyncio.run(run()), strict=True):
        expected = oracle_greedy(oracle, prompt, length)
        assert list(found[: len(expected)]) == expected
        assert len(found) == length


def test_a_request_that_never_fits_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=1, window=256)
    artifact = compile_tiny(model, tmp_path / "artifact")

    async def run() -> None:
        async with serving(artifact, num_pages=10) as engine:
            with pytest.raises(RequestError, match=r"10 pages.*11 pages"):
                engine.submit([1] * 20, SamplingParams(max_tokens=150))
            with pytest.raises(RequestError, match=r"256 tokens.*= 320"):
                engine.submit([1] * 20, SamplingParams(max_tokens=300))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ((5, True, 7.0), "whole number, not True"),
        ((5, 7.0, 99), "whole number, not 7.0"),
        ((5, -1, 99), "token id -1 is outside the vocabulary of 32"),
        ((5, 32, -1), "token id 32 is outside"),
    ],
)
def test_the_first_token_that_is_none_is_named(prompt: tuple[Any, ...], wrong: str) -> None:
    with pytest.raises(RequestError, match=wrong) as caught:
        check_token_ids(prompt, 32)
    assert caught.value.param == "prompt"


def test_tokens_of_the_vocabulary_are_taken_also_where_there_are_none() -> None:
    for prompt in ((), (0,), (31, 0, 31)):
        check_token_ids(prompt, 32)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    (prompt, *others) = _prompts(rng_seed, (12, 3, 30, 8))
    params = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}

    async def run() -> None:
        async with serving(artifact) as engine:
            alone = await answer(engine, prompt, seed=11, **params)
            together = await asyncio.gather(
                answer(engine, prompt, seed=11, **params),
                *(answer(engine, other, temperature=1.0, max_tokens=20) for other in others),
            )
            other_seed = await answer(engine, prompt, seed=12, **params)
        assert together[0].token_ids == alone.token_ids
        assert other_seed.token_ids != alone.token_ids

    asyncio.run(run())


def test_an_aborted_answer_frees_its_row_and_its_neighbour_goes_on(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    prompts = _prompts(rng_seed, (9, 9))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def run() -> None:
        async with serving(artifact) as engine:
            alone = await collect(engine.submit(prompts[0], params))
            kept, dropped = (engine.submit(prompt, params) for prompt in prompts)
            async for _ in dropped:
                dropped.abort()
                break
            dropped.abort()
            assert (await collect(kept)).token_ids == alone.token_ids

    asyncio.run(run())


def test_draining_refuses_new_requests_and_lets_running_ones_end(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=2)
    artifact = compile_tiny(model, tmp_path / "artifact")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def run() -> None:
        async with serving(artifact) as engine:
            running = asyncio.ensure_future(collect(engine.submit([1, 2, 3], params)))
            await asyncio.sleep(0)
            draining = asyncio.ensure_future(engine.drain(60.0))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                engine.submit([1], params)
            assert not engine.ready
            assert (await running).finish_reason is FinishReason.LENGTH
            await draining

    asyncio.run(run())


def test_a_stop_string_ends_the_request_in_the_engine_too(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=3)
    artifact = compile_tiny(model, tmp_path / "artifact")

    async def run() -> None:
        async with serving(artifact) as engine:
            whole = await answer(engine, [5, 6, 7], temperature=0.0, max_tokens=40, ignore_eos=True)
            stop = next(c for c in whole.text if c.isascii() and c.isprintable())
            cut = await answer(
                engine, [5, 6, 7], temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,)
            )
            assert cut.finish_reason is FinishReason.STOP and cut.stop_reason == stop
            assert cut.text == whole.text[: whole.text.index(stop)]

    asyncio.run(run())


def test_a_step_that_does_not_end_is_told_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = compile_tiny(make_llama(tmp_path / "model"), tmp_path / "artifact")
    goes_on = threading.Event()
    tokens = StepResult.tokens

    def hang(result: StepResult) -> Any:
        goes_on.wait()
        return tokens(result)

    async def run() -> None:
        async with serving(artifact) as engine:
            assert engine.stats().step_in_flight_s == 0.0
            monkeypatch.setattr(StepResult, "tokens", hang)
            asking = asyncio.create_task(answer(engine, [1, 2, 3], max_tokens=2, ignore_eos=True))
            try:
                async with asyncio.timeout(20):
                    while engine.stats().step_in_flight_s < 0.2:
                        await asyncio.sleep(0.01)
            finally:
                goes_on.set()
            await asking
            async with asyncio.timeout(20):
                # A step that was begun ahead may still be on its way.
                while engine.stats().step_in_flight_s:
                    await asyncio.sleep(0.01)
            assert engine.stats().last_step_age_s < 20

    asyncio.run(run())
