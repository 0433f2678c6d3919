"""Weights filled after programs know their addresses: the same values, in turn with captures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_family, write_gguf
from treadle.ir.errors import CheckpointError
from treadle.ir.graph import Weight
from treadle.ir.pipeline import run_passes
from treadle.models.config import from_hf
from treadle.models.registry import build_graph
from treadle.runtime import pending_weights, upload
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.pending_weights import PendingWeights, can_be_pending
from treadle.runtime.weights import load_weights, plan_weights

WINDOW = 64
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Joined parts, alternating halves, tied heads; sections by head; pairs of neighbours; experts one
# by one, and as one tensor with swapped axes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "cohere2": {},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 40, **EXPERTS},
}


def declared(checkpoint: Checkpoint, dtype: str) -> tuple[Weight, ...]:
    """Give the weights of the model's fused graph."""
    graph = build_graph(from_hf(checkpoint.config), step="mixed", dtype=dtype, page_size=16)
    return run_passes(graph, few_tokens=False)[0].weights


def make(path: Path, family: str, seed: int) -> Checkpoint:
    model_type = family.partition(",")[0]
    made = make_family(path, model_type, seed=seed % 1000, head_dim=16, **FAMILIES[family])
    return open_checkpoint(made)


def pend(checkpoint: Checkpoint, device: str = "cpu", dtype: str = "f32") -> PendingWeights:
    weights = declared(checkpoint, dtype)
    return PendingWeights(
        weights,
        plan_weights(weights, checkpoint, pytest.fail),
        checkpoint,
        device=torch.device(device),
        max_context_tokens=WINDOW,
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "BLOCK_BYTES", 1000)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_filled_weights_are_those_that_are_loaded_at_once(
    tmp_path: Path, rng_seed: int, device: str, family: str, dtype: str
) -> None:
    """The files hold f32: in bf16 every tensor has to be cast on its way."""
    checkpoint = make(tmp_path, family, rng_seed)
    pending = pend(checkpoint, device, dtype)
    addresses = {name: tensor.data_ptr() for name, tensor in pending.tensors.items()}
    pending.fill(threading.Lock())
    expected = load_weights(
        declared(checkpoint, dtype),
        checkpoint,
        device=torch.device(device),
        max_context_tokens=WINDOW,
    )
    assert pending.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(pending.tensors[name], tensor), name
        assert pending.tensors[name].data_ptr() == addresses[name], name
    shared = [{w.data_ptr() for w in of.values()} for of in (pending.tensors, expected)]
    assert len(shared[0]) == len(shared[1])


def test_weights_are_zeros_until_they_are_filled(tmp_path: Path, rng_seed: int) -> None:
    pending = pend(make(tmp_path, "llama", rng_seed))
    assert not pending.tensors["embed"].any()


def test_a_tensor_that_is_stored_as_it_is_used_goes_straight_to_its_place(
    tmp_path: Path, rng_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only gate and up, whose rows alternate, pass through memory of their own."""
    arranged: list[tuple[str, ...]] = []
    assemble = pending_weights.assemble

    def note(recipe: Any, *arguments: Any) -> torch.Tensor:
        arranged.append(recipe.names)
        return assemble(recipe, *arguments)

    monkeypatch.setattr(pending_weights, "assemble", note)
    pending = pend(make(tmp_path, "llama", rng_seed))
    pending.fill(threading.Lock())
    assert arranged == [("layers.0.gate_up",), ("layers.1.gate_up",)]
    halves = 2 * 128 * 64 * 4
    assert pending.passing_bytes == upload.AHEAD_BYTES + halves + 3 * halves + halves // 2


def test_nothing_is_allocated_while_a_capture_has_its_turn(tmp_path: Path, rng_seed: int) -> None:
    """Blocks go on arriving meanwhile, and the rest comes when the turn is over."""
    checkpoint = make(tmp_path, "llama", rng_seed)
    pending = pend(checkpoint)
    allocating = threading.Lock()
    filling = threading.Thread(target=pending.fill, args=(allocating,))
    with allocating:
        filling.start()
        filling.join(timeout=0.5)
        assert filling.is_alive()
        name = "model.embed_tokens.weight"
        assert torch.equal(pending.tensors["embed"], checkpoint.tensor(name))
        assert not pending.tensors["layers.1.gate_up"].any()
    filling.join(timeout=60)
    assert not filling.is_alive() and pending.tensors["layers.1.gate_up"].any()


def test_filling_stops_when_nobody_wants_it_any_more(tmp_path: Path, rng_seed: int) -> None:
    pending = pend(make(tmp_path, "llama", rng_seed))
    pending.fill(threading.Lock(), lambda: True)
    assert not pending.tensors["layers.1.gate_up"].any()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_no_number_is_told_with_its_tensor(
    tmp_path: Path, rng_seed: int, name: str, value: float, at_once: bool
) -> None:
    make(tmp_path, "llama", rng_seed)
    file, name = tmp_path / "model.safetensors", f"model.layers.1.{name}.weight"
    tensors = load_file(file)
    tensors[name][3, 5] = value
    save_file(tensors, file, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"`{name}` .* holds NaN or infinite values"):
        if at_once:
            load_weights(
                declared(checkpoint, "f32"),
                checkpoint,
                device=torch.device("cpu"),
                max_context_tokens=WINDOW,
            )
        else:
            pend(checkpoint).fill(threading.Lock())


def test_a_number_that_the_dtype_does_not_hold_is_told(tmp_path: Path, rng_seed: int) -> None:
    make(tmp_path, "llama", rng_seed)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name][3, 5] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"`{name}` .* values as torch.float16"):
        pend(open_checkpoint(tmp_path), dtype="f16").fill(threading.Lock())


def test_values_that_have_to_be_computed_are_not_left_for_later(
    tmp_path: Path, rng_seed: int
) -> None:
    """What they pass through can't be told before, so it can't be left free for them."""
    stored = make(tmp_path / "model", "llama", rng_seed)
    widened = open_checkpoint(write_gguf(tmp_path / "model", tmp_path / "model.gguf"))
    for checkpoint, expected in ((stored, True), (widened, False)):
        recipes = plan_weights(declared(checkpoint, "f32"), checkpoint, pytest.fail)
        assert can_be_pending(recipes, checkpoint) is expected
