"""Programs of the `reference` target: a graph's ops played in order by their torch functions.

The functions come from `kernels/reference/`; fused ops are played through their bodies, unless
there is a quick form of the whole. Called by the executor where no GPU is found, and by `verify`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from treadle.ir.dims import bind
from treadle.ir.graph import Graph, Op, walk
from treadle.ir.ops.registry import lookup
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.kernels.reference.by_kind import REFERENCES
from treadle.kernels.reference.linears import PackedWeight
from treadle.kernels.reference.rope import rope_angles
from treadle.kernels.reference.step_plan import StepPlan, plan_step
from treadle.runtime.packed_weights import PackedWeights
from treadle.runtime.quick_steps import Environment, QuickForms, Step
from treadle.runtime.state import DeviceState


class ReferenceProgram:
    """Play one graph.

    With `packed` weights ops are played in their quick forms, where they have one; without, each
    plain op is played by its reference function. Weights that are read packed only are not kept. A
    program that `follows` another changes the values that the other left.
    """

    def __init__(
        self,
        graph: Graph,
        state: DeviceState,
        weights: Mapping[str, torch.Tensor],
        packed: PackedWeights | None = None,
        follows: ReferenceProgram | None = None,
    ) -> None:
        self.values: Environment = {}
        self._follows = follows
        self._graph = graph
        self._state = state
        self._weights = {f"@{name}": tensor for name, tensor in weights.items()}
        linears: Mapping[str, PackedWeight] = packed.linears if packed else {}
        self._packed = {f"@{name}": tensor for name, tensor in linears.items()}
        self._leading = [
            (v.name, v.type.shape[0])
            for v in graph.inputs
            if not v.type.layout and v.name in state.tensors
        ]
        # What all layers derive from the step's inputs is derived once, before the first that asks.
        self._shared = _SharedInputs(tuple(walk(graph.ops)), graph)
        quick = None
        if packed:
            quick = QuickForms(graph, weights, packed, state.caches, self._shared)
        self._read_whole = _read_beside_linears(graph)
        self._ops = [
            (self._bind(op, quick), done)
            for op, done in zip(graph.ops, _values_done(graph), strict=True)
        ]
        self._weights = {n: w for n, w in self._weights.items() if n in self._read_whole}

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """Give the weights that are kept, those packed left out."""
        return self._weights.values()

    def run(self, num_tokens: int, num_seqs: int, *, keep_values: bool = False) -> Environment:
        """Run a step whose inputs lie in the state; give values by name.

        Values that no later op reads are dropped, which leaves their memory warm for the next ones;
        all but the graph's outputs are, in the end. `keep_values` keeps all.
        """
        dims = {**self._state.dims, "T": num_tokens, "B": num_seqs}
        tensors = self._state.tensors
        env: Environment = dict(self._weights)
        env.update((name, tensors[name][: bind(dim, dims)]) for name, dim in self._leading)
        if self._follows is not None:
            left = self._follows.values
            env.update(logits=left["logits"], sample_index=left["tokens"])
        self._shared.forget()
        with torch.inference_mode():
            for steps, done in self._ops:
                for step in steps:
                    step(env)
                if not keep_values:
                    for name in done:
                        env.pop(name, None)  # a quick form of the whole never made what is inside
        self.values = env
        return env

    def _bind(self, op: Op, quick: QuickForms | None) -> list[Step]:
        """Give the steps that play an op: one for the whole if it can be, or one per plain op."""
        whole = quick and quick.bind(op)
        if whole:
            return [whole]
        if op.body:
            return [step for inner in op.body for step in self._bind(inner, quick)]
        return [self._bind_plain(op)]

    def _bind_plain(self, op: Op) -> Step:
        """Make a closure that reads an op's operands from an environment and stores its results."""
        function, options = reference_call(op, self._graph)
        accepted = inspect.signature(function).parameters
        constants = self._packed if op.kind == "linear" else {}
        if op.kind == "linear" and op.inputs[1] not in constants:
            self._read_whole.add(op.inputs[1])
        caches: Mapping[str, tuple[torch.Tensor, ...]] = {}
        if any(self._graph.type_of(name).layout for name in op.inputs):
            caches = self._state.caches
            if options.get("kv_format"):
                cache = op.inputs[lookup(op.kind).operands.index("cache")]
                options["open_pages"] = self._state.open_pages[cache]
        inputs, outputs = op.inputs, op.outputs
        shares_plan, shares_angles = "plan" in accepted, "angles" in accepted

        def step(env: Environment) -> None:
            operands: list[PackedWeight] = []
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


def _read_beside_linears(graph: Graph) -> set[str]:
    """Name the weights that are read otherwise than as what a linear multiplies by."""
    ops = [inner for op in graph.ops for inner in op.plain]
    return {
        name
        for op in ops
        for operand, name in enumerate(op.inputs)
        if name.startswith("@") and not (op.kind == "linear" and operand == 1)
    }


def _values_done(graph: Graph) -> list[list[str]]:
    """Say for each op which values nobody reads after it; graph outputs are not among them."""
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        made = [name for inner in op.plain for name in inner.outputs]
        last.update(dict.fromkeys((*made, *op.inputs), index))
    lasting = {*graph.outputs, *(f"@{weight.name}" for weight in graph.weights)}
    done: list[list[str]] = [[] for _ in graph.ops]
    for name, index in last.items():
        if name not in lasting:
            done[index].append(name)
    return done


def reference_call(op: Op, graph: Graph) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Give the function that a plain op means, and the options that parameters and types become."""
    function = REFERENCES[op.kind]
    accepted = inspect.signature(function).parameters
    options = {name: value for name, value in asdict(op.params).items() if name in accepted}
    if "out_dtype" in options:
        options["out_dtype"] = TORCH_DTYPES.get(options["out_dtype"])
    if "kv_format" in accepted:
        cache = op.inputs[lookup(op.kind).operands.index("cache")]
        options["kv_format"] = graph.type_of(cache).kv_format
    return _by_name(function, op), options


def _by_name(function: Callable[..., Any], op: Op) -> Callable[..., Any]:
    """Give the function as it takes the op's operands in a row, though some may be absent."""
    definition = lookup(op.kind)
    names = definition.present(len(op.inputs))
    if names == tuple(name.removesuffix("?") for name in definition.operands[: len(names)]):
        return function
    optional = names[definition.required :]

    @functools.wraps(function)
    def call(*tensors: torch.Tensor, **options: Any) -> Any:
        count = len(tensors) - len(optional)
        named = dict(zip(optional, tensors[count:], strict=True))
        return function(*tensors[:count], **named, **options)

    return call


# What `plan_step` takes, of the operands of ops that write a cache or read one.
_PLANNED = (
    "positions",
    "token_seq",
    "seq_rows",
    "block_table",
    "query_start",
    "context_lens",
)


class _SharedInputs:
    """Keep, for the length of one step, what every layer would derive anew."""

    def __init__(self, ops: tuple[Op, ...], graph: Graph) -> None:
        self._plan: StepPlan | None = None
        self._angles: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        named: dict[str, str] = {}
        for op in ops:
            for cache in (t for t in map(graph.type_of, op.inputs) if t.layout):
                self._num_kv_heads, self._page_size = cache.size(1), cache.size(2)
                named |= zip(lookup(op.kind).operands, op.inputs, strict=False)
        self._operands = tuple(named[name] for name in _PLANNED if name in named)

    def forget(self) -> None:
        """Begin a new step."""
        self._plan = None
        self._angles.clear()

    def plan(self, env: Environment) -> StepPlan:
        """Give the step's plan of cache slots."""
        if self._plan is None:
            self._plan = plan_step(
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
            self._angles[table] = rope_angles(env[positions], env[table])
        return self._angles[table]
