"""Cohere 2 against transformers: one norm, parallel branches, windows that rotate alone."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestCohere2(FamilyTests):
    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    cases: ClassVar = {
        "third layer sees all": {
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "logit_scale": 1.5,
        },
        "first layer sees all, biased": {
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "logit_scale": 1.0,
        },
    }
    prompt_tokens = (1, 16, 37, 60)
