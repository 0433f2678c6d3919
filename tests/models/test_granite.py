"""Granite against transformers: four constants that scale."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestGranite(FamilyTests):
    model_type = "granite"
    architecture = "GraniteForCausalLM"
    cases: ClassVar = {
        "all scaled": {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 12.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
        "none scaled": {},
    }
