"""A request's parameters are checked by name, fitted to the window, and never cut in silence."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from treadle.ir.errors import RequestError
from treadle.runtime.request import (
    Delta,
    FinishReason,
    SamplingParams,
    Usage,
    collect,
    derive_seed,
    fit_to_window,
    show_value,
)
from treadle.runtime.tokenizer import Tokenizer

from ..server import tiny


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("temperature", "0"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", math.inf),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ["a"]),
        ("stop", ("a",) * 33),
        ("stop_token_ids", (-1,)),
        ("min_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"`{field}`") as caught:
        SamplingParams(**{field: value}).validate()
    assert caught.value.param == field


def test_good_parameters_come_back() -> None:
    params = SamplingParams(max_tokens=4, temperature=0, stop=("a",), seed=-(2**63), min_tokens=4)
    assert params.validate() is params


def test_choices_have_different_seeds_and_the_first_the_requests_own(rng_seed: int) -> None:
    params = SamplingParams(seed=rng_seed)
    assert params.for_choice(0) == params
    seeds = [params.for_choice(choice).validate().seed for choice in range(128)]
    assert len(set(seeds)) == 128
    assert seeds == [derive_seed(rng_seed, choice) for choice in range(128)]
    assert SamplingParams().for_choice(3) == SamplingParams()


@pytest.mark.parametrize(
    ("max_tokens", "default", "fitted"),
    [(None, None, 24), (None, 16, 16), (None, 99, 24), (24, 16, 24), (1, None, 1)],
)
def test_max_tokens_becomes_what_the_window_holds(
    max_tokens: int | None, default: int | None, fitted: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert fit_to_window(params, 40, 64, default_max_tokens=default).max_tokens == fitted


@pytest.mark.parametrize(
    ("prompt_tokens", "params", "param"),
    [
        (40, SamplingParams(max_tokens=25), "max_tokens"),
        (64, SamplingParams(), "prompt"),
        (900, SamplingParams(max_tokens=1), "prompt"),
        (40, SamplingParams(min_tokens=25), "min_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    prompt_tokens: int, params: SamplingParams, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        fit_to_window(params, prompt_tokens, 64)
    assert caught.value.param == param


def test_a_whole_answer_is_the_collected_stream() -> None:
    async def deltas() -> AsyncIterator[Delta]:
        yield Delta("a", (1,), None, None, Usage(3, 1, 0))
        yield Delta("", (2,), None, None, Usage(3, 2, 0))
        yield Delta("b", (3,), FinishReason.STOP, "c", Usage(3, 3, 2))

    whole = asyncio.run(collect(deltas()))
    assert whole == Delta("ab", (1, 2, 3), FinishReason.STOP, "c", Usage(3, 3, 2))


@pytest.mark.parametrize("value", ["x" * 10**6, ["x"] * 10**6, {"x": 1}, 10**4000, b"x" * 999])
def test_a_value_is_shown_briefly(value: Any) -> None:
    assert len(show_value(value)) <= 80


def test_a_text_is_called_too_long_only_if_it_is(tmp_path: Path, rng_seed: int) -> None:
    random_ = random.Random(rng_seed)
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("aaaaaaaa", "aaaaaaaa")]
    tokenizer = Tokenizer.from_path(tiny.save_byte_level(tmp_path, merges=merges))
    found = set()
    for _ in range(12):
        text = "".join(random_.choice("ab") * random_.randint(1, 60) for _ in range(5_000))
        num_tokens = len(tokenizer.encode(text))
        for most in (8, num_tokens // 4, num_tokens, 4 * num_tokens):
            exceeds = tokenizer.surely_exceeds(text, most)
            found.add(exceeds)
            assert not exceeds or num_tokens > most
        assert not tokenizer.surely_exceeds("b" * 10_000, 8)  # short enough to tokenise
    assert found == {True, False}
