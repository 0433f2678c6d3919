"""SmolLM3 against transformers: some layers have no RoPE."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.models.families import FamilyTests
from treadle.ir.errors import SpecError
from treadle.models.config import from_hf
from treadle.models.registry import build_graph

SIZES = {
    "architectures": ["SmolLM3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}


class TestSmolLM3(FamilyTests):
    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    cases: ClassVar = {
        "second layer without": {"no_rope_layers": [1, 0]},
        "every other layer, untied": {
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        },
    }


def test_the_list_wins_over_the_interval_and_the_default_is_every_fourth() -> None:
    assert from_hf(SIZES).no_rope_layers == (3,)
    assert from_hf({**SIZES, "no_rope_layer_interval": 2}).no_rope_layers == (1, 3)
    listed = {"no_rope_layers": [0, 1, 1, 1, 0, 0], "no_rope_layer_interval": 2}
    assert from_hf({**SIZES, **listed}).no_rope_layers == (0, 4)


@pytest.mark.parametrize("flags", [[1, 0], [1, 1, 1, 1, 2], "10110", []])
def test_a_list_that_does_not_fit_the_layers_is_refused(flags: object) -> None:
    with pytest.raises(SpecError, match="`no_rope_layers`"):
        from_hf({**SIZES, "no_rope_layers": flags})


@pytest.mark.parametrize(("flag", "tables"), [(0, {"no_rope"}), (1, {"rope"})])
def test_layers_of_one_kind_need_one_table(flag: int, tables: set[str]) -> None:
    config = from_hf({**SIZES, "no_rope_layers": [flag] * 5})
    graph = build_graph(config, step="mixed", dtype="f32", page_size=16)
    assert {weight.name for weight in graph.weights if weight.rope} == tables
