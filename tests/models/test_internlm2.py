"""InternLM2 against its definition: a Llama whose q, k and v are one tensor, KV head by KV head.

transformers has no InternLM2. A Llama of transformers is the judge; its tensors are given
InternLM2's names and order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, make_family
from tests.models.families import FamilyTests
from treadle.ir.builder import GraphBuilder
from treadle.ir.errors import ShapeError
from treadle.runtime.weights import sort_sections

NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Put the rows of each KV head together: the queries that share it, its key, its value."""
    parts = (rows.chunk(num_kv_heads) for rows in (q, k, v))
    return torch.cat([rows for head in zip(*parts, strict=True) for rows in head])


class TestInternLM2(FamilyTests):
    model_type = "internlm2"
    architecture = "InternLM2ForCausalLM"
    cases: ClassVar = {
        "two groups": {"bias": False},
        "biased, ratio 3": {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 96,
            "bias": True,
        },
    }

    def make(self, path: Path, case: str, seed: int, **changes: Any) -> Path:
        settings = {**self.cases[case], **changes}
        is_biased = settings.pop("bias")
        make_family(path, "llama", seed=seed % 1000, attention_bias=is_biased, **settings)
        llama = path.parent / f"{path.name}.llama"
        path.rename(llama)
        path.mkdir()
        for file in llama.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        config = json.loads((llama / "config.json").read_text())
        config |= {"architectures": [self.architecture], "model_type": self.model_type}
        del config["attention_bias"], config["mlp_bias"]
        (path / "config.json").write_text(json.dumps({**config, "bias": is_biased}))
        tensors = load_file(llama / "model.safetensors")
        kinds = ["weight", "bias"] if is_biased else ["weight"]
        for index in range(config["num_hidden_layers"]):
            at = f"model.layers.{index}"
            for kind in kinds:
                parts = [tensors.pop(f"{at}.self_attn.{name}_proj.{kind}") for name in "qkv"]
                rows = joined(*parts, config["num_key_value_heads"])
                tensors[f"{at}.attention.wqkv.{kind}"] = rows
        renamed = {}
        for name, tensor in tensors.items():
            for old, new in NAMES.items():
                name = name.replace(old, new)
            renamed[name] = tensor
        save_file(renamed, path / "model.safetensors", {"format": "pt"})
        return path

    def oracle(self, model: Path) -> Any:
        return load_oracle(model.parent / f"{model.name}.llama")


def test_rows_of_groups_are_sorted_by_section(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    q, k, v = torch.randn(24, 5), torch.randn(8, 5), torch.randn(8, 5)
    rows = joined(q, k, v, 2)
    assert torch.equal(sort_sections(rows, (24, 8, 8), 2), torch.cat((q, k, v)))
    assert sort_sections(rows, (), 1) is rows


def test_sections_that_no_group_shares_are_refused() -> None:
    b = GraphBuilder("odd", step="mixed", dtype="f32", page_size=16)
    with pytest.raises(ShapeError, match="3 equal groups"):
        b.weight("qkv", {"wqkv": 40}, 5, sections=(24, 8, 8), groups=3)
