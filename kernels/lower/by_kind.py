"""Fused op → the kernels that may compute it: template, facts, schedule, hooks, arguments.

The one table that finds a lowering by kind. The first candidate is the default; the tuner chooses
among all. Refuses, with the reason, what no template covers. Called by the runtime's planner and
by `verify`; must not know tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import lookup
from treadle.kernels.lower.attention import lower_attention
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.lower.experts import (
    lower_combine,
    lower_expert_linear,
    lower_grouped_linear,
    lower_sort,
)
from treadle.kernels.lower.header import header_of
from treadle.kernels.lower.kv_write import lower_append
from treadle.kernels.lower.latent_attention import (
    lower_latent_attention,
    lower_latent_write,
    lower_prompt_attention,
)
from treadle.kernels.lower.linears import lower_head_linear, lower_linear
from treadle.kernels.lower.norms import lower_layer_norm, lower_norm, lower_section_norm
from treadle.kernels.lower.pointwise import lower_add, lower_glu
from treadle.kernels.lower.rows import lower_embed, lower_gather
from treadle.kernels.lower.sampling import lower_adjust, lower_count, lower_sample
from treadle.kernels.lower.step_inputs import lower_advance, lower_resolve

_LOWERINGS: dict[str, Callable[[Op, Graph, Situation], Iterator[Candidate]]] = {
    "linear": lower_linear,
    "expert_linear": lower_expert_linear,
    "grouped_linear": lower_grouped_linear,
    "sort_by_expert": lower_sort,
    "combine": lower_combine,
    "attention": lower_attention,
    "kv_write": lower_append,
    "head_linear": lower_head_linear,
    "latent_attention": lower_latent_attention,
    "latent_write": lower_latent_write,
    "prompt_attention": lower_prompt_attention,
    "rms_norm": lower_norm,
    "layer_norm": lower_layer_norm,
    "section_norm": lower_section_norm,
    "add": lower_add,
    "glu": lower_glu,
    "embed": lower_embed,
    "gather_rows": lower_gather,
    "sample": lower_sample,
    "adjust_logits": lower_adjust,
    "count_tokens": lower_count,
    "advance": lower_advance,
    "resolve_tokens": lower_resolve,
}


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
    header = header_of(op, graph)
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
