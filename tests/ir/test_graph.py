"""The graph's text, its rules, its passes and its memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.golden import Golden
from tests.ir.toy import toy_graph
from treadle.ir import dims, fuse
from treadle.ir.builder import GraphBuilder
from treadle.ir.errors import ShapeError, SpecError
from treadle.ir.graph import Graph, Op, walk
from treadle.ir.memory import plan_buffers
from treadle.ir.ops.registry import REGISTRY, infer_types, lookup
from treadle.ir.pipeline import run_passes
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.verify import verify

FORMS = [("decode", True), ("decode", False), ("mixed", False)]
DIMS = {"T": 8, "B": 8, "R": 8, "M": 4, "P": 10, "C": 64}


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_authored_graph_reads_back_equal(step: str, bias: bool) -> None:
    graph = toy_graph(step, mlp_bias=bias, attention_bias=bias)
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize(("step", "few"), FORMS)
def test_a_fused_graph_reads_back_equal(step: str, few: bool) -> None:
    graph, _ = run_passes(toy_graph(step), few_tokens=few)
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_the_authored_graph_is_as_its_golden(golden: Callable[[str], Golden], step: str) -> None:
    assert print_graph(toy_graph(step)) == golden(f"ir/llama.{step}.authored.ir")


@pytest.mark.parametrize(("step", "few"), FORMS)
def test_each_pass_does_what_its_golden_shows(
    golden: Callable[[str], Golden], step: str, few: bool
) -> None:
    _, records = run_passes(toy_graph(step), few_tokens=few)
    form = f"{step}.few" if few else step
    for number, record in enumerate(records, start=1):
        assert record.dump == golden(f"ir/llama.{form}.{number:02}_{record.name}.ir")


def test_a_layer_of_the_few_token_form_is_six_kernels() -> None:
    graph, _ = run_passes(toy_graph("decode"), few_tokens=True)
    per_layer = [op for op in graph.ops if op.name.startswith("layers.1.")]
    assert [op.params.kernel if op.body else op.kind for op in per_layer] == [
        "rms_norm__linear",
        "rope__kv_write",
        "attention",
        "linear__add",
        "rms_norm__linear__glu",
        "linear__add",
    ]


def test_a_layer_of_the_joined_form_has_a_kernel_less() -> None:
    graph, _ = run_passes(toy_graph("decode"), few_tokens=True, joined=True)
    per_layer = [op for op in graph.ops if op.name.startswith("layers.1.")]
    assert [op.params.kernel for op in per_layer] == [
        "rms_norm__linear",
        "rope__kv_write__attention",
        "linear__add",
        "rms_norm__linear__glu",
        "linear__add",
    ]
    assert parse_graph(print_graph(graph)) == graph


def test_appending_and_attending_are_joined_as_the_golden_shows(
    golden: Callable[[str], Golden],
) -> None:
    _, records = run_passes(toy_graph("decode"), few_tokens=False, joined=True)
    (record,) = [record for record in records if record.name == "fuse_rope_attention"]
    assert record.dump == golden("ir/llama.decode.joined.fuse_rope_attention.ir")


def _with_sinks() -> Graph:
    b = GraphBuilder("sinking", step="mixed", dtype="f32", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 64))
    q, k, v = b.split(x, 32, 16, 16, name="q k v")
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "scale": 1.0}
    y = b.attention(q, k, v, b.weight("sinks", "sinks", 2), cache="kv.0", **heads)
    return b.finish(b.linear(b.last_rows(y), b.weight("h", "h", 32, 32), out_dtype="f32"))


def test_operands_that_come_together_may_be_left_out_before_another() -> None:
    definition = lookup("attention")
    assert definition.present(7)[6:] == ("sinks",)
    assert definition.present(8)[6:] == ("k", "v")
    assert definition.present(9)[6:] == ("k", "v", "sinks")
    assert not definition.present(5) and not definition.present(10)
    graph = _with_sinks()
    (attention,) = [op for op in graph.ops if op.kind == "attention"]
    assert len(attention.inputs) == 7 and attention.inputs[-1] == "@sinks"
    verify(graph, "authored")
    assert parse_graph(print_graph(graph)) == graph


def test_sinks_are_one_score_a_head() -> None:
    graph = _with_sinks()
    (op,) = [op for op in graph.ops if op.kind == "attention"]
    types = [graph.type_of(name) for name in op.inputs]
    with pytest.raises(ShapeError, match=r"sinks \[2\]"):
        infer_types("attention", op.params, (*types[:-1], types[-1].with_shape(3)))


def test_a_step_of_several_tokens_per_sequence_is_not_joined_and_the_reason_is_kept() -> None:
    joined, records = run_passes(toy_graph("mixed"), few_tokens=False, joined=True)
    assert joined == run_passes(toy_graph("mixed"), few_tokens=False)[0]
    (record,) = [record for record in records if record.name == "fuse_rope_attention"]
    assert len(record.refusals) == 2
    assert all("several tokens" in refusal.reason for refusal in record.refusals)


def test_two_anchors_that_are_no_append_and_attention_are_refused() -> None:
    graph, _ = run_passes(toy_graph("decode"), few_tokens=False)
    append = next(op for op in graph.ops if op.plain[-1].kind == "kv_write")
    projection = next(op for op in graph.ops if op.outputs[0] == append.inputs[0])
    with pytest.raises(SpecError, match="one anchor, found linear, kv_write"):
        verify(fuse.join(graph, [projection, append]), "fused")


@pytest.mark.parametrize("joined", [False, True])
def test_fusion_keeps_every_authored_op_once(joined: bool) -> None:
    authored = toy_graph("decode")
    fused, _ = run_passes(authored, few_tokens=True, joined=joined)
    kinds = sorted(op.kind for op in authored.ops)
    assert sorted(op.kind for op in walk(fused.ops)) == kinds


def test_a_residual_read_twice_is_not_fused_and_the_reason_is_kept() -> None:
    b = GraphBuilder("odd", step="mixed", dtype="f32", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 16))
    y = b.linear(x, b.weight("w", "w", 16, 16), name="y")
    total = b.add(b.add(x, y, name="first"), y, name="second")
    graph = b.finish(b.linear(b.last_rows(total), b.weight("h", "h", 32, 16), out_dtype="f32"))
    _, refusals = fuse.fuse_residual(graph)
    assert {refusal.op for refusal in refusals} == {"first", "second"}
    assert all("only reader" in refusal.reason for refusal in refusals)


def _rotated_by_neighbours(*, of_k: bool = True, read_twice: bool = False) -> Graph:
    b = GraphBuilder("pairs", step="mixed", dtype="f32", page_size=16)
    table = b.rope_table("rope", (1.0,) * 4, 1.0)
    x = b.embed(b.weight("embed", "embed", 32, 64))
    weight, bias = b.weight("w", "w", 64, 64), b.weight("bias", {"bias": 64})
    projected = b.linear(x, weight, bias, name="projected")
    q, k, v = b.split(projected, 32, 16, 16, name="q k v")
    attended = b.attention(
        b.rope(q, table, head_dim=16, interleaved=True, name="q_rope"),
        b.rope(k, table, head_dim=16, interleaved=of_k, name="k_rope"),
        v,
        cache="kv.0",
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scale=1.0,
    )
    total = b.add(attended, q) if read_twice else attended
    return b.finish(b.linear(b.last_rows(total), b.weight("h", "h", 32, 32), out_dtype="f32"))


def test_neighbours_that_rotate_are_reordered_in_weights_and_ops_together() -> None:
    graph, refusals = fuse.pair_rope_halves(_rotated_by_neighbours())
    assert not refusals
    assert not any(op.params.interleaved for op in graph.ops if op.kind == "rope")
    pairs = {weight.name: weight.rope_pairs for weight in graph.weights if weight.rope_pairs}
    assert pairs == {"w": (48, 16, 8), "bias": (48, 16, 8)}
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"of_k": False}, "not q and k, in this order"),
        ({"read_twice": True}, "read elsewhere"),
    ],
)
def test_neighbours_whose_order_shows_are_left_alone_and_the_reason_is_kept(
    changes: dict[str, bool], reason: str
) -> None:
    authored = _rotated_by_neighbours(**changes)
    graph, refusals = fuse.pair_rope_halves(authored)
    assert graph == authored
    assert refusals and all(reason in refusal.reason for refusal in refusals)


def _append_with_norms(*, of_q: bool, of_k: bool) -> Graph:
    b = GraphBuilder("normed", step="mixed", dtype="f32", page_size=16)
    table = b.rope_table("rope", (1.0,) * 8, 1.0)
    x = b.embed(b.weight("embed", "embed", 32, 64))
    weight = b.weight("norm", "norm", 16)
    q, k, v = b.split(b.linear(x, b.weight("w", "w", 64, 64)), 32, 16, 16, name="q k v")
    q = b.head_norm(q, weight, eps=1e-6, name="q_norm") if of_q else q
    k = b.head_norm(k, weight, eps=1e-6, name="k_norm") if of_k else k
    attended = b.attention(
        b.rope(q, table, head_dim=16),
        b.rope(k, table, head_dim=16),
        v,
        cache="kv.0",
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scale=1.0,
    )
    head = b.weight("h", "h", 32, 32)
    return b.finish(b.linear(b.last_rows(attended), head, out_dtype="f32"))


def test_norms_of_the_heads_of_q_and_k_join_the_append() -> None:
    fused, refusals = fuse.fuse_rope_kv_write(_append_with_norms(of_q=True, of_k=True))
    assert not refusals
    (append,) = (op for op in fused.ops if op.body)
    kinds = [inner.kind for inner in append.body]
    assert sorted(kinds) == sorted(["split", *["head_norm", "rope"] * 2, "kv_write"])


def test_a_norm_of_q_alone_keeps_the_append_apart_and_the_reason_is_kept() -> None:
    _, (refusal,) = fuse.fuse_rope_kv_write(_append_with_norms(of_q=True, of_k=False))
    assert refusal.reason == "of q and k only one is normalised"


def test_each_linear_takes_one_residual_at_most() -> None:
    b = GraphBuilder("parallel", step="mixed", dtype="f32", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 16))
    attended = b.linear(x, b.weight("a", "a", 16, 16), name="attended")
    fed = b.linear(x, b.weight("m", "m", 16, 16), name="fed")
    total = b.add(b.add(x, attended, name="first"), fed, name="second")
    graph = b.finish(b.linear(b.last_rows(total), b.weight("h", "h", 32, 16), out_dtype="f32"))
    fused, refusals = fuse.fuse_residual(graph)
    assert not refusals
    kernels = {op.name: [inner.kind for inner in op.body] for op in fused.ops if op.body}
    assert kernels == {"first": ["linear", "add"], "second": ["linear", "add"]}


def test_ops_that_touch_the_same_state_stay_in_order() -> None:
    graph = toy_graph("decode")
    write = next(op for op in graph.ops if op.kind == "kv_write")
    attention = next(op for op in graph.ops if op.kind == "attention")
    later = next(op for op in graph.ops if op.name == "layers.0.o")
    assert "touches the same state" in (fuse.obstacle(graph, [write, later]) or "")
    assert fuse.obstacle(graph, [write, attention]) is None


def test_gate_and_up_alternate_in_weight_and_op_together() -> None:
    graph, _ = fuse.interleave_gate_up(toy_graph("decode", intermediate_size=132))
    assert graph.weight_table["layers.0.gate_up"].interleave == 4
    assert {op.params.interleave for op in graph.ops if op.kind == "glu"} == {4}


@pytest.mark.parametrize(("parts", "interleave"), [((16, 16), 8), ((32,), 8), ((12, 20), 0)])
def test_gate_and_up_alternate_where_they_are_two_halves_however_stored(
    parts: tuple[int, ...], interleave: int
) -> None:
    b = GraphBuilder("joined", step="mixed", dtype="f32", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 16))
    weight = b.weight("w", {f"part{number}": rows for number, rows in enumerate(parts)}, 16)
    gated = b.glu(b.linear(x, weight))
    graph = b.finish(b.linear(b.last_rows(gated), b.weight("h", "h", 32, 16), out_dtype="f32"))
    graph, refusals = fuse.interleave_gate_up(graph)
    assert graph.weight_table["w"].interleave == interleave
    assert bool(refusals) == (interleave == 0)


def test_an_illegal_graph_names_the_op() -> None:
    graph = toy_graph("decode")
    with pytest.raises(SpecError, match="before anything produces it"):
        verify(replace(graph, ops=graph.ops[1:]), "authored")
    with pytest.raises(SpecError, match="a second time"):
        verify(replace(graph, ops=(*graph.ops, graph.ops[-2])), "authored")
    with pytest.raises(SpecError, match="never used"):
        verify(replace(graph, ops=graph.ops[:2], outputs=()), "authored")
    with pytest.raises(SpecError, match="not fused"):
        verify(graph, "fused")


def test_a_shape_mistake_is_told_at_the_op_with_both_types() -> None:
    b = GraphBuilder("odd", step="mixed", dtype="f32", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 16))
    with pytest.raises(ShapeError, match=r"f32\[T, 16\].*f32\[8, 24\]"):
        b.linear(x, b.weight("w", "w", 8, 24))
    with pytest.raises(SpecError, match="declared twice"):
        b.weight("w", "w", 8, 24)


def test_authors_lines_point_into_the_spec() -> None:
    graph = toy_graph("decode")
    assert next(op for op in graph.ops if op.kind == "attention").where.startswith("blocks.py:")


@pytest.mark.parametrize(("step", "few"), FORMS)
def test_no_two_live_values_share_bytes(step: str, few: bool) -> None:
    graph, _ = run_passes(toy_graph(step), few_tokens=few)
    plan = plan_buffers(graph, DIMS)
    last = {name: index for index, op in enumerate(graph.ops) for name in op.inputs}
    last.update(dict.fromkeys(graph.outputs, len(graph.ops)))
    born = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    assert set(born) == set(plan.offsets)
    for a in born:
        for b in born:
            if a < b and born[a] <= last.get(b, born[b]) and born[b] <= last.get(a, born[a]):
                ends = plan.offsets[a] + plan.sizes[a], plan.offsets[b] + plan.sizes[b]
                assert ends[0] <= plan.offsets[b] or ends[1] <= plan.offsets[a], (a, b)
    total = sum(graph.types[name].num_bytes(DIMS) for name in born)
    assert plan.total_bytes < total


def test_without_reuse_no_two_values_share_bytes() -> None:
    graph, _ = run_passes(toy_graph("decode"), few_tokens=False)
    plan = plan_buffers(graph, DIMS, reuse_memory=False)
    places = sorted((plan.offsets[name], plan.sizes[name]) for name in plan.offsets)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))


def test_every_op_has_a_docstring_with_its_shapes_or_formula() -> None:
    for kind, definition in REGISTRY.items():
        assert definition.doc.splitlines()[0].endswith("."), kind
        assert "Formula:" in definition.doc or "Shapes:" in definition.doc, kind


def test_costs_of_the_ops_are_positive_and_grow_with_the_tokens() -> None:
    graph = toy_graph("mixed")
    few, many = {**DIMS, "T": 1}, {**DIMS, "T": 64}

    def moved(op: Op, values: dict[str, int]) -> int:
        inputs = tuple(map(graph.type_of, op.inputs))
        outputs = tuple(map(graph.type_of, op.outputs))
        return lookup(op.kind).bytes(op.params, inputs, outputs, values)

    per_token = [op for op in graph.ops if op.kind in ("linear", "embed", "rope", "kv_write")]
    for op in per_token:
        leading = graph.type_of(op.inputs[0]).shape[0]
        if leading == dims.T:
            assert 0 < moved(op, few) < moved(op, many), op.name
