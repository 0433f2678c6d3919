"""EXAONE 4.0 against transformers: norms after the blocks and of the heads of q and k."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestExaone4(FamilyTests):
    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    cases: ClassVar = {
        "first layer with a window": {
            "sliding_window": 12,
            "sliding_window_pattern": 2,
        },
        "without a window": {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    }
    prompt_tokens = (1, 16, 37, 60)
