"""Which spec describes which architecture.

Called by the runtime's compiler and by `show`. Every family registers by its `ARCHITECTURES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle.ir.builder import GraphBuilder
from treadle.ir.errors import SpecError
from treadle.ir.graph import Graph
from treadle.models import llama, phi3, qwen3, smollm3
from treadle.models.config import ModelConfig, architecture_of, from_hf


@dataclass(frozen=True)
class Family:
    """Name a family's module and the function that builds a step of it."""

    name: str
    architectures: tuple[str, ...]
    build: Callable[[ModelConfig, GraphBuilder], Graph]


FAMILIES: tuple[Family, ...] = (
    Family("llama", llama.ARCHITECTURES, llama.build),
    Family("phi3", phi3.ARCHITECTURES, phi3.build),
    Family("qwen3", qwen3.ARCHITECTURES, qwen3.build),
    Family("smollm3", smollm3.ARCHITECTURES, smollm3.build),
)


def find_family(architecture: str) -> Family:
    """Give the family of a Hugging Face architecture name.

    Raises: SpecError: there is none; names the nearest ones and how to write a spec.
    """
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    nearest = difflib.get_close_matches(architecture, known, n=3, cutoff=0.3) or known
    raise SpecError(
        f"No spec describes the architecture `{architecture}`; nearest are {', '.join(nearest)}.",
        remedy="docs/tutorial.md shows how to describe a model of your own in models/.",
    )


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """Read the Hugging Face config of a model that a spec describes.

    Raises: SpecError: none does, said before anything else, because to an unknown architecture keys
    may mean other things; or as `from_hf`.
    """
    find_family(architecture_of(config))
    return from_hf(config)


def build_graph(config: ModelConfig, *, step: str, dtype: str, page_size: int) -> Graph:
    """Build the authored graph of a `decode` or `mixed` step."""
    family = find_family(config.architecture)
    return family.build(
        config, GraphBuilder(family.name, step=step, dtype=dtype, page_size=page_size)
    )
