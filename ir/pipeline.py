"""The passes in their order, on one screen. After each: verify, record the time, dump if asked.

Called by the runtime's compiler, `show` and `explain`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from treadle.ir import fuse, text
from treadle.ir.graph import Graph
from treadle.ir.pick_rows import pick_rows_early
from treadle.ir.verify import verify


@dataclass(frozen=True)
class Pass:
    """Rewrite a graph.

    `few_tokens_only` passes run only in the form meant for few tokens, `many_tokens_only` ones only
    in the others, `joined_only` ones only in the forms that append and attend in one kernel.
    """

    name: str
    run: Callable[[Graph], fuse.Result]
    stage_after: str
    few_tokens_only: bool = False
    many_tokens_only: bool = False
    joined_only: bool = False


PASSES: tuple[Pass, ...] = (
    # weights first: everything after sees the layout that the loader will make
    Pass("interleave_gate_up", fuse.interleave_gate_up, "authored"),
    Pass("pair_rope_halves", fuse.pair_rope_halves, "authored"),
    # then how many rows each op has and which form experts multiply in: what joins them follows
    Pass("pick_rows_early", pick_rows_early, "authored", many_tokens_only=True),
    Pass("group_by_expert", fuse.group_by_expert, "authored", many_tokens_only=True),
    # then what must be one kernel because a view would have to be materialised otherwise
    Pass("fuse_rope_kv_write", fuse.fuse_rope_kv_write, "partly fused"),
    Pass("fuse_latent_write", fuse.fuse_latent_write, "partly fused"),
    Pass("fuse_rope_attention", fuse.fuse_rope_attention, "partly fused", joined_only=True),
    Pass("fuse_gather_norm", fuse.fuse_gather_norm, "partly fused"),
    # epilogues before prologues: an epilogue always wins, a prologue only for few tokens
    Pass("fuse_glu", fuse.fuse_glu, "partly fused"),
    Pass("fuse_pointwise", fuse.fuse_pointwise, "partly fused"),
    Pass("fuse_experts", fuse.fuse_experts, "partly fused"),
    Pass("fuse_residual", fuse.fuse_residual, "fused"),
    Pass("fuse_norm_residual", fuse.fuse_norm_residual, "fused"),
    Pass("fuse_norm_prologue", fuse.fuse_norm_prologue, "fused", few_tokens_only=True),
)


@dataclass(frozen=True)
class PassRecord:
    """Tell what one pass did: the graph after it, its refusals and its time."""

    name: str
    graph: Graph
    refusals: tuple[fuse.Refusal, ...]
    seconds: float

    @property
    def dump(self) -> str:
        """The graph's text with the refusals as comments above it."""
        return "".join(f"# {refusal}\n" for refusal in self.refusals) + text.print_graph(self.graph)


def run_passes(
    graph: Graph, *, few_tokens: bool, joined: bool = False
) -> tuple[Graph, tuple[PassRecord, ...]]:
    """Fuse an authored graph. `few_tokens` chooses the form for steps of a handful of tokens.

    `joined` chooses the form whose decode steps append k and v and attend to them in one kernel.
    Raises: SpecError: a pass left an illegal graph; the message names the op.
    """
    verify(graph, "authored")
    records = []
    for pass_ in PASSES:
        if (
            (pass_.few_tokens_only and not few_tokens)
            or (pass_.many_tokens_only and few_tokens)
            or (pass_.joined_only and not joined)
        ):
            continue
        start = time.perf_counter()
        graph, refusals = pass_.run(graph)
        verify(graph, pass_.stage_after)
        records.append(PassRecord(pass_.name, graph, refusals, time.perf_counter() - start))
    return graph, tuple(records)
