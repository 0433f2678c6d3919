"""GLM-4 against transformers: neighbours rotate as pairs, in a part of each head."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestGlm4(FamilyTests):
    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    cases: ClassVar = {
        "half rotated, q k v biased": {"head_dim": 16, "pad_token_id": 0},
        "all rotated, tied, ratio 3": {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    }
