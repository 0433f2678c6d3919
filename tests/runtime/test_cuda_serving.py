"""Serving on a GPU: CUDA graphs, one step ahead, nothing compiled. Run with `--device cuda`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.runtime.serving import answer, answers, compile_tiny, serving
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
