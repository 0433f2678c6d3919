"""What an engine is asked to be: sizes, dtypes and limits, checked once and never changed.

Called by the compiler, the engine and the CLI.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from treadle.ir.errors import ConfigError
from treadle.ir.kv_cache import KV_FORMATS, PAGE_MULTIPLE

AUTOTUNE = ("off", "cached", "quick", "full")
TARGETS = ("cuda", "interpret", "reference")
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# How the command line names the formats of the KV cache; `auto` is the dtype that is computed in.
KV_DTYPES = {"auto": "", **{name: name for name in KV_FORMATS}}
# How the `reference` target holds weights in memory; auto: in float16 if that holds them.
WEIGHT_DTYPES = ("auto", "float32", "float16")
# The same as LMDeploy's numbers.
QUANT_POLICIES = {0: "auto", 4: "int4", 8: "int8", 16: "fp8"}


@dataclass(frozen=True)
class EngineConfig:
    """Fix the shape of an engine; part of an artifact, because kernels and graphs depend on it.

    Units: `page_size` slots (tokens) per KV page; `max_rows` requests that run at once;
    `max_step_tokens` tokens that one step may hold, which bounds a prefill chunk;
    `max_context_tokens` is the window; `num_pages` of the pool, 0 to measure what fits. `kv_format`
    is one of `KV_FORMATS`, or empty where keys and values are stored as they are computed.
    Raises: ConfigError: a value out of range; names the option.
    """

    target: str
    dtype: str
    page_size: int = 64
    max_rows: int = 64
    max_step_tokens: int = 2048
    max_context_tokens: int = 4096
    num_pages: int = 0
    kv_format: str = ""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"--target is one of {', '.join(TARGETS)}, not `{self.target}`.")
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"--dtype is one of {', '.join(DTYPES)}, not `{self.dtype}`.")
        if self.kv_format not in KV_DTYPES.values():
            raise ConfigError(f"--kv-dtype is one of {', '.join(KV_DTYPES)}, not {self.kv_format}.")
        if self.page_size % 8 or not 8 <= self.page_size <= 1024:
            raise ConfigError(
                f"--page-size is a multiple of 8 from 8 to 1024 tokens, not {self.page_size}."
            )
        if self.kv_format and self.page_size % PAGE_MULTIPLE:
            raise ConfigError(
                f"--page-size is a multiple of {PAGE_MULTIPLE} tokens with --kv-dtype "
                f"{self.kv_format}, not {self.page_size}."
            )
        for name in ("max_rows", "max_step_tokens", "max_context_tokens"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is at least 1, not {getattr(self, name)}.")
        if self.max_step_tokens < self.max_rows:
            raise ConfigError(
                f"--max-step-tokens {self.max_step_tokens} is less than --max-rows "
                f"{self.max_rows}: a decode step would not hold one token of each.",
                remedy="Raise the first or lower the second.",
            )

    @property
    def pages_per_row(self) -> int:
        """The width of the block table: pages of a request that fills the window."""
        return -(-self.max_context_tokens // self.page_size)

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache as the command line names it."""
        return self.kv_format or "auto"

    def to_json(self) -> dict[str, Any]:
        """Give the fields as they stand in an artifact's manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineConfig:
        """Read the manifest's form. Raises: ConfigError: fields of another version."""
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            odd = ", ".join(sorted(known ^ set(data)))
            raise ConfigError(f"The artifact's engine settings don't fit this version: {odd}.")
        return cls(**data)


def read_kv_dtypes(kv_dtypes: str, quant_policy: int | None = None) -> tuple[str, ...]:
    """Read `--kv-dtype` (several with commas) or `--quant-policy` as formats; none where neither.

    Raises: ConfigError: both are given, or a name or number is unknown.
    """
    if quant_policy is not None:
        if kv_dtypes:
            raise ConfigError(
                "--kv-dtype and --quant-policy both say how the KV cache is stored.",
                remedy="Leave one of them out.",
            )
        if quant_policy not in QUANT_POLICIES:
            known = ", ".join(f"{number} ({name})" for number, name in QUANT_POLICIES.items())
            raise ConfigError(f"--quant-policy is one of {known}, not {quant_policy}.")
        kv_dtypes = QUANT_POLICIES[quant_policy]
    names = [name.strip() for name in kv_dtypes.split(",") if name.strip()]
    for name in names:
        if name not in KV_DTYPES:
            raise ConfigError(f"--kv-dtype is one of {', '.join(KV_DTYPES)}, not `{name}`.")
    return tuple(dict.fromkeys(KV_DTYPES[name] for name in names))


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Give the batch sizes that get a decode program: powers of two, and the largest batch."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


MIXED_TOKEN_STEPS = (16, 64, 256, 1024, 4096)


def mixed_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """Give the upper bounds of tokens that get a program of their own for mixed steps."""
    return (*(n for n in MIXED_TOKEN_STEPS if n < max_step_tokens), max_step_tokens)
