"""Mixtral against transformers: every layer has experts, normalised after the choice."""

from __future__ import annotations

from typing import ClassVar

from tests.models.families import FamilyTests


class TestMixtral(FamilyTests):
    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    cases: ClassVar = {
        "two of four": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "one of three": {"num_local_experts": 3, "num_experts_per_tok": 1},
    }
