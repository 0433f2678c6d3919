"""What an engine is asked to be: sizes, dtypes and limits, checked once and never changed.

Called by the compiler, the engine and the CLI.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from treadle.ir.errors import ConfigError

AUTOTUNE = ("off", "cached", "quick", "full")
TARGETS = ("cuda", "interpret", "reference")
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class EngineConfig:
    """Fix the shape of an engine; part of an artifact, because kernels and graphs depend on it.

    Units: `page_size` slots (tokens) per KV page; `max_rows` requests that run at once;
    `max_step_tokens` tokens that one step may hold, which bounds a prefill chunk;
    `max_context_tokens` is the window; `num_pages` of the pool, 0 to measure what fits.
    Raises: ConfigError: a value out of range; names the option.
    """

    target: str
    dtype: str
    page_size: int = 64
    max_rows: int = 64
    max_step_tokens: int = 2048
    max_context_tokens: int = 4096
    num_pages: int = 0

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"--target is one of {', '.join(TARGETS)}, not `{self.target}`.")
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"--dtype is one of {', '.join(DTYPES)}, not `{self.dtype}`.")
        if self.page_size % 8 or not 8 <= self.page_size <= 1024:
            raise ConfigError(
                f"--page-size is a multiple of 8 from 8 to 1024 tokens, not {self.page_size}."
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
