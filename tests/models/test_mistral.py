"""Mistral against transformers: a sliding window in every layer."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestMistral(FamilyTests):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    cases: ClassVar = {
        "window": {"sliding_window": 12, "tie_word_embeddings": True},
        "window of a page": {"sliding_window": 16, "head_dim": 24},
    }
    prompt_tokens = (1, 16, 37, 60)
