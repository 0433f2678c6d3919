"""Log probabilities: the device's function, and a real engine against transformers."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest
import torch

from tests.checkpoints import load_oracle, make_llama, oracle_logits
from tests.runtime.serving import answer, compile_tiny, serving
from treadle.ir.errors import RequestError
from treadle.runtime.logprobs import (
    LEAST_LOGPROB,
    PendingLogprobs,
    Wish,
    log_probabilities,
)
from treadle.runtime.request import Delta, SamplingParams


def test_values_are_the_log_softmax_and_the_same_token_has_the_same_bits(rng_seed: int) -> None:
    generator = torch.Generator().manual_seed(rng_seed)
    logits = 20 * torch.randn(5, 331, generator=generator)
    best = logits.argmax(-1)
    chosen, largest, ids = log_probabilities(logits, best, 7)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(chosen.double(), expected.gather(1, best[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(largest.double(), expected.topk(7, -1).values, atol=1e-5)
    assert torch.equal(largest[:, 0], chosen) and torch.equal(ids[:, 0], best)


def test_large_logits_stay_finite_and_no_more_tokens_come_than_there_are() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0]])
    chosen, largest, ids = log_probabilities(logits, torch.tensor([1]), 20)
    assert torch.isfinite(chosen).all() and torch.isfinite(largest).all()
    assert ids.tolist() == [[0, 2, 1]]


def test_what_json_can_not_hold_becomes_the_least_value() -> None:
    logits = torch.tensor([[0.0, -math.inf], [math.nan, 0.0]])
    wishes = [Wish(0, "a", 2), Wish(1, "b", 0)]
    pending = PendingLogprobs(wishes, logits, torch.tensor([1, -2]))
    answers = pending.take()
    assert answers["a"].logprob == answers["a"].top[1][1] == LEAST_LOGPROB
    assert answers["b"].logprob == LEAST_LOGPROB and answers["b"].top == ()


@pytest.mark.parametrize("value", [-1, 21, True, 0.5])
def test_a_number_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(RequestError, match="`logprobs`"):
        SamplingParams(logprobs=value).validate()


def check_against(oracle: object, prompt: list[int], found: Delta, num_top: int) -> None:
    """Compare an answer's log probabilities with those of transformers."""
    assert [one.token_id for one in found.logprobs] == list(found.token_ids)
    logits = oracle_logits(oracle, [*prompt, *found.token_ids])
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    for row, one in zip(expected, found.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-3)
        assert [v for _, v in one.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob


@pytest.mark.parametrize(
    "sizes", [{}, {"max_step_tokens": 8}], ids=["whole prompts", "prompts in pieces"]
)
def test_they_are_the_models_whoever_else_is_served(
    tmp_path: Path, rng_seed: int, sizes: dict[str, int]
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    oracle = load_oracle(model)
    generator = random.Random(rng_seed)
    prompts = [[generator.randrange(320) for _ in range(n)] for n in (1, 15, 33, 40, 5, 20)]
    # Raw values: neither temperature nor top-k changes them. Neighbours ask for more, less, none.
    tops: list[int | None] = [3, None, 0, 20, None, 1]

    async def run() -> list[Delta]:
        async with serving(compile_tiny(model, tmp_path / "artifact", **sizes)) as engine:
            asked = zip(prompts, tops, strict=True)
            return list(
                await asyncio.gather(
                    *(
                        answer(
                            engine, p, logprobs=k, max_tokens=9, temperature=0.7, seed=i, top_k=40
                        )
                        for i, (p, k) in enumerate(asked)
                    )
                )
            )

    for prompt, top, found in zip(prompts, tops, asyncio.run(run()), strict=True):
        if top is None:
            assert found.logprobs == ()
        else:
            check_against(oracle, prompt, found, top)


@pytest.mark.usefixtures("admits_at_once")
def test_they_do_not_change_what_is_drawn_nor_when_pages_run_out(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, window=64)
    oracle = load_oracle(model)
    artifact = compile_tiny(model, tmp_path / "artifact", max_rows=4)
    prompts = [[i + 3, *range(5, 20)] for i in range(4)]

    async def run(logprobs: int | None, num_pages: int) -> tuple[list[Delta], int]:
        async with serving(artifact, num_pages=num_pages) as engine:
            found = await asyncio.gather(
                *(
                    answer(engine, p, logprobs=logprobs, max_tokens=40, seed=7, ignore_eos=True)
                    for p in prompts
                )
            )
            return list(found), engine.stats().preemptions_total

    plain, _ = asyncio.run(run(None, 32))
    asked, preemptions = asyncio.run(run(2, 6))
    assert preemptions > 0
    assert [d.token_ids for d in asked] == [d.token_ids for d in plain]
    for prompt, found in zip(prompts, asked, strict=True):
        check_against(oracle, prompt, found, 2)


@pytest.mark.interpreted
def test_emitted_kernels_give_them_too(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, num_layers=1)
    artifact = compile_tiny(
        model, tmp_path / "artifact", target="interpret", max_rows=2, max_step_tokens=16
    )
    prompt = [5, 6, 7, 8]

    async def run() -> Delta:
        async with serving(artifact) as engine:
            wishes = {"logprobs": 2, "prompt_logprobs": 2}
            return await answer(engine, prompt, max_tokens=3, temperature=0.0, **wishes)

    found = asyncio.run(run())
    check_against(load_oracle(model), prompt, found, 2)
    check_prompt(load_oracle(model), prompt, found, 2)


def test_a_prompt_is_scored_in_as_few_steps_as_slices_allow(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact", max_rows=8)
    prompt = [random.Random(rng_seed).randrange(3, 320) for _ in range(42)]

    async def run() -> tuple[Delta, int]:
        async with serving(artifact) as engine:
            found = await answer(engine, prompt, max_tokens=1, prompt_logprobs=1)
            return found, engine.stats().steps_total

    found, steps = asyncio.run(run())
    check_prompt(load_oracle(model), prompt, found, 1)
    # 41 tokens, 8 a step, and the last one, which draws.
    assert steps == 7


def check_prompt(oracle: object, prompt: list[int], found: Delta, num_top: int) -> None:
    """Compare a prompt's log probabilities with those of transformers."""
    assert [one.token_id for one in found.prompt_logprobs] == prompt[1:]
    expected = torch.log_softmax(oracle_logits(oracle, prompt)[:-1], -1)
    for row, one in zip(expected, found.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-3)
        assert [v for _, v in one.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("num_pages", [64, 6], ids=["room", "preemption"])
def test_prompts_are_scored_beside_others_and_when_pages_run_out(
    tmp_path: Path, rng_seed: int, num_pages: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, window=64)
    oracle = load_oracle(model)
    artifact = compile_tiny(model, tmp_path / "artifact", max_rows=4)
    generator = random.Random(rng_seed)
    shared = [generator.randrange(3, 320) for _ in range(20)]
    # The same prompt twice: what the first leaves in the prefix cache must not hide the second's.
    prompts = [shared, shared, [7], [*shared, 9, 8], [*shared[:5], 4]]
    tops: list[int | None] = [1, 3, 2, None, 0]

    async def run(scored: bool) -> list[Delta]:
        async with serving(artifact, num_pages=num_pages) as engine:
            found = []
            for _ in range(2):
                found = await asyncio.gather(
                    *(
                        answer(
                            engine,
                            prompt,
                            prompt_logprobs=top if scored else None,
                            logprobs=top,
                            max_tokens=30,
                            seed=3,
                            ignore_eos=True,
                        )
                        for prompt, top in zip(prompts, tops, strict=True)
                    )
                )
            assert (engine.stats().preemptions_total > 0) == (num_pages == 6)
            return found

    plain = asyncio.run(run(False))
    for prompt, top, found, other in zip(prompts, tops, asyncio.run(run(True)), plain, strict=True):
        assert found.token_ids == other.token_ids
        if top is None:
            assert found.prompt_logprobs == ()
        else:
            assert found.usage.cached_tokens == 0
            check_prompt(oracle, prompt, found, top)
            check_against(oracle, prompt, found, top)
