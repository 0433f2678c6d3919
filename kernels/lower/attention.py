"""Lower attention to pages of keys and values, by itself or joined with the append."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import lookup
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import kernel_name, value_arguments
from treadle.kernels.lower.attention_limits import limit_hooks, limits_suffix, rope_limit_hooks
from treadle.kernels.lower.candidates import Candidate, Scratch, Situation
from treadle.kernels.lower.kv_write import (
    cache_arguments,
    format_fact,
    read_append,
    without_head_norms,
)
from treadle.kernels.schedule.attention import (
    attention_decode_quantised_schedules,
    attention_decode_schedules,
    attention_prefill_gluon_schedules,
    attention_prefill_quantised_gluon_schedules,
    attention_prefill_quantised_schedules,
    attention_prefill_schedules,
    attention_prefill_tma_schedules,
    rope_attention_decode_schedules,
    within_shared_memory,
)
from treadle.kernels.schedule.machine import Schedule

# Of kernels whose programs take blocks of queries off a counter, and say when they are done.
BLOCK_COUNTERS = Scratch("counters", "i32", 2)


def lower_attention(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower attention: split over the context in decode steps, by rows in others.

    Raises: LoweringError: a quantised cache, and no k and v of the step.
    """
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
        **format_fact(kv_format),
    }
    shared = {
        **value_arguments(
            ("q", "block_table", "seq_rows", "context_lens", "out"),
            (q, block_table, seq_rows, context_lens, op.outputs[0]),
        ),
        **cache_arguments(cache, kv_format),
        "num_seqs": "size:B",
    }
    where = _within_window(where, op, graph)
    element = (params.head_dim, DTYPE_BYTES[graph.type_of(q).dtype])
    limits = limits_suffix(params, sinks)
    hooks = limit_hooks(params, where.step, sinks, is_quantised=bool(kv_format))
    shared |= value_arguments(("sinks",) * len(sinks), sinks)
    if where.step != "decode":
        arguments = {**shared, "query_start": f"value:{query_start}", "num_tokens": "size:T"}
        if kv_format:
            if not own:
                raise LoweringError(
                    f"`{op.name}`: a step of prompts with a {kv_format} cache attends to the keys "
                    "and values of its own tokens as they were computed; found none.",
                    remedy="Give attention the step's k and v.",
                )
            arguments |= value_arguments(("k", "v"), own)
            quantised = Candidate(
                f"attention_prefill{limits}",
                "attention_prefill_quantised",
                shape,
                {},
                arguments,
                hooks=hooks,
                operands=("sinks",) * len(sinks),
            )
            for schedule in attention_prefill_quantised_schedules(
                page_size, kv_format, where.dims, where.machine, is_limited=bool(limits)
            ):
                yield replace(quantised, schedule=schedule)
            if limits:
                return
            for schedule in attention_prefill_quantised_gluon_schedules(
                params.num_heads,
                params.num_kv_heads,
                params.head_dim,
                page_size,
                kv_format,
                element[1],
                where.dims,
                where.machine,
            ):
                yield replace(
                    quantised,
                    template="attention_prefill_quantised_gluon",
                    schedule=schedule,
                    arguments={**arguments, "counters": "scratch:counters"},
                    scratch=(BLOCK_COUNTERS,),
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
        if limits:
            return
        for schedule in attention_prefill_gluon_schedules(
            params.num_heads,
            params.num_kv_heads,
            params.head_dim,
            page_size,
            element[1],
            where.dims,
            where.machine,
        ):
            yield replace(
                prefill,
                template="attention_prefill_gluon",
                schedule=schedule,
                arguments={**arguments, "counters": "scratch:counters"},
                scratch=(BLOCK_COUNTERS,),
                hooks={},
            )
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
    plain, norm_facts, norm_weights = without_head_norms(op)
    *append, attention = plain.body
    if where.step != "decode":
        raise LoweringError(
            f"`{op.name}`: appending and attending are one kernel in decode steps only; this is a "
            f"{where.step} step."
        )
    roped = read_append(op.name, append)
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
        **value_arguments(
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
        **cache_arguments(roped.cache),
        **norm_weights,
        **value_arguments(("sinks",) * len(sinks), sinks),
        "num_seqs": "size:B",
    }
    num_kv_heads = attention.params.num_kv_heads
    schedules = within_shared_memory(
        rope_attention_decode_schedules(num_kv_heads, where.dims, where.machine),
        attention.params.head_dim,
        DTYPE_BYTES[graph.type_of(roped.cache).dtype],
        where.machine,
    )
    name = f"{kernel_name(op)}{limits_suffix(attention.params, sinks)}"
    hooks = rope_limit_hooks(attention.params, sinks)
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
