"""Mistral against transformers: a sliding window in every layer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import torch

from tests.checkpoints import load_oracle, make_family
from tests.models.families import FamilyTests, assert_logits, prompts_of
from tests.runtime.serving import answers, compile_tiny, serving


class TestMistral(FamilyTests):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    cases: ClassVar = {
        "window": {"sliding_window": 12, "tie_word_embeddings": True},
        "window of a page": {"sliding_window": 16, "head_dim": 24},
    }
    prompt_tokens = (1, 16, 37, 60)


def test_a_window_of_one_token_gives_what_transformers_gives_without_its_cache(
    tmp_path: Path, rng_seed: int
) -> None:
    """No case of the family: with its cache, transformers 5.24 attends to what no token may see.

    `DynamicSlidingWindowLayer` keeps `keys[:, :, -window + 1 :]`, which for a window of 1 is all of
    them, while the mask is as wide as the window.
    """
    model = make_family(tmp_path / "model", "mistral", seed=rng_seed % 1000, sliding_window=1)
    oracle, prompts = load_oracle(model), prompts_of(rng_seed, 40, 3)
    artifact = compile_tiny(model, tmp_path / "artifact", max_rows=3, max_step_tokens=24)
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(8):
            with torch.inference_mode():
                logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        expected.append(tokens[len(prompt) :])

    async def run() -> list[list[int]]:
        async with serving(artifact, num_pages=24) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=8, ignore_eos=True)
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected
    assert_logits(artifact, oracle, prompts_of(rng_seed, 1, 20))
