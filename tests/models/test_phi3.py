"""Phi-3 against transformers: joined projections, and RoPE over a part of each head."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.checkpoints import load_oracle, make_family
from tests.models.families import FamilyTests, assert_logits, prompts_of
from tests.runtime.serving import answer, compile_tiny, serving
from treadle.runtime.weights import arrange


class TestPhi3(FamilyTests):
    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    cases: ClassVar = {
        "three quarters rotated": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
            "pad_token_id": 0,
        },
        "all rotated, tied": {"tie_word_embeddings": True, "pad_token_id": 0},
    }


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
}


@pytest.mark.parametrize(("window", "lengths"), [(32, (1, 16, 31)), (64, (33, 50, 63))])
def test_longrope_is_long_in_a_window_beyond_the_original_and_short_within(
    tmp_path: Path, rng_seed: int, window: int, lengths: tuple[int, ...]
) -> None:
    """transformers chooses by the length of its input: the prompts are those it agrees on."""
    model = make_family(
        tmp_path / "model",
        "phi3",
        seed=rng_seed % 1000,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=32,
        pad_token_id=0,
    )
    artifact = compile_tiny(model, tmp_path / "artifact", max_context_tokens=window)
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, *lengths))


def test_tokens_beyond_the_original_window_are_those_of_a_prompt(
    tmp_path: Path, rng_seed: int
) -> None:
    """Keys of one cache are rotated alike: decoding over position 32 is as reading it."""
    model = make_family(
        tmp_path / "model",
        "phi3",
        seed=rng_seed % 1000,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=32,
        pad_token_id=0,
    )
    artifact = compile_tiny(model, tmp_path / "artifact", max_context_tokens=64)
    (prompt,) = prompts_of(rng_seed, 28)

    async def run() -> None:
        async with serving(artifact, num_pages=24) as engine:
            whole = list((await answer(engine, prompt, temperature=0.0, max_tokens=16)).token_ids)
            for kept in range(1, len(whole)):
                longer, left = prompt + whole[:kept], 16 - kept
                again = await answer(engine, longer, temperature=0.0, max_tokens=left)
                assert list(again.token_ids) == whole[kept:]

    asyncio.run(run())


@pytest.mark.parametrize("interleave", [0, 1, 2, 4])
def test_halves_of_one_tensor_are_arranged_as_two_tensors(interleave: int, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    joined = torch.randn(16, 3)
    assert torch.equal(arrange([joined], interleave), arrange([joined[:8], joined[8:]], interleave))
