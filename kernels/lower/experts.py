"""Lower mixtures of experts: the router, the sort, the products, the sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.ir import dims as d
from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels.emit import Fact
from treadle.kernels.epilogue import lower_linear
from treadle.kernels.lower.arguments import (
    kernel_name,
    leading_size,
    plain_arguments,
    value_arguments,
)
from treadle.kernels.lower.candidates import Candidate, Scratch, Situation
from treadle.kernels.schedule.experts import (
    combine_schedules,
    expert_gemv_combine_schedules,
    expert_gemv_schedules,
    grouped_choices,
    router_schedules,
    sort_schedules,
)
from treadle.kernels.schedule.linears import Sizes
from treadle.kernels.schedule.machine import Schedule, power_of_two


def lower_router(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the product that makes the logits of experts, and the choice among them."""
    kinds = [inner.kind for inner in op.plain]
    if kinds != ["linear", "route"]:
        raise LoweringError(
            f"`{op.name}`: experts are chosen in the kernel of one linear; found "
            f"{', '.join(kinds)}.",
            remedy="Let a linear without a norm of its own make the logits.",
        )
    linear, route = op.plain
    x, weight, *bias = linear.inputs
    correction = route.inputs[1:]
    num_experts, num_inputs = graph.type_of(weight).size(0), graph.type_of(weight).size(1)
    params = route.params
    shape: dict[str, Fact] = {
        "NUM_EXPERTS": num_experts,
        "K": num_inputs,
        "TOP_K": params.top_k,
        "SCORE": params.score,
        "NORMALISE": params.normalise,
        "SCALING": params.scaling,
        "NUM_GROUPS": params.num_groups,
        "KEPT_GROUPS": params.kept_groups,
        "GROUP_TOP": params.group_top,
        "BIAS": bool(bias),
        "CORRECTION": bool(correction),
    }
    size = leading_size(graph, op, x)
    rows = where.dims[size]
    block_x = max(16, power_of_two(num_experts))
    for schedule in router_schedules(num_experts, num_inputs, rows, where.machine):
        split = int(schedule["SPLIT_K"])
        scratch = (
            Scratch("partials", "f32", split * rows * block_x if split > 1 else 1),
            Scratch("counters", "i32", -(-rows // int(schedule["BLOCK_M"]))),
        )
        yield Candidate(
            name=kernel_name(op),
            template="router",
            shape=shape,
            schedule=schedule,
            arguments={
                **value_arguments(("x", "w", "experts", "scales"), (x, weight, *route.outputs)),
                "bias": f"value:{bias[0]}" if bias else "none:",
                "correction": f"value:{correction[0]}" if correction else "none:",
                **{each.name: f"scratch:{each.name}" for each in scratch},
                "num_tokens": f"size:{size}",
            },
            scratch=scratch,
        )


def lower_sort(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the sort of choices by expert."""
    num_experts, top_k = op.params.num_experts, graph.type_of(op.inputs[0]).size(1)
    shape: dict[str, Fact] = {"NUM_EXPERTS": num_experts, "TOP_K": top_k}
    size = leading_size(graph, op, op.inputs[0])
    num_choices = where.dims[size] * top_k
    for schedule in sort_schedules(num_experts, num_choices, where.machine):
        blocks = 0 if schedule["ONE_BLOCK"] else -(-num_choices // int(schedule["BLOCK_CHOICES"]))
        counts = Scratch("expert_counts", "i32", max(1, blocks * num_experts))
        arguments = {
            **plain_arguments(op, ("order", "starts"), num_tokens=size),
            "counts": f"scratch:{counts.name}",
        }
        yield Candidate("sort_by_expert", "sort_by_expert", shape, schedule, arguments, (counts,))


def lower_expert_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of each choice by itself, or of all choices of a token, added up."""
    linear = op.plain[0]
    x, weight, experts, *_ = linear.inputs
    top_k = graph.type_of(experts).size(1)
    size = leading_size(graph, op, experts)
    sizes = _expert_sizes(op, graph, where.dims[size] * top_k)
    combine = next((inner for inner in op.plain if inner.kind == "combine"), None)
    facts: dict[str, Fact] = {"TOP_K": top_k}
    values = {"x": x, "w": weight, "experts": experts}
    if combine:
        template, schedules = (
            "expert_gemv_combine",
            expert_gemv_combine_schedules(sizes, where.machine),
        )
        values["scales"] = combine.inputs[1]
    else:
        template, schedules = "expert_gemv", expert_gemv_schedules(sizes, where.machine)
        facts["ROW_PER_CHOICE"] = _has_row_per_choice(x, experts, graph)
    if combine and top_k > 1 and not _has_row_per_choice(x, experts, graph):
        raise LoweringError(
            f"`{op.name}`: results are added up where each choice has a row of its own; `{x}` has "
            "one per token.",
            remedy="Multiply by another weight of the experts before.",
        )
    choices = ((template, schedule) for schedule in schedules)
    yield from _expert_candidates(op, graph, values, facts, choices, size)


def lower_grouped_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of the choices of each expert together."""
    x, weight, order, starts, *_ = op.plain[0].inputs
    num_choices, num_experts = graph.type_of(order).shape[0], graph.type_of(weight).size(0)
    assert isinstance(num_choices, d.Sym), "a choice or more of each row"
    top_k = num_choices.scale
    sizes = _expert_sizes(op, graph, d.bind(num_choices, where.dims))
    facts: dict[str, Fact] = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "ROW_PER_CHOICE": graph.type_of(x).shape[0] == num_choices and top_k > 1,
    }
    values = {"x": x, "w": weight, "order": order, "starts": starts}
    choices = grouped_choices(sizes, num_experts, where.machine)
    yield from _expert_candidates(op, graph, values, facts, choices, num_choices.name)


def _has_row_per_choice(x: str, experts: str, graph: Graph) -> bool:
    return graph.type_of(x).shape[0] != graph.type_of(experts).shape[0]


def _expert_sizes(op: Op, graph: Graph, rows: int) -> Sizes:
    weight = graph.type_of(op.plain[0].inputs[1])
    glu = next((inner for inner in op.plain if inner.kind == "glu"), None)
    return Sizes(
        rows=rows,
        num_features=weight.size(1),
        num_inputs=weight.size(2),
        feature_multiple=2 * glu.params.interleave if glu else 1,
        element_bytes=DTYPE_BYTES[weight.dtype],
    )


def _expert_candidates(
    op: Op,
    graph: Graph,
    values: Mapping[str, str],
    facts: Mapping[str, Fact],
    choices: Iterator[tuple[str, Schedule]],
    size: str,
) -> Iterator[Candidate]:
    for template, schedule in choices:
        fused = lower_linear(template, op, graph.types)
        yield Candidate(
            name=kernel_name(op),
            template=template,
            shape={**fused.shape, **facts},
            schedule=schedule,
            arguments={
                **value_arguments(tuple(values), tuple(values.values())),
                **value_arguments(fused.operands, fused.inputs[2:]),
                "y": f"value:{op.outputs[0]}",
                "num_tokens": f"size:{size}",
            },
            hooks=fused.hooks,
            operands=fused.operands,
        )


def lower_combine(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the sum over a token's experts, and the residual that is added to it."""
    combine, *adds = op.plain
    rows, scales = combine.inputs
    width, top_k = graph.type_of(rows).size(1), graph.type_of(scales).size(1)
    residual = [name for add in adds for name in add.inputs if name != combine.outputs[0]]
    size = leading_size(graph, op, scales)
    shape: dict[str, Fact] = {"WIDTH": width, "TOP_K": top_k, "ADD_RESIDUAL": bool(residual)}
    arguments = {
        **value_arguments(("rows", "scales", "y"), (rows, scales, op.outputs[0])),
        "residual": f"value:{residual[0]}" if residual else "none:",
        "num_tokens": f"size:{size}",
    }
    for schedule in combine_schedules(width, where.dims[size], where.machine):
        yield Candidate(kernel_name(op), "combine", shape, schedule, arguments)
