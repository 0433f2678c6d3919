"""OLMo 3 against transformers: windows in three layers of four, whose RoPE is not scaled."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestOlmo3(FamilyTests):
    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    cases: ClassVar = {
        "yarn": {
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "listed": {
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_theta": 3000.0,
        },
    }
    prompt_tokens = (1, 16, 37, 60)
