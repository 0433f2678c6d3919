"""How a lowering names what `launch` takes, and reads an op for it: shared by all kinds of op."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.ir import dims as d
from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import lookup


def kernel_name(op: Op) -> str:
    """Give the name of the kernel that computes an op, fused or plain."""
    return op.params.kernel if op.body else op.kind


def leading_size(graph: Graph, op: Op, name: str) -> str:
    """Name the size that decides the rows of an operand or result: T or B."""
    dim = graph.type_of(name).shape[0]
    if dim not in (d.T, d.B):
        raise LoweringError(
            f"`{op.name}`: `{name}` should have a row per token or sequence of the step; it is "
            f"{graph.type_of(name)}."
        )
    return str(dim)


def operand_of(op: Op, name: str) -> str:
    """Give the value that stands for an operand of a plain op."""
    return op.inputs[lookup(op.kind).operands.index(name)]


def value_arguments(parameters: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Give the arguments of parameters that are values, each by its name in the graph."""
    return {p: f"value:{name}" for p, name in zip(parameters, names, strict=True)}


def plain_arguments(op: Op, results: Sequence[str], **sizes: str) -> dict[str, str]:
    """Give the arguments of a template whose parameters are called like the op's operands."""
    operands = value_arguments(lookup(op.kind).operands, op.inputs)
    outputs = value_arguments(results, op.outputs)
    return {**operands, **outputs, **{name: f"size:{size}" for name, size in sizes.items()}}
