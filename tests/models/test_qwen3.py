"""Qwen3 against transformers: heads of q and k are normalised before rope."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests

RATIO_3 = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}


class TestQwen3(FamilyTests):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    cases: ClassVar = {
        "head 16": {"head_dim": 16},
        "biased, tied, ratio 3": {**RATIO_3, "attention_bias": True, "tie_word_embeddings": True},
    }
