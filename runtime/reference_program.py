"""Programs of the `reference` target: a graph's ops played in order by their torch functions.

The functions come from `kernels/reference.py`; fused ops are played through their bodies. Called by
the executor where no GPU is found, and by `verify` as the oracle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from treadle.ir.dims import bind
from treadle.ir.graph import Graph, Op, walk
from treadle.ir.ops import lookup
from treadle.kernels import reference
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.runtime.state import DeviceState

Environment = dict[str, torch.Tensor]


class ReferenceProgram:
    """Play one graph; `run` leaves every value of the step in the returned environment.

    `packed` are weights in the layout that oneDNN multiplies fastest, used by linears instead of
    the plain ones; see `pack_weights`.
    """

    def __init__(
        self,
        graph: Graph,
        state: DeviceState,
        weights: Mapping[str, torch.Tensor],
        packed: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._state = state
        self._weights = {f"@{name}": tensor for name, tensor in weights.items()}
        self._packed = {f"@{name}": tensor for name, tensor in (packed or {}).items()}
        self._leading = [(v.name, v.type.shape[0]) for v in graph.inputs if not v.type.layout]
        ops = tuple(walk(graph.ops))
        self._steps = [self._bind(op) for op in ops]
        # What all layers derive from the step's inputs is derived once, before the first that asks.
        self._shared = _SharedInputs(ops, graph)

    def run(self, num_tokens: int, num_seqs: int) -> Environment:
        """Run a step whose inputs lie in the state; give all values by name."""
        dims = {**self._state.dims, "T": num_tokens, "B": num_seqs}
        tensors = self._state.tensors
        env: Environment = dict(self._weights)
        env.update((name, tensors[name][: bind(dim, dims)]) for name, dim in self._leading)
        self._shared.forget()
        with torch.inference_mode():
            for step in self._steps:
                step(env)
        return env

    def _bind(self, op: Op) -> Callable[[Environment], None]:
        """Make a closure that reads an op's operands from an environment and stores its results."""
        function, options = reference_call(op)
        accepted = inspect.signature(function).parameters
        constants = self._packed if op.kind == "linear" else {}
        caches: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if "cache" in lookup(op.kind).operands:
            caches = self._state.caches
        inputs, outputs = op.inputs, op.outputs
        shares_plan, shares_angles = "plan" in accepted, "angles" in accepted

        def step(env: Environment) -> None:
            operands: list[torch.Tensor] = []
            for name in inputs:
                if name in caches:
                    operands += caches[name]
                else:
                    operands.append(constants[name] if name in constants else env[name])
            shared: dict[str, object] = {}
            if shares_plan:
                shared["plan"] = self._shared.plan(env)
            if shares_angles:
                shared["angles"] = self._shared.angles(inputs[1], inputs[2], env)
            result = function(*operands, **options, **shared)
            if len(outputs) == 1:
                env[outputs[0]] = result[0] if isinstance(result, tuple) else result
            elif outputs:
                env.update(zip(outputs, result, strict=True))

        return step


def reference_call(op: Op) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Give the function that a plain op means, and the options that its parameters become."""
    function = getattr(reference, op.kind)
    accepted = inspect.signature(function).parameters
    options = {name: value for name, value in asdict(op.params).items() if name in accepted}
    if "out_dtype" in options:
        options["out_dtype"] = TORCH_DTYPES.get(options["out_dtype"])
    return function, options


class _SharedInputs:
    """Keep, for the length of one step, what every layer would derive anew."""

    def __init__(self, ops: tuple[Op, ...], graph: Graph) -> None:
        self._plan: reference.StepPlan | None = None
        self._angles: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._operands: tuple[str, ...] = ()
        for op in ops:
            if op.kind == "kv_write":
                _, _, positions, token_seq, seq_rows, block_table, cache = op.inputs
                cache_type = graph.type_of(cache)
                self._num_kv_heads = cache_type.size(1)
                self._page_size = cache_type.size(2)
                self._operands = (positions, token_seq, seq_rows, block_table)
            elif op.kind == "attention":
                self._operands = (*self._operands[:4], *op.inputs[4:6])

    def forget(self) -> None:
        """Begin a new step."""
        self._plan = None
        self._angles.clear()

    def plan(self, env: Environment) -> reference.StepPlan:
        """Give the step's plan of cache slots."""
        if self._plan is None:
            self._plan = reference.plan_step(
                *(env[name] for name in self._operands),
                num_kv_heads=self._num_kv_heads,
                page_size=self._page_size,
            )
        return self._plan

    def angles(
        self, positions: str, table: str, env: Environment
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the step's cosines and sines of a rope table."""
        if table not in self._angles:
            self._angles[table] = reference.rope_angles(env[positions], env[table])
        return self._angles[table]


def pack_weights(graph: Graph, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Pack the weights that linears read, where this CPU can; those of one storage once."""
    names = {op.inputs[1].removeprefix("@") for op in walk(graph.ops) if op.kind == "linear"}
    packed: dict[int, torch.Tensor] = {}
    result = {}
    for name in sorted(names):
        weight = weights[name]
        if not reference.can_pack_weight(weight.dtype):
            continue
        if weight.data_ptr() not in packed:
            packed[weight.data_ptr()] = reference.pack_weight(weight)
        result[name] = packed[weight.data_ptr()]
    return result
