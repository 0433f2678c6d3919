"""Lower norms, with the choice of their rows before them or an add after them."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import (
    kernel_name,
    leading_size,
    plain_arguments,
    value_arguments,
)
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.schedule.rows import norm_schedules


def lower_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a norm, with the choice of its rows before it or an add after it."""
    norm, gather = _read_norm(op)
    add = op.plain[-1] if op.plain[-1].kind == "add" else None
    others = [name for name in add.inputs if name != norm.outputs[0]] if add else []
    if add and len(others) != 1:
        raise LoweringError(f"`{op.name}`: a norm's result should be added to another value.")
    x = gather.inputs[0] if gather else norm.inputs[0]
    hidden = graph.type_of(x).size(-1)
    rows = leading_size(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "HIDDEN": hidden,
        "EPS": norm.params.eps,
        "OFFSET": norm.params.offset,
        "ADD_RESIDUAL": False,
        "GATHER": gather is not None,
    }
    arguments = {
        **value_arguments(("x", "weight", "y"), (x, norm.inputs[1], op.outputs[0])),
        "index": f"value:{gather.inputs[1]}" if gather else "none:",
        "residual": "none:",
        "stream": "none:",
        **value_arguments(("other",) if add else (), others),
        "num_rows": f"size:{rows}",
    }
    epilogue = (
        "other = tl.load(other_ptr + offsets, mask=mask, other=0.0).to(tl.float32)",
        "y += other",
    )
    for schedule in norm_schedules(hidden, where.dims[rows], where.machine):
        yield Candidate(
            kernel_name(op),
            "norm",
            shape,
            schedule,
            arguments,
            hooks={"EPILOGUE": epilogue if add else ()},
            operands=("other",) if add else (),
        )


def _read_norm(op: Op) -> tuple[Op, Op | None]:
    """Give the norm of a body, and what chooses its rows."""
    gather = op.plain[0] if op.plain[0].kind == "gather_rows" else None
    return op.plain[1 if gather else 0], gather


def lower_layer_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a layer norm, with the choice of its rows before it."""
    norm, gather = _read_norm(op)
    x, weight, *bias = norm.inputs
    hidden = graph.type_of(x).size(-1)
    rows = leading_size(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "HIDDEN": hidden,
        "EPS": norm.params.eps,
        "HAS_BIAS": bool(bias),
        "GATHER": gather is not None,
    }
    arguments = {
        **value_arguments(("weight", "y"), (weight, op.outputs[0])),
        "x": f"value:{gather.inputs[0] if gather else x}",
        "bias": f"value:{bias[0]}" if bias else "none:",
        "index": f"value:{gather.inputs[1]}" if gather else "none:",
        "num_rows": f"size:{rows}",
    }
    for schedule in norm_schedules(hidden, where.dims[rows], where.machine):
        yield Candidate(kernel_name(op), "layer_norm", shape, schedule, arguments)


def lower_section_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the norms of one or two sections of a row."""
    sizes = op.params.sizes
    if len(sizes) > 2:
        raise LoweringError(
            f"`{op.name}`: a kernel normalises at most two sections of a row; found {len(sizes)}.",
            remedy="Normalise the others with a second `section_norm`.",
        )
    rows = leading_size(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "FIRST": sizes[0],
        "SECOND": sizes[1] if len(sizes) > 1 else 0,
        "WIDTH": graph.type_of(op.inputs[0]).size(-1),
        "EPS": op.params.eps,
        "OFFSET": op.params.offset,
    }
    arguments = plain_arguments(op, ("y",), num_rows=rows)
    for schedule in norm_schedules(max(sizes), where.dims[rows], where.machine):
        yield Candidate("section_norm", "section_norm", shape, schedule, arguments)
