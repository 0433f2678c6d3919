"""OLMo 2 against transformers: norms after the blocks, and of q and k as rows."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestOlmo2(FamilyTests):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    cases: ClassVar = {
        "plain": {},
        "biased, tied, ratio 3": {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 72,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
