"""StarCoder2 against transformers: layer norms, biases, a feed-forward without a gate."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestStarcoder2(FamilyTests):
    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    cases: ClassVar = {
        "biased, tied": {},
        "without biases, untied": {"use_bias": False, "tie_word_embeddings": False},
    }
