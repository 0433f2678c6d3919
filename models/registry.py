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
from treadle.models import (
    cohere2,
    deepseek,
    ernie4_5,
    exaone4,
    gemma,
    glm4,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    internlm2,
    llama,
    mixtral,
    olmo2,
    phi3,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from treadle.models.config import ModelConfig, architecture_of, from_hf


@dataclass(frozen=True)
class Family:
    """Name a family's module and the function that builds a step of it."""

    name: str
    architectures: tuple[str, ...]
    build: Callable[[ModelConfig, GraphBuilder], Graph]


FAMILIES: tuple[Family, ...] = (
    Family("llama", llama.ARCHITECTURES, llama.build),
    Family("cohere2", cohere2.ARCHITECTURES, cohere2.build),
    Family("deepseek", deepseek.ARCHITECTURES, deepseek.build),
    Family("ernie4_5", ernie4_5.ARCHITECTURES, ernie4_5.build),
    Family("exaone4", exaone4.ARCHITECTURES, exaone4.build),
    Family("gemma", gemma.ARCHITECTURES, gemma.build),
    Family("glm4", glm4.ARCHITECTURES, glm4.build),
    Family("glm4_moe", glm4_moe.ARCHITECTURES, glm4_moe.build),
    Family("gpt_neox", gpt_neox.ARCHITECTURES, gpt_neox.build),
    Family("gpt_oss", gpt_oss.ARCHITECTURES, gpt_oss.build),
    Family("granite", granite.ARCHITECTURES, granite.build),
    Family("internlm2", internlm2.ARCHITECTURES, internlm2.build),
    Family("mixtral", mixtral.ARCHITECTURES, mixtral.build),
    Family("olmo2", olmo2.ARCHITECTURES, olmo2.build),
    Family("phi3", phi3.ARCHITECTURES, phi3.build),
    Family("qwen2_moe", qwen2_moe.ARCHITECTURES, qwen2_moe.build),
    Family("qwen3", qwen3.ARCHITECTURES, qwen3.build),
    Family("qwen3_moe", qwen3_moe.ARCHITECTURES, qwen3_moe.build),
    Family("smollm3", smollm3.ARCHITECTURES, smollm3.build),
    Family("stablelm", stablelm.ARCHITECTURES, stablelm.build),
    Family("starcoder2", starcoder2.ARCHITECTURES, starcoder2.build),
)


def find_family(architecture: str) -> Family:
    """Give the family of a Hugging Face architecture name.

    Raises: SpecError: there is none; names the nearest ones and how to write a spec.
    """
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    specs = {name: family.name for family in FAMILIES for name in family.architectures}
    nearest = difflib.get_close_matches(architecture, specs, n=3, cutoff=0.3) or list(specs)
    shown = ", ".join(f"`{name}` (models/{specs[name]}.py)" for name in nearest)
    raise SpecError(
        f"No spec describes the architecture `{architecture}`; nearest are {shown}.",
        remedy=f"Start one from the nearest: python cli.py new-model NAME --like "
        f"{specs[nearest[0]]} --config MODEL; docs/tutorial.md goes on from there.",
    )


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """Read the Hugging Face config of a model that a spec describes.

    Raises: SpecError: none does, said before anything else, because to an unknown architecture keys
    may mean other things; or as `from_hf`.
    """
    find_family(architecture_of(config))
    return from_hf(config)


def build_graph(
    config: ModelConfig, *, step: str, dtype: str, page_size: int, kv_format: str = ""
) -> Graph:
    """Build the authored graph of a `decode` or `mixed` step; see `GraphBuilder`."""
    family = find_family(config.architecture)
    builder = GraphBuilder(
        family.name, step=step, dtype=dtype, page_size=page_size, kv_format=kv_format
    )
    return family.build(config, builder)
