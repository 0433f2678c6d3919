"""Gemma 3 against transformers: two RoPEs, alternating windows, norms of heads."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestGemma3(FamilyTests):
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    cases: ClassVar = {
        "scaled rope in full layers": {
            "sliding_window": 12,
            "head_dim": 16,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "older keys, untied": {
            "sliding_window": 20,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "rope_theta": 50000.0,
            "rope_local_base_freq": 700.0,
            "tie_word_embeddings": False,
        },
    }
    prompt_tokens = (1, 16, 37, 60)
