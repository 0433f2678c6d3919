"""Phi-3 against transformers: joined projections, and RoPE over a part of each head."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.models.families import FamilyTests
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


@pytest.mark.parametrize("interleave", [0, 1, 2, 4])
def test_halves_of_one_tensor_are_arranged_as_two_tensors(interleave: int, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    joined = torch.randn(16, 3)
    assert torch.equal(arrange([joined], interleave), arrange([joined[:8], joined[8:]], interleave))
