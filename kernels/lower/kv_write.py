"""Lower the append of keys and values, with the ropes and the norms of heads before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.norms import RmsNormParams
from treadle.kernels.emit import Fact
from treadle.kernels.lower.arguments import value_arguments
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.schedule.attention import rope_kv_write_schedules


def cache_arguments(name: str, kv_format: str = "") -> dict[str, str]:
    """Give the arguments of a cache's pages; a quantised cache has open ones too."""
    pages = {"k_cache": f"keys:{name}", "v_cache": f"values:{name}"}
    open_pages = {"k_open": f"open_keys:{name}", "v_open": f"open_values:{name}"}
    return pages | (open_pages if kv_format else {})


def format_fact(kv_format: str) -> dict[str, Fact]:
    """Give the fact that kernels of a quantised cache have and others don't."""
    return {"KV_FORMAT": kv_format} if kv_format else {}


@dataclass(frozen=True)
class Append:
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
            **format_fact(graph.type_of(self.cache).kv_format),
        }


def read_append(name: str, body: Sequence[Op]) -> Append:
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
    return Append(
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
    roped = read_append(op.name, op.plain)
    arguments = {
        **value_arguments(
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
        **cache_arguments(roped.cache, graph.type_of(roped.cache).kv_format),
        "num_tokens": "size:T",
    }
    shape, template = roped.shape(graph), "rope_kv_write"
    if graph.type_of(roped.cache).kv_format:
        template = "rope_kv_write_quantised"
        query_start, context_lens = op.plain[-1].inputs[7:]
        arguments |= value_arguments(("query_start", "context_lens"), (query_start, context_lens))
        arguments["num_seqs"] = "size:B"
        has_own = roped.k in op.outputs
        shape = {**shape, "STORE_OWN": has_own}
        own = (
            value_arguments(("k", "v"), (roped.k, roped.v))
            if has_own
            else {"k": "none:", "v": "none:"}
        )
        arguments |= own
    for schedule in rope_kv_write_schedules(sum(roped.sizes) // roped.head_dim, where.machine):
        yield Candidate("rope_kv_write", template, shape, schedule, arguments)


def lower_append(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower an append of k and v, with the norms of q's and k's heads before the ropes."""
    plain, facts, weights = without_head_norms(op)
    for candidate in _lower_kv_write(plain, graph, where):
        name = f"head_norm_{candidate.name}" if facts["HEAD_NORM"] else candidate.name
        yield replace(
            candidate,
            name=name,
            shape={**candidate.shape, **facts},
            arguments={**candidate.arguments, **weights},
        )


def without_head_norms(op: Op) -> tuple[Op, dict[str, Fact], dict[str, str]]:
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
    return q_norm.params, value_arguments(
        ("q_weight", "k_weight"), (q_norm.inputs[1], k_norm.inputs[1])
    )
