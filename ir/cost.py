"""What an op must compute and move: the floor of its time. Reads the registry's formulas.

Called by lowering, for the headers of kernels, and by benchmarks, for what memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.ir.graph import Graph, Op, walk
from treadle.ir.ops.registry import lookup


@dataclass(frozen=True)
class Cost:
    """Count the operations and the bytes that must cross memory at least once."""

    flops: int
    bytes: int


def op_cost(op: Op, graph: Graph, dims: Mapping[str, int]) -> Cost:
    """Give the cost of a plain or fused op in a step with these dims.

    A fused op moves its own operands and results; what stays inside its body moves nothing.
    """
    if not op.body:
        return _plain_cost(op, graph, dims)
    flops = sum(_plain_cost(inner, graph, dims).flops for inner in op.body)
    # State is touched in part only; the op that touches it knows how much.
    stateful = [inner for inner in op.body if lookup(inner.kind).mutates]
    touched = sum(_plain_cost(inner, graph, dims).bytes // 2 for inner in stateful)
    # So does one that reads the cache: what it reads beside the operands and results of its own.
    readers = [inner for inner in op.body if inner not in stateful and _reads_cache(inner, graph)]
    touched += sum(
        max(0, _plain_cost(inner, graph, dims).bytes - _values_bytes(inner, graph, dims))
        for inner in readers
    )
    # And one with weights: of all experts it reads those that the tokens choose.
    others = [inner for inner in op.body if inner not in (*stateful, *readers)]
    loaders = [inner for inner in others if any(_is_loaded(n, graph) for n in inner.inputs)]
    touched += sum(_loaded_bytes(inner, graph, dims) for inner in loaders)
    loaded = {name for inner in loaders for name in inner.inputs if _is_loaded(name, graph)}
    per_token = {**dims, "C": dims["T"]}  # of a table over positions a row per token is read
    moved = sum(
        graph.type_of(name).num_bytes(per_token)
        for name in (*op.inputs, *op.outputs)
        if name not in loaded and not graph.type_of(name).layout and name != "block_table"
    )
    return Cost(flops, moved + touched)


def read_bytes(graph: Graph, dims: Mapping[str, int]) -> int:
    """Give the bytes of weights and caches that a step with these dims can't do without.

    Values that ops hand on are left out: a GPU's caches may hold them. Of experts those count that
    the step's tokens choose on average, of an embedding the rows that are looked up.
    """
    total = 0
    for op in walk(graph.ops):
        if _reads_cache(op, graph):
            if not lookup(op.kind).mutates:
                whole, without = (_plain_cost(op, graph, {**dims, **c}) for c in ({}, {"C": 0}))
                total += whole.bytes - without.bytes
        elif any(_is_loaded(name, graph) for name in op.inputs):
            total += _loaded_bytes(op, graph, dims)
    return total


def _loaded_bytes(op: Op, graph: Graph, dims: Mapping[str, int]) -> int:
    """Give what an op with weights reads of them."""
    values = [name for name in (*op.inputs, *op.outputs) if not name.startswith("@")]
    moved = sum(graph.type_of(name).num_bytes(dims) for name in values)
    return max(0, _plain_cost(op, graph, dims).bytes - moved)


def _is_loaded(name: str, graph: Graph) -> bool:
    """Say whether a name is that of a weight, and not of a table that positions index."""
    return name.startswith("@") and graph.weight_table[name.removeprefix("@")].rope is None


def _reads_cache(op: Op, graph: Graph) -> bool:
    return any(graph.type_of(name).layout for name in op.inputs)


def _values_bytes(op: Op, graph: Graph, dims: Mapping[str, int]) -> int:
    """Count the first operand and the results, which an op that reads a cache counts as well."""
    return sum(graph.type_of(name).num_bytes(dims) for name in (op.inputs[0], *op.outputs))


def _plain_cost(op: Op, graph: Graph, dims: Mapping[str, int]) -> Cost:
    definition = lookup(op.kind)
    inputs = tuple(map(graph.type_of, op.inputs))
    outputs = tuple(map(graph.type_of, op.outputs))
    return Cost(
        definition.flops(op.params, inputs, outputs, dims),
        definition.bytes(op.params, inputs, outputs, dims),
    )
