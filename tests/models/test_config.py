"""Reading config.json: every spelling, what absent keys mean, and what is refused.

transformers' own config classes and rotary embeddings are the judge.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from treadle.ir.errors import SpecError
from treadle.models.config import ModelConfig, from_hf
from treadle.models.rope import (
    ROPE_KINDS,
    rope_attention_factor,
    rope_inverse_frequencies,
)

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The config.json files of well-known models, as their authors published them.
LLAMA_3_1_8B = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
 "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
 "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
 "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
 "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
 "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256}"""
SMOLLM2_135M = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
 "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
 "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
 "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
 "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
 "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
 "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
 "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"""
MISTRAL_7B_V3 = """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0,
 "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
 "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
 "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.42.0.dev0", "use_cache": true, "vocab_size": 32768}"""

JUDGES = [LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config]


def hf(**changes: object) -> dict[str, Any]:
    """Make the config dict of a tiny Llama, with keys changed; `...` removes one."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not ...}


def mistral(**changes: object) -> dict[str, Any]:
    return hf(**{"architectures": ["MistralForCausalLM"], "model_type": "mistral"} | changes)


def assert_matches(model: ModelConfig, judge: Any) -> None:
    """Compare with a transformers config, field by field."""
    assert model.vocab_size == judge.vocab_size
    assert model.hidden_size == judge.hidden_size
    assert model.num_layers == judge.num_hidden_layers
    assert model.num_heads == judge.num_attention_heads
    assert model.num_kv_heads == judge.num_key_value_heads
    hidden_per_head = judge.hidden_size // judge.num_attention_heads
    assert model.head_dim == (getattr(judge, "head_dim", None) or hidden_per_head)
    assert model.intermediate_size == judge.intermediate_size
    assert model.norm_eps == judge.rms_norm_eps
    assert model.max_position_embeddings == judge.max_position_embeddings
    assert model.tie_word_embeddings == judge.tie_word_embeddings
    has_bias = getattr(judge, "attention_bias", False)
    assert model.output_bias == has_bias
    assert model.qkv_bias == (has_bias or judge.model_type == "qwen2")
    assert model.mlp_bias == getattr(judge, "mlp_bias", False)
    assert model.hidden_act == judge.hidden_act
    assert model.rope.theta == judge.rope_parameters["rope_theta"]
    assert model.rope.kind == judge.rope_parameters["rope_type"]
    eos = judge.eos_token_id
    assert model.eos_token_ids == (
        () if eos is None else tuple(eos if type(eos) is list else [eos])
    )
    assert model.bos_token_id == judge.bos_token_id


@pytest.mark.parametrize("text", [LLAMA_3_1_8B, SMOLLM2_135M, MISTRAL_7B_V3])
def test_published_configs_read_as_transformers_reads_them(text: str) -> None:
    config = json.loads(text)
    judge_class = LlamaConfig if config["model_type"] == "llama" else MistralConfig
    model = from_hf(config)
    assert_matches(model, judge_class(**json.loads(text)))
    assert model.dtype == "bfloat16"
    assert model.unknown_keys == ()


@pytest.mark.parametrize("judge_class", JUDGES)
def test_random_configs_saved_by_transformers_read_back_with_no_unknown_key(
    judge_class: type, rng_seed: int
) -> None:
    rng = random.Random(rng_seed)
    for _ in range(30):
        num_kv_heads = rng.randint(1, 4)
        num_heads = num_kv_heads * rng.randint(1, 9)
        settings: dict[str, Any] = {
            "architectures": [judge_class.__name__.replace("Config", "ForCausalLM")],
            "vocab_size": rng.randint(1, 10**6),
            "hidden_size": num_heads * rng.randint(1, 100) * 2,
            "num_hidden_layers": rng.randint(1, 100),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": rng.choice([None, 2 * rng.randint(1, 128)]),
            "intermediate_size": rng.randint(1, 10**5),
            "rms_norm_eps": 10 ** -rng.uniform(4, 8),
            "max_position_embeddings": rng.randint(2, 10**6),
            "tie_word_embeddings": rng.random() < 0.5,
            "rope_theta": 10 ** rng.uniform(2, 7),
            "eos_token_id": rng.choice([None, 2, [2, 7, 9]]),
            "bos_token_id": rng.choice([None, 1]),
            "dtype": rng.choice(["float32", "float16", "bfloat16"]),
        }
        if judge_class is LlamaConfig:
            settings |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        elif judge_class is MistralConfig:
            settings["sliding_window"] = None
        elif judge_class is Qwen3Config and settings["head_dim"] is None:
            del settings["head_dim"]  # its config can't be null, and absent it is 128
        judge = judge_class(**settings)
        model = from_hf(json.loads(judge.to_json_string(use_diff=rng.random() < 0.5)))
        assert_matches(model, judge)
        assert model.dtype == settings["dtype"]
        assert model.unknown_keys == ()


@pytest.mark.parametrize("judge_class", JUDGES)
def test_an_absent_key_means_what_it_means_to_transformers(judge_class: type) -> None:
    architecture = judge_class.__name__.replace("Config", "ForCausalLM")
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 128,
    }
    if judge_class is MistralConfig:
        sizes["sliding_window"] = None
    model = from_hf({"architectures": [architecture]} | sizes)
    assert_matches(model, judge_class(**sizes))
    assert model.dtype == "float32"


def test_the_architecture_follows_from_the_model_type_where_no_class_is_named() -> None:
    assert from_hf(mistral(architectures=...)).architecture == "MistralForCausalLM"


def test_an_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    assert from_hf(hf()).head_dim == 16
    assert from_hf(hf(head_dim=32)).head_dim == 32
    assert from_hf(hf(head_dim=32)).rope.rotary_dim == 32
    assert from_hf(hf(head_dim=None)).head_dim == 16


def test_null_kv_heads_mean_as_many_as_query_heads() -> None:
    assert from_hf(hf(num_key_value_heads=None)).num_kv_heads == 4
    assert from_hf(mistral(num_key_value_heads=None)).num_kv_heads == 4


def test_both_spellings_of_the_dtype_are_read() -> None:
    assert from_hf(hf(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert from_hf(hf(torch_dtype=..., dtype="torch.float16")).dtype == "float16"
    assert from_hf(hf(torch_dtype="bfloat16", dtype="bfloat16")).dtype == "bfloat16"


def test_keys_nobody_reads_are_collected_and_harmless_ones_are_not() -> None:
    model = from_hf(hf(use_cache=True, initializer_range=0.1, zebra=1, aardvark=None))
    assert model.unknown_keys == ("aardvark", "zebra")


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "linear", "factor": 2}, "linear"),
        (LLAMA3_ROPE | {"type": "llama3"}, "llama3"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "yarn"),
        ({"type": "yarn", "factor": 4.0}, "yarn"),
        (
            {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
            },
            "longrope",
        ),
    ],
)
def test_every_spelling_of_a_rope_block_reads_the_same(block: dict[str, Any], kind: str) -> None:
    renamed = {"rope_type": block["type"]} | {k: v for k, v in block.items() if k != "type"}
    old = from_hf(hf(rope_scaling=block))
    assert old.rope.kind == kind
    assert old.unknown_keys == ()
    assert from_hf(hf(rope_scaling=renamed)) == old
    assert from_hf(hf(rope_scaling=block | renamed)) == old
    assert from_hf(hf(rope_theta=..., rope_parameters=renamed | {"rope_theta": 10000.0})) == old
    assert from_hf(hf(rope_scaling=block, rope_parameters=renamed)) == old


def test_a_null_or_default_rope_block_scales_nothing() -> None:
    plain = from_hf(hf())
    assert plain.rope.kind == "default"
    assert from_hf(hf(rope_scaling=None)) == plain
    assert from_hf(hf(rope_theta=..., rope_parameters={"rope_theta": 10000.0})) == plain
    assert from_hf(hf(rope_parameters={"rope_type": "default"})) == plain


def test_the_original_window_may_stand_outside_the_rope_block() -> None:
    block = {key: value for key, value in LLAMA3_ROPE.items() if not key.startswith("original")}
    outside = hf(rope_scaling=block | {"rope_type": "llama3"}, original_max_position_embeddings=64)
    assert from_hf(outside) == from_hf(hf(rope_scaling=LLAMA3_ROPE | {"rope_type": "llama3"}))


def test_extra_keys_of_a_rope_block_are_collected() -> None:
    model = from_hf(hf(rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 32}))
    assert model.unknown_keys == ("rope_parameters.beta_fast",)


@pytest.mark.parametrize("kind", ["Linear", "ntk-by-parts", 3, ""])
def test_an_unknown_rope_type_is_refused_with_the_known_ones(kind: object) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf(hf(rope_scaling={"rope_type": kind, "factor": 2.0}))
    assert repr(kind) in str(caught.value)
    assert all(f"`{known}`" in str(caught.value) for known in ROPE_KINDS)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
    ],
)
def test_a_rope_block_with_a_key_missing_is_refused(block: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match=f"missing: .*`{key}`"):
        from_hf(hf(rope_scaling=block))


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "linear", "llama3"),
        ({"rope_parameters": {"rope_theta": 500000.0}}, "10000.0", "500000.0"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling.factor",
            "rope_parameters.factor",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "linear",
            "default",
        ),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "torch_dtype", "bfloat16"),
        ({"num_key_value_heads": 3}, "num_attention_heads", "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size", "num_attention_heads"),
        ({"model_type": "mistral"}, "architectures", "model_type"),
        ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers", "layer_types"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3", "low_freq_factor": 8.0}},
            "low_freq_factor",
            "high_freq_factor",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_both_named(
    changes: dict[str, Any], first: str, second: str
) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf(hf(**changes))
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pretraining_tp", 2),
        ("hidden_act", "quick_gelu"),
        ("sliding_window", 64),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 8.0),
        ("num_local_experts", 8),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("is_encoder_decoder", True),
        ("rope_interleaved", True),
        ("use_qk_norm", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_key_that_would_change_the_maths_is_refused_by_name_and_value(
    key: str, value: object
) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf(hf(**{key: value}))
    assert f"`{key}`" in str(caught.value)
    assert str(value)[:40] in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pretraining_tp", 1),
        ("hidden_act", "swish"),
        ("num_local_experts", 0),
        ("quantization_config", None),
        ("layer_types", ["full_attention", "full_attention"]),
        ("sliding_window", 128),
        ("logits_scaling", 1.0),
    ],
)
def test_a_value_that_changes_nothing_is_accepted(key: str, value: object) -> None:
    assert from_hf(hf(**{key: value})) == from_hf(hf())


def test_an_absent_sliding_window_is_mistrals_default() -> None:
    assert MistralConfig().sliding_window == 4096
    windowed = from_hf(mistral(max_position_embeddings=8192))
    assert [windowed.window_of(layer) for layer in range(2)] == [4096, 4096]


@pytest.mark.parametrize("window", [None, 8192, 10000])
def test_a_window_that_no_position_leaves_is_none(window: int | None) -> None:
    config = from_hf(mistral(max_position_embeddings=8192, sliding_window=window))
    assert config.sliding_window is None
    assert [config.window_of(layer) for layer in range(2)] == [0, 0]


def test_a_switched_off_sliding_window_is_accepted() -> None:
    assert from_hf(hf(use_sliding_window=False, sliding_window=8)).sliding_window is None


def test_biases_in_mistral_are_refused() -> None:
    with pytest.raises(SpecError, match="attention_bias"):
        from_hf(mistral(attention_bias=True))


REQUIRED = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("key", [*REQUIRED, "intermediate_size"])
@pytest.mark.parametrize("value", [..., None, 0, -1, 2.5, "64", True, [64]])
def test_a_size_that_is_missing_or_impossible_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"`{key}`"):
        from_hf(hf(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("architectures", ["LlamaForCausalLM", "MistralForCausalLM"]),
        ("architectures", [None]),
        ("head_dim", 0),
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", math.nan),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("torch_dtype", "int8"),
        ("torch_dtype", 16),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("bos_token_id", [1, 2]),
        ("sliding_window", -1),
    ],
)
def test_an_impossible_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"`{key}`"):
        from_hf(hf(**{key: value}))


@pytest.mark.parametrize("factor", [0.5, 0, math.inf, "2", True])
def test_an_impossible_rope_factor_is_refused(factor: object) -> None:
    with pytest.raises(SpecError, match="`factor`"):
        from_hf(hf(rope_scaling={"type": "linear", "factor": factor}))


@pytest.mark.parametrize("fraction", [2.0, 0, 0.01, 0.2])
def test_a_rotated_part_that_is_odd_or_wider_than_the_head_is_refused(fraction: float) -> None:
    with pytest.raises(SpecError, match="`partial_rotary_factor`"):
        from_hf(hf(partial_rotary_factor=fraction))


def test_a_family_with_unknown_defaults_must_state_every_key() -> None:
    complete = hf(architectures=["OtherForCausalLM"], model_type="other", tie_word_embeddings=False)
    assert from_hf(complete).architecture == "OtherForCausalLM"
    for key in ("tie_word_embeddings", "rms_norm_eps", "rope_theta", "num_key_value_heads"):
        with pytest.raises(SpecError, match=f"`{key}`"):
            from_hf({name: value for name, value in complete.items() if name != key})


def judge_frequencies(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config))
    return embedding.inv_freq.double(), float(embedding.attention_scaling)


def rope_block(kind: str, rng: random.Random, pairs: int) -> dict[str, Any] | None:
    """Draw a rope block of a kind."""
    block: dict[str, Any] = {"rope_type": kind, "factor": rng.uniform(1, 40)}
    original = rng.choice([32, 2048, 8192])
    if kind == "default":
        return None
    if kind == "llama3":
        low = rng.uniform(0.5, 4)
        block |= {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.1, 8)}
    if kind == "yarn":
        optional = {
            "beta_fast": rng.uniform(20, 40),
            "beta_slow": rng.uniform(0.5, 4),
            "attention_factor": rng.uniform(0.5, 2),
            "truncate": rng.random() < 0.5,
        }
        block |= {key: value for key, value in optional.items() if rng.random() < 0.5}
        if rng.random() < 0.5:
            block |= {"mscale": rng.uniform(0.5, 2), "mscale_all_dim": rng.uniform(0.5, 2)}
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            block[key] = [rng.uniform(1, 30) for _ in range(pairs)]
        if rng.random() < 0.5:
            del block["factor"]
    if kind in ("llama3", "yarn", "longrope"):
        block["original_max_position_embeddings"] = original
    return block


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_frequencies_equal_transformers(kind: str, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    # The judge computes in float32, in which llama3 subtracts near numbers, then multiplies.
    rtol = 3e-4 if kind in ("llama3", "yarn") else 1e-5
    for _ in range(25):
        head_dim = 2 * rng.randint(2, 128)
        config = hf(
            head_dim=head_dim,
            rope_theta=10 ** rng.uniform(2, 7),
            max_position_embeddings=10**5,
            rope_scaling=rope_block(kind, rng, head_dim // 2),
        )
        model = from_hf(config)
        judge, judge_scaling = judge_frequencies(config)
        ours = torch.tensor(rope_inverse_frequencies(model.rope)).double()
        torch.testing.assert_close(ours, judge, rtol=rtol, atol=0)
        assert rope_attention_factor(model.rope) == pytest.approx(judge_scaling, rel=1e-6)
        if kind in ROPE_INIT_FUNCTIONS:
            initialise, long = ROPE_INIT_FUNCTIONS[kind], kind == "longrope"
            direct, _ = initialise(LlamaConfig(**config), torch.device("cpu"), 10**5)
            ours = torch.tensor(rope_inverse_frequencies(model.rope, is_long=long)).double()
            torch.testing.assert_close(ours, direct.double(), rtol=rtol, atol=0)


def test_a_partial_rotation_covers_the_first_part_of_the_head() -> None:
    model = from_hf(hf(head_dim=32, partial_rotary_factor=0.5))
    assert model.rope.rotary_dim == 16
    whole = from_hf(hf(head_dim=16))
    assert rope_inverse_frequencies(model.rope) == rope_inverse_frequencies(whole.rope)


def test_llama3_ratios_are_those_worked_out_by_hand() -> None:
    plain = from_hf(hf()).rope
    scaled = from_hf(hf(rope_scaling=LLAMA3_ROPE | {"rope_type": "llama3"})).rope
    ratios = [
        after / before
        for before, after in zip(
            rope_inverse_frequencies(plain), rope_inverse_frequencies(scaled), strict=True
        )
    ]
    assert ratios == pytest.approx([1, 0.7728, 0.1304, *[0.125] * 5], abs=5e-5)
