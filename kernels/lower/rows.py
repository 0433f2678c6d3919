"""Lower ops that pick rows."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.graph import Graph, Op
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import plain_arguments
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.schedule.rows import embed_schedules, pointwise_schedules


def lower_embed(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the lookup of tokens' rows in the embedding."""
    hidden = graph.type_of(op.inputs[1]).size(1)
    shape: dict[str, Fact] = {"HIDDEN": hidden, "SCALE": op.params.scale}
    arguments = plain_arguments(op, ("y",), num_tokens="T")
    for schedule in embed_schedules(hidden, where.machine):
        yield Candidate("embed", "embed", shape, schedule, arguments)


def lower_gather(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the choice of rows, where no norm that reads them makes it."""
    width = graph.type_of(op.inputs[0]).size(-1)
    arguments = plain_arguments(op, ("y",), num_rows="B")
    for schedule in pointwise_schedules(width, where.machine):
        yield Candidate("gather_rows", "gather_rows", {"WIDTH": width}, schedule, arguments)
