"""StableLM against transformers: layer norms, heads rotated in part, two kinds of residual."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestStableLm(FamilyTests):
    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    cases: ClassVar = {
        "in parallel, biased": {"use_parallel_residual": True, "use_qkv_bias": True},
        "one after the other": {"tie_word_embeddings": True},
    }
