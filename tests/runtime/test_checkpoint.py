"""Opening Hugging Face folders: every tensor as transformers sees it, every damage as an error."""

from __future__ import annotations

import json
import random
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_json, load_oracle, make_llama, split_into_shards
from treadle.ir.errors import CheckpointError
from treadle.models.config import from_hf
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.safetensors_source import DTYPES

SHARD_2 = "model-00002-of-00003.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def whole(tmp_path: Path, rng_seed: int) -> Path:
    return make_llama(tmp_path / "whole", seed=rng_seed, with_tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path, rng_seed: int) -> Path:
    return make_llama(tmp_path / "sharded", seed=rng_seed, shards=3, with_tokenizer=False)


def assert_equals_oracle(checkpoint: Checkpoint, folder: Path) -> None:
    state = load_oracle(folder).state_dict()
    assert checkpoint.names() <= set(state)
    for name in checkpoint.names():
        assert checkpoint.shape(name) == tuple(state[name].shape)
        assert checkpoint.tensor(name).dtype == checkpoint.dtype(name)
        assert torch.equal(checkpoint.tensor(name).float(), state[name])


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_equal_what_transformers_loads(
    tmp_path: Path, rng_seed: int, shards: int, dtype: str
) -> None:
    make_llama(tmp_path, seed=rng_seed, shards=shards, dtype=dtype, with_tokenizer=False)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kind == "safetensors"
    assert len(checkpoint.names()) == 2 * 9 + 3
    assert checkpoint.dtype(Q_PROJ) == getattr(torch, dtype)
    assert from_hf(checkpoint.config).dtype == dtype
    assert_equals_oracle(checkpoint, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_config_reads_into_the_sizes_that_were_asked_for(tmp_path: Path, architecture: str) -> None:
    make_llama(
        tmp_path,
        num_layers=3,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=3,
        head_dim=24,
        intermediate_size=40,
        architecture=architecture,  # type: ignore[arg-type]
        tie=True,
    )
    checkpoint = open_checkpoint(tmp_path)
    model = from_hf(checkpoint.config)
    assert (model.num_layers, model.hidden_size, model.head_dim) == (3, 48, 24)
    assert (model.num_heads, model.num_kv_heads, model.intermediate_size) == (6, 3, 40)
    assert model.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.names()
    assert checkpoint.generation_config["eos_token_id"] == model.eos_token_ids[0]
    assert_equals_oracle(checkpoint, tmp_path)


def test_biases_appear_under_their_names(tmp_path: Path) -> None:
    make_llama(tmp_path, attention_bias=True, mlp_bias=True, with_tokenizer=False)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("model.layers.1.self_attn.k_proj.bias") == (32,)
    assert checkpoint.shape("model.layers.1.mlp.down_proj.bias") == (64,)
    assert_equals_oracle(checkpoint, tmp_path)


def test_a_missing_generation_config_is_empty(whole: Path) -> None:
    (whole / "generation_config.json").unlink(missing_ok=True)
    assert open_checkpoint(whole).generation_config == {}


def test_the_weights_say_the_dtype_where_the_config_does_not(tmp_path: Path) -> None:
    make_llama(tmp_path, dtype="float16", with_tokenizer=False)
    edit_json(tmp_path / "config.json", {}, drop=["dtype", "torch_dtype"])
    assert open_checkpoint(tmp_path).config["torch_dtype"] == "float16"
    edit_json(tmp_path / "config.json", {"dtype": "bfloat16"})
    assert "torch_dtype" not in open_checkpoint(tmp_path).config


def test_shards_without_an_index_are_found(sharded: Path) -> None:
    expected = open_checkpoint(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    found = open_checkpoint(sharded)
    assert found.names() == expected.names()
    assert found.fingerprint() == expected.fingerprint()


def test_a_single_file_of_another_name_is_found(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "weights.safetensors")
    assert Q_PROJ in open_checkpoint(whole).names()


def test_an_index_of_one_whole_file_is_accepted(whole: Path) -> None:
    index = {"weight_map": dict.fromkeys(open_checkpoint(whole).names(), "model.safetensors")}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Q_PROJ in open_checkpoint(whole).names()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_of_the_table_reads_back(whole: Path, dtype: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, DTYPES[dtype].name))
    save_file({"extra": tensor}, whole / "model.safetensors")
    checkpoint = open_checkpoint(whole)
    assert checkpoint.dtype("extra") == tensor.dtype
    assert checkpoint.is_narrow("extra") == (tensor.element_size() <= 2)
    assert torch.equal(checkpoint.tensor("extra").float(), tensor.float())


def test_threads_may_read_at_once(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    names = sorted(checkpoint.names()) * 8
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda name: checkpoint.tensor(name).sum().item(), names))
    assert sums == [checkpoint.tensor(name).sum().item() for name in names]


def test_an_unknown_tensor_is_refused_with_the_nearest_names(whole: Path) -> None:
    checkpoint = open_checkpoint(whole)
    for read in (checkpoint.shape, checkpoint.dtype, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight"):
            read("model.layers.0.self_attn.q_prj.weight")


# What can be wrong with a folder: the damage, and what the error must name.


def delete_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_config_in_half(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def write_a_list_as_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def write_config_in_latin_1(folder: Path) -> None:
    (folder / "config.json").write_bytes('{"_name_or_path": "modèle"}'.encode("latin-1"))


def repeat_a_config_key(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"hidden_size": 1, ', 1))


def break_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def delete_a_shard(folder: Path) -> None:
    (folder / SHARD_2).unlink()


def delete_a_shard_and_the_index(folder: Path) -> None:
    delete_a_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def delete_all_shards(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def leave_only_a_pytorch_file(folder: Path) -> None:
    delete_all_shards(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def cut_a_shard(folder: Path) -> None:
    content = (folder / SHARD_2).read_bytes()
    (folder / SHARD_2).write_bytes(content[:-1])


def empty_a_shard(folder: Path) -> None:
    (folder / SHARD_2).write_bytes(b"")


def lengthen_a_shard(folder: Path) -> None:
    with (folder / SHARD_2).open("ab") as stream:
        stream.write(b"\0" * 16)


def fill_a_shard_with_zeros(folder: Path) -> None:
    (folder / SHARD_2).write_bytes(b"\0" * 1000)


def leave_a_lfs_pointer_as_shard(folder: Path) -> None:
    (folder / SHARD_2).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def leave_a_lfs_pointer_as_config(folder: Path) -> None:
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")


def write_a_header_of_an_unknown_dtype(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / SHARD_2).write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


def write_a_header_whose_shape_and_size_differ(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / SHARD_2).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def put_a_tensor_into_two_shards(folder: Path) -> None:
    tensors = load_file(folder / SHARD_2)
    first = load_file(folder / "model-00001-of-00003.safetensors")
    name = sorted(first)[0]
    save_file(tensors | {name: first[name]}, folder / SHARD_2)


def list_a_tensor_twice(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    extra = '"weight_map": {"lm_head.weight": "model-00003-of-00003.safetensors", '
    index.write_text(index.read_text().replace('"weight_map": {', extra))


def list_a_tensor_that_no_shard_holds(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, {"weight_map": weight_map | {"model.phantom.weight": SHARD_2}})


def list_a_tensor_in_the_wrong_shard(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, {"weight_map": weight_map | {"lm_head.weight": SHARD_2}})


def point_the_index_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    edit_json(index, {"weight_map": {"lm_head.weight": "../secret.safetensors"}})


def empty_the_index(folder: Path) -> None:
    edit_json(folder / "model.safetensors.index.json", {"weight_map": {}})


def leave_a_whole_file_beside_shards(folder: Path) -> None:
    shutil.copy(folder / SHARD_2, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (delete_config, ["config.json"]),
        (cut_config_in_half, ["config.json", "JSON"]),
        (write_a_list_as_config, ["config.json", "list"]),
        (write_config_in_latin_1, ["config.json", "utf-8"]),
        (repeat_a_config_key, ["config.json", "`hidden_size`", "twice"]),
        (break_generation_config, ["generation_config.json"]),
        (delete_a_shard, [SHARD_2, "index.json"]),
        (delete_a_shard_and_the_index, [SHARD_2, "2 of 3"]),
        (delete_all_shards, ["model.safetensors"]),
        (leave_only_a_pytorch_file, ["save_pretrained"]),
        (cut_a_shard, [SHARD_2, "truncated", "bytes"]),
        (empty_a_shard, [SHARD_2, "0 bytes"]),
        (lengthen_a_shard, [SHARD_2, "longer"]),
        (fill_a_shard_with_zeros, [SHARD_2, "header"]),
        (leave_a_lfs_pointer_as_shard, [SHARD_2, "git lfs pull"]),
        (leave_a_lfs_pointer_as_config, ["config.json", "git lfs pull"]),
        (write_a_header_of_an_unknown_dtype, [SHARD_2, "Q7"]),
        (write_a_header_whose_shape_and_size_differ, [SHARD_2, "8 bytes"]),
        (put_a_tensor_into_two_shards, ["must be in one shard", "model-00001-of-00003", SHARD_2]),
        (list_a_tensor_twice, ["lm_head.weight", "twice"]),
        (list_a_tensor_that_no_shard_holds, ["model.phantom.weight", SHARD_2]),
        (list_a_tensor_in_the_wrong_shard, ["lm_head.weight", SHARD_2, "model-00001-of-00003"]),
        (point_the_index_outside, ["../secret.safetensors"]),
        (empty_the_index, ["weight_map"]),
        (leave_a_whole_file_beside_shards, ["model.safetensors", "index.json"]),
    ],
)
def test_damage_is_named_when_the_folder_is_opened(
    sharded: Path, damage: object, named: list[str]
) -> None:
    open_checkpoint(sharded)  # sound before
    damage(sharded)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(sharded)
    for text in named:
        assert text in str(caught.value)
    assert caught.value.remedy


def test_a_file_cut_anywhere_is_refused_when_opened(whole: Path, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    file = whole / "model.safetensors"
    content = file.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", content[:8])[0]
    lengths = [rng.randrange(len(content)) for _ in range(100)]
    for length in [*range(12), header_bytes - 1, header_bytes, *lengths]:
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(whole)


def test_a_header_with_any_bit_flipped_opens_or_is_refused(whole: Path, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    file = whole / "model.safetensors"
    content = bytearray(file.read_bytes())
    header_bytes = 8 + struct.unpack("<Q", content[:8])[0]
    refused = 0
    for _ in range(300):
        flipped = bytearray(content)
        flipped[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        try:
            checkpoint = open_checkpoint(whole)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("absent", "does not exist"),
        ("org/model", "hf download org/model"),
        ("notes.txt", "another kind of file"),
        ("model.safetensors", "folder that holds it"),
    ],
)
def test_a_path_that_is_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if "." in name:
        Path(name).write_text("text")
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(name)


def test_a_folder_with_a_gguf_file_is_pointed_to_that_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give its own path: .*tiny\.gguf"):
        open_checkpoint(tmp_path)


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_survives_a_move_and_later_times(whole: Path, tmp_path: Path) -> None:
    before = open_checkpoint(whole).fingerprint()
    shutil.copytree(whole, tmp_path / "moved", copy_function=shutil.copyfile)
    assert open_checkpoint(tmp_path / "moved").fingerprint() == before


def test_the_fingerprint_sees_other_weights_of_the_same_shapes(
    tmp_path: Path, rng_seed: int
) -> None:
    for folder, seed in (("one", rng_seed), ("two", rng_seed + 1)):
        make_llama(tmp_path / folder, seed=seed, with_tokenizer=False)
    prints = {open_checkpoint(tmp_path / folder).fingerprint() for folder in ("one", "two")}
    assert len(prints) == 2


def test_the_fingerprint_sees_one_changed_matrix(whole: Path, rng_seed: int) -> None:
    before = open_checkpoint(whole).fingerprint()
    tensors = load_file(whole / "model.safetensors")
    name = random.Random(rng_seed).choice(sorted(tensors))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(whole).fingerprint() != before


def test_the_fingerprint_sees_a_changed_config(whole: Path) -> None:
    before = open_checkpoint(whole).fingerprint()
    edit_json(whole / "config.json", {"rms_norm_eps": 1e-5})
    assert open_checkpoint(whole).fingerprint() != before


def test_splitting_into_shards_keeps_every_tensor(whole: Path) -> None:
    before = open_checkpoint(whole)
    tensors = {name: before.tensor(name).clone() for name in before.names()}
    split_into_shards(whole, 4)
    after = open_checkpoint(whole)
    assert after.names() == set(tensors)
    assert all(torch.equal(after.tensor(name), tensors[name]) for name in tensors)
