"""Lower pointwise ops that no other op took into its epilogue."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.graph import Graph, Op
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import leading_size, plain_arguments
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.lower.norms import lower_norm
from treadle.kernels.schedule.rows import pointwise_schedules


def lower_add(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower an add that no linear took into its epilogue, with a norm before it if it has one."""
    if op.body:
        yield from lower_norm(op, graph, where)
        return
    width = graph.type_of(op.outputs[0]).size(-1)
    shape: dict[str, Fact] = {"WIDTH": width, "OP": "add"}
    rows = leading_size(graph, op, op.outputs[0])
    arguments = plain_arguments(op, ("y",), num_tokens=rows)
    for schedule in pointwise_schedules(width, where.machine):
        yield Candidate("add", "pointwise", shape, schedule, arguments)


def lower_glu(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a gated activation that no linear took into its epilogue."""
    width = graph.type_of(op.outputs[0]).size(-1)
    params = op.params
    shape: dict[str, Fact] = {
        "WIDTH": width,
        "ACT": params.act,
        "INTERLEAVE": params.interleave,
        "LIMIT": params.limit,
        "SHARPNESS": params.sharpness,
        "UP_OFFSET": params.up_offset,
    }
    rows = leading_size(graph, op, op.outputs[0])
    arguments = plain_arguments(op, ("y",), num_tokens=rows)
    for schedule in pointwise_schedules(width, where.machine):
        yield Candidate("glu", "glu", shape, schedule, arguments)
