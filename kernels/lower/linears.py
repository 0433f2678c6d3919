"""Lower linears with what is fused into them, and products of each head."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels import epilogue
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import kernel_name, leading_size, value_arguments
from treadle.kernels.lower.candidates import Candidate, Scratch, Situation
from treadle.kernels.lower.experts import lower_router
from treadle.kernels.schedule.linears import Sizes, head_linear_schedules, matmul_choices
from treadle.kernels.schedule.machine import Schedule


def lower_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a linear with its prologue and its epilogue.

    Raises: LoweringError: no template takes it; says why each one does not.
    """
    if any(inner.kind == "route" for inner in op.plain):
        yield from lower_router(op, graph, where)
        return
    linear = next(inner for inner in op.plain if inner.kind == "linear")
    weight = graph.type_of(linear.inputs[1])
    size = leading_size(graph, op, linear.inputs[0])
    glu = next((inner for inner in op.plain if inner.kind == "glu"), None)
    sizes = Sizes(
        rows=where.dims[size],
        num_features=weight.size(0),
        num_inputs=weight.size(1),
        feature_multiple=2 * glu.params.interleave if glu else 1,
        element_bytes=DTYPE_BYTES[weight.dtype],
        wide_out=DTYPE_BYTES[graph.type_of(op.outputs[0]).dtype] > DTYPE_BYTES[weight.dtype],
    )
    # A template may lack the place for a norm, or need rows of whole 16 bytes: others take the op.
    lowered: dict[str, epilogue.FusedLinear | LoweringError] = {}
    for template, schedule in matmul_choices(sizes, where.machine):
        if template not in lowered:
            lowered[template] = _fit_linear(template, op, graph)
        fused = lowered[template]
        if isinstance(fused, LoweringError):
            continue
        scratch = _split_scratch(sizes, schedule) if "SPLIT_K" in schedule else ()
        yield Candidate(
            name=kernel_name(op),
            template=template,
            shape=fused.shape,
            schedule=schedule,
            arguments={
                **value_arguments(("x", "w", *fused.operands), fused.inputs),
                "y": f"value:{op.outputs[0]}",
                **{each.name: f"scratch:{each.name}" for each in scratch},
                "num_tokens": f"size:{size}",
            },
            scratch=scratch,
            hooks=fused.hooks,
            operands=fused.operands,
        )
    refusals = [each for each in lowered.values() if isinstance(each, LoweringError)]
    if lowered and len(refusals) == len(lowered):
        raise LoweringError(
            f"No template fits `{op.name}` in a step of {sizes.rows} rows. "
            + " ".join(refusal.message for refusal in refusals),
            remedy=" ".join(dict.fromkeys(refusal.remedy for refusal in refusals)),
        )


def _fit_linear(template: str, op: Op, graph: Graph) -> epilogue.FusedLinear | LoweringError:
    """Give what the template makes of the op, or why it can't."""
    try:
        return epilogue.lower_linear(template, op, graph.types)
    except LoweringError as refusal:
        return refusal


def _split_scratch(sizes: Sizes, schedule: Schedule) -> tuple[Scratch, Scratch]:
    """Give the room for the parts of K, and the counters of how many of them have arrived."""
    block_m, block_n, split = (int(schedule[k]) for k in ("BLOCK_M", "BLOCK_N", "SPLIT_K"))
    tiles = -(-sizes.rows // block_m) * -(-sizes.num_features // block_n)
    partials = split * tiles * block_m * block_n if split > 1 else 1
    return Scratch("partials", "f32", partials), Scratch("counters", "i32", tiles)


def lower_head_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of each head with its own rows of a weight."""
    x, weight = op.inputs
    params, weight_type = op.params, graph.type_of(weight)
    shape: dict[str, Fact] = {
        "NUM_HEADS": params.num_heads,
        "X_DIM": graph.type_of(x).size(-1) // params.num_heads,
        "WEIGHT_ROWS": weight_type.size(0) // params.num_heads,
        "FIRST": params.first,
        "ROWS": params.rows,
        "K": weight_type.size(1),
        "TRANSPOSED": params.transposed,
    }
    num_inputs, num_outputs = weight_type.size(1), params.rows
    if params.transposed:
        num_inputs, num_outputs = num_outputs, num_inputs
    arguments = {
        "x": f"value:{x}",
        "w": f"value:{weight}",
        "y": f"value:{op.outputs[0]}",
        "num_tokens": "size:T",
    }
    sizes = (num_inputs, num_outputs, DTYPE_BYTES[weight_type.dtype])
    for schedule in head_linear_schedules(*sizes, params.num_heads, where.dims["T"], where.machine):
        yield Candidate("head_linear", "head_linear", shape, schedule, arguments)
