"""GPT-NeoX against transformers: q, k and v in one tensor head by head, two kinds of residual."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestGPTNeoX(FamilyTests):
    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    cases: ClassVar = {
        "in parallel": {"num_key_value_heads": 4},
        "one after the other": {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    }
