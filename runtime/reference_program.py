"""Programs of the `reference` target: a graph's ops played in order by their torch functions.

The functions come from `kernels/reference.py`; fused ops are played through their bodies. Called by
the executor where no GPU is found, and by `verify` as the oracle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from treadle.ir.dims import bind
from treadle.ir.graph import Graph, Op, walk
from treadle.ir.ops import lookup
from treadle.kernels import reference
from treadle.runtime.state import DeviceState

Environment = dict[str, torch.Tensor]


class ReferenceProgram:
    """Play one graph; `run` leaves every value of the step in the returned environment."""

    def __init__(
        self, graph: Graph, state: DeviceState, weights: Mapping[str, torch.Tensor]
    ) -> None:
        self.graph = graph
        self._state = state
        self._weights = {f"@{name}": tensor for name, tensor in weights.items()}
        self._leading = [(v.name, v.type.shape[0]) for v in graph.inputs if not v.type.layout]
        self._steps = [_bind(op) for op in walk(graph.ops)]

    def run(self, num_tokens: int, num_seqs: int) -> Environment:
        """Run a step whose inputs lie in the state; give all values by name."""
        dims = {**self._state.dims, "T": num_tokens, "B": num_seqs}
        tensors = self._state.tensors
        env: Environment = dict(self._weights)
        env.update((name, tensors[name][: bind(dim, dims)]) for name, dim in self._leading)
        with torch.inference_mode():
            for step in self._steps:
                step(env, self._state.caches)
        return env


def _bind(op: Op) -> Callable[[Environment, Mapping[str, tuple[torch.Tensor, torch.Tensor]]], None]:
    """Make a closure that reads an op's operands from the environment and stores its results."""
    function = getattr(reference, op.kind)
    accepted = inspect.signature(function).parameters
    options = {name: value for name, value in asdict(op.params).items() if name in accepted}
    if options.get("out_dtype") is not None:
        options["out_dtype"] = _OUT_DTYPES[options["out_dtype"]]
    has_cache = "cache" in lookup(op.kind).operands
    inputs, outputs = op.inputs, op.outputs

    def step(env: Environment, caches: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        if has_cache:
            operands = [t for name in inputs for t in (caches.get(name) or (env[name],))]
        else:
            operands = [env[name] for name in inputs]
        result = function(*operands, **options)
        if len(outputs) == 1:
            env[outputs[0]] = result[0] if isinstance(result, tuple) else result
        elif outputs:
            env.update(zip(outputs, result, strict=True))

    return step


_OUT_DTYPES = {"": None, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
