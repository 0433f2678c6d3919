"""A model's sizes and settings, read from a Hugging Face config dict, checked and typed.

Knows no tensors, files or kernels: a dict goes in, a frozen dataclass comes out, whatever would
change the maths without being supported is an error. Called by the model specs and the registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from treadle.ir.errors import SpecError
from treadle.models.defaults import BIAS_KEYS, DEFAULTS, LLAMA_BIASES, Defaults
from treadle.models.experts import EXPERTS, ExpertsConfig, read_experts
from treadle.models.latent import LATENT, LatentConfig, read_latent
from treadle.models.rope import ROPE_KINDS, RopeConfig, rope_score_factor

DTYPES: tuple[str, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Hold what a Llama-like model's spec needs to know. Sizes are counts of elements, not bytes.

    `qkv_bias` says whether q, k and v have biases, `output_bias` whether attention's output
    projection has one. `sliding_window` is None where attention sees the whole context.
    `no_rope_layers` are the indices of the layers that rotate nothing. `attention_scale` multiplies
    the scores, `embedding_scale` the embeddings, `residual_scale` what a block adds to the stream,
    `logit_scale` the logits; `attention_cap` and `logit_cap` bend scores and logits, where they are
    not 0. `sliding_layers` are those whose attention has the window, and whose RoPE is `local_rope`
    where there is one. `parallel_residual` says that attention and feed-forward of a layer
    read the same stream. `has_head_norms` says that the heads of q and k are normalised, where the
    config decides it. `experts` is what there is in place of a feed-forward, None where there is no
    mixture; `latent` how keys and values are projected up from latents, None where they are not.
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
    sliding_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    no_rope_layers: tuple[int, ...] = ()
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    parallel_residual: bool = False
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    has_head_norms: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    unknown_keys: tuple[str, ...] = ()

    def window_of(self, layer: int) -> int:
        """Give the window of a layer's attention, in tokens, or 0 where it sees all."""
        return (self.sliding_window or 0) if layer in self.sliding_layers else 0


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
    "swiglu_alpha": (None, 1),
    "swiglu_limit": (None, 0),
    "use_bidirectional_attention": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
}

# Keys that say nothing about the maths of inference: training, saving, labels, generation defaults
# (those are read from generation_config.json), and settings of other software.
_IGNORED: frozenset[str] = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "_sliding_window_pattern",
    "attention_dropout", "aux_loss_alpha",
    "attn_implementation", "attn_pdrop", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "embd_pdrop", "embedding_dropout",
    "encoder_no_repeat_ngram_size", "ep_size", "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout",
    "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id", "length_penalty",
    "max_length", "max_window_layers", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_mtp_layers", "num_nextn_predict_layers", "num_return_sequences",
    "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
    "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
    "seq_aux", "suppress_tokens", "task_specific_params",
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
    if architecture in LATENT:
        head_dim = reader.positive_int("qk_rope_head_dim", LATENT[architecture].rope_dim)
        _check_latent_heads(reader, num_heads, num_kv_heads, head_dim)
    else:
        head_dim = _read_head_dim(reader, hidden_size, num_heads, defaults)
    max_positions = reader.positive_int(
        "max_position_embeddings", defaults.max_position_embeddings if defaults else None
    )
    num_layers = reader.positive_int("num_hidden_layers")
    biased = _read_biases(reader, architecture, defaults)
    window = _read_sliding_window(reader, max_positions, defaults)
    sliding = _read_sliding_layers(reader, num_layers, defaults)
    has_head_norms = False
    if defaults is not None and defaults.has_head_norms_key:
        has_head_norms = reader.boolean("use_qk_norm", False)
    _check_only_neutral(reader, architecture, defaults)
    intermediate_size = reader.positive_int("intermediate_size")
    keeps_kinds = defaults and (defaults.rotates_in_windows_only or defaults.local_rope_theta)
    if window is None and not keeps_kinds:
        sliding = ()  # no layer differs from another
    (rope, *local), unknown_rope_keys = _read_ropes(reader, head_dim, max_positions, defaults)
    latent = read_latent(reader, architecture)
    scale = head_dim**-0.5
    if latent is not None:
        scale = (latent.nope_dim + head_dim) ** -0.5 * rope_score_factor(rope)

    model = ModelConfig(
        architecture=architecture,
        vocab_size=reader.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        norm_eps=reader.positive_number(
            defaults.norm_eps_key if defaults else "rms_norm_eps",
            defaults.norm_eps if defaults else None,
        ),
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.boolean(
            "tie_word_embeddings", defaults.tie_word_embeddings if defaults else None
        ),
        qkv_bias="qkv" in biased,
        output_bias="output" in biased,
        mlp_bias="mlp" in biased,
        hidden_act=_read_activation(reader, defaults),
        rope=rope,
        dtype=_read_dtype(reader),
        eos_token_ids=_read_token_ids(
            reader, "eos_token_id", defaults.eos_token_id if defaults else None
        ),
        bos_token_id=_read_bos(reader, defaults),
        sliding_window=window,
        sliding_layers=sliding,
        local_rope=local[0] if local else None,
        no_rope_layers=_read_no_rope_layers(reader, num_layers, sliding, defaults),
        has_head_norms=has_head_norms,
        experts=read_experts(reader, architecture, num_layers, intermediate_size),
        parallel_residual=_read_parallel_residual(reader, defaults),
        latent=latent,
        **{"attention_scale": scale, **_read_scales(reader, defaults)},
    )
    return replace(model, unknown_keys=reader.unread() + unknown_rope_keys)


def architecture_of(config: Mapping[str, object]) -> str:
    """Read the architecture's name only. Raises: SpecError: there is none, or two disagree."""
    return _read_architecture(_Reader(config))


def unused_layers(config: Mapping[str, object]) -> tuple[str, ...]:
    """Give the beginnings of tensors' names that a checkpoint may hold and no spec needs.

    They are of layers behind the last one, trained to draft several tokens at once.
    """
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(first, int) or not isinstance(count, int):
        return ()
    return tuple(f"model.layers.{first + index}." for index in range(count))


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
    for name, defaults in DEFAULTS.items():
        if defaults.saved_as == architecture and defaults.model_type == model_type:
            return name
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


def _check_latent_heads(reader: _Reader, num_heads: int, num_kv_heads: int, rope_dim: int) -> None:
    """Check what latent attention decides otherwise: a KV head per head; `head_dim` is RoPE's."""
    if num_kv_heads != num_heads:
        _contradiction(
            "num_attention_heads",
            num_heads,
            "num_key_value_heads",
            num_kv_heads,
            "as many: keys and values of each head are projected up from one latent",
        )
    stated = reader.get("head_dim")
    if stated is not None and stated != rope_dim:
        _contradiction("head_dim", stated, "qk_rope_head_dim", rope_dim, "the same value")


def _check_only_neutral(reader: _Reader, architecture: str, defaults: Defaults | None) -> None:
    heeded: tuple[str, ...] = ()
    if architecture in EXPERTS:
        heeded = EXPERTS[architecture].heeded_keys
    if defaults:
        heeded += (*defaults.unheeded_keys, *defaults.scales)
        heeded += ("use_qk_norm",) if defaults.has_head_norms_key else ()
        heeded += ("use_parallel_residual",) if defaults.parallel_residual is not None else ()
    for key, accepted in _ONLY_NEUTRAL.items():
        value = reader.get(key)
        if (
            value is not None
            and key not in heeded
            and not any(_same(value, neutral) for neutral in accepted)
        ):
            _unsupported(key, value, accepted)


def _read_biases(reader: _Reader, architecture: str, defaults: Defaults | None) -> set[str]:
    """Give which of the projections `qkv`, `output` and `mlp` have biases."""
    known = defaults.biases if defaults else LLAMA_BIASES
    biased = set(defaults.always_biased.split()) if defaults else set()
    for key in BIAS_KEYS:
        if not reader.boolean(key, defaults is not None and key in defaults.biases_on):
            continue
        if key not in known:
            raise SpecError(
                f"In `{architecture}` no `{key}` turns biases on or off; found `{key}` = true.",
                remedy=f"Set `{key}` to false, or name the architecture that the weights belong "
                "to.",
            )
        biased |= {*known[key].split()}
    return biased


# transformers' names of activations, and ours; those of one function differ in nothing.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _read_activation(reader: _Reader, defaults: Defaults | None) -> str:
    """Read the activation, under the newer name of its key too."""
    newer, value = reader.get("hidden_activation"), reader.get("hidden_act")
    key = "hidden_act" if newer is None else "hidden_activation"
    value = newer if newer is not None else value
    if value is None:
        value = defaults.hidden_act if defaults else "silu"
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        _unsupported(key, value, tuple(_ACTIVATIONS))
    return _ACTIVATIONS[value]


def _read_parallel_residual(reader: _Reader, defaults: Defaults | None) -> bool:
    if defaults is None or defaults.parallel_residual is None:
        return False
    return reader.boolean("use_parallel_residual", defaults.parallel_residual)


# The keys of constants: the field of the config that each gives, and how.
_SCALES: dict[str, tuple[str, Callable[[float], float]]] = {
    "attention_multiplier": ("attention_scale", float),
    "attn_logit_softcapping": ("attention_cap", float),
    "embedding_multiplier": ("embedding_scale", float),
    "final_logit_softcapping": ("logit_cap", float),
    "logit_scale": ("logit_scale", float),
    "logits_scaling": ("logit_scale", lambda divisor: 1.0 / divisor),
    "query_pre_attn_scalar": ("attention_scale", lambda size: size**-0.5),
    "residual_multiplier": ("residual_scale", float),
}


def _read_scales(reader: _Reader, defaults: Defaults | None) -> dict[str, float]:
    scales: dict[str, float] = {}
    for key, default in (defaults.scales if defaults else {}).items():
        value = reader.get(key, default)
        if value is not None:
            name, convert = _SCALES[key]
            scales[name] = convert(_positive_number(key, value))
    return scales


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


def _read_token_ids(
    reader: _Reader, key: str, default: int | tuple[int, ...] | None
) -> tuple[int, ...]:
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
    value = reader.get("sliding_window", defaults.sliding_window if defaults else None)
    is_used = reader.get("use_sliding_window", defaults.use_sliding_window if defaults else None)
    if is_used is False or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _bad_value("sliding_window", value, "a whole number of at least 1, or null")
    if value >= max_positions:
        return None  # no position is ever outside such a window
    if defaults and not defaults.has_window:
        _unsupported("sliding_window", value, (None, max_positions))
    return value


def _read_no_rope_layers(
    reader: _Reader, num_layers: int, sliding: Sequence[int], defaults: Defaults | None
) -> tuple[int, ...]:
    """Give the layers without RoPE: those that the list marks 0, or one in every interval."""
    if defaults and defaults.rotates_in_windows_only and sliding:
        return tuple(index for index in range(num_layers) if index not in sliding)
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


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_sliding_layers(
    reader: _Reader, num_layers: int, defaults: Defaults | None
) -> tuple[int, ...]:
    """Give the layers whose attention has the window: as listed, by a pattern, or all."""
    types = reader.get("layer_types")
    pattern = reader.get("sliding_window_pattern", defaults.full_every if defaults else None)
    is_listed = isinstance(types, list) and len(types) == num_layers
    if types is not None and (not isinstance(types, list) or not {*types} <= {*_LAYER_TYPES}):
        raise SpecError(
            f"Every entry of `layer_types` must be one of {_list(_LAYER_TYPES)}; found {types!r}.",
            remedy="Models with other kinds of layers have no spec yet.",
        )
    if types is not None and not is_listed:
        _contradiction(
            "num_hidden_layers",
            num_layers,
            "layer_types",
            f"{len(types)} entries",
            "as many entries",
        )
    if types is not None:
        if "sliding_attention" in types and defaults and not defaults.has_window:
            raise SpecError(
                f"This architecture attends in full in every layer; found `layer_types` {types!r}.",
                remedy="Name the architecture that the weights belong to.",
            )
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if reader.get("sliding_window", defaults.sliding_window if defaults else None) is None:
        return ()
    if isinstance(pattern, str) and pattern and {*pattern} <= {"L", "G"}:
        # The last layer sees all, whatever the letters say.
        local = [pattern[i % len(pattern)] == "L" for i in range(num_layers - 1)]
        return tuple(i for i, is_local in enumerate(local) if is_local)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return tuple(i for i in range(num_layers) if (i + 1) % pattern)
    if pattern not in (None, 0):
        _bad_value("sliding_window_pattern", pattern, "a number of layers, or letters L and G")
    first = 0
    if defaults and defaults.full_layers_first is not None:
        first = reader.get("max_window_layers", defaults.full_layers_first)  # type: ignore[assignment]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            _bad_value("max_window_layers", first, "a whole number")
    return tuple(range(first, num_layers))


def _read_ropes(
    reader: _Reader, head_dim: int, max_positions: int, defaults: Defaults | None
) -> tuple[list[RopeConfig], tuple[str, ...]]:
    """Give the rope settings, and those of layers with a window where they have their own.

    Also gives the keys of the rope blocks that nobody reads.
    """
    shared, by_type = _merge_rope_blocks(reader)
    if defaults and not shared and not by_type:
        shared = dict(defaults.rope_block)
    if defaults is None or defaults.local_rope_theta is None:
        if by_type:
            raise SpecError(
                f"`rope_parameters` must hold one set of values for all layers; found one for each "
                f"of {_list(by_type)}.",
                remedy="This architecture has one RoPE; another one's config may have two.",
            )
        rope, unknown = _read_rope(reader, shared, head_dim, max_positions, defaults)
        return [rope], unknown
    local = {**by_type.get("sliding_attention", {})}
    local_theta = local.get("rope_theta", reader.get("rope_local_base_freq"))
    local["rope_theta"] = defaults.local_rope_theta if local_theta is None else local_theta
    merged = {**shared, **by_type.get("full_attention", {})}
    rope, unknown = _read_rope(reader, merged, head_dim, max_positions, defaults)
    plain = _Reader({})
    own, own_unknown = _read_rope(plain, local, head_dim, max_positions, defaults)
    return [rope, own], (*unknown, *own_unknown)


def _read_rope(
    reader: _Reader,
    block: dict[str, object],
    head_dim: int,
    max_positions: int,
    defaults: Defaults | None,
) -> tuple[RopeConfig, tuple[str, ...]]:
    """Return the rope settings of a block, and its keys that nobody reads."""
    kind = _read_rope_kind(block)
    theta = _one_spelling(reader, block, "rope_theta", "rotary_emb_base")
    fraction = _one_spelling(reader, block, "partial_rotary_factor", "rotary_pct")
    if theta is None:
        if defaults is None:
            raise SpecError(
                "The config must have `rope_theta`, at the top or in `rope_parameters`; "
                "it has none."
            )
        theta = defaults.rope_theta
    rotary_dim = head_dim
    if fraction is None and defaults:
        fraction = defaults.partial_rotary_factor
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
    original = _one_spelling(reader, block, _ORIGINAL_WINDOW, "initial_context_length")
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


def _merge_rope_blocks(
    reader: _Reader,
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Join `rope_scaling` (old) and `rope_parameters` (new) into one block with `rope_type`.

    Also gives the blocks of kinds of layers, where `rope_parameters` has one for each.
    """
    merged: dict[str, object] = {}
    by_type: dict[str, dict[str, object]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        block = reader.get(name)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            _bad_value(name, block, "an object or null")
        if {*block} <= {*_LAYER_TYPES} and block:
            by_type = {kind: _named_rope(name, each) for kind, each in block.items() if each}
            continue
        block = _named_rope(name, block)
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
    return merged, by_type


def _named_rope(name: str, block: object) -> dict[str, object]:
    """Give a rope block with its type under the newer of the key's names."""
    if not isinstance(block, Mapping):
        _bad_value(name, block, "an object or null")
    named = dict(block)
    old, new = named.pop("type", None), named.pop("rope_type", None)
    if old is not None and new is not None and _rope_name(old) != _rope_name(new):
        _contradiction(f"{name}.type", old, f"{name}.rope_type", new, "the same value")
    if (kind := new if new is not None else old) is not None:
        named["rope_type"] = _rope_name(kind)
    return named


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


def _one_spelling(reader: _Reader, block: dict[str, object], key: str, top_key: str = "") -> object:
    """Take a key that may stand at the top of the config, in the rope block, or in both.

    `top_key` is another name that it may have at the top.
    """
    top, inner = reader.get(key), block.pop(key, None)
    other = reader.get(top_key) if top_key else None
    if top is not None and other is not None and not _same(top, other):
        _contradiction(key, top, top_key, other, "the same value")
    name, top = (top_key, other) if top is None else (key, top)
    if top is not None and inner is not None and not _same(top, inner):
        _contradiction(name, top, f"rope_parameters.{key}", inner, "the same value")
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
