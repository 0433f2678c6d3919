"""InternLM3 against transformers, to which it is a Llama under another name."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestInternLM3(FamilyTests):
    model_type = "internlm3"
    architecture = "InternLM3ForCausalLM"
    cases: ClassVar = {
        "biased": {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
        "plain, dynamic rope": {
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000.0},
        },
    }
