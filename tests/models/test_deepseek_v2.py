"""DeepSeek-V2 against transformers: latent attention, routing by softmax, in groups or not."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import pytest
from transformers import AutoConfig

from tests.models.families import FamilyTests
from treadle.ir.errors import SpecError
from treadle.models.config import from_hf
from treadle.models.registry import build_graph

# The config.json of DeepSeek-V2-Lite, as its authors published it.
V2_LITE = """{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false,
 "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
 "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
 "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
 "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
 "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
 "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
 "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
 "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
 "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
 "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
 "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
 "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
 "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
 "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
 "v_head_dim": 128, "vocab_size": 102400}"""

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}


class TestDeepseekV2(FamilyTests):
    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    cases: ClassVar = {
        # As V2-Lite: queries are projected as a whole, RoPE is YaRN with a factor on the scores.
        "lite": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 32,
            },
        },
        "groups": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "mlp_bias": False,
        },
    }


def described(**changes: object) -> dict[str, object]:
    """Give the config that transformers would save of the first case, changed."""
    case = {"num_attention_heads": 4, "hidden_size": 64, **TestDeepseekV2.cases["groups"]}
    config = AutoConfig.for_model("deepseek_v2", **case).to_dict()
    return {**config, "architectures": ["DeepseekV2ForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_topk_prob", True),
        ("scoring_func", "sigmoid"),
        ("moe_layer_freq", 2),
        ("topk_method", "noaux_tc"),
        ("attention_bias", True),
        ("num_key_value_heads", 2),
        ("num_experts_per_tok", None),
        ("head_dim", 20),
        ("qk_head_dim", 24),
        ("q_lora_rank", 0),
        ("kv_lora_rank", 0),
    ],
)
def test_a_config_that_would_change_the_maths_is_refused_by_key(key: str, value: object) -> None:
    from_hf(described())
    with pytest.raises(SpecError, match=f"`{key}`"):
        from_hf(described(**{key: value}))


def test_groups_count_only_where_the_method_says_so() -> None:
    grouped, greedy = (
        from_hf(described(topk_method=method)).experts
        for method in ("group_limited_greedy", "greedy")
    )
    assert grouped and (grouped.num_groups, grouped.kept_groups, grouped.group_top) == (3, 2, 1)
    assert greedy and (greedy.num_groups, greedy.kept_groups) == (1, 1)


def test_the_published_config_of_v2_lite_is_read() -> None:
    config = from_hf(json.loads(V2_LITE))
    assert config.unknown_keys == ("auto_map",)
    latent, experts = config.latent, config.experts
    assert latent and experts
    assert (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim) == (0, 512, 128, 64)
    assert (experts.top_k, experts.shared_size, experts.dense_layers) == (6, 2816, (0,))
    # As transformers multiplies them: by the root of 128 + 64, and twice by YaRN's factor.
    factor = 0.1 * 0.707 * math.log(40) + 1.0
    assert config.attention_scale == pytest.approx(192**-0.5 * factor**2)


def test_a_quantised_cache_of_latents_is_refused() -> None:
    config = from_hf(described())
    with pytest.raises(SpecError, match="int8") as caught:
        build_graph(config, step="decode", dtype="f32", page_size=16, kv_format="int8")
    assert "--kv-dtype" in caught.value.remedy


def test_a_row_of_the_cache_is_one_latent_for_all_heads() -> None:
    graph = build_graph(from_hf(described()), step="decode", dtype="bf16", page_size=16)
    first = next(value for value in graph.inputs if value.type.layout)
    assert str(first.type) == "latent.bf16[P, 1, 16, 32]"
    assert first.type.num_bytes({"P": 1}) == 2 * 16 * (24 + 8)
