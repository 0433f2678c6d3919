"""Penalties, biases and bans in a real engine: what a plain loop over the oracle's logits gives."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import EOS_ID, load_oracle, make_dice, make_llama, oracle_logits
from tests.runtime.serving import answer, compile_tiny, serving
from treadle.ir.errors import RequestError
from treadle.runtime.adjustments import FOREVER, count_history, list_biases
from treadle.runtime.request import FinishReason, SamplingParams

# What each request of a batch asks for; the first asks for nothing.
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "negative": {"frequency_penalty": -0.7, "presence_penalty": -1.0},
    "bias": {"logit_bias": ((7, 30.0), (9, 29.0), (5, -100.0))},
    "bans": {"bad_token_ids": tuple(range(0, 320, 2))},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": tuple((token, 6.0) for token in range(20)),
        "bad_token_ids": (3, 4),
    },
}


def simulate(oracle: Any, prompt: Sequence[int], count: int, **wishes: Any) -> list[int]:
    """Decode greedily, adjusting each step's logits token by token."""
    answer: list[int] = []
    for _ in range(count):
        logits = oracle_logits(oracle, [*prompt, *answer])[-1].double()
        for token, bias in wishes.get("logit_bias", ()):
            logits[token] += bias
        for token in {*prompt, *answer}:
            penalty = wishes.get("repetition_penalty", 1.0)
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        for token in set(answer):
            logits[token] -= wishes.get("presence_penalty", 0.0)
            logits[token] -= wishes.get("frequency_penalty", 0.0) * answer.count(token)
        logits[list(wishes.get("bad_token_ids", ()))] = -math.inf
        answer.append(int(logits.argmax()))
    return answer


def prompts_of(seed: int, count: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(320) for _ in range(generator.randint(1, 40))] for _ in range(count)
    ]


@pytest.mark.parametrize("target", ["reference", "interpret"])
def test_each_request_of_a_batch_gets_its_own_adjustments(
    tmp_path: Path, rng_seed: int, target: str
) -> None:
    interpreted = target == "interpret"
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, num_layers=1)
    sizes = {"max_rows": 3, "max_step_tokens": 32} if interpreted else {}
    artifact = compile_tiny(model, tmp_path / "artifact", target=target, **sizes)
    oracle = load_oracle(model)
    names = ["plain", "all", "repetition"] if interpreted else list(WISHES)
    count = 8 if interpreted else 24
    work = list(zip(names, prompts_of(rng_seed, len(names)), strict=True))
    expected = {name: simulate(oracle, prompt, count, **WISHES[name]) for name, prompt in work}

    async def run() -> dict[str, list[int]]:
        async with serving(artifact, num_pages=64) as engine:
            params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
            found = await asyncio.gather(
                *(answer(engine, prompt, **params, **WISHES[name]) for name, prompt in work)
            )
            return {name: list(delta.token_ids) for name, delta in zip(names, found, strict=True)}

    assert asyncio.run(run()) == expected


def test_repetition_penalty_is_that_of_transformers(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    oracle = load_oracle(model)
    (prompt,) = prompts_of(rng_seed, 1)
    given = torch.tensor([prompt])
    expected = oracle.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=30,
        repetition_penalty=1.4,
    )

    async def run() -> tuple[int, ...]:
        async with serving(artifact) as engine:
            wishes = {"temperature": 0.0, "max_tokens": 30, "repetition_penalty": 1.4}
            return (await answer(engine, prompt, **wishes)).token_ids

    assert list(asyncio.run(run())) == expected[0, len(prompt) :].tolist()


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_34_counts_survive_preemption(
    tmp_path: Path, rng_seed: int, prefix_cache: bool
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, window=256)
    artifact = compile_tiny(model, tmp_path / "artifact")
    prompts = prompts_of(rng_seed, 4)
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0, **WISHES["all"]},
        {"temperature": 0.9, "seed": 3, **WISHES["frequency"]},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, **WISHES["repetition"]},
        {"temperature": 1.0, "seed": 5, "logprobs": 2, **WISHES["bans"]},
    ]

    async def run(num_pages: int) -> tuple[list[Any], int]:
        async with serving(artifact, num_pages=num_pages, prefix_cache=prefix_cache) as engine:
            params = {"max_tokens": 100, "ignore_eos": True}
            found = await asyncio.gather(
                *(
                    answer(engine, prompt, **params, **wish)
                    for prompt, wish in zip(prompts, wishes, strict=True)
                )
            )
            return [delta.token_ids for delta in found], engine.stats().preemptions_total

    roomy, no_preemptions = asyncio.run(run(64))
    tight, preemptions = asyncio.run(run(10))
    assert tight == roomy
    assert no_preemptions == 0 < preemptions


def test_a_row_forgets_what_its_last_request_asked(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact", max_rows=2)
    (prompt,) = prompts_of(rng_seed, 1)
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}

    async def run() -> None:
        async with serving(artifact) as engine:
            alone = (await answer(engine, prompt, **params)).token_ids
            for name in ("all", "frequency", "bias", "plain"):
                first = (await answer(engine, prompt, **params, **WISHES[name])).token_ids
                again = (await answer(engine, prompt, **params, **WISHES[name])).token_ids
                assert first == again, name
                # In company, so that the plain row is drawn again beside the adjusted one.
                others = await asyncio.gather(
                    answer(engine, prompt, **params),
                    answer(engine, prompt, **params, **WISHES[name]),
                )
                assert [other.token_ids for other in others] == [alone, first], name

    asyncio.run(run())


def test_case_16_which_tokens_each_penalty_counts(tmp_path: Path) -> None:
    # exp(2.0) and exp(1.9), over their sum: logits that differ by 0.1.
    faces = {"A": 1 / (1 + math.exp(-0.1)), "B": 1 / (1 + math.exp(0.1))}
    dice = make_dice(tmp_path / "model", faces)
    artifact = compile_tiny(dice.path, tmp_path / "artifact")
    a, b = dice.face_ids["A"], dice.face_ids["B"]
    prompt = [a, dice.cue_id]

    async def first_token(engine: Any, **wishes: Any) -> int:
        return (await answer(engine, prompt, temperature=0.0, max_tokens=1, **wishes)).token_ids[0]

    async def run() -> None:
        async with serving(artifact) as engine:
            assert await first_token(engine) == a
            assert await first_token(engine, presence_penalty=0.5) == a, "the prompt is not counted"
            assert await first_token(engine, frequency_penalty=0.5) == a
            # A negative logit is multiplied, and the prompt counts.
            assert await first_token(engine, repetition_penalty=1.5) == b
            assert await first_token(engine, repetition_penalty=5) == b
            for wishes in ({"repetition_penalty": 0}, {"repetition_penalty": -1}):
                with pytest.raises(RequestError, match="repetition_penalty"):
                    await first_token(engine, **wishes)
            with pytest.raises(RequestError, match="presence_penalty"):
                await first_token(engine, presence_penalty=2.1)

    asyncio.run(run())


def test_no_end_is_drawn_before_min_tokens(tmp_path: Path) -> None:
    dice = make_dice(tmp_path / "model", {"A": 0.6, "B": 0.4}, then="end")
    artifact = compile_tiny(dice.path, tmp_path / "artifact")
    b = dice.face_ids["B"]

    async def run() -> None:
        async with serving(artifact) as engine:
            params = {"temperature": 0.0, "max_tokens": 12}
            short = await answer(engine, [dice.cue_id], **params)
            assert short.token_ids == (dice.face_ids["A"], EOS_ID)
            for min_tokens in (1, 2, 5):
                delta = await answer(engine, [dice.cue_id], **params, min_tokens=min_tokens)
                assert EOS_ID not in delta.token_ids[:min_tokens]
            # A stop token is an end as well.
            stopped = {**params, "stop_token_ids": (dice.face_ids["A"],)}
            delta = await answer(engine, [dice.cue_id], **stopped, min_tokens=1)
            assert delta.token_ids[0] == b

    asyncio.run(run())


def test_a_ban_of_every_token_is_an_error_of_its_request_alone(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=4)
    artifact = compile_tiny(model, tmp_path / "artifact")

    async def run() -> None:
        async with serving(artifact) as engine:
            params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
            results = await asyncio.gather(
                answer(
                    engine,
                    [1, 2],
                    **params,
                    bad_token_ids=tuple(range(256)),
                    stop_token_ids=tuple(range(256, 320)),
                    min_tokens=1,
                ),
                answer(engine, [1, 2], **params),
                return_exceptions=True,
            )
            assert "no token" in str(results[0])
            assert not isinstance(results[1], BaseException)
            assert results[1].finish_reason is FinishReason.LENGTH

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_of_the_model_before_any_adjustment(
    tmp_path: Path, rng_seed: int, temperature: float
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    artifact = compile_tiny(model, tmp_path / "artifact")
    oracle = load_oracle(model)
    (prompt,) = prompts_of(rng_seed, 1)

    async def run() -> Any:
        async with serving(artifact) as engine:
            return await answer(
                engine,
                prompt,
                temperature=temperature,
                max_tokens=6,
                ignore_eos=True,
                logprobs=3,
                **WISHES["all"],
            )

    delta = asyncio.run(run())
    expected = oracle_logits(oracle, [*prompt, *delta.token_ids]).log_softmax(-1)
    for index, told in enumerate(delta.logprobs):
        row = expected[len(prompt) - 1 + index]
        assert math.isclose(told.logprob, float(row[told.token_id]), abs_tol=1e-3)
        assert [pair[0] for pair in told.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("name", ["logit_bias", "bad_token_ids", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    model = make_llama(tmp_path / "model", seed=4)
    artifact = compile_tiny(model, tmp_path / "artifact")
    value: Any = ((320, 1.0),) if name == "logit_bias" else (320,)

    async def run() -> None:
        async with serving(artifact) as engine:
            with pytest.raises(RequestError, match=f"`{name}` from 0 to 319.*found 320"):
                engine.submit([1], SamplingParams(**{name: value}))

    asyncio.run(run())


# --- row state ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 9), max_size=30), answer=st.lists(st.integers(0, 9)))
def test_a_history_is_counted_whatever_its_border(prompt: list[int], answer: list[int]) -> None:
    tokens, codes = count_history([*prompt, *answer], len(prompt))
    assert tokens.tolist() == sorted({*prompt, *answer})
    expected = [2 * answer.count(token) + (token in prompt) for token in tokens.tolist()]
    assert codes.tolist() == expected and codes.dtype == np.int16


def test_bans_of_ends_stop_where_the_answer_may_end() -> None:
    params = SamplingParams(min_tokens=3, logit_bias=((5, 2.0),), bad_token_ids=(6,))
    assert list_biases(params, frozenset({9, 8}), 10) == [
        (5, 2.0, FOREVER),
        (6, -math.inf, FOREVER),
        (8, -math.inf, 13),
        (9, -math.inf, 13),
    ]
