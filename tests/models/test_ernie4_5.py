"""ERNIE 4.5 against transformers: neighbours rotate as pairs."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.models.families import FamilyTests
from treadle.kernels.reference.rope import rope
from treadle.runtime.weights import pair_halves


class TestErnie4p5(FamilyTests):
    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    cases: ClassVar = {
        "biased": {"head_dim": 16, "use_bias": True},
        "untied": {"head_dim": 24, "tie_word_embeddings": False},
    }


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 8), (6, 4)])
def test_reordered_heads_rotated_by_halves_are_heads_rotated_by_neighbours_reordered(
    head_dim: int, rotary_dim: int, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, table = torch.randn(5, 3 * head_dim), torch.randn(9, rotary_dim)
    positions = torch.tensor([0, 8, 1, 4, 4], dtype=torch.int32)

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        return pair_halves(rows.T, (3 * head_dim, head_dim, rotary_dim)).T

    rotated = rope(x, positions, table, head_dim=head_dim, interleaved=True)
    halves = rope(reorder(x), positions, table, head_dim=head_dim)
    torch.testing.assert_close(reorder(rotated), halves)
    assert not torch.allclose(rotated, rope(x, positions, table, head_dim=head_dim))


def test_rows_beyond_the_rotated_heads_stay_where_they_are(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    rows = torch.randn(12)
    assert torch.equal(pair_halves(rows, (8, 4, 4))[8:], rows[8:])
    assert pair_halves(rows, (8, 4, 4)).tolist()[:4] == rows[[0, 2, 1, 3]].tolist()
