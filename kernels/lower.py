"""Fused op → the kernels that may compute it: template, facts, schedule, hooks, arguments.

The first candidate is the default; the tuner chooses among all. Refuses, with the reason, what no
template covers. Called by the runtime's planner and by `verify`; must not know tensors or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.ir import dims as d
from treadle.ir.cost import op_cost
from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.attention import AttentionParams
from treadle.ir.ops.norms import RmsNormParams
from treadle.ir.ops.params import describe
from treadle.ir.ops.registry import lookup
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels.candidates import Candidate, Scratch, Situation
from treadle.kernels.emit import Fact, Header
from treadle.kernels.epilogue import TILES, FusedLinear, lower_linear, soft_cap
from treadle.kernels.latent import (
    lower_head_linear,
    lower_latent_attention,
    lower_latent_write,
    lower_prompt_attention,
)
from treadle.kernels.schedule import (
    INTERPRETER,
    Schedule,
    Sizes,
    attention_decode_quantised_schedules,
    attention_decode_schedules,
    attention_prefill_quantised_schedules,
    attention_prefill_schedules,
    attention_prefill_tma_schedules,
    combine_schedules,
    embed_schedules,
    expert_gemv_combine_schedules,
    expert_gemv_schedules,
    grouped_choices,
    matmul_choices,
    norm_schedules,
    pointwise_schedules,
    power_of_two,
    rope_attention_decode_schedules,
    rope_kv_write_schedules,
    router_schedules,
    sample_schedules,
    sort_schedules,
    step_schedules,
    within_shared_memory,
)


def lower(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Yield the candidates for an op of a fused graph, the default first; at least one.

    Raises: LoweringError: no template covers it; names the op and what stands in the way.
    """
    kinds = tuple(inner.kind for inner in op.plain)
    # Without an anchor a kernel is made of row ops, and of what joined the last of them.
    roles = [lookup(kind).role for kind in kinds]
    leading = [i for role in ("row", "anchor") for i, r in enumerate(roles) if r == role]
    anchor = kinds[leading[-1]] if leading else kinds[-1]
    if anchor not in _LOWERINGS:
        raise LoweringError(
            f"No template covers `{op.name}`, of kind {anchor}.",
            remedy=f"Templates exist for {', '.join(sorted(_LOWERINGS))}.",
        )
    header = _header(op, graph)
    seen = set()  # small sizes cut different schedules down to the same one
    for candidate in _LOWERINGS[anchor](op, graph, where):
        way = (candidate.template, *candidate.schedule.items())
        if way not in seen:
            seen.add(way)
            yield replace(candidate, header=header)
    if not seen:
        raise LoweringError(
            f"No schedule fits `{op.name}`, of kind {anchor}, in {dict(where.dims)}."
        )


# Templates that read the step's inputs before they wait for the kernel before them. That one must
# let dependents start only once what it depends on has ended: then all that is older is complete.
_EARLY_READERS: dict[str, frozenset[str]] = {
    "rope_kv_write": frozenset(TILES),
    "attention_decode": frozenset({"rope_kv_write"}),
    "rope_kv_write_quantised": frozenset(TILES),
    "attention_decode_quantised": frozenset({"rope_kv_write_quantised"}),
    "expert_gemv_combine": frozenset({"expert_gemv"}),
    "rope_attention_decode": frozenset(TILES),
    "latent_attention_decode": frozenset({"head_linear"}),
}


def without_unsafe_pdl(candidate: Candidate, previous: str) -> Candidate:
    """Give the candidate, without dependent launch where the template before it forbids that."""
    allowed = _EARLY_READERS.get(candidate.template)
    if allowed is None or previous in allowed or not candidate.schedule["USE_PDL"]:
        return candidate
    return replace(candidate, schedule={**candidate.schedule, "USE_PDL": False})


def _kernel_name(op: Op) -> str:
    return op.params.kernel if op.body else op.kind


def local_name(name: str) -> str:
    """Drop scopes and layer numbers of a name: kernels are shared by all layers."""
    sigil = "@" if name.startswith("@") else ""
    return sigil + [part for part in name.removeprefix("@").split(".") if not part.isdigit()][-1]


def _header(op: Op, graph: Graph) -> Header:
    covers = []
    for inner in op.plain:
        results = ", ".join(f"{local_name(n)}: {graph.types[n]}" for n in inner.outputs)
        params = describe(inner.params)
        operands = ", ".join(map(local_name, inner.inputs)) + (f"; {params}" if params else "")
        call = f"{inner.kind}({operands})"
        covers.append(f"{results} = {call}" if results else call)
    return Header(_summary(op), tuple(covers), _cost_facts(op, graph))


def _summary(op: Op) -> str:
    first = [
        lookup(inner.kind).doc.partition("\n")[0].removesuffix(".")
        for inner in op.plain
        if lookup(inner.kind).role != "view"
    ]
    joined = "; then ".join(dict.fromkeys(first))
    return joined[0].lower() + joined[1:] + "."


def _cost_facts(op: Op, graph: Graph) -> tuple[str, ...]:
    def cost(tokens: int) -> tuple[int, int]:
        dims = {"T": tokens, "B": tokens, "C": 0, "R": 0, "M": 0, "P": 0}
        found = op_cost(op, graph, dims)
        return found.flops, found.bytes

    fixed, each = cost(0), cost(1)
    facts = (
        f"Must move {fixed[1]:,} bytes and {each[1] - fixed[1]:,} per token; must compute "
        f"{each[0] - fixed[0]:,} operations per token.",
    )
    if any(inner.kind in ("attention", "latent_attention") for inner in op.plain):
        return (
            *facts,
            "Keys and values come on top: their bytes and operations per context token.",
        )
    return facts


# --- linears ------------------------------------------------------------------------------------


def _lower_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    if any(inner.kind == "route" for inner in op.plain):
        yield from _lower_router(op, graph, where)
        return
    linear = next(inner for inner in op.plain if inner.kind == "linear")
    weight = graph.type_of(linear.inputs[1])
    size = _leading(graph, op, linear.inputs[0])
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
    lowered: dict[str, FusedLinear | LoweringError] = {}
    for template, schedule in matmul_choices(sizes, where.machine):
        if template not in lowered:
            lowered[template] = _fit_linear(template, op, graph)
        fused = lowered[template]
        if isinstance(fused, LoweringError):
            continue
        scratch = _split_scratch(sizes, schedule) if "SPLIT_K" in schedule else ()
        yield Candidate(
            name=_kernel_name(op),
            template=template,
            shape=fused.shape,
            schedule=schedule,
            arguments={
                **_values(("x", "w", *fused.operands), fused.inputs),
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


def _fit_linear(template: str, op: Op, graph: Graph) -> FusedLinear | LoweringError:
    """Give what the template makes of the op, or why it can't."""
    try:
        return lower_linear(template, op, graph.types)
    except LoweringError as refusal:
        return refusal


def _split_scratch(sizes: Sizes, schedule: Schedule) -> tuple[Scratch, Scratch]:
    """Give the room for the parts of K, and the counters of how many of them have arrived."""
    block_m, block_n, split = (int(schedule[k]) for k in ("BLOCK_M", "BLOCK_N", "SPLIT_K"))
    tiles = -(-sizes.rows // block_m) * -(-sizes.num_features // block_n)
    partials = split * tiles * block_m * block_n if split > 1 else 1
    return Scratch("partials", "f32", partials), Scratch("counters", "i32", tiles)


# --- mixtures of experts ------------------------------------------------------------------------


def _lower_router(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
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
    rows = where.dims[_leading(graph, op, x)]
    block_x = max(16, power_of_two(num_experts))
    for schedule in router_schedules(num_experts, num_inputs, rows, where.machine):
        split = int(schedule["SPLIT_K"])
        scratch = (
            Scratch("partials", "f32", split * rows * block_x if split > 1 else 1),
            Scratch("counters", "i32", -(-rows // int(schedule["BLOCK_M"]))),
        )
        yield Candidate(
            name=_kernel_name(op),
            template="router",
            shape=shape,
            schedule=schedule,
            arguments={
                **_values(("x", "w", "experts", "scales"), (x, weight, *route.outputs)),
                "bias": f"value:{bias[0]}" if bias else "none:",
                "correction": f"value:{correction[0]}" if correction else "none:",
                **{each.name: f"scratch:{each.name}" for each in scratch},
                "num_tokens": "size:T",
            },
            scratch=scratch,
        )


def _lower_sort(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    num_experts, top_k = op.params.num_experts, graph.type_of(op.inputs[0]).size(1)
    shape: dict[str, Fact] = {"NUM_EXPERTS": num_experts, "TOP_K": top_k}
    num_choices = where.dims["T"] * top_k
    for schedule in sort_schedules(num_experts, num_choices, where.machine):
        blocks = 0 if schedule["ONE_BLOCK"] else -(-num_choices // int(schedule["BLOCK_CHOICES"]))
        counts = Scratch("expert_counts", "i32", max(1, blocks * num_experts))
        arguments = {
            **_plain_arguments(op, ("order", "starts"), num_tokens="T"),
            "counts": f"scratch:{counts.name}",
        }
        yield Candidate("sort_by_expert", "sort_by_expert", shape, schedule, arguments, (counts,))


def _lower_expert_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of each choice by itself, or of all choices of a token, added up."""
    linear = op.plain[0]
    x, weight, experts, *_ = linear.inputs
    top_k = graph.type_of(experts).size(1)
    sizes = _expert_sizes(op, graph, where.dims["T"] * top_k)
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
    yield from _expert_candidates(op, graph, values, facts, choices)


def _lower_grouped_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of the choices of each expert together."""
    x, weight, order, starts, *_ = op.plain[0].inputs
    num_choices, num_experts = graph.type_of(order).shape[0], graph.type_of(weight).size(0)
    top_k = d.bind(num_choices, {"T": 1})
    sizes = _expert_sizes(op, graph, d.bind(num_choices, where.dims))
    facts: dict[str, Fact] = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": top_k,
        "ROW_PER_CHOICE": graph.type_of(x).shape[0] == num_choices and top_k > 1,
    }
    values = {"x": x, "w": weight, "order": order, "starts": starts}
    choices = grouped_choices(sizes, num_experts, where.machine)
    yield from _expert_candidates(op, graph, values, facts, choices)


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
) -> Iterator[Candidate]:
    for template, schedule in choices:
        fused = lower_linear(template, op, graph.types)
        yield Candidate(
            name=_kernel_name(op),
            template=template,
            shape={**fused.shape, **facts},
            schedule=schedule,
            arguments={
                **_values(tuple(values), tuple(values.values())),
                **_values(fused.operands, fused.inputs[2:]),
                "y": f"value:{op.outputs[0]}",
                "num_tokens": "size:T",
            },
            hooks=fused.hooks,
            operands=fused.operands,
        )


def _lower_combine(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower the sum over a token's experts, and the residual that is added to it."""
    combine, *adds = op.plain
    rows, scales = combine.inputs
    width, top_k = graph.type_of(rows).size(1), graph.type_of(scales).size(1)
    residual = [name for add in adds for name in add.inputs if name != combine.outputs[0]]
    shape: dict[str, Fact] = {"WIDTH": width, "TOP_K": top_k, "ADD_RESIDUAL": bool(residual)}
    arguments = {
        **_values(("rows", "scales", "y"), (rows, scales, op.outputs[0])),
        "residual": f"value:{residual[0]}" if residual else "none:",
        "num_tokens": "size:T",
    }
    for schedule in combine_schedules(width, where.dims["T"], where.machine):
        yield Candidate(_kernel_name(op), "combine", shape, schedule, arguments)


# --- attention ----------------------------------------------------------------------------------


def _lower_attention(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    if op.body:
        yield from _lower_rope_attention(op, graph, where)
        return
    q, cache, block_table, seq_rows, query_start, context_lens, *_ = op.inputs
    own, sinks = _own_and_sinks(op)
    params, page_size = op.params, graph.type_of(cache).size(2)
    kv_format = graph.type_of(cache).kv_format
    shape: dict[str, Fact] = {
        "NUM_HEADS": params.num_heads,
        "NUM_KV_HEADS": params.num_kv_heads,
        "HEAD_DIM": params.head_dim,
        "PAGE_SIZE": page_size,
        "SCALE": params.scale,
        **_format_fact(kv_format),
    }
    shared = {
        **_values(
            ("q", "block_table", "seq_rows", "context_lens", "out"),
            (q, block_table, seq_rows, context_lens, op.outputs[0]),
        ),
        **_cache(cache, kv_format),
        "num_seqs": "size:B",
    }
    where = _within_window(where, op, graph)
    element = (params.head_dim, DTYPE_BYTES[graph.type_of(q).dtype])
    limits = _limits(params, sinks)
    hooks = _limit_hooks(params, where.step, sinks, is_quantised=bool(kv_format))
    shared |= _values(("sinks",) * len(sinks), sinks)
    if where.step != "decode":
        arguments = {**shared, "query_start": f"value:{query_start}", "num_tokens": "size:T"}
        if kv_format:
            if not own:
                raise LoweringError(
                    f"`{op.name}`: a step of prompts with a {kv_format} cache attends to the keys "
                    "and values of its own tokens as they were computed; found none.",
                    remedy="Give attention the step's k and v.",
                )
            arguments |= _values(("k", "v"), own)
            name = "attention_prefill_quantised"
            for schedule in attention_prefill_quantised_schedules(
                page_size, kv_format, where.dims, where.machine, is_limited=bool(limits)
            ):
                yield Candidate(
                    f"attention_prefill{limits}",
                    name,
                    shape,
                    schedule,
                    arguments,
                    hooks=hooks,
                    operands=("sinks",) * len(sinks),
                )
            return
        prefill = Candidate(
            f"attention_prefill{limits}",
            "attention_prefill",
            shape,
            {},
            arguments,
            hooks=hooks,
            operands=("sinks",) * len(sinks),
        )
        schedules = attention_prefill_schedules(
            params.head_dim, where.dims, where.machine, is_capped=bool(params.soft_cap)
        )
        for schedule in within_shared_memory(schedules, *element, where.machine):
            yield replace(prefill, schedule=schedule)
        for schedule in attention_prefill_tma_schedules(
            params.head_dim, page_size, where.dims, where.machine
        ):
            yield replace(prefill, template="attention_prefill_tma", schedule=schedule)
        return
    template = "attention_decode"
    schedules = attention_decode_schedules(params.num_kv_heads, where.dims, where.machine)
    if not kv_format:
        schedules = within_shared_memory(schedules, *element, where.machine)
    else:
        template = "attention_decode_quantised"
        schedules = attention_decode_quantised_schedules(
            params.num_kv_heads,
            page_size,
            kv_format,
            where.dims,
            where.machine,
            is_limited=bool(limits),
        )
    for candidate in _split_attention(
        f"attention_decode{limits}", template, shape, shared, where, schedules
    ):
        yield replace(candidate, hooks=hooks, operands=("sinks",) * len(sinks))


def _own_and_sinks(attention: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give attention's k and v, and its sinks, where it has them."""
    names = lookup("attention").present(len(attention.inputs))
    given = dict(zip(names, attention.inputs, strict=True))
    own = tuple(given[name] for name in ("k", "v") if name in given)
    return own, (given["sinks"],) if "sinks" in given else ()


def _limits(params: AttentionParams, sinks: Sequence[str]) -> str:
    """Write what a kernel's name says of limits."""
    known = (("_window", params.window), ("_cap", params.soft_cap), ("_sinks", sinks))
    return "".join(suffix for suffix, is_on in known if is_on)


def _limit_hooks(
    params: AttentionParams, step: str, sinks: Sequence[str], *, is_quantised: bool
) -> dict[str, tuple[str, ...]]:
    """Write the lines of a window, of a soft cap and of sinks; none where there is none."""
    # Scores are scaled later, but for those of a decode step with a quantised cache, which are
    # in units of log2.
    in_log2 = is_quantised and step == "decode"
    scores = _cap_lines(params, params.scale if not in_log2 else math.log(2.0))
    window, newest = params.window, "context" if step == "decode" else "positions[:, None] + 1"
    if window:
        scores += (
            "# Not infinite: a row may see nothing of its first tiles.",
            f"seen = tokens[None, :] >= {newest} - {window}",
            "scores = tl.where(seen, scores, -1.0e30)",
        )
    lines: tuple[str, ...] = ()
    if sinks and step == "decode":
        lines = (
            *_sink_lines("kv_head * GROUP_HEADS + heads, mask=heads < GROUP_HEADS, other=0.0"),
            "best = tl.where(split == 0, sink, best)  # [BLOCK_H]",
            "total += tl.where(split == 0, 1.0, 0.0)  # [BLOCK_H]",
        )
    elif sinks:
        lines = (
            *_sink_lines("heads"),
            "best = tl.zeros_like(best) + sink  # [BLOCK_ROWS]",
            "total += 1.0  # [BLOCK_ROWS]",
        )
    hooks = {"FIRST_PAGE": _page_lines(params, step), "SCORES": scores, "SINKS": lines}
    if not is_quantised or step == "decode":
        return hooks
    own: tuple[str, ...] = ()
    if window:
        first = f"tl.maximum(first_query + 1 - {window}, 0)"
        own = (f"first_own = {first} // BLOCK_TOKENS * BLOCK_TOKENS",)
    return {**hooks, "FIRST_OWN": own}


def _page_lines(params: AttentionParams, step: str) -> tuple[str, ...]:
    if not params.window:
        return ()
    first = "context" if step == "decode" else "context - num_queries + first_query + 1"
    return (
        f"# Whole pages before the window of {params.window} tokens are left out.",
        f"skipped = tl.maximum({first} - {params.window}, 0) // PAGE_SIZE",
        "context -= skipped * PAGE_SIZE",
        "block_table_ptr += skipped",
    )


def _cap_lines(params: AttentionParams, unit: float) -> tuple[str, ...]:
    """Write the lines of a cap for scores of which 1 stands for `unit`."""
    if not params.soft_cap:
        return ()
    capped = soft_cap("scores", params.soft_cap / unit)
    return (
        f"# a score s counts as {params.soft_cap!r} tanh(s / {params.soft_cap!r})",
        f"scores = {capped}",
    )


def _sink_lines(where: str) -> tuple[str, ...]:
    return (
        "# The sink is one more score, whose value is zero.",
        f"sink = tl.load(sinks_ptr + {where})",
        "sink = sink.to(tl.float32) * 1.4426950408889634",
    )


def _rope_limit_hooks(params: AttentionParams, sinks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Write the lines of limits for a kernel whose softmax begins with the newest token."""
    live: tuple[str, ...] = ()
    if params.window:
        live = (f"live &= tokens >= context - {params.window}",)
    lines: tuple[str, ...] = ()
    if sinks:
        lines = (
            *_sink_lines("kv_head * GROUP_HEADS + heads, mask=heads < GROUP_HEADS, other=0.0"),
            'sink = tl.where(split == 0, sink, float("-inf"))  # [BLOCK_H]',
            "new_best = tl.maximum(best, sink)  # [BLOCK_H]",
            "rescale = tl.exp2(best - new_best)  # [BLOCK_H]",
            "acc = acc * rescale[:, None]  # [BLOCK_H, BLOCK_D]",
            "total = total * rescale + tl.exp2(sink - new_best)  # [BLOCK_H]",
            "best = new_best  # [BLOCK_H]",
        )
    pages = _page_lines(params, "decode")
    return {
        "FIRST_PAGE": pages,
        "LIVE": live,
        "SCORES": _cap_lines(params, params.scale),
        "SINKS": lines,
    }


def _format_fact(kv_format: str) -> dict[str, Fact]:
    """Give the fact that kernels of a quantised cache have and others don't."""
    return {"KV_FORMAT": kv_format} if kv_format else {}


def _split_attention(
    name: str,
    template: str,
    shape: Mapping[str, Fact],
    shared: Mapping[str, str],
    where: Situation,
    schedules: Iterator[Schedule],
) -> Iterator[Candidate]:
    """Yield the candidates of a kernel whose programs share a sequence, with what they leave."""
    num_heads, num_kv_heads, head_dim = (
        int(shape[fact]) for fact in ("NUM_HEADS", "NUM_KV_HEADS", "HEAD_DIM")
    )
    rows = where.dims["B"]
    for schedule in schedules:
        partials = rows * num_heads * int(schedule["MAX_SPLITS"])
        scratch = (
            Scratch("partial_out", "f32", partials * head_dim),
            Scratch("partial_lse", "f32", partials),
            Scratch("counters", "i32", rows * num_kv_heads),
        )
        arguments = {**shared, **{each.name: f"scratch:{each.name}" for each in scratch}}
        yield Candidate(name, template, shape, schedule, arguments, scratch)


def _lower_rope_attention(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower split + two ropes + append + attention: what a decode step does between two linears."""
    plain, norm_facts, norm_weights = _without_head_norms(op)
    *append, attention = plain.body
    if where.step != "decode":
        raise LoweringError(
            f"`{op.name}`: appending and attending are one kernel in decode steps only; this is a "
            f"{where.step} step."
        )
    roped = _read_append(op.name, append)
    shape: dict[str, Fact] = {
        **roped.shape(graph),
        "SCALE": attention.params.scale,
        **norm_facts,
    }
    context_lens = attention.inputs[5]
    _, sinks = _own_and_sinks(attention)
    where = _within_window(where, attention, graph)
    # One token per sequence: token i is sequence i, and its position is its length less one.
    shared = {
        **_values(
            ("qkv", "cos_sin", "block_table", "seq_rows", "context_lens", "out"),
            (
                roped.projection,
                roped.table,
                roped.block_table,
                roped.seq_rows,
                context_lens,
                op.outputs[0],
            ),
        ),
        **_cache(roped.cache),
        **norm_weights,
        **_values(("sinks",) * len(sinks), sinks),
        "num_seqs": "size:B",
    }
    num_kv_heads = attention.params.num_kv_heads
    schedules = within_shared_memory(
        rope_attention_decode_schedules(num_kv_heads, where.dims, where.machine),
        attention.params.head_dim,
        DTYPE_BYTES[graph.type_of(roped.cache).dtype],
        where.machine,
    )
    name = f"{_kernel_name(op)}{_limits(attention.params, sinks)}"
    hooks = _rope_limit_hooks(attention.params, sinks)
    for candidate in _split_attention(
        name, "rope_attention_decode", shape, shared, where, schedules
    ):
        yield replace(candidate, hooks=hooks, operands=("sinks",) * len(sinks))


def _within_window(where: Situation, attention: Op, graph: Graph) -> Situation:
    """Give the situation with sequences no longer than what an attention with a window reads."""
    if not attention.params.window:
        return where
    # What lies before the window is not read: it does not lengthen a sequence.
    seen = attention.params.window + graph.type_of(attention.inputs[1]).size(2)
    return replace(where, dims={**where.dims, "C": min(where.dims["C"], seen)})


def _values(parameters: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    return {p: f"value:{name}" for p, name in zip(parameters, names, strict=True)}


def _cache(name: str, kv_format: str = "") -> dict[str, str]:
    pages = {"k_cache": f"keys:{name}", "v_cache": f"values:{name}"}
    open_pages = {"k_open": f"open_keys:{name}", "v_open": f"open_values:{name}"}
    return pages | (open_pages if kv_format else {})


# --- row ops ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Append:
    """The values of a split, two ropes and an append, and what a head is."""

    projection: str
    q: str
    k: str
    v: str
    positions: str
    table: str
    token_seq: str
    seq_rows: str
    block_table: str
    cache: str
    sizes: tuple[int, ...]
    head_dim: int

    def shape(self, graph: Graph) -> dict[str, Fact]:
        """Give the facts that the kernels which rope and append share."""
        return {
            "NUM_HEADS": self.sizes[0] // self.head_dim,
            "NUM_KV_HEADS": self.sizes[1] // self.head_dim,
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": graph.type_of(self.table).size(1),
            "PAGE_SIZE": graph.type_of(self.cache).size(2),
            **_format_fact(graph.type_of(self.cache).kv_format),
        }


def _read_append(name: str, body: Sequence[Op]) -> _Append:
    """Read a body of split, two ropes and append. Raises: LoweringError: it is none such."""
    kinds = [inner.kind for inner in body]
    if kinds != ["split", "rope", "rope", "kv_write"]:
        raise LoweringError(
            f"`{name}`: the append of k and v is emitted only together with the ropes of q and "
            f"k that share one projection; found {', '.join(kinds)} alone.",
            remedy="Declare q, k and v as one weight and rope q and k.",
        )
    split, *ropes, write = body
    parts, roped = split.outputs, {rope.inputs[0]: rope for rope in ropes}
    if {*parts[:2]} != {*roped} or write.inputs[:2] != (roped[parts[1]].outputs[0], *parts[2:]):
        raise LoweringError(
            f"`{name}`: the projection should be split into q, k and v, in this order; found "
            f"{', '.join(parts)}, of which {', '.join(roped)} are roped and k and v are "
            f"{', '.join(write.inputs[:2])}.",
            remedy="Split the projection as q, k, v and rope the first two.",
        )
    rope_q, rope_k = roped[parts[0]], roped[parts[1]]
    if (rope_q.params, rope_q.inputs[1:]) != (rope_k.params, rope_k.inputs[1:]):
        raise LoweringError(
            f"`{name}`: q and k should be roped alike; found {rope_q.inputs[1:]} and "
            f"{rope_k.inputs[1:]}.",
            remedy="One kernel ropes both: give them one table and one head size.",
        )
    if rope_q.params.interleaved:
        raise LoweringError(
            f"`{name}`: a kernel rotates pairs that are halves of a head, not neighbours.",
            remedy="`explain` says why the rows of q and k were not reordered "
            "(`pair_rope_halves`).",
        )
    _, positions, table = rope_q.inputs
    _, _, _, token_seq, seq_rows, block_table, cache, *_ = write.inputs
    return _Append(
        split.inputs[0],
        rope_q.outputs[0],
        rope_k.outputs[0],
        parts[2],
        positions,
        table,
        token_seq,
        seq_rows,
        block_table,
        cache,
        split.params.sizes,
        rope_q.params.head_dim,
    )


def _lower_kv_write(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower split + two ropes + append: one pass over the fused projection."""
    roped = _read_append(op.name, op.plain)
    arguments = {
        **_values(
            ("qkv", "positions", "cos_sin", "token_seq", "seq_rows", "block_table", "q"),
            (
                roped.projection,
                roped.positions,
                roped.table,
                roped.token_seq,
                roped.seq_rows,
                roped.block_table,
                roped.q,
            ),
        ),
        **_cache(roped.cache, graph.type_of(roped.cache).kv_format),
        "num_tokens": "size:T",
    }
    shape, template = roped.shape(graph), "rope_kv_write"
    if graph.type_of(roped.cache).kv_format:
        template = "rope_kv_write_quantised"
        query_start, context_lens = op.plain[-1].inputs[7:]
        arguments |= _values(("query_start", "context_lens"), (query_start, context_lens))
        arguments["num_seqs"] = "size:B"
        has_own = roped.k in op.outputs
        shape = {**shape, "STORE_OWN": has_own}
        own = _values(("k", "v"), (roped.k, roped.v)) if has_own else {"k": "none:", "v": "none:"}
        arguments |= own
    for schedule in rope_kv_write_schedules(sum(roped.sizes) // roped.head_dim, where.machine):
        yield Candidate("rope_kv_write", template, shape, schedule, arguments)


def _lower_append(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower an append of k and v, with the norms of q's and k's heads before the ropes."""
    plain, facts, weights = _without_head_norms(op)
    for candidate in _lower_kv_write(plain, graph, where):
        name = f"head_norm_{candidate.name}" if facts["HEAD_NORM"] else candidate.name
        yield replace(
            candidate,
            name=name,
            shape={**candidate.shape, **facts},
            arguments={**candidate.arguments, **weights},
        )


def _without_head_norms(op: Op) -> tuple[Op, dict[str, Fact], dict[str, str]]:
    """Give an op as if it had no norms of heads, and those as facts and arguments."""
    norms = [inner for inner in op.plain if inner.kind == "head_norm"]
    if not norms:
        facts: dict[str, Fact] = {"HEAD_NORM": False, "EPS": 0.0, "OFFSET": 0.0}
        return op, facts, {"q_weight": "none:", "k_weight": "none:"}
    params, weights = _read_head_norms(op, norms)
    # What is left when the ropes read the parts of the split themselves.
    source = {norm.outputs[0]: norm.inputs[0] for norm in norms}
    body = [
        replace(inner, inputs=tuple(source.get(name, name) for name in inner.inputs))
        for inner in op.body
        if inner not in norms
    ]
    facts = {"HEAD_NORM": True, "EPS": params.eps, "OFFSET": params.offset}
    return replace(op, body=tuple(body)), facts, weights


def _read_head_norms(op: Op, norms: Sequence[Op]) -> tuple[RmsNormParams, dict[str, str]]:
    """Give what the norms of q and k share, and their weights as arguments."""
    by_part = {norm.inputs[0]: norm for norm in norms}
    parts = op.body[0].outputs
    found = [by_part[part] for part in parts[:2] if part in by_part]
    if len(found) != 2 or len(norms) != 2:
        raise LoweringError(
            f"`{op.name}`: the heads of q and those of k should be normalised, or neither; found "
            f"norms of {', '.join(norm.inputs[0] for norm in norms)}.",
            remedy="Split the projection as q, k, v and normalise the first two.",
        )
    q_norm, k_norm = found
    if q_norm.params != k_norm.params:
        raise LoweringError(
            f"`{op.name}`: q and k should be normalised alike; found {q_norm.params} and "
            f"{k_norm.params}.",
            remedy="One kernel normalises both: give them one eps and one offset.",
        )
    return q_norm.params, _values(("q_weight", "k_weight"), (q_norm.inputs[1], k_norm.inputs[1]))


def _lower_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a norm, with the choice of its rows before it or an add after it."""
    norm, gather = _read_norm(op)
    add = op.plain[-1] if op.plain[-1].kind == "add" else None
    others = [name for name in add.inputs if name != norm.outputs[0]] if add else []
    if add and len(others) != 1:
        raise LoweringError(f"`{op.name}`: a norm's result should be added to another value.")
    x = gather.inputs[0] if gather else norm.inputs[0]
    hidden = graph.type_of(x).size(-1)
    rows = _leading(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "HIDDEN": hidden,
        "EPS": norm.params.eps,
        "OFFSET": norm.params.offset,
        "ADD_RESIDUAL": False,
        "GATHER": gather is not None,
    }
    arguments = {
        **_values(("x", "weight", "y"), (x, norm.inputs[1], op.outputs[0])),
        "index": f"value:{gather.inputs[1]}" if gather else "none:",
        "residual": "none:",
        "stream": "none:",
        **_values(("other",) if add else (), others),
        "num_rows": f"size:{rows}",
    }
    epilogue = (
        "other = tl.load(other_ptr + offsets, mask=mask, other=0.0).to(tl.float32)",
        "y += other",
    )
    for schedule in norm_schedules(hidden, where.dims[rows], where.machine):
        yield Candidate(
            _kernel_name(op),
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


def _lower_layer_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    norm, gather = _read_norm(op)
    x, weight, *bias = norm.inputs
    hidden = graph.type_of(x).size(-1)
    rows = _leading(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "HIDDEN": hidden,
        "EPS": norm.params.eps,
        "HAS_BIAS": bool(bias),
        "GATHER": gather is not None,
    }
    arguments = {
        **_values(("weight", "y"), (weight, op.outputs[0])),
        "x": f"value:{gather.inputs[0] if gather else x}",
        "bias": f"value:{bias[0]}" if bias else "none:",
        "index": f"value:{gather.inputs[1]}" if gather else "none:",
        "num_rows": f"size:{rows}",
    }
    for schedule in norm_schedules(hidden, where.dims[rows], where.machine):
        yield Candidate(_kernel_name(op), "layer_norm", shape, schedule, arguments)


def _lower_section_norm(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    sizes = op.params.sizes
    if len(sizes) > 2:
        raise LoweringError(
            f"`{op.name}`: a kernel normalises at most two sections of a row; found {len(sizes)}.",
            remedy="Normalise the others with a second `section_norm`.",
        )
    rows = _leading(graph, op, op.outputs[0])
    shape: dict[str, Fact] = {
        "FIRST": sizes[0],
        "SECOND": sizes[1] if len(sizes) > 1 else 0,
        "WIDTH": graph.type_of(op.inputs[0]).size(-1),
        "EPS": op.params.eps,
        "OFFSET": op.params.offset,
    }
    arguments = _plain_arguments(op, ("y",), num_rows=rows)
    for schedule in norm_schedules(max(sizes), where.dims[rows], where.machine):
        yield Candidate("section_norm", "section_norm", shape, schedule, arguments)


def _leading(graph: Graph, op: Op, name: str) -> str:
    """Name the size that decides the rows of an operand or result: T or B."""
    dim = graph.type_of(name).shape[0]
    if dim not in (d.T, d.B):
        raise LoweringError(
            f"`{op.name}`: `{name}` should have a row per token or sequence of the step; it is "
            f"{graph.type_of(name)}."
        )
    return str(dim)


def _operand(op: Op, name: str) -> str:
    """Give the value that stands for an operand of a plain op."""
    return op.inputs[lookup(op.kind).operands.index(name)]


def _plain_arguments(op: Op, results: Sequence[str], **sizes: str) -> dict[str, str]:
    """Give the arguments of a template whose parameters are called like the op's operands."""
    operands = _values(lookup(op.kind).operands, op.inputs)
    outputs = _values(results, op.outputs)
    return {**operands, **outputs, **{name: f"size:{size}" for name, size in sizes.items()}}


def _lower_embed(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    hidden = graph.type_of(op.inputs[1]).size(1)
    shape: dict[str, Fact] = {"HIDDEN": hidden, "SCALE": op.params.scale}
    arguments = _plain_arguments(op, ("y",), num_tokens="T")
    for schedule in embed_schedules(hidden, where.machine):
        yield Candidate("embed", "embed", shape, schedule, arguments)


def _lower_add(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower an add that no linear took into its epilogue, with a norm before it if it has one."""
    if op.body:
        yield from _lower_norm(op, graph, where)
        return
    width = graph.type_of(op.outputs[0]).size(-1)
    shape: dict[str, Fact] = {"WIDTH": width, "OP": "add"}
    rows = _leading(graph, op, op.outputs[0])
    arguments = _plain_arguments(op, ("y",), num_tokens=rows)
    for schedule in pointwise_schedules(width, where.machine):
        yield Candidate("add", "pointwise", shape, schedule, arguments)


def _lower_glu(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
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
    rows = _leading(graph, op, op.outputs[0])
    arguments = _plain_arguments(op, ("y",), num_tokens=rows)
    for schedule in pointwise_schedules(width, where.machine):
        yield Candidate("glu", "glu", shape, schedule, arguments)


def _lower_sample(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    vocab = graph.type_of(op.inputs[0]).size(1)
    arguments = _plain_arguments(op, ("tokens",), num_seqs="B")
    for schedule in sample_schedules(vocab, where.machine):
        yield Candidate("sample", "sample", {"VOCAB": vocab}, schedule, arguments)


def _lower_adjust(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    vocab = graph.type_of(op.inputs[0]).size(1)
    shape: dict[str, Fact] = {
        "VOCAB": vocab,
        "MAX_BIASES": graph.type_of(_operand(op, "bias_tokens")).size(1),
    }
    arguments = _plain_arguments(op, (), num_seqs="B")
    # A block of the vocabulary a program; in the interpreter, whose programs cost most, all of it.
    block_v = power_of_two(vocab) if where.machine == INTERPRETER else 1024
    for schedule in step_schedules("BLOCK_V", where.machine):
        schedule = {**schedule, "BLOCK_V": block_v, "BLOCK_K": 8, "num_warps": 4}
        yield Candidate("adjust_logits", "adjust_logits", shape, schedule, arguments)


def _lower_count(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    vocab = graph.type_of(_operand(op, "token_counts")).size(1)
    arguments = _plain_arguments(op, (), num_seqs="B")
    for schedule in step_schedules("BLOCK_B", where.machine):
        yield Candidate("count_tokens", "count_tokens", {"VOCAB": vocab}, schedule, arguments)


def _lower_advance(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    arguments = _plain_arguments(op, lookup("advance").results, num_seqs="B")
    for schedule in step_schedules("BLOCK_B", where.machine):
        yield Candidate("advance", "step_inputs", {}, schedule, arguments)


def _lower_resolve(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    arguments = _plain_arguments(op, ("y",), num_tokens="T")
    for schedule in step_schedules("BLOCK_T", where.machine):
        yield Candidate("resolve_tokens", "resolve_tokens", {}, schedule, arguments)


_LOWERINGS: dict[str, Callable[[Op, Graph, Situation], Iterator[Candidate]]] = {
    "linear": _lower_linear,
    "expert_linear": _lower_expert_linear,
    "grouped_linear": _lower_grouped_linear,
    "sort_by_expert": _lower_sort,
    "combine": _lower_combine,
    "attention": _lower_attention,
    "kv_write": _lower_append,
    "head_linear": lower_head_linear,
    "latent_attention": lower_latent_attention,
    "latent_write": lower_latent_write,
    "prompt_attention": lower_prompt_attention,
    "rms_norm": _lower_norm,
    "layer_norm": _lower_layer_norm,
    "section_norm": _lower_section_norm,
    "add": _lower_add,
    "glu": _lower_glu,
    "embed": _lower_embed,
    "sample": _lower_sample,
    "adjust_logits": _lower_adjust,
    "count_tokens": _lower_count,
    "advance": _lower_advance,
    "resolve_tokens": _lower_resolve,
}
