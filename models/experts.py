"""What a config says of a mixture of experts, and what its absent keys mean per architecture.

Called by `config.py`, whose reader hands out the values; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from treadle.ir.errors import SpecError


@dataclass(frozen=True)
class ExpertsConfig:
    """Hold what a spec needs to know of a mixture of experts.

    `intermediate_size` is the width of one expert, `shared_size` that of what every token passes,
    0 where there is none; `has_shared_gate` says that a gate scales it. `dense_layers` are the
    layers that have a plain feed-forward instead. `has_biases` says that the router and the experts
    have biases; `gate_limit`, `gate_sharpness` and `up_offset` are parameters of the op `glu`. The
    rest are those of the op `route`; `has_correction` says that the checkpoint has a correction of
    the choice.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    score: str
    normalise: bool
    scaling: float
    num_groups: int
    kept_groups: int
    group_top: int
    has_correction: bool
    shared_size: int
    has_shared_gate: bool
    dense_layers: tuple[int, ...]
    has_biases: bool = False
    gate_limit: float = 0.0
    gate_sharpness: float = 1.0
    up_offset: float = 0.0


@dataclass(frozen=True)
class ExpertsDefaults:
    """Say which keys an architecture reads, and what absent ones mean, as in transformers.

    `count_keys` are the spellings of the number of experts. A `top_k` of 0 says that there is no
    default. An `intermediate_size` of 0 says that
    experts have the model's. `normalise` None leaves it to `norm_topk_prob`, by default
    `norm_topk_prob`. `shared_size` is of the key `shared_expert_intermediate_size`, `num_shared` of
    `n_shared_experts`, which counts experts. `dense_by` is the key that tells dense layers. A
    `gate_limit` above 0 is the default of the key `swiglu_limit`, `gate_sharpness` then that of
    `swiglu_alpha`. `num_groups`, `kept_groups` and `scaling` are of `n_group`, `topk_group` and
    `routed_scaling_factor`. `methods` are the values of `topk_method`, the first one by default;
    `greedy` means that groups don't count. `neutral` keys may have this value alone, or none.
    """

    count_keys: tuple[str, ...]
    num_experts: int
    top_k: int
    intermediate_size: int = 0
    normalise: bool | None = None
    norm_topk_prob: bool = False
    score: str = "softmax"
    has_groups: bool = False
    group_top: int = 1
    has_correction: bool = False
    shared_size: int = 0
    num_shared: int = 0
    has_shared_gate: bool = False
    dense_by: str = ""
    dense_default: int = 1
    num_groups: int = 1
    kept_groups: int = 1
    scaling: float = 1.0
    methods: tuple[str, ...] = ()
    neutral: Mapping[str, object] = field(default_factory=dict)
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    has_biases: bool = False
    gate_limit: float = 0.0
    gate_sharpness: float = 1.0
    up_offset: float = 0.0

    @property
    def heeded_keys(self) -> tuple[str, ...]:
        """The keys that have a meaning here, though they have none for most architectures."""
        return (*self.count_keys, *(("swiglu_limit", "swiglu_alpha") if self.gate_limit else ()))


EXPERTS: dict[str, ExpertsDefaults] = {
    "MixtralForCausalLM": ExpertsDefaults(("num_local_experts",), 8, 2, normalise=True),
    "Qwen2MoeForCausalLM": ExpertsDefaults(
        ("num_experts", "num_local_experts"),
        60,
        4,
        1408,
        shared_size=5632,
        has_shared_gate=True,
        dense_by="decoder_sparse_step",
    ),
    "Qwen3MoeForCausalLM": ExpertsDefaults(
        ("num_experts", "num_local_experts"), 128, 8, 768, dense_by="decoder_sparse_step"
    ),
    "Glm4MoeForCausalLM": ExpertsDefaults(
        ("n_routed_experts", "num_local_experts", "num_experts"),
        128,
        8,
        1408,
        norm_topk_prob=True,
        score="sigmoid",
        has_groups=True,
        group_top=2,
        has_correction=True,
        num_shared=1,
        dense_by="first_k_dense_replace",
    ),
    "GptOssForCausalLM": ExpertsDefaults(
        ("num_local_experts", "num_experts"),
        128,
        4,
        normalise=True,
        top_k_keys=("num_experts_per_tok", "experts_per_token"),
        has_biases=True,
        gate_limit=7.0,
        gate_sharpness=1.702,
        up_offset=1.0,
    ),
    "DeepseekV2ForCausalLM": ExpertsDefaults(
        ("n_routed_experts", "num_experts"),
        64,
        0,
        1407,
        normalise=False,
        has_groups=True,
        num_shared=2,
        dense_by="first_k_dense_replace",
        dense_default=0,
        methods=("greedy", "group_limited_greedy"),
        # transformers doesn't normalise, the model's own code does, and then leaves out the factor.
        neutral={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "DeepseekV3ForCausalLM": ExpertsDefaults(
        ("n_routed_experts", "num_local_experts"),
        256,
        8,
        2048,
        norm_topk_prob=True,
        score="sigmoid",
        has_groups=True,
        group_top=2,
        has_correction=True,
        num_shared=1,
        dense_by="first_k_dense_replace",
        dense_default=3,
        num_groups=8,
        kept_groups=4,
        scaling=2.5,
        methods=("noaux_tc",),
        neutral={"scoring_func": "sigmoid", "moe_layer_freq": 1},
    ),
}


class Reader(Protocol):
    """Hand out the values of a config."""

    def get(self, key: str, default: object = None) -> object: ...
    def positive_int(self, key: str, default: int | None = None) -> int: ...
    def positive_number(self, key: str, default: float | None = None) -> float: ...
    def boolean(self, key: str, default: bool | None = None) -> bool: ...


def read_experts(
    reader: Reader, architecture: str, num_layers: int, intermediate_size: int
) -> ExpertsConfig | None:
    """Read the mixture of an architecture that has one.

    Raises: SpecError: a value is impossible; names the key.
    """
    defaults = EXPERTS.get(architecture)
    if defaults is None:
        return None
    num_experts = _one_of(reader, defaults.count_keys, defaults.num_experts)
    top_k = _one_of(reader, defaults.top_k_keys, defaults.top_k) or reader.positive_int(
        defaults.top_k_keys[0]
    )
    size = intermediate_size
    if defaults.intermediate_size:
        size = reader.positive_int("moe_intermediate_size", defaults.intermediate_size)
    normalise = defaults.normalise
    if normalise is None:
        normalise = reader.boolean("norm_topk_prob", defaults.norm_topk_prob)
    groups, kept, scaling = 1, 1, 1.0
    if defaults.has_groups:
        groups = reader.positive_int("n_group", defaults.num_groups)
        kept = reader.positive_int("topk_group", defaults.kept_groups)
        scaling = reader.positive_number("routed_scaling_factor", defaults.scaling)
    if _read_method(reader, defaults) == "greedy":
        groups, kept = 1, 1
    for key, neutral in defaults.neutral.items():
        value = reader.get(key)
        if value is not None and value != neutral:
            raise SpecError(
                f"The config's `{key}` = {value!r} changes how {architecture} routes, which is not "
                f"supported; expected {neutral!r}.",
                remedy="Use a checkpoint without it.",
            )
    if num_experts % groups or kept > groups or top_k > kept * (num_experts // groups):
        raise SpecError(
            f"The config's experts don't fit: {top_k} of {num_experts}, in {groups} groups of "
            f"which {kept} are kept.",
            remedy="Check `num_experts_per_tok`, `n_group` and `topk_group` in config.json.",
        )
    shared = 0
    if defaults.shared_size:
        shared = reader.positive_int("shared_expert_intermediate_size", defaults.shared_size)
    if defaults.num_shared:
        shared = size * reader.positive_int("n_shared_experts", defaults.num_shared)
    limit, sharpness = 0.0, 1.0
    if defaults.gate_limit:
        limit = reader.positive_number("swiglu_limit", defaults.gate_limit)
        sharpness = reader.positive_number("swiglu_alpha", defaults.gate_sharpness)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=size,
        score=defaults.score,
        normalise=normalise,
        scaling=scaling,
        num_groups=groups,
        kept_groups=kept,
        group_top=min(defaults.group_top, num_experts // groups),
        has_correction=defaults.has_correction,
        shared_size=shared,
        has_shared_gate=defaults.has_shared_gate,
        dense_layers=tuple(_dense_layers(reader, defaults, num_layers)),
        has_biases=defaults.has_biases,
        gate_limit=limit,
        gate_sharpness=sharpness,
        up_offset=defaults.up_offset,
    )


def _read_method(reader: Reader, defaults: ExpertsDefaults) -> str:
    """Give how experts are chosen, empty where no key says it."""
    if not defaults.methods:
        return ""
    method = reader.get("topk_method")
    if method is None:
        return defaults.methods[0]
    if method not in defaults.methods:
        raise SpecError(
            f"The config's `topk_method` must be {' or '.join(defaults.methods)}; found "
            f"{method!r}.",
            remedy="Name the architecture that the weights belong to.",
        )
    return str(method)


def _one_of(reader: Reader, keys: tuple[str, ...], default: int) -> int:
    """Read a key that has several spellings. Raises: SpecError: two disagree."""
    found = {key: reader.positive_int(key) for key in keys if reader.get(key) is not None}
    if len(set(found.values())) > 1:
        said = ", ".join(f"`{key}` = {value}" for key, value in found.items())
        raise SpecError(f"The config contradicts itself: {said}.", remedy="Correct config.json.")
    return next(iter(found.values()), default)


def _dense_layers(reader: Reader, defaults: ExpertsDefaults, num_layers: int) -> Iterable[int]:
    if defaults.dense_by == "first_k_dense_replace":
        first = reader.get("first_k_dense_replace")
        first = defaults.dense_default if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise SpecError(
                f"The config's `first_k_dense_replace` must be a number of layers; found {first!r}."
            )
        return range(min(first, num_layers))
    if defaults.dense_by == "decoder_sparse_step":
        step = reader.positive_int("decoder_sparse_step", defaults.dense_default)
        listed = reader.get("mlp_only_layers") or []
        if not isinstance(listed, list) or any(not isinstance(index, int) for index in listed):
            raise SpecError(
                f"The config's `mlp_only_layers` must be a list of layers; found {listed!r}."
            )
        return [i for i in range(num_layers) if i in listed or (i + 1) % step]
    return ()
