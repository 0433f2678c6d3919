"""Qwen2's mixtures of experts against transformers: a shared expert with a gate, plain layers."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}


class TestQwen2Moe(FamilyTests):
    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    cases: ClassVar = {
        "shared": EXPERTS,
        "normalised, first layer plain": {
            **EXPERTS,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "qkv_bias": False,
        },
    }
