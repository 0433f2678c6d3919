"""The accuracy harness: what it measures is what attention and the model make of stored numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.checkpoints import load_oracle, make_llama, oracle_logits
from treadle.models.registry import build_graph, read_config
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.quality import (
    FORMS,
    KINDS,
    attention_error,
    compare_text,
    hadamard,
    play_text,
    synthetic,
)
from treadle.runtime.weights import load_weights


def error(form: str, kind: str, **options: bool) -> float:
    return attention_error(
        FORMS[form], *synthetic(kind, tokens=512, head_dim=128, seed=3), **options
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_a_finite_error_for_every_kind_of_keys(form: str, kind: str) -> None:
    assert math.isfinite(error(form, kind))


def test_int8_keeps_gaussian_attention_within_two_percent() -> None:
    assert error("int8", "gaussian") < 0.02


def test_outliers_ruin_int4_keys_by_token_and_not_those_by_channel() -> None:
    by_token = error("int4 by token", "outliers 50", quantises_values=False)
    rotated = error("int4 by token with keys rotated", "outliers 50", quantises_values=False)
    by_channel = error("int4", "outliers 50", quantises_values=False)
    assert by_channel < 0.12 < rotated < by_token / 2


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_outliers_cost_the_formats_of_the_cache_nothing(form: str) -> None:
    assert error(form, "outliers 100") < 1.1 * error(form, "gaussian")


def test_no_format_of_four_bits_can_be_better_than_rate_distortion_allows() -> None:
    # A Gaussian source at R bits has a relative error of at least 2 ** -R.
    assert error("int4 of values alone", "gaussian") > 2**-4


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_rotation_changes_no_score(head_dim: int) -> None:
    rotation = hadamard(head_dim)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(head_dim))


def test_bits_per_element_are_those_of_the_pages() -> None:
    # Codes; two f16 per channel of a page of 64 tokens; one or two per token of 128 features.
    assert FORMS["int8"].bits == 8 + (32 / 64 + 16 / 128) / 2
    assert FORMS["int4"].bits == 4 + (32 / 64 + 32 / 128) / 2


def test_a_text_is_played_as_the_model_is_defined(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    checkpoint = open_checkpoint(model)
    config = read_config(checkpoint.config)
    graph = build_graph(config, step="mixed", dtype="f32", page_size=16)
    weights = load_weights(
        graph.weights, checkpoint, device=torch.device("cpu"), max_context_tokens=128
    )
    tokens = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(rng_seed))
    with torch.inference_mode():
        logits = play_text(graph, weights, tokens.tolist())
    expected = oracle_logits(load_oracle(model), tokens.tolist())
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    windows = [tokens.tolist()]
    found = dict(compare_text(graph, weights, windows, [FORMS["int8"], FORMS["int4"]]))
    int8, int4 = found[FORMS["int8"]], found[FORMS["int4"]]
    assert 0 < int8.kl_divergence < int4.kl_divergence
    assert int8.plain_perplexity == int4.plain_perplexity
    assert 64 <= int4.agreement_tokens <= 99  # the first page is open for its own tokens
