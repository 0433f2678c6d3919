"""Rows that nobody wants are not computed: rows are picked before the ops that need no others.

Logits are wanted of the last token of each sequence. Behind the last op that mixes tokens, the
attention of the last layer, a prompt's other tokens are of no use: the projections behind it
multiply a row per sequence. Called by `pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treadle.ir.fuse import LINEARS, Refusal, Result
from treadle.ir.graph import Graph, Op, Value
from treadle.ir.ops.registry import infer_types, lookup

RULE = "pick_rows_early"


def pick_rows_early(graph: Graph) -> Result:
    """Move each `gather_rows` before the ops whose results only it reads, if they take any rows."""
    refusals: list[Refusal] = []
    for gather in [op for op in graph.ops if op.kind == "gather_rows"]:
        followers = _read_by_no_other(graph, gather)
        index = graph.producers.get(gather.inputs[1])
        if index is not None and index.kind == "advance":
            reason = "a sequence has one token in this step"
        elif gather.outputs[0] in graph.outputs:
            reason = "its rows leave the graph"
        elif not any(op.kind in LINEARS for op in followers):
            reason = "no linear before it multiplies rows for it alone"
        else:
            graph = _pick_before(graph, gather, followers)
            continue
        refusals.append(Refusal(RULE, gather.name, reason))
    return graph, tuple(refusals)


def _read_by_no_other(graph: Graph, gather: Op) -> list[Op]:
    """Give the ops before `gather` that take any rows and whose results nobody else needs."""
    found: list[Op] = []
    for op in reversed(graph.ops[: graph.ops.index(gather)]):
        readers = [reader for name in op.outputs for reader in graph.uses.get(name, ())]
        if (
            lookup(op.kind).any_rows
            and not set(op.outputs) & set(graph.outputs)
            and readers
            and all(reader is gather or reader in found for reader in readers)
        ):
            found.append(op)
    return found


def _pick_before(graph: Graph, gather: Op, followers: list[Op]) -> Graph:
    """Pick the rows of all that `followers` read, and let them compute no others."""
    wanted, index = gather.inputs
    made = {name for op in followers for name in op.outputs}
    types = dict(graph.types)
    picked: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op is gather:
            continue
        if op not in followers:
            # What came out of the gather comes out of the last of them.
            inputs = tuple(wanted if name == gather.outputs[0] else name for name in op.inputs)
            ops.append(replace(op, inputs=inputs))
            continue
        for name in op.inputs:
            if name not in made and name not in picked and not name.startswith("@"):
                picked[name] = _name_picked(name, op, types)
                types[picked[name]] = infer_types(
                    gather.kind, gather.params, (types[name], types[index])
                )[0]
                ops.append(replace(gather, inputs=(name, index), outputs=(picked[name],)))
        op = replace(op, inputs=tuple(picked.get(name, name) for name in op.inputs))
        found = infer_types(op.kind, op.params, tuple(types[name] for name in op.inputs))
        types.update(zip(op.outputs, found, strict=True))
        ops.append(op)
    made_by_ops = dict.fromkeys(name for op in ops for name in op.outputs)
    values = tuple(Value(name, types[name]) for name in made_by_ops)
    return replace(graph, ops=tuple(ops), values=values)


def _name_picked(name: str, reader: Op, taken: Mapping[str, object]) -> str:
    """Name the rows that are picked of a value after it, but in the layer that wants them."""
    scope, dot, _ = reader.name.rpartition(".")
    found = f"{scope}{dot}{name.rpartition('.')[2]}_picked"
    while found in taken:
        found += "_too"
    return found
