"""Norms without a kernel: one half where their rows are made, one where they are read.

A norm's scale is a number per row, so a linear may multiply rows that lack it and scale the result.
The linear before then leaves the weighted rows and their sums of squares; nothing runs between
the two. Called by `pipeline.py`, after residuals have joined their linears.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.ir import fuse, ops
from treadle.ir.graph import Graph, Op, Value

# Features that share a sum of squares: a tile of the linear before holds whole parts.
PART_FEATURES = 64
# Rows that lack their scale can be as large as the residual stream, which leaves the range of f16.
_WIDE_DTYPES = ("bf16", "f32")
_AFTER = {"linear", "glu", "activate", "scale", "soft_cap"}


def split_norms(graph: Graph) -> fuse.Result:
    """Replace each norm between a residual's linear and the linear that reads it by two halves."""
    refusals: list[fuse.Refusal] = []
    for norm in [op for op in graph.ops if op.kind == "rms_norm"]:
        reason = _obstacle(graph, norm)
        if reason:
            refusals.append(fuse.Refusal("split_norms", norm.name, reason))
        else:
            graph = _split(graph, norm)
    return graph, tuple(refusals)


def _obstacle(graph: Graph, norm: Op) -> str | None:
    x, normed = norm.inputs[0], norm.outputs[0]
    before, reader = graph.producers.get(x), graph.single_use(normed)
    rows = graph.type_of(x)
    if before is None or before.plain[0].kind != "linear" or before.plain[-1].kind != "add":
        return "its rows are not made by a linear and its residual"
    if len(graph.uses[x]) == 1 and x not in graph.outputs:
        return "nothing else reads its rows: the linear before would make no result of its own"
    if reader is None or reader.plain[0].kind != "linear":
        return "it is not one linear that reads it"
    if len(reader.plain[0].inputs) != 2:
        return "the bias of the linear that reads it would be scaled too"
    if (
        not _AFTER.issuperset(op.kind for op in reader.plain)
        or normed in reader.plain[0].inputs[1:]
    ):
        return "what follows the linear that reads it is no epilogue"
    if rows.dtype not in _WIDE_DTYPES:
        return f"rows without their scale may leave the range of {rows.dtype}"
    if rows.size(-1) % PART_FEATURES:
        return f"its rows are not whole parts of {PART_FEATURES} features"
    return None


def _split(graph: Graph, norm: Op) -> Graph:
    (x, weight), (normed,) = norm.inputs, norm.outputs
    before, reader = graph.producers[x], graph.uses[normed][0]
    linear, *after = reader.plain
    (product,) = linear.outputs
    weighted, squares, unscaled = f"{normed}_weighted", f"{normed}_squares", f"{product}_unscaled"

    params = ops.RmsBeginParams(PART_FEATURES, norm.params.offset)
    types = ops.infer_types("rms_begin", params, tuple(map(graph.type_of, norm.inputs)))
    begin = Op("rms_begin", (x, weight), (weighted, squares), params, norm.where, norm.origin)
    plain = replace(linear, inputs=(weighted, *linear.inputs[1:]), outputs=(unscaled,))
    scale = ops.RmsFinishParams(norm.params.eps, graph.type_of(x).size(-1))
    finish = Op("rms_finish", (unscaled, squares), (product,), scale, norm.where, norm.origin)

    new_values = [Value(weighted, types[0]), Value(squares, types[1])]
    new_values.append(Value(unscaled, graph.type_of(product)))
    new_ops: list[Op] = []
    for op in graph.ops:
        if op is norm:
            new_ops.append(begin)
        elif op is reader:
            new_ops += [plain, finish, *after]
        else:
            new_ops.append(op)
    graph = replace(graph, values=(*graph.values, *new_values)).replace_ops(new_ops)
    graph = fuse.join(graph, [before, begin])
    return fuse.join(graph, [plain, finish, *after])
