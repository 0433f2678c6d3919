"""Prove the kernels: each launch of a program against the reference of its op, on the same inputs.

A step is played launch by launch. Before each, its results are poisoned and the op's reference is
computed from the very tensors the kernel will read; after it, results and state are compared. Called
by `verify` and by tests; works on every target that launches kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch

from treadle.ir import ops
from treadle.ir.graph import Graph, Op
from treadle.kernels import reference
from treadle.runtime.state import DeviceState
from treadle.runtime.triton_program import TritonProgram
from treadle.runtime.weights import TORCH_DTYPES

# Relative error of a result's norm that its compute dtype explains: a few rounding steps.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 1e-2}
POISON = float("nan")


@dataclass(frozen=True)
class OpCheck:
    """Tell how far one result of one launch is from the reference, relative to its norm."""

    op: str
    kernel: str
    result: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Say whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def verify_program(
    program: TritonProgram,
    graph: Graph,
    state: DeviceState,
    weights: Mapping[str, torch.Tensor],
    num_tokens: int,
    num_seqs: int,
) -> Iterator[OpCheck]:
    """Play a step whose inputs lie in the state and yield a check per result, in launch order."""
    dims = {**state.dims, "T": num_tokens, "B": num_seqs}
    tensors = {
        **state.tensors,
        **{f"@{name}": tensor for name, tensor in weights.items()},
        **program.values,
    }
    for index, op in enumerate(graph.ops):
        expected, expected_state = _reference(op, graph, tensors, state, dims)
        for name in op.outputs:
            _poison(tensors[name])
        program.launch(index, num_tokens, num_seqs)
        kernel = program.plan.launches[index].kernel
        for name, value in expected.items():
            yield _compare(op, kernel, name, value, _bound(tensors[name], graph, name, dims))
        for name, value in expected_state.items():
            yield _compare(op, kernel, name, value, _state_tensor(name, tensors, state))


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(POISON) if tensor.is_floating_point() else tensor.fill_(-(2**30))


def _bound(
    tensor: torch.Tensor, graph: Graph, name: str, dims: Mapping[str, int]
) -> torch.Tensor:
    """Give the part of a buffer that a step of these dims uses."""
    return tensor[: graph.types[name].bound_shape(dims)[0]]


def _state_tensor(
    name: str, tensors: Mapping[str, torch.Tensor], state: DeviceState
) -> torch.Tensor:
    return torch.stack(state.caches[name]) if name in state.caches else tensors[name]


def _reference(
    op: Op,
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    state: DeviceState,
    dims: Mapping[str, int],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Compute an op's results and the state it should leave, without touching either."""
    env: dict[str, torch.Tensor] = {}
    changed: dict[str, torch.Tensor] = {}
    body = op.body or (op,)
    for inner in body:
        definition = ops.lookup(inner.kind)
        operands: list[torch.Tensor] = []
        for operand, name in zip(definition.operands, inner.inputs, strict=False):
            if name in state.caches:
                both = _state_tensor(name, tensors, state).clone()
                changed |= {name: both} if operand in definition.mutates else {}
                operands += [both[0], both[1]]
                continue
            value = env[name] if name in env else tensors[name]
            if name not in env and not name.startswith("@"):
                value = _bound(value, graph, name, dims)
            if operand in definition.mutates:
                value = value.clone()
                changed[name] = value
            # The reference of a chain rounds once, at its end, as a fused kernel does.
            is_value = value.is_floating_point() and not name.startswith("@")
            operands.append(value.float() if is_value and len(body) > 1 else value)
        function = getattr(reference, inner.kind)
        accepted = inspect.signature(function).parameters
        options = {k: v for k, v in asdict(inner.params).items() if k in accepted}
        if "out_dtype" in options:
            options["out_dtype"] = TORCH_DTYPES.get(options["out_dtype"], torch.float32)
        result = function(*operands, **options)
        results = result if isinstance(result, tuple) else (result,)
        env.update(zip(inner.outputs, results, strict=False))
    found = {name: env[name].to(TORCH_DTYPES[graph.types[name].dtype]) for name in op.outputs}
    return found, changed


def _compare(
    op: Op, kernel: str, name: str, expected: torch.Tensor, found: torch.Tensor
) -> OpCheck:
    if not expected.is_floating_point():
        error = float((expected != found.view_as(expected)).sum())
        return OpCheck(op.name, kernel, name, error, 0.0)
    wide, other = expected.double(), found.view_as(expected).double()
    error = float((other - wide).norm() / wide.norm().clamp(min=1e-30))
    return OpCheck(op.name, kernel, name, error, TOLERANCES[expected.dtype])
