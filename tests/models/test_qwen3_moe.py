"""Qwen3's mixtures of experts against transformers: routed layers, plain ones, and both."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_family
from tests.models.families import FamilyTests
from tests.runtime.serving import compile_tiny
from treadle.runtime.loading import ServeOptions, load_artifact

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}


class TestQwen3Moe(FamilyTests):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    cases: ClassVar = {
        "normalised": {**EXPERTS, "norm_topk_prob": True},
        "every second layer, tied": {
            **EXPERTS,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    }


def test_experts_may_be_stored_as_one_tensor(tmp_path: Path) -> None:
    """As transformers keeps them in memory: gate and up of all experts, and down."""
    model = make_family(tmp_path / "model", "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    options = ServeOptions(num_pages=4)
    of_each = load_artifact(compile_tiny(model, tmp_path / "of each"), options).weights
    file, at = model / "model.safetensors", "model.layers.0.mlp.experts"
    tensors = load_file(file)

    def join(*modules: str) -> torch.Tensor:
        names = [[f"{at}.{e}.{m}_proj.weight" for m in modules] for e in range(4)]
        return torch.stack([torch.cat([tensors.pop(n) for n in own]) for own in names])

    joined = {f"{at}.gate_up_proj": join("gate", "up"), f"{at}.down_proj": join("down")}
    save_file({**tensors, **joined}, file, {"format": "pt"})
    of_all = load_artifact(compile_tiny(model, tmp_path / "of all"), options).weights
    assert {name: tuple(weight.shape) for name, weight in of_all.items() if "experts" in name} == {
        "layers.0.experts_gate_up": (4, 80, 64),
        "layers.0.experts_down": (4, 64, 40),
    }
    for name, weight in of_each.items():
        assert torch.equal(weight, of_all[name]), name
