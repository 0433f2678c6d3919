"""Rows that nobody wants: which ops compute none of them, and which must compute all."""

from __future__ import annotations

import pytest
import torch

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.ir.ops.registry import REGISTRY
from treadle.ir.pick_rows import pick_rows_early
from treadle.ir.pipeline import run_passes
from treadle.ir.verify import verify
from treadle.runtime.reference_program import reference_call

from .toy import toy_graph


def rows_of(graph: Graph, kind: str) -> dict[str, str]:
    """Give the size of the rows of each op of this kind, T or B, by the op's name."""
    return {
        op.name: str(graph.type_of(op.outputs[0]).shape[0]) for op in graph.ops if op.kind == kind
    }


def test_behind_the_last_attention_a_row_per_sequence_is_multiplied() -> None:
    graph, refusals = pick_rows_early(toy_graph("mixed"))
    assert not refusals
    assert rows_of(graph, "linear") == {
        "layers.0.qkv": "T",
        "layers.0.o": "T",
        "layers.0.gate_up": "T",
        "layers.0.down": "T",
        "layers.1.qkv": "T",
        "layers.1.o": "B",
        "layers.1.gate_up": "B",
        "layers.1.down": "B",
        "logits": "B",
    }
    picked = [op.inputs[0] for op in graph.ops if op.kind == "gather_rows"]
    assert picked == ["layers.1.attended", "layers.0.after_mlp"]


def test_in_a_step_of_one_token_per_sequence_all_rows_are_wanted() -> None:
    graph, (refusal,) = pick_rows_early(toy_graph("decode"))
    assert graph == toy_graph("decode")
    assert refusal.reason == "a sequence has one token in this step"


def chain(b: GraphBuilder) -> tuple[Value, Value]:
    """Author rows and what two linears make of them."""
    x = b.embed(b.weight("embed", "embed", 32, 16))
    y = b.linear(b.linear(x, b.weight("v", "v", 16, 16)), b.weight("w", "w", 16, 16), name="y")
    return x, y


def end(b: GraphBuilder, rows: Value) -> Graph:
    return b.finish(b.linear(rows, b.weight("h", "h", 32, 16), out_dtype="f32"))


def test_what_another_op_reads_too_is_computed_for_all_tokens() -> None:
    b = GraphBuilder("odd", step="mixed", dtype="f32", page_size=16)
    _, y = chain(b)
    attended = b.attention(
        y, y, y, cache="kv.0", num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0
    )
    graph, (refusal,) = pick_rows_early(end(b, b.last_rows(b.add(attended, y))))
    assert rows_of(graph, "linear")["y"] == "T"
    assert refusal.reason == "no linear before it multiplies rows for it alone"


def test_rows_that_leave_the_graph_are_picked_where_the_author_says() -> None:
    b = GraphBuilder("odd", step="mixed", dtype="f32", page_size=16)
    _, y = chain(b)
    rows = b.last_rows(y)
    logits = b.linear(rows, b.weight("h", "h", 32, 16), out_dtype="f32")
    _, (refusal,) = pick_rows_early(b.finish(logits, rows))
    assert refusal.reason == "its rows leave the graph"


@pytest.mark.parametrize("kind", [kind for kind, op in REGISTRY.items() if op.any_rows])
def test_an_op_that_takes_any_rows_is_no_op_that_mixes_them(kind: str) -> None:
    definition = REGISTRY[kind]
    assert definition.role in ("anchor", "row", "pointwise")
    assert not definition.mutates


def test_the_rows_that_are_wanted_stay_the_same(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    b = GraphBuilder("chain", step="mixed", dtype="f32", page_size=16)
    x, y = chain(b)
    authored = end(b, b.last_rows(b.add(x, b.rms_norm(y, b.weight("n", "n", 16), eps=1e-5))))
    picked, refusals = pick_rows_early(authored)
    verify(picked, "authored")
    assert not refusals
    given = {f"@{w.name}": torch.randn(w.type.bound_shape({})) for w in authored.weights}
    given["token_ids"] = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    given["sample_index"] = torch.tensor([6, -1, 2], dtype=torch.int32)

    def logits(graph: Graph) -> torch.Tensor:
        env = dict(given)
        for op in graph.ops:
            if op.kind == "resolve_tokens":
                env[op.outputs[0]] = env["token_ids"]
            elif op.kind != "sample":
                function, options = reference_call(op, graph)
                env[op.outputs[0]] = function(*(env[name] for name in op.inputs), **options)
        return env[graph.outputs[1]]

    torch.testing.assert_close(logits(picked), logits(authored), rtol=1e-5, atol=1e-5)
    assert logits(picked).shape == (3, 32)


def test_what_follows_the_rows_is_fused_as_in_other_layers() -> None:
    fused, _ = run_passes(toy_graph("mixed"), few_tokens=False)
    kinds = [[op.kind for op in each.plain] for each in fused.ops]
    assert kinds[-9:] == [
        ["gather_rows"],
        ["gather_rows"],
        ["linear", "add"],
        ["rms_norm"],
        ["linear", "glu"],
        ["linear", "add"],
        ["rms_norm"],
        ["linear"],
        ["sample"],
    ]
