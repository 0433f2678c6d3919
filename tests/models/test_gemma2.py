"""Gemma 2 against transformers: caps, alternating windows, norms before and after."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestGemma2(FamilyTests):
    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    cases: ClassVar = {
        "capped": {
            "sliding_window": 12,
            "head_dim": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
        "without caps, biased": {
            "sliding_window": 20,
            "head_dim": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
    }
    prompt_tokens = (1, 16, 37, 60)
