"""The rules that make a graph legal, checked after every pass: it fails where it went wrong.

Called by the pipeline and by tests.
"""

from __future__ import annotations

from treadle.ir.errors import SpecError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import infer_types, lookup

STAGES = ("authored", "partly fused", "fused")


def verify(graph: Graph, stage: str) -> None:
    """Check names, types and the stage's form.

    Stage `authored`: plain ops only. Stage `partly fused`: fused ops stand beside plain ones of any
    role. Stage `fused`: no `view` op stands outside a body. At every stage a body
    has exactly one anchor, or an append and the attention that reads it, or is made of row ops.

    Raises: SpecError, ShapeError: the rule, the op and what breaks it.
    """
    if stage not in STAGES:
        raise SpecError(f"A stage is one of {', '.join(STAGES)}, not `{stage}`.")
    known = {value.name for value in graph.inputs} | {f"@{w.name}" for w in graph.weights}
    for op in graph.ops:
        _verify_op(graph, op, known)
        if op.kind == "fused":
            if stage == "authored":
                raise SpecError(f"`{op.name}`: a fused op in an authored graph.")
            _verify_body(graph, op)
        elif stage == "fused" and lookup(op.kind).role == "view":
            raise SpecError(
                f"`{op.name}`: the {op.kind} was not fused, and no kernel covers it alone."
            )
        known.update(op.outputs)
    for name in graph.outputs:
        if name not in known:
            raise SpecError(f"The graph returns `{name}`, which nothing produces.")
    used = {name for op in graph.ops for name in op.inputs}
    for weight in graph.weights:
        if f"@{weight.name}" not in used:
            raise SpecError(f"The weight `{weight.name}` is declared and never used.")


def _verify_op(graph: Graph, op: Op, known: set[str]) -> None:
    for name in op.inputs:
        if name not in known:
            raise SpecError(f"`{op.name}` reads `{name}` before anything produces it.")
    for name in op.outputs:
        if name in known:
            raise SpecError(f"`{op.name}` produces `{name}` a second time.")
    if op.kind == "fused":
        return
    found = tuple(graph.type_of(name) for name in op.outputs)
    expected = infer_types(op.kind, op.params, tuple(map(graph.type_of, op.inputs)))
    if found != expected:
        raise SpecError(
            f"`{op.name}`: the {op.kind} gives {', '.join(map(str, expected))}, the graph says "
            f"{', '.join(map(str, found))}."
        )


def _verify_body(graph: Graph, op: Op) -> None:
    anchors = [inner for inner in op.body if lookup(inner.kind).role == "anchor"]
    rows = [inner for inner in op.body if lookup(inner.kind).role == "row"]
    appends_and_attends = [anchor.kind for anchor in anchors] == ["kv_write", "attention"]
    if len(anchors) != 1 and not appends_and_attends and not (not anchors and rows):
        raise SpecError(
            f"`{op.name}`: a fused op has one anchor, found "
            f"{', '.join(anchor.kind for anchor in anchors) or 'none'}."
        )
    known = set(op.inputs)
    for inner in op.body:
        _verify_op(graph, inner, known)
        known.update(inner.outputs)
    missing = [name for name in op.outputs if name not in known]
    if missing:
        raise SpecError(f"`{op.name}`: nothing in the body produces {', '.join(missing)}.")
    read = {name for inner in op.body for name in inner.inputs}
    unread = [name for name in op.inputs if name not in read]
    if unread:
        raise SpecError(f"`{op.name}`: the body never reads {', '.join(unread)}.")
