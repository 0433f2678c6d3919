"""Opening GGUF files: names, row order, values, config; judged by transformers and gguf."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from tests.checkpoints import (
    load_oracle,
    make_llama,
    oracle_logits,
    write_gguf,
)
from treadle.ir.errors import CheckpointError
from treadle.models.config import from_hf
from treadle.models.rope import rope_inverse_frequencies
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
SIMPLE_QUANTS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def make_pair(
    tmp_path: Path,
    kind: Kind = Kind.F32,
    *,
    gguf_options: dict[str, Any] | None = None,
    **sizes: Any,
) -> tuple[Path, Checkpoint]:
    """Write one model as a folder and as a GGUF file; give the folder and the opened file."""
    folder = make_llama(tmp_path / "hf", with_tokenizer=False, **sizes)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind, **(gguf_options or {}))
    return folder, open_checkpoint(file)


def llama3_divisors(
    original: int, low: float, high: float, factor: float, theta: float, d: int
) -> Any:
    """Tabulate what llama.cpp's converter writes for a llama3 rope, by its own formula."""
    frequencies = theta ** -(np.arange(0, d, 2) / d)
    wavelengths = 2 * np.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    medium = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < original / high, 1.0, medium)
    return np.where(wavelengths > original / low, factor, divisors).astype(np.float32)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 8)])
def test_a_float32_file_gives_back_the_folders_tensors_bit_by_bit(
    tmp_path: Path, rng_seed: int, tie: bool, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    folder, checkpoint = make_pair(
        tmp_path,
        seed=rng_seed,
        tie=tie,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=72,
        attention_bias=True,
        mlp_bias=True,
    )
    expected = load_file(folder / "model.safetensors")
    assert checkpoint.kind == "gguf"
    assert checkpoint.names() == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.tensor(name), tensor), name


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *SIMPLE_QUANTS])
def test_tensors_equal_what_transformers_reads_from_the_file(
    tmp_path: Path, rng_seed: int, kind: Kind
) -> None:
    _, checkpoint = make_pair(tmp_path, kind, seed=rng_seed)
    state = load_oracle(tmp_path, gguf_file="tiny.gguf").state_dict()
    assert checkpoint.names() == set(state)
    for name in checkpoint.names():
        ours = checkpoint.tensor(name)
        assert ours.dtype == checkpoint.dtype(name)
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.float(), state[name], rtol=1e-6, atol=1e-7)


def test_the_files_logits_equal_the_folders_in_transformers(tmp_path: Path, rng_seed: int) -> None:
    folder, checkpoint = make_pair(tmp_path, seed=rng_seed)
    token_ids = random.Random(rng_seed).choices(range(320), k=20)
    model = load_oracle(folder)
    expected = oracle_logits(model, token_ids)
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.names()})
    assert torch.equal(oracle_logits(model, token_ids), expected)


@pytest.mark.parametrize("kind", [*K_QUANTS, Kind.IQ4_NL, Kind.IQ4_XS])
def test_a_quantised_matrix_reads_as_the_library_dequantises_it(
    tmp_path: Path, rng_seed: int, kind: Kind
) -> None:
    # The library can't quantise to these types, so the codes are random, with small scales.
    rng = np.random.default_rng(rng_seed)
    folder = make_llama(tmp_path / "hf", hidden_size=256, with_tokenizer=False)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    codes = rng.integers(0, 60, (128, 256 // block_elements * block_bytes), dtype=np.uint8)
    file = write_gguf(folder, tmp_path / "tiny.gguf", replacements={"blk.0.ffn_up": (codes, kind)})
    found = open_checkpoint(file).tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(codes, kind)))
    assert found.shape == (128, 256)


@pytest.mark.parametrize("rows", [1, 1023, 1025, 5000])
def test_dequantising_in_runs_misses_no_row(tmp_path: Path, rng_seed: int, rows: int) -> None:
    values = np.random.default_rng(rng_seed).standard_normal((rows, 256), dtype=np.float32)
    folder = make_llama(tmp_path / "hf", hidden_size=256, vocab_size=rows, with_tokenizer=False)
    codes = gguf.quantize(values, Kind.Q8_0)
    file = write_gguf(
        folder, tmp_path / "tiny.gguf", replacements={"token_embd": (codes, Kind.Q8_0)}
    )
    found = open_checkpoint(file).tensor("model.embed_tokens.weight")
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(codes, Kind.Q8_0)))


@pytest.mark.parametrize(
    ("kind", "stored", "compute"),
    [
        (Kind.F32, torch.float32, "float32"),
        (Kind.F16, torch.float16, "float16"),
        (Kind.BF16, torch.bfloat16, "bfloat16"),
        (Kind.Q4_1, torch.float32, "bfloat16"),
    ],
)
def test_dtypes_follow_the_type_of_most_weights(
    tmp_path: Path, kind: Kind, stored: torch.dtype, compute: str
) -> None:
    _, checkpoint = make_pair(tmp_path, kind)
    assert checkpoint.dtype(Q_PROJ) == stored
    assert checkpoint.dtype("model.norm.weight") == torch.float32
    assert from_hf(checkpoint.config).dtype == compute


@pytest.mark.parametrize("tie", [False, True])
def test_the_config_reads_as_the_folders_does(tmp_path: Path, rng_seed: int, tie: bool) -> None:
    rng = random.Random(rng_seed)
    folder, checkpoint = make_pair(
        tmp_path,
        num_layers=rng.randint(1, 3),
        num_heads=6,
        num_kv_heads=3,
        head_dim=rng.choice([8, 16, 24]),
        hidden_size=96,
        window=rng.randint(32, 4096),
        rope_theta=float(rng.randint(1000, 10**6)),
        tie=tie,
    )
    assert from_hf(checkpoint.config) == from_hf(open_checkpoint(folder).config)


def test_the_config_reads_as_transformers_reads_the_file(tmp_path: Path) -> None:
    _, checkpoint = make_pair(tmp_path, tie=True)
    judge = load_oracle(tmp_path, gguf_file="tiny.gguf").config.to_dict()
    for key in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "bos_token_id",
        "eos_token_id",
    ):
        assert checkpoint.config[key] == judge[key], key
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(judge["rms_norm_eps"], rel=1e-6)
    assert checkpoint.config["rope_theta"] == judge["rope_parameters"]["rope_theta"]


def test_metadata_that_may_be_absent_has_llama_cpps_defaults(tmp_path: Path) -> None:
    absent = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
    absent += ["rope.freq_base", "vocab_size", "attention.head_count_kv"]
    options = {"metadata": {f"llama.{key}": None for key in absent}}
    folder, checkpoint = make_pair(tmp_path, num_kv_heads=4, gguf_options=options)
    assert from_hf(checkpoint.config) == from_hf(open_checkpoint(folder).config)


def test_every_id_that_ends_a_generation_is_collected(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 261, "tokenizer.ggml.eom_token_id": 257}
    _, checkpoint = make_pair(tmp_path, gguf_options={"metadata": ids})
    assert checkpoint.config["eos_token_id"] == 257
    assert checkpoint.generation_config == {"bos_token_id": 256, "eos_token_id": [257, 261]}


def test_metadata_nobody_reads_shows_among_the_unknown_keys(tmp_path: Path) -> None:
    _, checkpoint = make_pair(tmp_path, gguf_options={"metadata": {"llama.zebra": 3}})
    assert from_hf(checkpoint.config).unknown_keys == ("gguf.llama.zebra",)


@pytest.mark.parametrize(
    ("original", "low", "high", "factor", "theta", "head_dim"),
    [
        (8192, 1.0, 4.0, 8.0, 500000.0, 128),  # Llama 3.1
        (8192, 1.0, 4.0, 32.0, 500000.0, 64),  # Llama 3.2
        (64, 1.0, 4.0, 8.0, 10000.0, 16),
        (4096, 1.0, 8.0, 4.0, 1000000.0, 96),
        (2048, 2.0, 4.0, 16.0, 100000.0, 64),
    ],
)
def test_tabulated_llama3_divisors_give_the_same_frequencies(
    tmp_path: Path,
    original: int,
    low: float,
    high: float,
    factor: float,
    theta: float,
    head_dim: int,
) -> None:
    divisors = llama3_divisors(original, low, high, factor, theta, head_dim)
    _, checkpoint = make_pair(
        tmp_path,
        head_dim=head_dim,
        rope_theta=theta,
        window=131072,
        gguf_options={"extra_tensors": {"rope_freqs.weight": divisors}},
    )
    assert "rope_freqs.weight" not in checkpoint.names()
    model = from_hf(checkpoint.config)
    assert model.rope.kind == "llama3"
    frequencies = np.array(rope_inverse_frequencies(model.rope))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(plain / frequencies, divisors, rtol=1e-4)
    if low == 1.0:
        assert model.rope.original_max_position_embeddings == original
        assert model.rope.high_freq_factor == pytest.approx(high)


def test_the_converters_divisors_match_a_folder_with_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    divisors = llama3_divisors(64, 1.0, 4.0, 8.0, 10000.0, 16)
    options = {"extra_tensors": {"rope_freqs.weight": divisors}}
    folder, checkpoint = make_pair(tmp_path, rope_scaling=scaling, gguf_options=options)
    assert from_hf(checkpoint.config) == from_hf(open_checkpoint(folder).config)


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    options = {"extra_tensors": {"rope_freqs.weight": np.ones(8, dtype=np.float32)}}
    folder, checkpoint = make_pair(tmp_path, gguf_options=options)
    assert from_hf(checkpoint.config) == from_hf(open_checkpoint(folder).config)


def test_divisors_of_another_form_are_refused(tmp_path: Path, rng_seed: int) -> None:
    divisors = np.random.default_rng(rng_seed).uniform(1, 8, 8).astype(np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        make_pair(tmp_path, gguf_options={"extra_tensors": {"rope_freqs.weight": divisors}})


@pytest.mark.parametrize(
    ("metadata", "kind", "factor"),
    [
        ({"llama.rope.scaling.type": "none"}, "default", 1.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"llama.rope.scale_linear": 2.0}, "linear", 2.0),
        ({"llama.rope.scale_linear": 1.0}, "default", 1.0),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            "yarn",
            4.0,
        ),
    ],
)
def test_rope_scaling_in_the_metadata_is_read(
    tmp_path: Path, metadata: dict[str, Any], kind: str, factor: float
) -> None:
    _, checkpoint = make_pair(tmp_path, gguf_options={"metadata": metadata})
    rope = from_hf(checkpoint.config).rope
    assert (rope.kind, rope.factor) == (kind, factor)
    assert rope.original_max_position_embeddings == (32 if kind == "yarn" else None)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.type": "adapter"}, ["adapter"]),
        ({"split.count": 3}, ["3 parts", "--merge"]),
        ({"llama.expert_count": 8}, ["expert_count", "8"]),
        ({"llama.attention.causal": False}, ["attention.causal", "False"]),
        ({"llama.logit_scale": 2.0}, ["logit_scale", "2.0"]),
        ({"llama.rope.scaling.type": "longrope"}, ["rope.scaling.type", "longrope"]),
        ({"llama.rope.scaling.type": "linear"}, ["rope.scaling.factor", "nothing"]),
        ({"llama.rope.dimension_count": 8}, ["rope.dimension_count", "8"]),
        ({"llama.attention.value_length": 32}, ["attention.value_length", "32"]),
        ({"llama.attention.head_count": 8}, ["attn", "q_proj", "8 heads"]),
        ({"llama.attention.head_count": [4, 2]}, ["attention.head_count"]),
        ({"llama.vocab_size": 321}, ["vocab_size", "321", "320"]),
        ({"llama.embedding_length": None}, ["embedding_length", "nothing"]),
        ({"llama.block_count": "two"}, ["block_count", "two"]),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        make_pair(tmp_path, gguf_options={"metadata": metadata})
    for text in named:
        assert text in str(caught.value)
    assert caught.value.remedy


def test_head_counts_given_per_layer_are_read_when_all_are_equal(tmp_path: Path) -> None:
    _, checkpoint = make_pair(
        tmp_path, gguf_options={"metadata": {"llama.attention.head_count_kv": [2, 2]}}
    )
    assert checkpoint.config["num_key_value_heads"] == 2


def test_another_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"llama, qwen2.*mamba"):
        open_checkpoint(tmp_path / "other.gguf")


def test_tensors_of_no_supported_family_are_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        make_pair(tmp_path, gguf_options={"extra_tensors": extra})


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.9.ffn_up.weight": np.zeros((4, 64), dtype=np.int8)}
    with pytest.raises(CheckpointError, match=r"blk\.9\.ffn_up\.weight.*I8"):
        make_pair(tmp_path, gguf_options={"extra_tensors": extra})


def test_a_file_cut_anywhere_is_refused_when_opened(tmp_path: Path, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    _, whole = make_pair(tmp_path, Kind.Q8_0)
    content = whole.path.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [rng.randrange(len(content)) for _ in range(40)]
    lengths += [rng.randrange(2000) for _ in range(40)]
    for length in [0, 1, 7, 8, 24, *lengths, len(content) - 64]:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(cut)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scales read from a wrong offset
def test_a_file_with_any_bit_of_its_header_flipped_opens_or_is_refused(
    tmp_path: Path, rng_seed: int
) -> None:
    rng = random.Random(rng_seed)
    _, whole = make_pair(tmp_path, Kind.Q8_0)
    content = whole.path.read_bytes()
    bent = tmp_path / "bent.gguf"
    refused = 0
    for _ in range(150):
        flipped = bytearray(content)
        flipped[rng.randrange(2200)] ^= 1 << rng.randrange(8)
        bent.write_bytes(flipped)
        try:
            checkpoint = open_checkpoint(bent)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except CheckpointError:
            refused += 1
    assert refused > 30


def test_a_projection_whose_rows_are_not_those_of_its_heads_is_refused(tmp_path: Path) -> None:
    _, whole = make_pair(tmp_path)
    whole.source.config["num_attention_heads"] = 3
    name = next(name for name in whole.names() if ".self_attn.q_proj." in name)
    with pytest.raises(CheckpointError, match=rf"{name}.*expected the rows of 3 heads"):
        whole.tensor(name)


def test_text_in_the_metadata_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    _, whole = make_pair(tmp_path, gguf_options={"metadata": {"general.name": "tiny model"}})
    bent = tmp_path / "bent.gguf"
    bent.write_bytes(whole.path.read_bytes().replace(b"tiny model", b"tiny\xffmodel"))
    with pytest.raises(CheckpointError, match=r"bent\.gguf.*utf-8"):
        open_checkpoint(bent)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 bytes"),
        (b"GGML" + bytes(100), "magic"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "not.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(file)


def test_the_fingerprint_survives_renaming_and_sees_other_weights(
    tmp_path: Path, rng_seed: int
) -> None:
    _, one = make_pair(tmp_path / "1", Kind.Q4_0, seed=rng_seed)
    _, two = make_pair(tmp_path / "2", Kind.Q4_0, seed=rng_seed + 1)
    before = one.fingerprint()
    renamed = one.path.rename(tmp_path / "renamed.gguf")
    assert open_checkpoint(renamed).fingerprint() == before
    assert two.fingerprint() != before


def test_a_long_vocabulary_is_skipped_and_what_follows_is_read(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": [f"token {number} é" for number in range(5000)],
        "tokenizer.ggml.token_type": list(range(5000)),
        "llama.rope.freq_base": 7777.0,
    }
    folder, checkpoint = make_pair(tmp_path, gguf_options={"metadata": metadata})
    assert checkpoint.config["rope_theta"] == 7777.0
    expected = load_file(folder / "model.safetensors")[Q_PROJ]
    assert torch.equal(checkpoint.tensor(Q_PROJ), expected)


def test_qwen2_files_keep_their_rows_and_name_their_class(tmp_path: Path, rng_seed: int) -> None:
    folder = make_llama(tmp_path / "hf", seed=rng_seed, with_tokenizer=False)
    file = write_gguf(folder, tmp_path / "tiny.gguf", architecture="qwen2")
    checkpoint = open_checkpoint(file)
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    judge = load_oracle(tmp_path, gguf_file="tiny.gguf").config
    config = json.loads(json.dumps(checkpoint.config))
    assert config["num_hidden_layers"] == judge.num_hidden_layers
    assert config["hidden_size"] == judge.hidden_size


@pytest.mark.parametrize(
    ("kind", "is_narrow"),
    [
        (Kind.F32, False),
        (Kind.F16, True),
        (Kind.BF16, True),
        (Kind.Q8_0, False),
        (Kind.Q4_1, False),
    ],
)
def test_floats_of_16_bits_are_narrow_and_scaled_codes_are_not(
    tmp_path: Path, kind: Kind, is_narrow: bool
) -> None:
    _, checkpoint = make_pair(tmp_path, kind)
    assert checkpoint.is_narrow(Q_PROJ) == is_narrow
    assert not checkpoint.is_narrow("model.norm.weight")  # vectors are written in F32
