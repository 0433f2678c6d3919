"""What other engines got wrong about checkpoints: tied heads, RoPE scaling, odd head sizes, fp16.

Tiny Llamas; transformers is the judge of all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import (
    edit_json,
    load_oracle,
    make_random,
    oracle_greedy,
    oracle_logits,
    split_into_shards,
)
from tests.models.families import assert_greedy, assert_logits, prompts_of
from tests.runtime.serving import answer, compile_tiny, serving
from treadle.ir.errors import CheckpointError, RequestError, SpecError, TreadleError
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.loading import ServeOptions, load_artifact

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


# --- tied embeddings ------------------------------------------------------------------------------


def retie(model: Path, head: str, tie: bool | None) -> None:
    """Give a checkpoint a head (`none`, `same`, `other`) and a key that ties it (None: no key)."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(HEAD, None)
    if head != "none":
        same = tensors[EMBED].clone()
        tensors[HEAD] = same if head == "same" else same.flip(0).contiguous()
    save_file(tensors, file, {"format": "pt"})
    keys = {} if tie is None else {"tie_word_embeddings": tie}
    edit_json(model / "config.json", keys, drop=["tie_word_embeddings"] if tie is None else [])


@pytest.mark.parametrize(
    ("head", "tie"),
    [("none", True), ("same", True), ("same", False), ("other", False), ("other", None)],
)
def test_every_spelling_of_a_tied_head_gives_the_logits_of_transformers(
    tmp_path: Path, rng_seed: int, head: str, tie: bool | None
) -> None:
    model = make_random(tmp_path / "model", seed=rng_seed % 1000)
    retie(model, head, tie)
    artifact = compile_tiny(model, tmp_path / "artifact")
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, 9))


def test_a_head_that_is_tied_and_yet_differs_is_kept_as_transformers_keeps_it_and_told(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_random(tmp_path / "model", seed=rng_seed % 1000)
    retie(model, "other", True)
    artifact = compile_tiny(model, tmp_path / "artifact")
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, 9))
    (warning,) = load_artifact(artifact, ServeOptions(num_pages=4)).warnings
    assert f"`{HEAD}` is tied to `{EMBED}`" in warning


def test_a_head_that_is_neither_there_nor_tied_is_named(tmp_path: Path) -> None:
    model = make_random(tmp_path / "model")
    for tie in (False, None):
        retie(model, "none", tie)
        with pytest.raises(CheckpointError, match=f"`{HEAD}`"):
            compile_tiny(model, tmp_path / "artifact")


def test_frequencies_that_older_checkpoints_carry_are_ignored(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_random(tmp_path / "model", seed=rng_seed % 1000)
    file = model / "model.safetensors"
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.randn(8) for i in range(2)}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    artifact = compile_tiny(model, tmp_path / "artifact")
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, 9))


def test_a_shard_that_the_index_lists_and_nobody_has_is_named_before_anything_is_read(
    tmp_path: Path,
) -> None:
    model = make_random(tmp_path / "model")
    split_into_shards(model, 3)
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        open_checkpoint(model)


# --- RoPE scaling ---------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "short_factor": [1.0 + 0.05 * pair for pair in range(8)],
    "long_factor": [1.5 + pair for pair in range(8)],
    "original_max_position_embeddings": 32,
}
BLOCKS: dict[str, dict[str, Any] | None] = {
    "linear": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn without the original window": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "null": None,
}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "both", "rope_parameters"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_spelling_of_rope_scaling_gives_the_logits_of_transformers(
    tmp_path: Path, rng_seed: int, kind: str, spelling: str
) -> None:
    model = make_random(tmp_path / "model", seed=rng_seed % 1000, num_layers=1)
    block = BLOCKS[kind]
    name = kind.partition(" ")[0]
    names = {"type": ["type"], "both": ["type", "rope_type"]}.get(spelling, ["rope_type"])
    spelt = None if block is None else {**block, **dict.fromkeys(names, name)}
    key = "rope_parameters" if spelling == "rope_parameters" else "rope_scaling"
    if key == "rope_parameters" and spelt is not None:
        spelt["rope_theta"] = 10000.0
    edit_json(model / "config.json", {key: spelt}, drop=["rope_parameters"] * (key[5] == "s"))
    artifact = compile_tiny(model, tmp_path / "artifact")
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, 1, 31, 32, 33, 63))


@pytest.mark.parametrize(("window", "lengths"), [(32, (1, 31)), (64, (33, 63))])
def test_longrope_is_that_of_the_window_served(
    tmp_path: Path, rng_seed: int, window: int, lengths: tuple[int, ...]
) -> None:
    scaling = {"rope_type": "longrope", **LONG}
    model = make_random(
        tmp_path / "model", seed=rng_seed % 1000, window=64, rope_scaling=scaling, num_layers=1
    )
    artifact = compile_tiny(model, tmp_path / "artifact", max_context_tokens=window)
    assert_logits(artifact, load_oracle(model), prompts_of(rng_seed, *lengths))


def test_an_unknown_rope_type_is_never_plain_rope(tmp_path: Path) -> None:
    model = make_random(tmp_path / "model")
    edit_json(model / "config.json", {"rope_scaling": {"type": "spiral", "factor": 2.0}})
    with pytest.raises(SpecError, match="spiral"):
        compile_tiny(model, tmp_path / "artifact")


# --- head sizes and ratios ------------------------------------------------------------------------

# (hidden size, heads, KV heads, head size): head sizes that are no powers of two or not hidden size
# / heads, and 7, 9, 3, 1 and 4 heads over a KV head.
SHAPES = [
    *((64, 2, 1, head_dim) for head_dim in (40, 80, 96, 112, 160, 192, 256)),
    (64, 4, 4, 32),
    (112, 14, 2, 16),
    (72, 9, 1, 8),
    (96, 12, 4, 8),
    (64, 4, 1, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_head_size_and_ratio_answers_as_transformers(
    tmp_path: Path, rng_seed: int, shape: tuple[int, int, int, int]
) -> None:
    """A prompt in pieces, prompts beside answers, answers."""
    artifact, oracle = compile_shape(tmp_path, rng_seed, shape, "reference")
    assert_logits(artifact, oracle, prompts_of(rng_seed, 1, 17, 33))
    artifact, oracle = compile_shape(tmp_path / "pieces", rng_seed, shape, "reference", 16)
    assert_greedy(artifact, oracle, prompts_of(rng_seed, 1, 17, 33), 20)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=str(shape), marks=() if index in (1, 8) else pytest.mark.slow)
        for index, shape in enumerate(SHAPES)
    ],
)
def test_emitted_kernels_take_any_head_size_and_ratio(
    tmp_path: Path, rng_seed: int, shape: tuple[int, int, int, int]
) -> None:
    artifact, oracle = compile_shape(tmp_path, rng_seed, shape, "interpret")
    assert_logits(artifact, oracle, prompts_of(rng_seed, 17, 33))
    assert_greedy(artifact, oracle, prompts_of(rng_seed, 17), 3)


def compile_shape(
    folder: Path, seed: int, shape: tuple[int, int, int, int], target: str, step_tokens: int = 64
) -> tuple[Path, Any]:
    hidden_size, num_heads, num_kv_heads, head_dim = shape
    model = make_random(
        folder / "model",
        seed=seed % 1000,
        num_layers=1,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    sizes = {"target": target, "max_rows": 3, "max_step_tokens": step_tokens}
    return compile_tiny(model, folder / "artifact", **sizes), load_oracle(model)


# --- float16 --------------------------------------------------------------------------------------


def loud(path: Path, seed: int) -> Path:
    """Write a model whose stream outgrows float16: twice 40000 is not a float16."""
    model = make_random(path, seed=seed % 1000)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[EMBED] *= 40000.0 / tensors[EMBED].abs().max()
    for layer in range(2):
        # What each layer adds is about as large as the embeddings.
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        tensors[name] *= 20000.0
    save_file(tensors, file, {"format": "pt"})
    edit_json(model / "config.json", {"dtype": "bfloat16"}, drop=["torch_dtype"])
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_stream_that_outgrows_float16_answers_or_fails_and_never_babbles(
    tmp_path: Path, rng_seed: int, dtype: str
) -> None:
    model = loud(tmp_path / "model", rng_seed)
    oracle = load_oracle(model)
    (prompt,) = prompts_of(rng_seed, 9)
    expected = oracle_greedy(oracle, prompt, 1)
    two_best = oracle_logits(oracle, prompt)[-1].topk(2).values
    try:
        artifact = compile_tiny(model, tmp_path / "artifact", dtype=dtype)

        async def run() -> list[int]:
            async with serving(artifact, num_pages=8) as engine:
                return list((await answer(engine, prompt, temperature=0.0, max_tokens=1)).token_ids)

        found = asyncio.run(run())
    except (RequestError, TreadleError) as error:
        assert dtype == "float16", error
        return
    is_close = dtype == "bfloat16" and bool(two_best[0] - two_best[1] < 0.05 * two_best[0].abs())
    assert found == expected or is_close


def test_weights_that_no_float16_holds_are_told_by_name(tmp_path: Path) -> None:
    model = make_random(tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[EMBED][3, 5] = 1e5
    save_file(tensors, file, {"format": "pt"})
    artifact = compile_tiny(model, tmp_path / "artifact", dtype="float16")
    with pytest.raises(CheckpointError, match=EMBED) as caught:
        load_artifact(artifact, ServeOptions(num_pages=4))
    assert "bfloat16" in caught.value.remedy
