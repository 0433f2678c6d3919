"""Quick forms bound to a graph's ops: which ops have one, with which constants, as steps to play.

Everything here is f32; an op without a quick form is played by its reference. Called by
`reference_program.py` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from treadle.ir.graph import Graph, Op, walk
from treadle.ir.types import FLOATS
from treadle.kernels import reference_quick
from treadle.kernels.reference.linears import can_pack_weight, pack_weight
from treadle.kernels.reference.step_plan import StepPlan

Environment = dict[str, torch.Tensor]
Step = Callable[[Environment], None]


@dataclass(frozen=True)
class PackedWeights:
    """Hold weights by name in the layout that oneDNN multiplies fastest.

    `linears` are in their own order; in `glus` all gate rows come first.
    """

    linears: Mapping[str, torch.Tensor]
    glus: Mapping[str, torch.Tensor]


class SharedInputs(Protocol):
    """Give what all layers derive from a step's inputs."""

    def plan(self, env: Environment) -> StepPlan:
        """Give the step's plan of cache slots."""

    def angles(
        self, positions: str, table: str, env: Environment
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the step's cosines and sines of a rope table."""


def pack_weights(graph: Graph, weights: Mapping[str, torch.Tensor]) -> PackedWeights:
    """Pack the weights that linears read, where this CPU can; those of one storage once."""
    parted = {_weight(op.body[0]): op.body[1].params.interleave for op in graph.ops if _is_glu(op)}
    linears: dict[str, torch.Tensor] = {}
    glus: dict[str, torch.Tensor] = {}
    by_storage: dict[int, torch.Tensor] = {}
    for name in sorted({_weight(op) for op in walk(graph.ops) if op.kind == "linear"}):
        weight = weights[name]
        if not can_pack_weight(weight.dtype):
            continue
        if name in parted and weight.dtype == torch.float32:
            rows = reference_quick.part_gate_up(weight, parted[name])
            glus[name] = pack_weight(rows)
            continue
        if weight.data_ptr() not in by_storage:
            by_storage[weight.data_ptr()] = pack_weight(weight)
        linears[name] = by_storage[weight.data_ptr()]
    return PackedWeights(linears, glus)


def _weight(linear: Op) -> str:
    return linear.inputs[1].removeprefix("@")


def _is_glu(op: Op) -> bool:
    return tuple(inner.kind for inner in op.body) == ("linear", "glu")


class QuickForms:
    """Bind the quick forms of one graph's ops."""

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, torch.Tensor],
        packed: PackedWeights,
        caches: Mapping[str, tuple[torch.Tensor, ...]],
        shared: SharedInputs,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._packed = packed
        self._caches = caches
        self._shared = shared

    def bind(self, op: Op) -> Step | None:
        """Give a step that plays the op, fused or plain, or None where it has no quick form."""
        types = [self._graph.type_of(name) for name in (*op.inputs, *op.outputs)]
        if any(type_.dtype in FLOATS and type_.dtype != "f32" for type_ in types):
            return None
        if any(type_.kv_format for type_ in types):
            return None
        kinds = tuple(inner.kind for inner in op.plain)
        leaving = "rope" if "rope" in kinds else kinds[-1]
        if op.outputs != next(inner.outputs for inner in op.plain if inner.kind == leaving):
            return None  # a value between the ops is read elsewhere too
        if kinds == ("rms_norm",):
            return self._bind_norm(op)
        if kinds == ("linear",):
            return self._bind_linear(op)
        if kinds == ("linear", "add"):
            return self._bind_linear_add(*op.body)
        if kinds == ("linear", "glu"):
            return self._bind_linear_glu(*op.body)
        if kinds == ("split", "rope", "rope", "kv_write"):
            return self._bind_rope_kv_write(*op.body)
        return None

    def _bind_norm(self, norm: Op) -> Step:
        x, (out,) = norm.inputs[0], norm.outputs
        weight = self._weights[norm.inputs[1].removeprefix("@")]
        if norm.params.offset:
            weight = weight + norm.params.offset
        eps = torch.full((1,), norm.params.eps)

        def step(env: Environment) -> None:
            env[out] = reference_quick.rms_norm(env[x], weight, eps)

        return step

    def _bind_linear(self, linear: Op) -> Step | None:
        if _weight(linear) not in self._packed.linears:
            return None
        x, (out,) = linear.inputs[0], linear.outputs
        packed, bias = self._packed.linears[_weight(linear)], self._bias(linear)

        def step(env: Environment) -> None:
            env[out] = reference_quick.linear(env[x], packed, bias)

        return step

    def _bind_linear_add(self, linear: Op, add: Op) -> Step | None:
        if _weight(linear) not in self._packed.linears:
            return None
        x, (out,) = linear.inputs[0], add.outputs
        (residual,) = (name for name in add.inputs if name not in linear.outputs)
        packed, bias = self._packed.linears[_weight(linear)], self._bias(linear)

        def step(env: Environment) -> None:
            env[out] = reference_quick.linear_add(env[x], packed, bias, env[residual])

        return step

    def _bind_linear_glu(self, linear: Op, glu: Op) -> Step | None:
        if _weight(linear) not in self._packed.glus:
            return None
        x, (out,) = linear.inputs[0], glu.outputs
        packed, bias = self._packed.glus[_weight(linear)], self._bias(linear)
        if bias is not None:
            bias = reference_quick.part_gate_up(bias, glu.params.interleave)
        form = asdict(glu.params)
        del form["interleave"]  # the rows are packed one half after the other

        def step(env: Environment) -> None:
            env[out] = reference_quick.linear_glu(env[x], packed, bias, **form)

        return step

    def _bind_rope_kv_write(self, split: Op, rope_q: Op, rope_k: Op, write: Op) -> Step | None:
        q, k, v = split.outputs
        _, positions, table = rope_q.inputs
        k_cache, v_cache = self._caches[write.inputs[-1]]
        head_dim = k_cache.shape[-1]
        is_usual = (
            rope_q.inputs == (q, positions, table)
            and rope_k.inputs == (k, positions, table)
            and write.inputs[:2] == (*rope_k.outputs, v)
            and self._graph.type_of(table).size(1) == head_dim
            and not rope_q.params.interleaved
        )
        if not is_usual:
            return None
        (qkv,), (out,) = split.inputs, rope_q.outputs
        num_heads = split.params.sizes[0] // head_dim
        shared = self._shared

        def step(env: Environment) -> None:
            env[out] = reference_quick.rope_kv_write(
                env[qkv],
                k_cache,
                v_cache,
                num_heads=num_heads,
                angles=shared.angles(positions, table, env),
                plan=shared.plan(env),
            )

        return step

    def _bias(self, linear: Op) -> torch.Tensor | None:
        return self._weights[linear.inputs[2].removeprefix("@")] if len(linear.inputs) > 2 else None
