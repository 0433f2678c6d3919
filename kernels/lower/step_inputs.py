"""Lower the ops that prepare a step's inputs on the device."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import lookup
from treadle.kernels.lower.arguments import plain_arguments
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.schedule.rows import step_schedules


def lower_advance(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the inputs of a decode step, made from the state of rows."""
    arguments = plain_arguments(op, lookup("advance").results, num_seqs="B")
    for schedule in step_schedules("BLOCK_B", where.machine):
        yield Candidate("advance", "step_inputs", {}, schedule, arguments)


def lower_resolve(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the tokens that the host does not know yet, filled in on the device."""
    arguments = plain_arguments(op, ("y",), num_tokens="T")
    for schedule in step_schedules("BLOCK_T", where.machine):
        yield Candidate("resolve_tokens", "resolve_tokens", {}, schedule, arguments)
