"""Qwen2 against transformers: biases of q, k and v alone."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.models.families import FamilyTests
from treadle.ir.errors import SpecError
from treadle.models.config import from_hf

RATIO_3 = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72}
SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}


class TestQwen2(FamilyTests):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    cases: ClassVar = {
        "plain": {},
        "tied, ratio 3": {**RATIO_3, "tie_word_embeddings": True},
        "second layer with a window": {
            "sliding_window": 20,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    }


def test_q_k_and_v_have_biases_and_the_output_has_none() -> None:
    config = from_hf(SIZES)
    assert config.qkv_bias and not config.output_bias and not config.mlp_bias


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_a_bias_that_the_architecture_does_not_have_is_refused(key: str) -> None:
    with pytest.raises(SpecError, match=f"`{key}` = true"):
        from_hf({**SIZES, key: True})


def test_a_window_is_used_only_where_the_config_says_so() -> None:
    assert from_hf({**SIZES, "sliding_window": 64}).sliding_window is None
    used = {**SIZES, "sliding_window": 64, "use_sliding_window": True}
    assert from_hf(used).sliding_layers == ()
    config = from_hf({**used, "max_window_layers": 1})
    assert [config.window_of(layer) for layer in range(2)] == [0, 64]
