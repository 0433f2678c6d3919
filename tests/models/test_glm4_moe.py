"""GLM-4.5's mixtures of experts against transformers: groups, correction, a shared expert."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_json, make_family
from tests.models.families import FamilyTests
from tests.runtime.serving import compile_tiny
from treadle.ir.errors import CheckpointError

EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}


class TestGlm4Moe(FamilyTests):
    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    cases: ClassVar = {
        "groups": {**EXPERTS, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0},
        "first layer plain, biased, normalised heads": {
            **EXPERTS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 24,
        },
    }


def test_layers_that_draft_tokens_are_left_out_as_many_as_the_config_says(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "glm4_moe", **EXPERTS)
    file, name = model / "model.safetensors", "model.layers.2.eh_proj.weight"
    save_file({**load_file(file), name: torch.zeros(4)}, file, {"format": "pt"})
    edit_json(model / "config.json", {"num_nextn_predict_layers": 1})
    compile_tiny(model, tmp_path / "artifact")
    edit_json(model / "config.json", {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=f"`{name}`"):
        compile_tiny(model, tmp_path / "artifact")
