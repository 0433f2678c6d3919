"""Tensors and config of a GGUF file, in the names, row order and config keys of Hugging Face.

Reads through the `gguf` library and undoes what llama.cpp's converter did; knows no specs and no
kernels. Only families that `FAMILIES` lists. Called by `checkpoint.open_checkpoint`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize
from gguf.gguf_reader import ReaderTensor

from treadle.ir.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Family:
    """Name a family's Hugging Face class and what its converter does to the weights.

    `permutes_rows`: rows of q and k are stored with the two halves of each head interleaved.
    `has_bias_keys`: its config says whether there are biases; without, they follow from the class.
    """

    architecture: str
    model_type: str
    permutes_rows: bool
    has_bias_keys: bool


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", permutes_rows=True, has_bias_keys=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", permutes_rows=False, has_bias_keys=False),
}

_FIXED_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"  # not a weight: the llama3 scaling, tabulated

# Stored as they are computed with; the names are torch's.
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
# Elements dequantised at once. The library takes 16 rows at a time; runs of this size stay in the
# CPU's cache and are some 6 times faster on a model with rows of 576.
_RUN_ELEMENTS = 1 << 18

# Metadata of the family that is read below, or says nothing about the maths.
_KNOWN_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)
# Metadata that changes the maths unless it has this value.
_ONLY_NEUTRAL: dict[str, object] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": False,
}

# Projections whose rows some converters interleave, and the key that counts their heads.
_HEADS_OF = {
    ".self_attn.q_proj.": "num_attention_heads",
    ".self_attn.k_proj.": "num_key_value_heads",
}


class GgufSource:
    """Give the tensors of a GGUF file by Hugging Face names, dequantised when asked for.

    Safe to read from several threads.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reader, values = _open_reader(file)
        self._metadata = _Metadata(file, values)
        self._family = _find_family(self._metadata)
        self._tensors = _name_tensors(file, self._reader.tensors)
        self.config: dict[str, Any] = _build_config(
            self._metadata, self._family, self._tensors, self._rope_freqs()
        )
        self.generation_config: dict[str, Any] = _build_generation_config(self._metadata)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._tensors[name])

    def dtype(self, name: str) -> torch.dtype:
        import torch

        plain = _PLAIN_DTYPES.get(self._tensors[name].tensor_type, "float32")
        return getattr(torch, plain)  # type: ignore[no-any-return]

    def is_narrow(self, name: str) -> bool:
        return self.dtype(name).itemsize <= 2  # scale times code has more digits than that

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        values = _dequantise(self._tensors[name])
        for projection, heads in _HEADS_OF.items():
            if self._family.permutes_rows and projection in name:
                num_heads = self.config[heads]
                if 0 in values.shape or values.shape[0] % (2 * num_heads):
                    raise CheckpointError(
                        f"`{name}` of {self._file} has the shape {list(values.shape)}; expected "
                        f"the rows of {num_heads} heads, an even number each.",
                        remedy="Download the file again, or convert the model again.",
                    )
                values = _restore_row_order(values, num_heads)
        return values if device is None else values.to(device)

    def entry(self, name: str) -> None:
        """A file's tensors are dequantised, transposed or joined on the way: none is as it lies."""

    def headers(self) -> Iterator[tuple[str, bytes, int]]:
        with self._file.open("rb") as stream:
            header = stream.read(self._reader.data_offset)
        yield "gguf", header, self._file.stat().st_size

    def spans(self) -> Iterator[tuple[Path, int, int]]:
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            yield self._file, tensor.data_offset, tensor.data_offset + tensor.n_bytes

    def _rope_freqs(self) -> tuple[float, ...]:
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FREQS:
                return tuple(dequantize(tensor.data, tensor.tensor_type).flatten().tolist())
        return ()


class _FastReader(GGUFReader):
    """Read arrays of the metadata in one piece, and skip arrays of strings.

    The library makes several numpy objects per element: 2 s for the vocabulary of 49152 tokens
    that only the tokenizer needs, which reads it by itself.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        types = [GGUFValueType.ARRAY, item_type]
        if item_type == GGUFValueType.STRING:
            stop = start
            raw = self.data.data
            for _ in range(count):
                stop += 8 + struct.unpack_from("<Q", raw, stop)[0]
            return stop - orig_offs, [], [], types
        if item_type not in self.gguf_scalar_to_np:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, self.gguf_scalar_to_np[item_type], count)
        if values.size != count:
            raise ValueError(f"an array of {count} values ends after {values.size}")
        return 12 + int(values.nbytes), [values], [0], types


class _Metadata:
    """Hand out typed values of a file's metadata; the family's keys come without its prefix."""

    def __init__(self, file: Path, values: Mapping[str, object]) -> None:
        self.file = file
        self._values = values
        architecture = self.general("general.architecture")
        if not isinstance(architecture, str):
            self._wrong("general.architecture", architecture, "a string")
        self.architecture = architecture

    def general(self, key: str) -> object:
        return self._values.get(key)

    def model_keys(self) -> Iterator[str]:
        """Give the keys under the family's prefix, without it."""
        prefix = f"{self.architecture}."
        return (key.removeprefix(prefix) for key in self._values if key.startswith(prefix))

    def model(self, key: str) -> object:
        return self._values.get(f"{self.architecture}.{key}")

    def model_int(self, key: str, default: int | None = None) -> int:
        """Return a whole number; in a list, one entry per layer, all must be the same."""
        value = self.model(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._wrong(f"{self.architecture}.{key}", value, "a whole number of at least 1")
        return value

    def model_float(self, key: str, default: float | None = None) -> float:
        value = self.model(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self._wrong(f"{self.architecture}.{key}", value, "a positive number")
        return float(str(np.float32(value)))  # 1e-05, which the file holds as 9.999999747e-06

    def token_id(self, kind: str) -> int | None:
        value = self._values.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def _wrong(self, key: str, value: object, expected: str) -> NoReturn:
        found = "nothing" if value is None else repr(value)[:80]
        raise CheckpointError(
            f"The metadata `{key}` of {self.file} must be {expected}; found {found}.",
            remedy="Convert the model again with a current llama.cpp.",
        )


def _open_reader(file: Path) -> tuple[GGUFReader, dict[str, object]]:
    """Open the file; give the library's reader, and the metadata less its arrays of strings."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            magic = stream.read(8)
        if magic == b"version ":
            raise CheckpointError(
                f"{file} is a git-lfs pointer of a few bytes, not the file itself.",
                remedy="Fetch the file with `git lfs pull`, or download it again.",
            )
        reader = _FastReader(file)
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if field.types != [GGUFValueType.ARRAY, GGUFValueType.STRING]
        }
    # What the library raises on a file cut short or overwritten, wherever it happens to notice.
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{file} ({size_bytes} bytes) is not a whole GGUF file: {error}.",
            remedy="Download the file again, or copy it again: the copy at hand is incomplete.",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{file} can't be read: {error.strerror or error}.", remedy="Check its permissions."
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(
            f"{file} is in the byte order of another kind of machine.",
            remedy="Convert it with `gguf-convert-endian`.",
        )
    return reader, values


def _find_family(metadata: _Metadata) -> Family:
    if (parts := metadata.general("split.count")) not in (None, 0, 1):
        raise CheckpointError(
            f"{metadata.file} is one of {parts} parts of a model; one whole file is expected.",
            remedy="Join the parts with `llama-gguf-split --merge`.",
        )
    if (kind := metadata.general("general.type")) not in (None, "model"):
        raise CheckpointError(
            f"{metadata.file} holds a `{kind}`; expected a `model`.", remedy="Give the base model."
        )
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise CheckpointError(
            f"`general.architecture` of a GGUF file must be one of {', '.join(FAMILIES)}; "
            f"{metadata.file} has `{metadata.architecture}`.",
            remedy="Use the model's safetensors files.",
        )
    for key, neutral in _ONLY_NEUTRAL.items():
        value = metadata.model(key)
        if value is not None and value != neutral:
            raise CheckpointError(
                f"`{metadata.architecture}.{key}` = {value!r} in {metadata.file} changes the model "
                f"in a way that is not supported; expected {neutral!r}.",
                remedy="Use a checkpoint without it.",
            )
    return family


def _name_tensors(file: Path, tensors: Sequence[ReaderTensor]) -> dict[str, ReaderTensor]:
    """Map Hugging Face names to the file's tensors, and check that each can be dequantised."""
    named: dict[str, ReaderTensor] = {}
    unknown: list[str] = []
    usable = set(_PLAIN_DTYPES)
    for tensor in tensors:
        name = _hugging_face_name(tensor.name)
        if name is not None:
            named[name] = tensor
        elif tensor.name != _ROPE_FREQS:
            unknown.append(tensor.name)
        if tensor.tensor_type not in usable:
            _check_dequantises(file, tensor)
            usable.add(tensor.tensor_type)
    if unknown:
        raise CheckpointError(
            f"{file} holds {len(unknown)} tensors that no supported family has: "
            f"{', '.join(sorted(unknown)[:6])}.",
            remedy="Use the model's safetensors files.",
        )
    return named


def _hugging_face_name(name: str) -> str | None:
    if match := _BLOCK.fullmatch(name):
        part = _BLOCK_NAMES.get(match["part"])
        return part and f"model.layers.{int(match['layer'])}.{part}.{match['kind']}"
    stem, _, kind = name.rpartition(".")
    return f"{_FIXED_NAMES[stem]}.{kind}" if stem in _FIXED_NAMES and kind == "weight" else None


def _check_dequantises(file: Path, tensor: ReaderTensor) -> None:
    _, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"`{tensor.name}` in {file} is of the type {tensor.tensor_type.name}, which the gguf "
            "library can't dequantise.",
            remedy="Use a file of another type, such as Q4_K_M or Q8_0.",
        ) from error


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Turn ggml's order of sizes, fastest first, into torch's."""
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def _dequantise(tensor: ReaderTensor) -> torch.Tensor:
    """Give a tensor's values: 16-bit floats as they are, everything else in float32."""
    import torch

    if tensor.tensor_type in _PLAIN_DTYPES:
        copy = torch.from_numpy(np.array(tensor.data))  # the mapped file itself is read-only
        plain: torch.dtype = getattr(torch, _PLAIN_DTYPES[tensor.tensor_type])
        return copy.view(plain).reshape(_shape(tensor))
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    codes = tensor.data.reshape(-1)
    num_blocks = codes.size // block_bytes
    run_blocks = _RUN_ELEMENTS // block_elements
    values = np.empty(num_blocks * block_elements, dtype=np.float32)
    for start in range(0, num_blocks, run_blocks):
        stop = min(start + run_blocks, num_blocks)
        run = codes[start * block_bytes : stop * block_bytes].reshape(1, -1)
        values[start * block_elements : stop * block_elements] = dequantize(
            run, tensor.tensor_type
        ).reshape(-1)
    return torch.from_numpy(values).reshape(_shape(tensor))


def _restore_row_order(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's interleaving of each head's two halves, for rotation by halves.

    Shapes: values [H * D, E] or [H * D] → the same.
    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [H, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()


def _build_config(
    metadata: _Metadata,
    family: Family,
    tensors: Mapping[str, ReaderTensor],
    rope_freqs: tuple[float, ...],
) -> dict[str, Any]:
    """Make what the model's config.json would say."""
    hidden_size = metadata.model_int("embedding_length")
    num_heads = metadata.model_int("attention.head_count")
    num_kv_heads = metadata.model_int("attention.head_count_kv", num_heads)
    head_dim = metadata.model_int("attention.key_length", hidden_size // num_heads)
    theta = metadata.model_float("rope.freq_base", 10000.0)
    _check_head_sizes(metadata, family, head_dim)
    vocab_size = _vocab_size(metadata, tensors)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.model_int("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": metadata.model_int("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": metadata.model_float("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.model_int("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, rope_freqs, theta, head_dim),
        "sliding_window": metadata.model("attention.sliding_window") or None,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": _majority_dtype(tensors.values()),
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": metadata.token_id("eos"),
        "pad_token_id": metadata.token_id("padding"),
    }
    if family.has_bias_keys:
        for key, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
            config[key] = any(f".{part}." in name and name.endswith(".bias") for name in tensors)
    for projection, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
        for name, tensor in tensors.items():
            if f".{projection}." in name and _shape(tensor)[0] != heads * head_dim:
                raise CheckpointError(
                    f"`{name}` in {metadata.file} should have {heads} heads of {head_dim} rows by "
                    f"the metadata; it has {_shape(tensor)[0]} rows.",
                    remedy="Convert the model again with a current llama.cpp.",
                )
    for key in metadata.model_keys():
        if key not in _KNOWN_KEYS and key not in _ONLY_NEUTRAL:
            config[f"gguf.{metadata.architecture}.{key}"] = metadata.model(key)
    return config


def _build_generation_config(metadata: _Metadata) -> dict[str, Any]:
    """Collect the ids that end a generation: of text, of a turn, of a message."""
    ends = [metadata.token_id(kind) for kind in ("eos", "eot", "eom")]
    eos_token_ids = list(dict.fromkeys(token for token in ends if token is not None))
    ids = {
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None,
        "pad_token_id": metadata.token_id("padding"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _check_head_sizes(metadata: _Metadata, family: Family, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        size = metadata.model_int(key, head_dim)
        if size != head_dim:
            raise CheckpointError(
                f"`{metadata.architecture}.{key}` in {metadata.file} must equal the head size "
                f"{head_dim}; found {size}.",
                remedy=f"`{family.architecture}` rotates whole heads, and its values are as wide "
                "as its keys: use the model's safetensors files.",
            )


def _vocab_size(metadata: _Metadata, tensors: Mapping[str, ReaderTensor]) -> int:
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(
            f"{metadata.file} must hold a tensor `token_embd.weight`; it has none.",
            remedy="Convert the model again with a current llama.cpp.",
        )
    rows = _shape(embedding)[0]
    stated = metadata.model_int("vocab_size", rows)
    if stated != rows:
        raise CheckpointError(
            f"`{metadata.architecture}.vocab_size` = {stated} in {metadata.file}, but "
            f"`token_embd.weight` has {rows} rows.",
            remedy="Convert the model again with a current llama.cpp.",
        )
    return rows


def _majority_dtype(tensors: Iterable[ReaderTensor]) -> str:
    """Choose the dtype to compute in from the type that holds most elements.

    Quantised weights say bfloat16: rounding to it is far finer than the quantisation, and unlike
    float16 it has the range that models trained in bfloat16 may need.
    """
    counts: dict[GGMLQuantizationType, int] = {}
    for tensor in tensors:
        counts[tensor.tensor_type] = counts.get(tensor.tensor_type, 0) + int(tensor.n_elements)
    majority = max(counts, key=lambda kind: counts[kind])
    return _PLAIN_DTYPES.get(majority, "bfloat16")


def _rope_scaling(
    metadata: _Metadata, rope_freqs: tuple[float, ...], theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.model("rope.scaling.type") or "none"
    if kind == "none" and metadata.model("rope.scale_linear") is not None:
        kind = "linear"  # the spelling of files from 2023
    scaled = any(factor != 1.0 for factor in rope_freqs)
    if kind != "none" and scaled:
        raise CheckpointError(
            f"{metadata.file} scales RoPE twice: by `rope.scaling.type` = {kind!r} and by the "
            f"tensor `{_ROPE_FREQS}`; expected one of the two.",
            remedy="Use the model's safetensors files.",
        )
    if scaled:
        return _fit_llama3(metadata.file, rope_freqs, theta, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        old = metadata.model("rope.scale_linear")
        factor = metadata.model_float(
            "rope.scaling.factor", old if isinstance(old, float) else None
        )
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        values = {
            "rope_type": "yarn",
            "factor": metadata.model_float("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.model(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": metadata.model("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.model("rope.scaling.yarn_beta_slow"),
            "attention_factor": metadata.model("rope.scaling.attn_factor"),
        }
        return {key: value for key, value in values.items() if value is not None}
    raise CheckpointError(
        f"`{metadata.architecture}.rope.scaling.type` in {metadata.file} must be none, linear or "
        f"yarn; found {kind!r}.",
        remedy="Use the model's safetensors files.",
    )


def _fit_llama3(
    file: Path, rope_freqs: tuple[float, ...], theta: float, head_dim: int
) -> dict[str, Any]:
    """Find the llama3 parameters that give the divisors which the converter wrote instead of them.

    Formula: divisor d_i = 1 / ((1-s)/factor + s), s = clamp((C x_i - low) / (high - low), 0, 1),
        where x_i is the reciprocal wavelength theta^(-2i/D) / 2π. Only the ratios C : low : high
        matter, so low is taken as 1.
    Raises: CheckpointError: the divisors are not of this form.
    Source: `generate_extra_tensors` of the Llama classes in llama.cpp's convert_hf_to_gguf.py.
    """
    factor = float(f"{max(rope_freqs):.6g}")
    reciprocal_wavelengths = [
        theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2)
    ]
    candidates = [(4.0, 8192)]  # Llama 3.1 and 3.2
    if len(rope_freqs) == head_dim // 2 and factor > 1:
        smooth = [(1 / divisor - 1 / factor) / (1 - 1 / factor) for divisor in rope_freqs]
        between = [
            (x, s)
            for x, s in zip(reciprocal_wavelengths, smooth, strict=True)
            if 1e-4 < s < 1 - 1e-4
        ]
        if len(between) == 1:  # one point fixes one number: take the other from Llama 3.1
            x, s = between[0]
            candidates.append((4.0, round((1 + 3 * s) / x)))
        elif between:
            xs, smooths = zip(*between, strict=True)
            slope, offset = np.polyfit(xs, smooths, 1)
            high = round(1 - 1 / offset, 3)
            candidates.append((high, round(-slope / offset)))
    for high, original in candidates:
        expected = [
            1 / ((1 - s) / factor + s)
            for x in reciprocal_wavelengths
            for s in [min(1.0, max(0.0, (original * x - 1) / (high - 1)))]
        ]
        if np.shape(expected) == np.shape(rope_freqs) and np.allclose(expected, rope_freqs, 1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"`{_ROPE_FREQS}` in {file} must hold {head_dim // 2} divisors of the llama3 form; found "
        f"{len(rope_freqs)}, from {min(rope_freqs):.4g} to {max(rope_freqs):.4g}.",
        remedy="Use the model's safetensors files.",
    )
