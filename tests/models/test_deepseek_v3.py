"""DeepSeek-V3 against transformers: latent attention, routing by sigmoids with a correction."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests
from tests.models.test_deepseek_v2 import EXPERTS, LATENT


class TestDeepseekV3(FamilyTests):
    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    cases: ClassVar = {
        "groups": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 28,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        "yarn, halves of a head rotate": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 32,
            },
        },
    }
