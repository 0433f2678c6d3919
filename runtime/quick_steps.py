"""Quick forms bound to a graph's ops: which ops have one, with which constants, as steps to play.

Everything here is f32; an op without a quick form is played by its reference. Called by
`reference_program.py` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

import torch

from treadle.ir.graph import Graph, Op
from treadle.ir.types import FLOATS
from treadle.kernels import reference_quick
from treadle.kernels.reference.step_plan import StepPlan
from treadle.runtime.packed_weights import PackedWeights, weight_of

Environment = dict[str, torch.Tensor]
Step = Callable[[Environment], None]


class SharedInputs(Protocol):
    """Give what all layers derive from a step's inputs."""

    def plan(self, env: Environment) -> StepPlan:
        """Give the step's plan of cache slots."""

    def angles(
        self, positions: str, table: str, env: Environment
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the step's cosines and sines of a rope table."""


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
        if kinds == ("attention",):
            return self._bind_attention(op)
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
        if weight_of(linear) not in self._packed.linears:
            return None
        x, (out,) = linear.inputs[0], linear.outputs
        packed, bias = self._packed.linears[weight_of(linear)], self._bias(linear)

        def step(env: Environment) -> None:
            env[out] = reference_quick.linear(env[x], packed, bias)

        return step

    def _bind_linear_add(self, linear: Op, add: Op) -> Step | None:
        if weight_of(linear) not in self._packed.linears:
            return None
        x, (out,) = linear.inputs[0], add.outputs
        (residual,) = (name for name in add.inputs if name not in linear.outputs)
        packed, bias = self._packed.linears[weight_of(linear)], self._bias(linear)

        def step(env: Environment) -> None:
            env[out] = reference_quick.linear_add(env[x], packed, bias, env[residual])

        return step

    def _bind_linear_glu(self, linear: Op, glu: Op) -> Step | None:
        if weight_of(linear) not in self._packed.glus:
            return None
        x, (out,) = linear.inputs[0], glu.outputs
        packed, bias = self._packed.glus[weight_of(linear)], self._bias(linear)
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

    def _bind_attention(self, attention: Op) -> Step | None:
        q, cache, *step_inputs = attention.inputs
        (out,) = attention.outputs
        params = asdict(attention.params)
        if params.pop("window") or params.pop("soft_cap") or len(step_inputs) > 4:
            return None
        k_cache, v_cache = self._caches[cache]
        shared = self._shared

        def step(env: Environment) -> None:
            env[out] = reference_quick.attention(
                env[q],
                k_cache,
                v_cache,
                *(env[name] for name in step_inputs),
                plan=shared.plan(env),
                **params,
            )

        return step

    def _bias(self, linear: Op) -> torch.Tensor | None:
        return self._weights[linear.inputs[2].removeprefix("@")] if len(linear.inputs) > 2 else None
