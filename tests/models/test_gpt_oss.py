"""gpt-oss against transformers: sinks, alternating windows, biased experts, MXFP4."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import edit_json, load_oracle, make_family
from tests.models.families import FamilyTests, assert_logits, prompts_of
from tests.runtime.serving import compile_tiny
from treadle.ir.errors import SpecError
from treadle.ir.pipeline import run_passes
from treadle.ir.text import parse_graph, print_graph
from treadle.models.config import from_hf
from treadle.models.registry import build_graph

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "head_dim": 16,
    "rope_parameters": YARN,
}
# As its authors published it, without `quantization_config`, which an opened checkpoint leaves out.
GPT_OSS_20B = """{"architectures": ["GptOssForCausalLM"], "attention_bias": true,
 "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
 "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
 "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072,
 "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
 "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
 "output_router_logits": false, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
 "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
 "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
 "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
 "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
 "vocab_size": 201088}"""
REQUIRED = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 40,
}


class TestGptOss(FamilyTests):
    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    cases: ClassVar = {
        "windows of 16": {**SIZES, "sliding_window": 16},
        "windows that see all, other limits, no biases of attention": {
            **SIZES,
            "sliding_window": 128,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "attention_bias": False,
        },
    }


def test_an_absent_key_means_what_it_means_to_transformers() -> None:
    theirs, ours = GptOssConfig(), from_hf({**REQUIRED, "model_type": "gpt_oss"})
    rope = theirs.rope_parameters
    assert ours.head_dim == theirs.head_dim and ours.num_kv_heads == theirs.num_key_value_heads
    assert [ours.window_of(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert theirs.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert ours.qkv_bias and ours.output_bias and theirs.attention_bias
    assert ours.norm_eps == theirs.rms_norm_eps
    assert (ours.rope.kind, ours.rope.factor, ours.rope.truncate) == ("yarn", 32.0, False)
    assert {rope[key] for key in ("rope_type", "factor", "truncate")} == {"yarn", 32.0, False}
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.original_max_position_embeddings == rope["original_max_position_embeddings"]
    experts = ours.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k) == (theirs.num_local_experts, 4)
    assert (experts.gate_limit, experts.gate_sharpness) == (theirs.swiglu_limit, 1.702)


def test_the_published_config_has_no_key_that_nobody_reads() -> None:
    config = from_hf(json.loads(GPT_OSS_20B))
    assert config.unknown_keys == () and config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k) == (32, 4)
    assert [config.window_of(layer) for layer in (0, 1, 23)] == [128, 0, 0]
    graph = build_graph(replace(config, num_layers=2), step="decode", dtype="bf16", page_size=64)
    for joined in (False, True):
        fused, _ = run_passes(graph, few_tokens=False, joined=joined)
        assert parse_graph(print_graph(fused)) == fused


@pytest.mark.parametrize(
    ("key", "value"), [("experts_per_token", 3), ("initial_context_length", 2048)]
)
def test_the_second_name_of_a_key_may_not_say_otherwise(key: str, value: int) -> None:
    first = {"num_experts_per_tok": 4, "rope_scaling": {**YARN, "rope_theta": 150000.0}}
    names = {"experts_per_token": 4, "initial_context_length": 32}
    assert from_hf({**REQUIRED, **first, **names}).unknown_keys == ()
    with pytest.raises(SpecError, match=f"`{key}` = {value}"):
        from_hf({**REQUIRED, **first, **names, key: value})


def test_experts_in_mxfp4_are_the_numbers_that_transformers_makes_of_them(
    tmp_path: Path, rng_seed: int
) -> None:
    """One checkpoint with codes and exponents, and one with what transformers widens them to."""
    sizes = {**SIZES, "intermediate_size": 96, "num_hidden_layers": 1}
    plain = make_family(tmp_path / "plain", "gpt_oss", seed=rng_seed % 1000, **sizes)
    packed = shutil.copytree(plain, tmp_path / "packed")
    tensors = load_file(plain / "model.safetensors")
    codes, at = {}, "model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(rng_seed)
    for name, rows, blocks in (("gate_up_proj", 192, 2), ("down_proj", 64, 3)):
        shape = (4, rows, blocks)
        codes[f"{at}.{name}_blocks"] = draw_bytes(256, *shape, 16, generator=generator)
        codes[f"{at}.{name}_scales"] = 120 + draw_bytes(5, *shape, generator=generator)
        parts = (codes[f"{at}.{name}_{part}"] for part in ("blocks", "scales"))
        tensors[f"{at}.{name}"] = convert_moe_packed_tensors(*parts).float().contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    others = {k: v for k, v in tensors.items() if f"{k}_blocks" not in codes}
    save_file({**others, **codes}, packed / "model.safetensors", {"format": "pt"})
    edit_json(packed / "config.json", {"quantization_config": {"quant_method": "mxfp4"}})
    artifact = compile_tiny(packed, tmp_path / "artifact")
    assert_logits(artifact, load_oracle(plain), prompts_of(rng_seed, 5, 23))


def draw_bytes(stop: int, *shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(stop, shape, generator=generator).to(torch.uint8)
