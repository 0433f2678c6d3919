"""Lower the ops that change logits, draw tokens from them and count these."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.graph import Graph, Op
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import operand_of, plain_arguments
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.schedule.machine import INTERPRETER, power_of_two
from treadle.kernels.schedule.rows import sample_schedules, step_schedules


def lower_sample(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the draw of a token for each sequence."""
    vocab = graph.type_of(op.inputs[0]).size(1)
    arguments = plain_arguments(op, ("tokens",), num_seqs="B")
    for schedule in sample_schedules(vocab, where.machine):
        yield Candidate("sample", "sample", {"VOCAB": vocab}, schedule, arguments)


def lower_adjust(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the penalties and biases of logits, which change in place."""
    vocab = graph.type_of(op.inputs[0]).size(1)
    shape: dict[str, Fact] = {
        "VOCAB": vocab,
        "MAX_BIASES": graph.type_of(operand_of(op, "bias_tokens")).size(1),
    }
    arguments = plain_arguments(op, (), num_seqs="B")
    # A block of the vocabulary a program; in the interpreter, whose programs cost most, all of it.
    block_v = power_of_two(vocab) if where.machine == INTERPRETER else 1024
    for schedule in step_schedules("BLOCK_V", where.machine):
        schedule = {**schedule, "BLOCK_V": block_v, "BLOCK_K": 8, "num_warps": 4}
        yield Candidate("adjust_logits", "adjust_logits", shape, schedule, arguments)


def lower_count(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the count of the tokens drawn."""
    vocab = graph.type_of(operand_of(op, "token_counts")).size(1)
    arguments = plain_arguments(op, (), num_seqs="B")
    for schedule in step_schedules("BLOCK_B", where.machine):
        yield Candidate("count_tokens", "count_tokens", {"VOCAB": vocab}, schedule, arguments)
