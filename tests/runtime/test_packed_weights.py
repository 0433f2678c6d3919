"""In which dtype the CPU's target holds what it multiplies by, and what it says of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, make_llama, oracle_greedy
from tests.runtime.serving import answers, compile_tiny, serving
from treadle.ir.errors import ConfigError, MachineError
from treadle.kernels.reference.linears import Float16Weight, can_pack_float16
from treadle.runtime import packed_weights
from treadle.runtime.config import EngineConfig
from treadle.runtime.loading import LoadedArtifact, ServeOptions, load_artifact, load_model
from treadle.runtime.packed_weights import PackedWeights, check_weight_dtype
from treadle.runtime.reference_program import ReferenceProgram

FLOAT32 = EngineConfig("reference", "f32")
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
NUM_MATRICES = 9  # qkv, o, gate-up and down of two layers, and the head

needs_fbgemm = pytest.mark.skipif(not can_pack_float16(), reason="torch has no FBGEMM here")


def load(tmp_path: Path, model: Path, weight_dtype: str = "auto") -> LoadedArtifact:
    artifact = compile_tiny(model, tmp_path / "artifact")
    return load_artifact(artifact, ServeOptions(num_pages=4, weight_dtype=weight_dtype))


def held(loaded: LoadedArtifact) -> PackedWeights:
    assert loaded.packed is not None
    return loaded.packed


def in_float16(packed: PackedWeights) -> set[str]:
    both = {**packed.linears, **packed.glus}
    return {name for name, weight in both.items() if isinstance(weight, Float16Weight)}


def change(model: Path, **tensors: torch.Tensor) -> None:
    """Replace tensors of a checkpoint; a double underscore stands for a dot."""
    file = model / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, metadata={"format": "pt"})


@needs_fbgemm
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True])
def test_weights_stored_in_16_bits_are_held_in_float16(
    tmp_path: Path, tie: bool, dtype: str
) -> None:
    packed = held(load(tmp_path, make_llama(tmp_path / "model", dtype=dtype, tie=tie)))
    assert len(in_float16(packed)) == NUM_MATRICES
    assert packed.describe() == "matrices in float16"


def test_weights_stored_in_float32_are_held_in_it(tmp_path: Path) -> None:
    packed = held(load(tmp_path, make_llama(tmp_path / "model")))
    assert not in_float16(packed)
    assert packed.describe() == "matrices in float32 (float16 would round them)"


@needs_fbgemm
def test_a_matrix_with_a_part_stored_in_float32_is_held_in_it(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", dtype="bfloat16")
    stored = load_file(model / "model.safetensors")[UP_PROJ]
    change(model, **{UP_PROJ: stored.float()})
    packed = held(load(tmp_path, model))
    assert (
        packed.describe()
        == "8 of 9 matrices in float16, the others in float32 (float16 would round them)"
    )


@needs_fbgemm
def test_weights_stored_in_float32_are_held_in_float16_on_demand(tmp_path: Path) -> None:
    packed = held(load(tmp_path, make_llama(tmp_path / "model"), "float16"))
    assert len(in_float16(packed)) == NUM_MATRICES


def test_weights_stored_in_16_bits_are_held_in_float32_on_demand(tmp_path: Path) -> None:
    packed = held(load(tmp_path, make_llama(tmp_path / "model", dtype="float16"), "float32"))
    assert not in_float16(packed)
    assert packed.describe() == "matrices in float32 (as asked for)"


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """A model with one number that bfloat16 holds and float16 does not."""
    model = make_llama(tmp_path / "model", dtype="bfloat16")
    weight = load_file(model / "model.safetensors")[UP_PROJ]
    weight[3, 5] = 1e5
    change(model, **{UP_PROJ: weight})
    return model


@needs_fbgemm
def test_a_matrix_beyond_float16_is_held_in_float32(tmp_path: Path, overflowing: Path) -> None:
    packed = held(load(tmp_path, overflowing))
    (odd,) = {*packed.linears, *packed.glus} - in_float16(packed)
    assert "layers.0" in odd and packed.why_float32[odd] == "float16 would round them"


@needs_fbgemm
def test_float16_is_refused_for_a_matrix_beyond_it(tmp_path: Path, overflowing: Path) -> None:
    with pytest.raises(ConfigError, match=r"`layers\.0\..*` holds numbers beyond its range"):
        load(tmp_path, overflowing, "float16")


@pytest.mark.parametrize("weight_dtype", ["float16", "float32"])
@pytest.mark.parametrize("target", ["cuda", "interpret"])
def test_other_targets_refuse_to_choose(target: str, weight_dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"the target {target}"):
        check_weight_dtype(weight_dtype, replace(FLOAT32, target=target))


def test_an_engine_that_computes_in_16_bits_refuses_to_choose() -> None:
    with pytest.raises(ConfigError, match="compiled for bf16"):
        check_weight_dtype("float16", replace(FLOAT32, dtype="bf16"))


def test_an_unknown_weight_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, float32, float16, not `int8`"):
        ServeOptions(weight_dtype="int8")


def test_without_fbgemm_float16_is_refused_and_auto_is_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "can_pack_float16", lambda: False)
    with pytest.raises(MachineError, match="no FBGEMM"):
        check_weight_dtype("float16", FLOAT32)
    packed = held(load(tmp_path, make_llama(tmp_path / "model", dtype="float16")))
    assert packed.describe() == "matrices in float32 (torch has no FBGEMM here)"


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("weight_dtype", ["float32", "auto"])
def test_programs_keep_no_weight_that_they_read_packed(
    tmp_path: Path, weight_dtype: str, tie: bool
) -> None:
    loaded = load(tmp_path, make_llama(tmp_path / "model", dtype="float16", tie=tie), weight_dtype)
    packed = held(loaded)
    only_packed = {*packed.linears, *packed.glus} - ({"lm_head"} if tie else set())
    addresses = {loaded.weights[name].data_ptr() for name in only_packed}
    for program in loaded.programs.values():
        assert isinstance(program, ReferenceProgram)
        kept = {weight.data_ptr() for weight in program.weights}
        assert loaded.weights["embed"].data_ptr() in kept
        assert not (kept & addresses) - {loaded.weights["embed"].data_ptr()}
    beside = sum(
        w.nbytes for n, w in loaded.weights.items() if n not in {*packed.linears, *packed.glus}
    )
    assert loaded.weight_bytes == packed.num_bytes + beside


@needs_fbgemm
def test_the_summary_says_how_weights_are_held(tmp_path: Path) -> None:
    artifact = compile_tiny(make_llama(tmp_path / "model", dtype="float16"), tmp_path / "artifact")
    summary = load_model(artifact, ServeOptions(num_pages=4)).summary
    assert summary["weights"] == "0 MiB, matrices in float16"
    assert "packing weights as float16" in summary["start-up"]


@needs_fbgemm
@pytest.mark.parametrize("weight_dtype", ["auto", "float32"])
def test_weights_stored_in_float16_answer_as_in_transformers(
    tmp_path: Path, weight_dtype: str, rng_seed: int
) -> None:
    model = make_llama(
        tmp_path / "model", dtype="float16", tie=True, window=320, seed=rng_seed % 1000
    )
    artifact = compile_tiny(model, tmp_path / "artifact", max_step_tokens=256)
    oracle = load_oracle(model)
    oracle.generation_config.eos_token_id = None
    torch.manual_seed(rng_seed)
    prompts = [torch.randint(0, 250, (length,)).tolist() for length in (1, 17, 210)]

    async def run() -> list[list[int]]:
        async with serving(artifact, num_pages=64, weight_dtype=weight_dtype) as engine:
            options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
            return [list(found.token_ids) for found in await answers(engine, prompts, **options)]

    assert asyncio.run(run()) == [oracle_greedy(oracle, prompt, 8) for prompt in prompts]
