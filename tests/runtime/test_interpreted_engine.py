"""The emitted kernels, interpreted, against transformers: logits, then tokens of whole requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import (
    load_oracle,
    make_family,
    make_llama,
    oracle_answers,
    oracle_hidden,
    oracle_logits,
)
from tests.models.test_deepseek_v2 import EXPERTS, LATENT
from tests.runtime.serving import TARGETS, answers, compile_tiny, serving
from tests.runtime.test_engine import VARIANTS
from treadle.runtime import verify
from treadle.runtime.config import KV_DTYPES
from treadle.runtime.executor import Program
from treadle.runtime.loading import ServeOptions, load_artifact
from treadle.runtime.request import Delta

NUM_TOKENS = 64


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_within_a_thousandth_of_transformers(
    tmp_path: Path, rng_seed: int, variant: str, target: str
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, **VARIANTS[variant])
    artifact = compile_tiny(model, tmp_path / "artifact", target=target)
    oracle = load_oracle(model)
    loaded = load_artifact(artifact, ServeOptions(num_pages=16))
    for length in (1, 16, 37):
        prompt = [random.Random(rng_seed + length).randrange(320) for _ in range(length)]
        found = verify.play_prompt(loaded, prompt)["logits"][0]
        expected = oracle_logits(oracle, prompt)[-1]
        assert float((found - expected).abs().max()) < 1e-3, length
    assert torch.isfinite(found).all()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("biased", "ratio 3, head 24")),
    ],
)
def test_interpreted_tokens_are_those_of_transformers(
    tmp_path: Path, rng_seed: int, variant: str
) -> None:
    """64 steps, batches of 1 to 3, a prompt in chunks, pages of 16."""
    model = make_llama(
        tmp_path / "model", seed=rng_seed % 1000, **{**VARIANTS[variant], "num_layers": 1}
    )
    artifact = compile_tiny(
        model, tmp_path / "artifact", target="interpret", max_rows=3, max_step_tokens=24
    )
    generator = random.Random(rng_seed)
    drawn = [[generator.randrange(320) for _ in range(length)] for length in (40, 3, 17)]
    prompts, expected = oracle_answers(load_oracle(model), drawn, NUM_TOKENS)

    async def run() -> list[list[int]]:
        async with serving(artifact, num_pages=24) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=NUM_TOKENS)
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected


class AtFullSize:
    """Run a program as a CUDA graph does: always with all tokens and sequences of its bucket."""

    def __init__(self, program: Program, sizes: tuple[int, int]) -> None:
        self.program, self.sizes = program, sizes
        self.num_runs = 0

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        assert (num_tokens, num_seqs) == self.sizes
        self.num_runs += 1
        return self.program.run(*self.sizes)


@pytest.mark.parametrize(
    "target", ["reference", pytest.param("interpret", marks=pytest.mark.interpreted)]
)
@pytest.mark.parametrize(
    ("kv_dtype", "family"), [("auto", "llama"), ("int8", "llama"), ("auto", "deepseek_v2")]
)
def test_steps_that_are_filled_up_give_the_same_tokens(
    tmp_path: Path, rng_seed: int, kv_dtype: str, family: str, target: str
) -> None:
    """Of latents, too, whose whole prompts have a kernel of their own, and of experts."""
    sizes = {**LATENT, **EXPERTS} if family == "deepseek_v2" else {"num_hidden_layers": 1}
    model = make_family(tmp_path / "model", family, seed=rng_seed % 1000, **sizes)
    artifact = compile_tiny(
        model,
        tmp_path / "artifact",
        target=target,
        max_rows=3,
        max_step_tokens=24,
        kv_formats=(KV_DTYPES[kv_dtype],),
    )
    generator = random.Random(rng_seed)
    prompts = [[generator.randrange(320) for _ in range(length)] for length in (40, 3, 17)]

    async def run(pads: bool) -> tuple[list[list[int]], int]:
        async with serving(artifact, num_pages=24) as engine:
            executor = engine.model.executor
            wrapped = {
                tokens: AtFullSize(program, (tokens, min(tokens, 3)))
                for tokens, program in executor.mixed.items()
            }
            executor.padded = wrapped if pads else {}
            found = await answers(engine, prompts, temperature=0.0, max_tokens=16)
            runs = sum(each.num_runs for each in wrapped.values())
            return [list(delta.token_ids) for delta in found], runs

    alone, none = asyncio.run(run(False))
    padded, some = asyncio.run(run(True))
    assert padded == alone
    assert none == 0 < some


@pytest.mark.interpreted
def test_interpreted_hidden_states_are_those_of_transformers(tmp_path: Path, rng_seed: int) -> None:
    """Of scored prompts, of steps that decode together, and beside adjusted logits."""
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000, num_layers=1)
    artifact = compile_tiny(
        model, tmp_path / "artifact", target="interpret", max_rows=3, max_step_tokens=24
    )
    generator = random.Random(rng_seed)
    prompts = [[generator.randrange(320) for _ in range(length)] for length in (9, 2)]
    oracle = load_oracle(model)
    wishes = {"logprobs": 0, "prompt_logprobs": 0, "tells_hidden": True, "presence_penalty": 0.5}

    async def run() -> list[Delta]:
        async with serving(artifact, num_pages=24) as engine:
            return await answers(engine, prompts, max_tokens=4, ignore_eos=True, **wishes)

    for prompt, found in zip(prompts, asyncio.run(run()), strict=True):
        rows = [one.hidden for one in (*found.prompt_logprobs, *found.logprobs)]
        expected = oracle_hidden(oracle, [*prompt, *found.token_ids])[:-1]
        torch.testing.assert_close(torch.tensor(np.stack(rows)), expected, atol=1e-3, rtol=0)
