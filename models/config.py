"""A model's sizes and settings, read from a Hugging Face config dict, checked and typed.

Knows no tensors, files or kernels: a dict goes in, a frozen dataclass comes out, whatever would
change the maths without being supported is an error. Called by the model specs and the registry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from treadle.ir.errors import SpecError
from treadle.models.defaults import DEFAULTS, Defaults
from treadle.models.rope import ROPE_KINDS, RopeConfig

DTYPES: tuple[str, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Hold what a Llama-like model's spec needs to know. Sizes are counts of elements, not bytes.

    `qkv_bias` says whether q, k and v have biases, `output_bias` whether attention's output
    projection has one. `sliding_window` is None where attention sees the whole context.
    `no_rope_layers` are the indices of the layers that rotate nothing.
    `unknown_keys` are the config's keys that nobody reads and nobody listed as harmless; they are
    for display.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    hidden_act: str
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] = ()
    unknown_keys: tuple[str, ...] = ()


# Keys that would change the maths: accepted only with a value under which they change nothing.
# fmt: off
_ONLY_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (None, 0),
    "attention_multiplier": (None,),
    "attention_out_bias": (None, False),
    "attn_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "is_encoder_decoder": (False,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mrope_section": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "qk_layernorm": (None, False),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "scale_depth": (None,),
    "scale_emb": (None, 1),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
}

# Keys that say nothing about the maths of inference: training, saving, labels, generation defaults
# (those are read from generation_config.json), and settings of other software.
_IGNORED: frozenset[str] = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "attention_dropout",
    "attn_implementation", "attn_pdrop", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout",
    "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id", "length_penalty",
    "max_length", "max_window_layers", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attn", "vocab_file",
})
# fmt: on

_ORIGINAL_WINDOW = "original_max_position_embeddings"
# Per rope kind: the keys its block must have, and those it may have.
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (_ORIGINAL_WINDOW,),
    "llama3": (_ORIGINAL_WINDOW,),
    "yarn": (
        _ORIGINAL_WINDOW,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (_ORIGINAL_WINDOW, "attention_factor", "factor"),
}
_ROPE_NUMBERS: tuple[str, ...] = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_ALIASES = {"su": "longrope"}  # the name Phi-3 first gave to longrope


def from_hf(config: Mapping[str, object]) -> ModelConfig:
    """Read a Hugging Face config dict, in the spelling of any transformers version.

    An absent optional key means what it means to transformers for that architecture; for an
    architecture whose defaults are not known here, it must be present.

    Raises:
        SpecError: a key is missing, has an impossible value, contradicts another key, or changes
            the maths in a way that is not supported; the message names the key and the value.
    """
    reader = _Reader(config)
    architecture = _read_architecture(reader)
    defaults = DEFAULTS.get(architecture)

    hidden_size = reader.positive_int("hidden_size")
    num_heads = reader.positive_int("num_attention_heads")
    num_kv_heads = _read_kv_heads(reader, num_heads, defaults)
    head_dim = _read_head_dim(reader, hidden_size, num_heads, defaults)
    max_positions = reader.positive_int(
        "max_position_embeddings", defaults.max_position_embeddings if defaults else None
    )
    num_layers = reader.positive_int("num_hidden_layers")
    attention_bias = _read_bias(reader, "attention_bias", architecture, defaults)
    _check_layer_types(reader, num_layers)
    _check_only_neutral(reader, defaults.unheeded_keys if defaults else ())
    rope, unknown_rope_keys = _read_rope(reader, head_dim, max_positions, defaults)

    model = ModelConfig(
        architecture=architecture,
        vocab_size=reader.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.positive_int("intermediate_size"),
        norm_eps=reader.positive_number("rms_norm_eps", defaults.norm_eps if defaults else None),
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.boolean(
            "tie_word_embeddings", defaults.tie_word_embeddings if defaults else None
        ),
        qkv_bias=attention_bias or (defaults is not None and defaults.has_qkv_bias),
        output_bias=attention_bias,
        mlp_bias=_read_bias(reader, "mlp_bias", architecture, defaults),
        hidden_act=_read_activation(reader),
        rope=rope,
        dtype=_read_dtype(reader),
        eos_token_ids=_read_token_ids(
            reader, "eos_token_id", defaults.eos_token_id if defaults else None
        ),
        bos_token_id=_read_bos(reader, defaults),
        sliding_window=_read_sliding_window(reader, max_positions, defaults),
        no_rope_layers=_read_no_rope_layers(reader, num_layers, defaults),
    )
    return replace(model, unknown_keys=reader.unread() + unknown_rope_keys)


def architecture_of(config: Mapping[str, object]) -> str:
    """Read the architecture's name only. Raises: SpecError: there is none, or two disagree."""
    return _read_architecture(_Reader(config))


class _Reader:
    """Hand out typed values of a config and remember which keys were asked for."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._read: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        """Return the value, None where it is null, `default` where the key is absent."""
        self._read.add(key)
        return self._config.get(key, default)

    def is_absent(self, key: str) -> bool:
        return key not in self._config

    def unread(self) -> tuple[str, ...]:
        keys = (str(key) for key in self._config)
        return tuple(sorted(key for key in keys if key not in self._read and key not in _IGNORED))

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Return the value, or `default` where it is absent or null; no default means required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            _bad_value(key, value, "a whole number of at least 1")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        return _positive_number(key, self._value(key, default))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            _bad_value(key, value, "true or false")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise SpecError(
                f"The config must have a value for `{key}`; it has none.",
                remedy="Is this the config.json of a Llama-like causal language model?",
            )
        return value


def _read_architecture(reader: _Reader) -> str:
    names = reader.get("architectures")
    model_type = reader.get("model_type")
    by_type = {defaults.model_type: name for name, defaults in DEFAULTS.items()}
    if names is None and isinstance(model_type, str) and model_type in by_type:
        return by_type[model_type]
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != 1:
        _bad_value("architectures", names, "a list of one class name, such as [`LlamaForCausalLM`]")
    architecture = names[0]
    if not isinstance(architecture, str):
        _bad_value("architectures", names, "a list of one class name, such as [`LlamaForCausalLM`]")
    known = DEFAULTS.get(architecture)
    if known and model_type is not None and model_type != known.model_type:
        _contradiction(
            "architectures", names, "model_type", model_type, f"model_type `{known.model_type}`"
        )
    return architecture


def _read_kv_heads(reader: _Reader, num_heads: int, defaults: Defaults | None) -> int:
    default: int | None = num_heads
    if reader.is_absent("num_key_value_heads"):
        default = (defaults.num_kv_heads or num_heads) if defaults else None
    num_kv_heads = reader.positive_int("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        _contradiction(
            "num_attention_heads",
            num_heads,
            "num_key_value_heads",
            num_kv_heads,
            "the first to be a multiple of the second",
        )
    return num_kv_heads


def _read_head_dim(
    reader: _Reader, hidden_size: int, num_heads: int, defaults: Defaults | None
) -> int:
    """Take the explicit `head_dim`, or else hidden size / heads; the two may differ."""
    if defaults and defaults.head_dim and reader.is_absent("head_dim"):
        return defaults.head_dim
    if reader.get("head_dim") is not None:
        return reader.positive_int("head_dim")
    if hidden_size % num_heads:
        _contradiction(
            "hidden_size",
            hidden_size,
            "num_attention_heads",
            num_heads,
            "the first to be a multiple of the second, or an explicit `head_dim`",
        )
    return hidden_size // num_heads


def _check_only_neutral(reader: _Reader, unheeded: Sequence[str]) -> None:
    for key, accepted in _ONLY_NEUTRAL.items():
        value = reader.get(key)
        if (
            value is not None
            and key not in unheeded
            and not any(_same(value, neutral) for neutral in accepted)
        ):
            _unsupported(key, value, accepted)


def _read_bias(reader: _Reader, key: str, architecture: str, defaults: Defaults | None) -> bool:
    biased = reader.boolean(key, False)
    if biased and defaults and key not in defaults.bias_keys:
        raise SpecError(
            f"In `{architecture}` no `{key}` turns biases on or off; found `{key}` = true.",
            remedy=f"Set `{key}` to false, or name the architecture that the weights belong to.",
        )
    return biased


def _read_activation(reader: _Reader) -> str:
    value = reader.get("hidden_act", "silu")
    if value not in ("silu", "swish"):  # two names of one function
        _unsupported("hidden_act", value, ("silu",))
    return "silu"


def _read_dtype(reader: _Reader) -> str:
    old, new = reader.get("torch_dtype"), reader.get("dtype")
    for key, value in (("torch_dtype", old), ("dtype", new)):
        if value is not None and not isinstance(value, str):
            _bad_value(key, value, f"one of {_list(DTYPES)}")
    old, new = (
        str(value).removeprefix("torch.") if value is not None else None for value in (old, new)
    )
    if old is not None and new is not None and old != new:
        _contradiction("torch_dtype", old, "dtype", new, "the same value")
    # Without a dtype, transformers builds the model in float32.
    dtype = new or old or "float32"
    if dtype not in DTYPES:
        _bad_value("dtype" if new else "torch_dtype", dtype, f"one of {_list(DTYPES)}")
    return dtype


def _read_token_ids(reader: _Reader, key: str, default: int | None) -> tuple[int, ...]:
    value = reader.get(key, default)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        _bad_value(key, value, "a token id, a list of token ids, or null")
    return tuple(dict.fromkeys(ids))


def _read_bos(reader: _Reader, defaults: Defaults | None) -> int | None:
    ids = _read_token_ids(reader, "bos_token_id", defaults.bos_token_id if defaults else None)
    if len(ids) > 1:
        _bad_value("bos_token_id", list(ids), "one token id or null")
    return ids[0] if ids else None


def _read_sliding_window(
    reader: _Reader, max_positions: int, defaults: Defaults | None
) -> int | None:
    absent = reader.is_absent("sliding_window")
    value = reader.get("sliding_window", defaults.sliding_window if defaults else None)
    is_used = reader.get("use_sliding_window", defaults.use_sliding_window if defaults else None)
    if is_used is False or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _bad_value("sliding_window", value, "a whole number of at least 1, or null")
    if value >= max_positions:
        return None  # no position is ever outside such a window
    origin = f"the default {value}, because the key is absent" if absent else str(value)
    raise SpecError(
        f"Sliding-window attention is not supported yet: `sliding_window` must be null or at least "
        f"`max_position_embeddings` = {max_positions}; found {origin}.",
        remedy=f"Contexts of up to {value} tokens never leave the window: to serve those, set "
        f'"max_position_embeddings": {value} and "sliding_window": null in config.json.',
    )


def _read_no_rope_layers(
    reader: _Reader, num_layers: int, defaults: Defaults | None
) -> tuple[int, ...]:
    """Give the layers without RoPE: those that the list marks 0, or one in every interval."""
    flags = reader.get("no_rope_layers")
    if defaults is None or defaults.no_rope_layer_interval is None:
        if flags not in (None, []):
            _unsupported("no_rope_layers", flags, (None, []))
        return ()
    interval = reader.positive_int("no_rope_layer_interval", defaults.no_rope_layer_interval)
    if flags is None:
        flags = [int((index + 1) % interval != 0) for index in range(num_layers)]
    if (
        not isinstance(flags, list)
        or len(flags) < num_layers
        or any(flag not in (0, 1) for flag in flags)
    ):
        _bad_value("no_rope_layers", flags, f"a list of {num_layers} ones and zeros, or null")
    return tuple(index for index in range(num_layers) if not flags[index])


def _check_layer_types(reader: _Reader, num_layers: int) -> None:
    types = reader.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise SpecError(
            f"Every entry of `layer_types` must be `full_attention`; found {types!r}.",
            remedy="Models that mix kinds of attention are not supported yet.",
        )
    if len(types) != num_layers:
        _contradiction(
            "num_hidden_layers",
            num_layers,
            "layer_types",
            f"{len(types)} entries",
            "as many entries",
        )


def _read_rope(
    reader: _Reader, head_dim: int, max_positions: int, defaults: Defaults | None
) -> tuple[RopeConfig, tuple[str, ...]]:
    """Return the rope settings and the keys of the rope block that nobody reads."""
    block = _merge_rope_blocks(reader)
    kind = _read_rope_kind(block)
    theta = _one_spelling(reader, block, "rope_theta")
    fraction = _one_spelling(reader, block, "partial_rotary_factor")
    if theta is None:
        if defaults is None:
            raise SpecError(
                "The config must have `rope_theta`, at the top or in `rope_parameters`; "
                "it has none."
            )
        theta = defaults.rope_theta
    rotary_dim = head_dim
    if fraction is not None:
        rotary_dim = int(head_dim * _positive_number("partial_rotary_factor", fraction))
    if rotary_dim > head_dim or rotary_dim < 2 or rotary_dim % 2:
        raise SpecError(
            f"RoPE must rotate an even number of elements, from 2 to `head_dim` = {head_dim}; "
            f"found {rotary_dim} (`partial_rotary_factor` = {fraction}).",
            remedy="Check `head_dim` and `partial_rotary_factor` in the config.",
        )
    missing = [key for key in _ROPE_REQUIRED[kind] if block.get(key) is None]
    if missing:
        raise SpecError(
            f"RoPE scaling of type `{kind}` needs the keys {_list(_ROPE_REQUIRED[kind])}; "
            f"missing: {_list(missing)}.",
            remedy="Add them to `rope_scaling` (or `rope_parameters`) in config.json.",
        )
    allowed = _ROPE_REQUIRED[kind] + _ROPE_OPTIONAL[kind]
    values: dict[str, object] = {}
    original = _one_spelling(reader, block, _ORIGINAL_WINDOW)
    if _ORIGINAL_WINDOW in allowed:  # elsewhere nothing is scaled from it
        values[_ORIGINAL_WINDOW] = original
    values.update({key: block.pop(key) for key in allowed if key in block})
    rope = _build_rope(
        kind, _positive_number("rope_theta", theta), rotary_dim, max_positions, values
    )
    return rope, tuple(f"rope_parameters.{key}" for key in sorted(block))


def _build_rope(
    kind: str, theta: float, rotary_dim: int, max_positions: int, values: Mapping[str, object]
) -> RopeConfig:
    numbers: dict[str, Any] = {
        key: _positive_number(key, value)
        for key, value in values.items()
        if key in _ROPE_NUMBERS and value is not None
    }
    if numbers.get("factor", 1.0) < 1.0:
        _bad_value("factor", values["factor"], "a number of at least 1")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        _contradiction(
            "low_freq_factor",
            values["low_freq_factor"],
            "high_freq_factor",
            values["high_freq_factor"],
            "a larger one",
        )
    # As in transformers: without the original window, the present one is taken.
    original = values.get(_ORIGINAL_WINDOW) or max_positions
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        _bad_value(_ORIGINAL_WINDOW, original, "a whole number of at least 1")
    truncate = True if values.get("truncate") is None else values["truncate"]
    if not isinstance(truncate, bool):
        _bad_value("truncate", truncate, "true or false")
    if kind == "longrope":
        numbers.setdefault("factor", max(1.0, max_positions / original))
    rope = RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        max_position_embeddings=max_positions,
        original_max_position_embeddings=None if kind in ("default", "linear") else original,
        truncate=truncate,
        short_factor=_read_factors("short_factor", values, rotary_dim),
        long_factor=_read_factors("long_factor", values, rotary_dim),
    )
    return replace(rope, **numbers)


def _read_factors(key: str, values: Mapping[str, object], rotary_dim: int) -> tuple[float, ...]:
    factors = values.get(key)
    if factors is None:
        return ()
    if not isinstance(factors, list | tuple) or len(factors) != rotary_dim // 2:
        found = f"{len(factors)} entries" if isinstance(factors, list | tuple) else repr(factors)
        raise SpecError(
            f"`{key}` must be a list of {rotary_dim // 2} numbers, one per rotated pair; "
            f"found {found}."
        )
    return tuple(_positive_number(key, factor) for factor in factors)


def _merge_rope_blocks(reader: _Reader) -> dict[str, object]:
    """Join `rope_scaling` (old) and `rope_parameters` (new) into one block with `rope_type`."""
    merged: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        block = reader.get(name)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            _bad_value(name, block, "an object or null")
        if any(isinstance(value, Mapping) for value in block.values()):
            raise SpecError(
                f"`{name}` must hold one set of values for all layers; found one for each of "
                f"{_list(block)}.",
                remedy="Models that mix kinds of attention are not supported yet.",
            )
        block = dict(block)
        old, new = block.pop("type", None), block.pop("rope_type", None)
        if old is not None and new is not None and _rope_name(old) != _rope_name(new):
            _contradiction(f"{name}.type", old, f"{name}.rope_type", new, "the same value")
        if (kind := new if new is not None else old) is not None:
            block["rope_type"] = _rope_name(kind)
        for key, value in block.items():
            if key in merged and not _same(merged[key], value):
                _contradiction(
                    f"rope_scaling.{key}",
                    merged[key],
                    f"rope_parameters.{key}",
                    value,
                    "the same value",
                )
        merged.update(block)
    return merged


def _rope_name(kind: object) -> object:
    return _ROPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind


def _read_rope_kind(block: dict[str, object]) -> str:
    kind = block.pop("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise SpecError(
            f"The type of RoPE scaling must be one of {_list(ROPE_KINDS)}; found {kind!r}.",
            remedy="Correct `rope_type` in config.json; another type cannot be computed.",
        )
    if block.get("mrope_section") is not None:
        _unsupported("mrope_section", block["mrope_section"], (None,))
    return str(kind)


def _one_spelling(reader: _Reader, block: dict[str, object], key: str) -> object:
    """Take a key that may stand at the top of the config, in the rope block, or in both."""
    top, inner = reader.get(key), block.pop(key, None)
    if top is not None and inner is not None and not _same(top, inner):
        _contradiction(key, top, f"rope_parameters.{key}", inner, "the same value")
    return top if top is not None else inner


def _positive_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        _bad_value(key, value, "a positive number")
    return float(value)


def _same(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _list(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _bad_value(key: str, value: object, expected: str) -> NoReturn:
    raise SpecError(
        f"The config's `{key}` must be {expected}; found {_short(value)}.",
        remedy="Correct it in config.json.",
    )


def _contradiction(
    left: str, left_value: object, right: str, right_value: object, expected: str
) -> NoReturn:
    raise SpecError(
        f"The config contradicts itself: `{left}` = {left_value!r}, `{right}` = {right_value!r}; "
        f"expected {expected}.",
        remedy="Correct one of the two in config.json.",
    )


def _unsupported(key: str, value: object, accepted: Sequence[object]) -> NoReturn:
    choices = " or ".join("null" if choice is None else repr(choice) for choice in accepted)
    raise SpecError(
        f"The config's `{key}` = {_short(value)} changes the model in a way that is not supported; "
        f"expected {choices}.",
        remedy="Use a checkpoint without it.",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
