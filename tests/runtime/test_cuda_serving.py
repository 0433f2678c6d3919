"""Serving on a GPU: CUDA graphs, one step ahead, nothing compiled. Run with `--device cuda`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.runtime.serving import answer, answers, compile_tiny, serving
from treadle.runtime.host_pages import HostStats
from treadle.runtime.request import FinishReason, SamplingParams, collect
from treadle.runtime.structure import Structure


@pytest.fixture(scope="module")
def artifact(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an artifact for this GPU, moved after it was compiled as artifacts are."""
    if device != "cuda":
        pytest.skip("needs a GPU: run with --device cuda")
    folder = tmp_path_factory.mktemp("cuda")
    model = make_llama(
        folder / "model",
        hidden_size=256,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=512,
        window=512,
        vocab_size=16384,
        std=0.05,
        dtype="bfloat16",
    )
    compile_tiny(model, folder / "first", target="cuda", dtype="bfloat16", max_step_tokens=96)
    return Path(shutil.move(folder / "first", folder / "moved"))


def test_requests_of_many_lengths_end_and_nothing_is_compiled(artifact: Path) -> None:
    prompts = [
        [(7 * i + j) % 256 for j in range(length)] for i, length in enumerate(range(1, 200, 9))
    ]

    async def run() -> None:
        async with serving(artifact) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=40, ignore_eos=True)
            assert all(delta.finish_reason is FinishReason.LENGTH for delta in found)
            assert all(len(delta.token_ids) == 40 for delta in found)
            assert engine.stats().jit_compiles_total == 0

    asyncio.run(run())


def test_an_answer_is_the_same_each_time_it_is_drawn_alone(artifact: Path) -> None:
    params = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3, "max_tokens": 60}

    async def run() -> list[tuple[int, ...]]:
        async with serving(artifact, prefix_cache=False) as engine:
            return [(await answer(engine, [1, 2, 3, 4], **params)).token_ids for _ in range(3)]

    first, second, third = asyncio.run(run())
    assert first == second == third


def test_an_aborted_request_frees_its_pages_while_others_go_on(artifact: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with serving(artifact) as engine:
            kept, dropped = engine.submit([5] * 20, params), engine.submit([6] * 20, params)
            async for _ in dropped:
                dropped.abort()
                break
            assert len((await collect(kept)).token_ids) == 200

    asyncio.run(run())


@pytest.mark.usefixtures("admits_at_once")
def test_preemption_ends_every_request(artifact: Path) -> None:
    async def run() -> None:
        async with serving(artifact, num_pages=14) as engine:
            prompts = [[i] * 20 for i in range(1, 7)]
            found = await answers(engine, prompts, temperature=0.0, max_tokens=90, ignore_eos=True)
            assert all(len(delta.token_ids) == 90 for delta in found)
            assert engine.stats().preemptions_total > 0

    asyncio.run(run())


def test_wishes_that_choose_tokens_again_hold_beside_others(artifact: Path) -> None:
    """Forms, penalties and biases choose after the step's graph, which their neighbours share."""
    wishes: list[dict[str, Any]] = [
        {"structure": Structure("choice", '["yes", "no", "maybe"]')},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "ignore_eos": True},
        {"logit_bias": ((65, 50.0), (66, 49.0)), "bad_token_ids": (65,)},
        {"logprobs": 2, "ignore_eos": True},
        {"ignore_eos": True},
    ]

    async def run() -> None:
        async with serving(artifact) as engine:
            form, penalised, biased, told, plain = await asyncio.gather(
                *(
                    answer(engine, range(10, 40), temperature=0.0, max_tokens=24, **each)
                    for each in wishes
                )
            )
            assert form.text in ("yes", "no", "maybe")
            assert set(biased.token_ids) == {66} and len(biased.token_ids) == 24
            assert len(told.logprobs) == len(told.token_ids) == len(plain.token_ids) == 24
            assert penalised.token_ids != plain.token_ids
            assert engine.stats().jit_compiles_total == 0

    asyncio.run(run())


def test_prefixes_from_host_memory_give_the_answers_of_those_in_the_cache(artifact: Path) -> None:
    """Pages are gone when their prefix comes again; from either place the same bytes are read."""
    prompts = [[(7 * i + j) % 256 for j in range(150)] for i in range(3)] * 4
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}

    async def run(**options: int) -> tuple[list[tuple[tuple[int, ...], int]], HostStats]:
        async with serving(artifact, **options) as engine:
            host = engine.model.scheduler.pool.host
            if host is not None:
                host.prefills.add(1, 1.0)  # so slow that fetching is always faster
                host.prefills.add = lambda amount, seconds: None  # type: ignore[method-assign]
            found = [await answer(engine, prompt, **params) for prompt in prompts]
            told = [(delta.token_ids, delta.usage.cached_tokens) for delta in found]
            assert engine.stats().jit_compiles_total == 0
            return told, engine.stats().host

    roomy, _ = asyncio.run(run(num_pages=64))
    tight, counted = asyncio.run(run(num_pages=12, kv_host_bytes=64 << 20))
    assert tight == roomy
    assert counted.pages_in_total == 9 * 9  # of 16 tokens, short of the prompt's last
    assert counted.pages_out_total > 0


def test_host_memory_under_load_gives_whole_answers(artifact: Path) -> None:
    """Two steps are in flight, and pages leave and come while others are read."""
    prompts = [[(7 * (i % 5) + j) % 256 for j in range(60 + i)] for i in range(40)]
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}

    async def run() -> None:
        async with serving(artifact, num_pages=24, kv_host_bytes=64 << 20) as engine:
            host = engine.model.scheduler.pool.host
            assert host is not None
            assert host.copies.per_s > 0
            for _ in range(2):
                found = await answers(engine, prompts, **params)
                assert all(len(delta.token_ids) == 60 for delta in found)
            assert engine.stats().host.pages_out_total > 0

    asyncio.run(run())
