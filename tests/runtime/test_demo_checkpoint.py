"""A real GGUF file, SmolLM2-135M in Q4_1: config and every weight as transformers reads them."""

from __future__ import annotations

import gguf
import pytest
import torch

from tests.checkpoints import find_demo_model, load_oracle
from treadle.models.config import from_hf
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(find_demo_model())


def test_its_config_is_the_published_one(checkpoint: Checkpoint) -> None:
    model = from_hf(checkpoint.config)
    assert model.architecture == "LlamaForCausalLM"
    assert (model.num_layers, model.hidden_size, model.intermediate_size) == (30, 576, 1536)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (9, 3, 64)
    assert (model.vocab_size, model.max_position_embeddings) == (49152, 8192)
    assert (model.rope.kind, model.rope.theta) == ("default", 100000.0)
    assert model.norm_eps == 1e-5
    assert model.tie_word_embeddings
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert model.dtype == "bfloat16"
    assert model.unknown_keys == ()


@pytest.fixture(scope="module")
def reader(checkpoint: Checkpoint) -> gguf.GGUFReader:
    return gguf.GGUFReader(checkpoint.path)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_equals_the_librarys_values_in_rotate_half_order(
    checkpoint: Checkpoint, reader: gguf.GGUFReader, projection: str
) -> None:
    stored = next(t for t in reader.tensors if t.name == f"blk.7.attn_{projection[0]}.weight")
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))  # [H * D, E]
    if projection != "v_proj":
        # Row 2i + j of a head in the file is row i of half j.
        rows = torch.arange(64).reshape(32, 2).T.flatten()
        expected = expected.reshape(-1, 64, 576)[:, rows].reshape(expected.shape)
    found = checkpoint.tensor(f"model.layers.7.self_attn.{projection}.weight")
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_every_weight_equals_what_transformers_reads(checkpoint: Checkpoint) -> None:
    state = load_oracle(checkpoint.path.parent, gguf_file=checkpoint.path.name).state_dict()
    assert checkpoint.names() == set(state) - {
        "lm_head.weight"
    }  # tied: one tensor, two names there
    for name in sorted(checkpoint.names()):
        assert checkpoint.shape(name) == tuple(state[name].shape)
        assert torch.equal(checkpoint.tensor(name), state[name]), name
