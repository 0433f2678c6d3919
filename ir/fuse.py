"""Fusion: rules that join ops into one kernel, each with its legality test and its reasons.

A rule matches kinds, use counts and types, never names. Every refusal is a value that `explain`
prints. Called by `pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from treadle.ir.graph import Graph, Op, Value, Weight, walk
from treadle.ir.ops.experts import SortParams
from treadle.ir.ops.params import FusedParams
from treadle.ir.ops.registry import infer_types, lookup


@dataclass(frozen=True)
class Refusal:
    """Say why `rule` left `op` as it was."""

    rule: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.op}: {self.reason}"


Result = tuple[Graph, tuple[Refusal, ...]]
LINEARS = ("linear", "expert_linear", "grouped_linear")  # ops that multiply by a weight
INTERLEAVE_GROUP = 8  # rows r and r + 8 of an mma tile live in one thread: splitting costs nothing


def obstacle(graph: Graph, members: Iterable[Op]) -> str | None:
    """Say why these ops can't run as one at the place of the last of them, or None if they can."""
    members = list(members)
    places = [graph.ops.index(op) for op in members]
    made = {name for op in members for name in op.outputs}
    touched = {name for op in members for name in op.inputs}
    written = {name for op in members for name in _mutated(op)}
    for op in graph.ops[min(places) : max(places) + 1]:
        if op in members:
            continue
        if made & set(op.inputs):
            return f"`{op.name}` between them reads {', '.join(sorted(made & set(op.inputs)))}"
        if touched & set(_mutated(op)) or written & set(op.inputs):
            return f"`{op.name}` between them touches the same state"
    return None


def _mutated(op: Op) -> list[str]:
    names = []
    for inner in op.plain:
        definition = lookup(inner.kind)
        operands = definition.present(len(inner.inputs))
        names += [
            name
            for operand, name in zip(operands, inner.inputs, strict=True)
            if operand in definition.mutates
        ]
    return names


def join(graph: Graph, members: Iterable[Op]) -> Graph:
    """Replace the members by one fused op at the place of the last."""
    members = sorted(members, key=graph.ops.index)
    body = tuple(walk(members))
    made = {name for op in body for name in op.outputs}
    inputs = tuple(dict.fromkeys(n for op in body for n in op.inputs if n not in made))
    others = [op for op in graph.ops if op not in members]
    outside = {*graph.outputs, *(name for op in others for name in op.inputs)}
    fused = Op(
        "fused",
        inputs,
        tuple(name for op in body for name in op.outputs if name in outside),
        FusedParams(kernel_name(body)),
        members[-1].where,
        tuple(dict.fromkeys(name for op in members for name in op.origin)),
        body,
    )
    new_ops = [fused if op is members[-1] else op for op in graph.ops]
    return graph.replace_ops(op for op in new_ops if op not in members)


def kernel_name(body: Iterable[Op]) -> str:
    """Name a kernel by the ops it covers; views vanish and repeated kinds are named once."""
    kinds = [op.kind for op in body if lookup(op.kind).role != "view"]
    return "__".join(dict.fromkeys(kinds))


# --- rules --------------------------------------------------------------------------------------


def interleave_gate_up(graph: Graph) -> Result:
    """Let gate and up rows of a weight alternate, so that one tile of the matmul holds both.

    Changes the weight's declaration and the glu's parameter together: the meaning stays.
    """
    refusals: list[Refusal] = []
    weights: dict[str, Weight] = dict(graph.weight_table)
    new_ops = []
    for op in graph.ops:
        if op.kind != "glu" or op.params.interleave:
            new_ops.append(op)
            continue
        linear = graph.producers.get(op.inputs[0])
        names = [n.removeprefix("@") for n in linear.inputs if n.startswith("@")] if linear else []
        if linear is None or linear.kind not in LINEARS or graph.single_use(op.inputs[0]) is None:
            reason = "its operand is not made by a linear of its own"
        elif any(not _has_halves(weights[name]) for name in names):
            reason = "the weight is not one gate and one up tensor, nor one of both"
        elif any(len(graph.uses[f"@{name}"]) > 1 for name in names):
            reason = "the weight is used elsewhere too"
        else:
            rows = sum(weights[names[0]].part_rows) // 2
            group = next(g for g in (INTERLEAVE_GROUP, 4, 2, 1) if rows % g == 0)
            for name in names:
                weights[name] = replace(weights[name], interleave=group)
            new_ops.append(replace(op, params=replace(op.params, interleave=group)))
            continue
        refusals.append(Refusal("interleave_gate_up", op.name, reason))
        new_ops.append(op)
    return graph.replace_ops(new_ops, weights.values()), tuple(refusals)


def pair_rope_halves(graph: Graph) -> Result:
    """Reorder the rows of q and k that rotate in pairs of neighbours, so that halves are the pairs.

    Scores are sums over the features of a head, in any order that q and k share.
    """
    rule = "pair_rope_halves"
    refusals: list[Refusal] = []
    weights: dict[str, Weight] = dict(graph.weight_table)
    changed: dict[Op, Op] = {}
    for split in [op for op in graph.ops if op.kind == "split"]:
        readers = [op for name in split.outputs for op in graph.uses.get(name, ())]
        ropes = [op for op in readers if op.kind == "rope" and op.params.interleaved]
        if not ropes:
            continue
        linear = graph.producers.get(split.inputs[0])
        names = [name.removeprefix("@") for name in linear.inputs[1:]] if linear else []
        reads = [rope.inputs[0] for rope in ropes]
        if linear is None or linear.kind != "linear" or graph.single_use(split.inputs[0]) is None:
            reason = "what is rotated is not part of a linear's result"
        elif len(split.outputs) != 3 or reads != list(split.outputs[:2]):
            reason = "it is not q and k, in this order, of one projection that are rotated"
        elif any(graph.single_use(name) is None for name in reads):
            reason = "q or k is read elsewhere too"
        elif ropes[0].params != ropes[1].params or ropes[0].inputs[2] != ropes[1].inputs[2]:
            reason = "q and k are not rotated alike"
        elif any(len(graph.uses[f"@{name}"]) > 1 for name in names):
            reason = "the weight is used elsewhere too"
        else:
            rows = sum(split.params.sizes[:2])
            rotary = graph.type_of(ropes[0].inputs[2]).size(-1)
            for name in names:
                pairs = (rows, ropes[0].params.head_dim, rotary)
                weights[name] = replace(weights[name], rope_pairs=pairs)
            for rope in ropes:
                changed[rope] = replace(rope, params=replace(rope.params, interleaved=False))
            continue
        refusals += [Refusal(rule, rope.name, reason) for rope in ropes]
    return graph.replace_ops((changed.get(op, op) for op in graph.ops), weights.values()), tuple(
        refusals
    )


def _has_halves(weight: Weight) -> bool:
    rows = weight.part_rows
    return len(rows) == 1 or (len(rows) == 2 and rows[0] == rows[1])


_ROPE_AND_APPEND = ["split", "rope", "rope", "kv_write"]


def fuse_rope_kv_write(graph: Graph) -> Result:
    """Join split, norms of heads and ropes of q and k and the append of k and v into one kernel."""
    refusals: list[Refusal] = []
    reason: str | None
    for write in [op for op in graph.ops if op.kind == "kv_write"]:
        rope_k, split = (graph.producers.get(name) for name in write.inputs[:2])
        if rope_k is None or split is None or rope_k.kind != "rope" or split.kind != "split":
            reason = "k is not roped or v is not part of a split"
            refusals.append(Refusal("fuse_rope_kv_write", write.name, reason))
            continue
        readers = [op for name in split.outputs for op in graph.uses.get(name, ())]
        norms = [op for op in readers if op.kind == "head_norm"]
        readers += [op for norm in norms for op in graph.uses.get(norm.outputs[0], ())]
        ropes = [op for op in readers if op.kind == "rope"]
        members = [split, *norms, *ropes, write]
        # Attention may read k and v beside the pages: the kernel stores them on its way.
        own = [op for op in readers if op.kind == "attention" and write.inputs[1] in op.inputs]
        strangers = [op.name for op in readers if op not in (*members, *own)]
        reason = obstacle(graph, members)
        if strangers:
            reason = f"parts of the split are read by {', '.join(strangers)} too"
        if len(ropes) != 2 or len(split.outputs) != 3 or rope_k not in ropes:
            reason = "it is not q, k and v of one projection with q and k roped"
        elif len(norms) not in (0, 2):
            reason = "of q and k only one is normalised"
        if reason:
            refusals.append(Refusal("fuse_rope_kv_write", write.name, reason))
        else:
            graph = join(graph, members)
    return graph, tuple(refusals)


def fuse_rope_attention(graph: Graph) -> Result:
    """Join the append of k and v with the attention that reads them, where each adds one token.

    One kernel can do both only if the program that appends a token is the only one that needs it:
    in a step of one token per sequence, which is what `advance` prepares.
    """
    rule = "fuse_rope_attention"
    refusals: list[Refusal] = []
    for attention in [op for op in graph.ops if op.kind == "attention"]:
        q, cache, *_ = attention.inputs
        append = graph.producers.get(q)
        kinds = [op.kind for op in append.plain if op.kind != "head_norm"] if append else []
        if append is None or kinds != _ROPE_AND_APPEND:
            refusals.append(Refusal(rule, attention.name, "no kernel ropes its q and appends"))
            continue
        *_, write = append.body
        positions, token_seq, *rows, appended = write.inputs[2:7]
        block_table, seq_rows, query_start, context_lens = attention.inputs[2:6]
        steps = [graph.producers.get(n) for n in (positions, token_seq, query_start, context_lens)]
        reason = obstacle(graph, [append, attention])
        if any(step is None or step is not steps[0] or step.kind != "advance" for step in steps):
            reason = "its sequences may add several tokens"
        elif appended != cache or rows != [seq_rows, block_table]:
            reason = "it reads another cache, or other rows, than its k and v are appended to"
        elif graph.single_use(q) is not attention:
            reason = "its q is read elsewhere too"
        elif graph.type_of(cache).kv_format:
            reason = "no one kernel appends to a quantised cache and attends to it"
        if reason:
            refusals.append(Refusal(rule, attention.name, reason))
        else:
            graph = join(graph, [append, attention])
    return graph, tuple(refusals)


def fuse_latent_write(graph: Graph) -> Result:
    """Join the split of a latent, its norm, the ropes of q and of the key, and the append."""
    refusals: list[Refusal] = []
    for write in [op for op in graph.ops if op.kind == "latent_write"]:
        members, reason = _latent_members(graph, write)
        if reason:
            refusals.append(Refusal("fuse_latent_write", write.name, reason))
        else:
            graph = join(graph, members)
    return graph, tuple(refusals)


def _latent_members(graph: Graph, write: Op) -> tuple[list[Op], str | None]:
    """Give the ops that one kernel appends latents with, or the reason why there is none."""
    readers = graph.uses.get(write.inputs[-1], ())
    attentions = [op for op in readers if op.kind == "latent_attention"]
    norm, rope_k = (graph.producers.get(name) for name in write.inputs[:2])
    rope_q = graph.producers.get(attentions[0].inputs[1]) if len(attentions) == 1 else None
    if norm is None or rope_k is None or rope_q is None:
        return [], "its latent, its key or the query is not made by an op of its own"
    if [norm.kind, rope_k.kind, rope_q.kind] != ["rms_norm", "rope", "rope"]:
        return [], "the latent is not normalised, or the key and q are not rotated"
    split = graph.producers.get(norm.inputs[0])
    if split is None or split.kind != "split":
        return [], "the latent is no part of a split"
    members = [split, norm, rope_k, rope_q, write]
    parts = [op for name in split.outputs for op in graph.uses.get(name, ())]
    strangers = [op.name for op in parts if op not in members]
    if strangers:
        return [], f"parts of the split are read by {', '.join(strangers)} too"
    if graph.single_use(rope_k.outputs[0]) is not write:
        return [], "the key is read elsewhere too"
    if rope_k not in parts or rope_q.inputs[1:] != rope_k.inputs[1:]:
        return [], "q and the key are not rotated alike"
    return members, obstacle(graph, members)


def group_by_expert(graph: Graph) -> Result:
    """Sort the choices of a step by expert, so that a tile of rows shares an expert's weights.

    Worth it where tokens share experts. One token has none to share: there each choice multiplies
    by itself.
    """
    orders: dict[str, tuple[str, str]] = {}
    values = list(graph.values)
    new_ops = []
    for op in graph.ops:
        if op.kind != "expert_linear":
            new_ops.append(op)
            continue
        x, weight, experts, *bias = op.inputs
        if experts not in orders:
            params = SortParams(graph.type_of(weight).size(0))
            types = infer_types("sort_by_expert", params, (graph.type_of(experts),))
            names = (f"{experts}_order", f"{experts}_starts")
            values += [Value(name, type_) for name, type_ in zip(names, types, strict=True)]
            sort = Op("sort_by_expert", (experts,), names, params, op.where, op.origin)
            orders[experts] = names
            new_ops.append(sort)
        inputs = (x, weight, *orders[experts], *bias)
        new_ops.append(replace(op, kind="grouped_linear", inputs=inputs))
    return replace(graph, values=tuple(values)).replace_ops(new_ops), ()


def _fuse_follower(
    graph: Graph, rule: str, *follower_kinds: str, after: tuple[str, ...] = LINEARS
) -> Result:
    """Join each op of `after`, plain or fused, with the one follower that reads its result."""
    refusals: list[Refusal] = []
    for follower in [op for op in graph.ops if op.kind in follower_kinds]:
        candidates = [graph.producers.get(name) for name in follower.inputs]
        leaders = [
            op
            for op in candidates
            if op is not None
            and any(inner.kind in after for inner in op.plain)
            # An epilogue adds one residual: a second add is better off with another linear.
            and not any(inner.kind == "add" for inner in op.plain)
            and graph.single_use(op.outputs[0]) is follower
        ]
        if not leaders:
            refusals.append(Refusal(rule, follower.name, f"no {after[0]} whose only reader it is"))
            continue
        latest = max(leaders, key=graph.ops.index)
        reason = obstacle(graph, [latest, follower])
        if reason:
            refusals.append(Refusal(rule, follower.name, reason))
        else:
            graph = join(graph, [latest, follower])
    return graph, tuple(refusals)


def fuse_glu(graph: Graph) -> Result:
    """Put the gated activation into the epilogue of the gate-up projection."""
    return _fuse_follower(graph, "fuse_glu", "glu")


def fuse_pointwise(graph: Graph) -> Result:
    """Put constants and activations into the epilogue of the projection before them."""
    return _fuse_follower(graph, "fuse_pointwise", "scale", "activate", "soft_cap")


def fuse_experts(graph: Graph) -> Result:
    """Put the choice of experts, sums over experts and gates of rows behind their projections."""
    graph, unrouted = _fuse_follower(graph, "fuse_experts", "route", after=("linear",))
    graph, uncombined = _fuse_follower(graph, "fuse_experts", "combine", after=("expert_linear",))
    graph, ungated = _fuse_row_gates(graph, "fuse_experts")
    return graph, (*unrouted, *uncombined, *ungated)


def _fuse_row_gates(graph: Graph, rule: str) -> Result:
    """Join each linear with the gate that scales its rows, and not with the one that makes it."""
    refusals: list[Refusal] = []
    for gate in [op for op in graph.ops if op.kind == "row_gate"]:
        linear = graph.producers.get(gate.inputs[0])
        reason: str | None = "its rows are not made by a linear of its own"
        if linear is not None and linear.kind == "linear":
            reason = obstacle(graph, [linear, gate])
            if graph.single_use(gate.inputs[0]) is not gate:
                reason = "its rows are read elsewhere too"
            if not reason:
                graph = join(graph, [linear, gate])
                continue
        refusals.append(Refusal(rule, gate.name, str(reason)))
    return graph, tuple(refusals)


def fuse_residual(graph: Graph) -> Result:
    """Put the residual add into the epilogue of the projection before it."""
    return _fuse_follower(graph, "fuse_residual", "add", after=(*LINEARS, "combine"))


def fuse_norm_residual(graph: Graph) -> Result:
    """Put the residual add into the kernel of the norm before it, where a block ends in one."""
    refusals: list[Refusal] = []
    for add in [op for op in graph.ops if op.kind == "add"]:
        candidates = [graph.producers.get(name) for name in add.inputs]
        norms = [
            op
            for op in candidates
            if op is not None and op.kind == "rms_norm" and graph.single_use(op.outputs[0]) is add
        ]
        if not norms:
            reason: str | None = "no norm whose only reader it is"
        else:
            reason = obstacle(graph, [norms[-1], add])
        if reason:
            refusals.append(Refusal("fuse_norm_residual", add.name, reason))
        else:
            graph = join(graph, [norms[-1], add])
    return graph, tuple(refusals)


def fuse_gather_norm(graph: Graph) -> Result:
    """Let the final norm read only the rows whose logits are wanted."""
    refusals: list[Refusal] = []
    for gather in [op for op in graph.ops if op.kind == "gather_rows"]:
        norm = graph.single_use(gather.outputs[0])
        if norm is None or norm.kind not in ("rms_norm", "layer_norm"):
            refusals.append(Refusal("fuse_gather_norm", gather.name, "no norm is its only reader"))
        else:
            graph = join(graph, [gather, norm])
    return graph, tuple(refusals)


def fuse_norm_prologue(graph: Graph) -> Result:
    """Fold a norm into the only linear that reads it.

    Each program of the linear recomputes the row's mean square while it streams the row: worth it
    for few tokens, where a launch costs more.
    """
    refusals: list[Refusal] = []
    for norm in [op for op in graph.ops if op.kind == "rms_norm"]:
        readers = graph.uses.get(norm.outputs[0], ())
        if len(readers) != 1 or norm.outputs[0] in graph.outputs:
            refusals.append(Refusal("fuse_norm_prologue", norm.name, "several ops read it"))
            continue
        (reader,) = readers
        first = reader.plain[0]
        if first.kind != "linear" or first.inputs[0] != norm.outputs[0]:
            refusals.append(Refusal("fuse_norm_prologue", norm.name, "its reader is not a linear"))
            continue
        graph = join(graph, [norm, reader])
    return graph, tuple(refusals)
