"""The weights of a CPU's linears in the forms that multiply fastest, in float32 or in float16.

A decode step takes as long as reading its weights does. Where the checkpoint stores numbers of 16
bits they are held in float16, which holds the same, and computed with in float32. Called by
`loading.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from treadle.ir.errors import ConfigError, MachineError
from treadle.ir.graph import Graph, Op, walk
from treadle.kernels import reference_quick
from treadle.kernels.reference.linears import (
    PackedWeight,
    can_pack_float16,
    can_pack_weight,
    float16_loss,
    pack_float16,
    pack_weight,
    packed_bytes,
)
from treadle.runtime.checkpoint import Checkpoint
from treadle.runtime.config import EngineConfig
from treadle.runtime.weights import Recipe

NO_FBGEMM = "torch has no FBGEMM here"
ROUNDED = "float16 would round them"
OTHER_ENGINE = "not computed in float32"
# Losses as of `float16_loss`: what float32 sums lose anyway, and what 11 bits lose.
EXACT_LOSS, ROUNDING_LOSS = 2.0**-22, 2.0**-11


@dataclass(frozen=True)
class PackedWeights:
    """Hold weights by name as `kernels/reference/linears.py` packs them.

    `linears` are in their own order; in `glus` all gate rows come first. `why_float32` says of
    those that multiply in float32 why they are held in it too; empty: they are held in float16.
    """

    linears: Mapping[str, PackedWeight]
    glus: Mapping[str, PackedWeight]
    why_float32: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """The bytes of all, shared ones counted once."""
        distinct = {id(each): each for each in (*self.linears.values(), *self.glus.values())}
        return sum(map(packed_bytes, distinct.values()))

    def describe(self) -> str:
        """Say how many are held in which dtype, and why; nothing where that is not the question."""
        reasons = Counter(self.why_float32.values())
        count, number = len(self.why_float32), reasons.pop("", 0)
        if number == count:
            return "matrices in float16" if count else ""
        if len(reasons) == 1:
            told = next(iter(reasons))
        else:
            told = ", ".join(f"{times} {reason}" for reason, times in sorted(reasons.items()))
        which = f"{number} of {count} matrices in float16, the others" if number else "matrices"
        return f"{which} in float32 ({told})"


def weight_of(linear: Op) -> str:
    """Give the name of the weight that a linear multiplies by."""
    return linear.inputs[1].removeprefix("@")


def find_narrow(recipes: Collection[Recipe], checkpoint: Checkpoint) -> frozenset[str]:
    """Name the weights all of whose tensors are stored in numbers of 16 bits."""
    return frozenset(
        name
        for recipe in recipes
        if all(checkpoint.is_narrow(source) for source in recipe.sources)
        for name in recipe.names
    )


def check_weight_dtype(weight_dtype: str, config: EngineConfig) -> None:
    """Refuse a `--weight-dtype` that this engine does not offer.

    Raises: ConfigError: another target than reference, or another dtype to compute in than float32.
    MachineError: float16, and torch can't multiply by it.
    """
    if weight_dtype == "auto":
        return
    if config.target != "reference":
        raise ConfigError(
            f"--weight-dtype {weight_dtype} is for --target reference; the target {config.target} "
            "holds weights in the dtype that it computes in.",
            remedy="Leave it out; `compile --dtype` chooses what is computed in.",
        )
    if config.dtype != "f32":
        raise ConfigError(
            f"--weight-dtype {weight_dtype} is for engines that compute in float32; this one was "
            f"compiled for {config.dtype}.",
            remedy="Leave it out, or compile with --dtype float32.",
        )
    if weight_dtype == "float16" and not can_pack_float16():
        raise MachineError(
            f"--weight-dtype float16: {NO_FBGEMM} (an x86 CPU with AVX2, and its engine "
            f"`{torch.backends.quantized.engine}` set to fbgemm or x86).",
            remedy="Leave it out: weights are held in float32.",
        )


def tries_float16(weight_dtype: str, config: EngineConfig, narrow: Collection[str]) -> bool:
    """Say whether any weight may be held in float16."""
    if weight_dtype == "float32" or config.dtype != "f32" or not can_pack_float16():
        return False
    return weight_dtype == "float16" or bool(narrow)


def pack_weights(
    graph: Graph,
    weights: Mapping[str, torch.Tensor],
    weight_dtype: str,
    narrow: Collection[str],
) -> PackedWeights:
    """Pack the weights that linears read, where this CPU can; those of one storage once.

    `weight_dtype` is as in `ServeOptions`, and has been checked; auto takes float16 for those named
    in `narrow` whose numbers it holds.
    Raises: ConfigError: float16 is demanded and hasn't the range of a weight; names it.
    """
    parted = {
        weight_of(op.body[0]): op.body[1].params.interleave for op in graph.ops if _is_glu(op)
    }
    linears: dict[str, PackedWeight] = {}
    glus: dict[str, PackedWeight] = {}
    why: dict[str, str] = {}
    by_storage: dict[int, PackedWeight] = {}
    for name in sorted({weight_of(op) for op in walk(graph.ops) if op.kind == "linear"}):
        weight = weights[name]
        if name not in parted and weight.data_ptr() in by_storage:
            linears[name] = by_storage[weight.data_ptr()]
            continue
        is_float32 = weight.dtype == torch.float32
        reason = _why_float32(name, weight, weight_dtype, narrow) if is_float32 else OTHER_ENGINE
        if reason and not can_pack_weight(weight.dtype):
            continue
        if is_float32:
            why[name] = reason
        is_glu = is_float32 and name in parted
        rows = reference_quick.part_gate_up(weight, parted[name]) if is_glu else weight
        packed = pack_weight(rows) if reason else pack_float16(rows)
        if is_glu:
            glus[name] = packed
        else:
            linears[name] = by_storage[weight.data_ptr()] = packed
    return PackedWeights(linears, glus, why)


def _why_float32(
    name: str, weight: torch.Tensor, weight_dtype: str, narrow: Collection[str]
) -> str:
    """Say why a weight is not held in float16; nothing where it is to be."""
    if weight_dtype == "float32":
        return "as asked for"
    if weight_dtype == "auto":
        if name not in narrow:
            return ROUNDED
        if not can_pack_float16():
            return NO_FBGEMM
    loss = float16_loss(weight)
    if weight_dtype == "auto":
        return ROUNDED if loss > EXACT_LOSS else ""
    if loss > ROUNDING_LOSS:
        found = "beyond its range" if math.isinf(loss) else "too small for it"
        raise ConfigError(
            f"--weight-dtype float16: `{name}` holds numbers {found}.",
            remedy="Leave it out: such weights are held in float32.",
        )
    return ""


def _is_glu(op: Op) -> bool:
    return tuple(inner.kind for inner in op.body) == ("linear", "glu")
