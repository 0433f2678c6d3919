"""Costs of fused ops: what their bodies read of the cache counts, what stays inside does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.ir.toy import CONFIG, toy_graph
from treadle.ir.cost import op_cost, read_bytes
from treadle.ir.graph import Graph
from treadle.ir.ops.experts import expected_experts
from treadle.ir.types import DTYPE_BYTES

DIMS = {"T": 4, "B": 4, "R": 4, "M": 8, "P": 32}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def test_attention_inside_a_fused_op_reads_the_cache_as_alone() -> None:
    graph = toy_graph("decode")
    alone = next(op for op in graph.ops if op.kind == "attention")
    fused = replace(alone, kind="fused", body=(alone,))
    for op in (alone, fused):
        short, long = (op_cost(op, graph, DIMS | {"C": context}) for context in (0, 100))
        params = alone.params
        per_token = 2 * params.num_kv_heads * params.head_dim * DIMS["B"]
        element = DTYPE_BYTES[graph.type_of(alone.inputs[1]).dtype]
        assert long.bytes - short.bytes == 100 * per_token * element
        assert long.flops > short.flops


def test_experts_inside_a_fused_op_are_those_that_its_tokens_choose() -> None:
    graph = toy_graph(**EXPERTS)
    alone = next(op for op in graph.ops if op.kind == "expert_linear")
    fused = replace(alone, kind="fused", body=(alone,))
    for rows in (1, 4):
        dims = {**DIMS, "T": rows, "B": rows, "C": 0}
        assert op_cost(fused, graph, dims) == op_cost(alone, graph, dims)


# --- what a step reads ----------------------------------------------------------------------------


def weight_bytes(graph: Graph, *left_out: str) -> int:
    """Add up the loaded weights but those whose names end so."""
    return sum(
        weight.type.num_bytes({})
        for weight in graph.weights
        if not weight.rope and not weight.name.endswith(left_out or ("?",))
    )


def test_a_step_reads_weights_once_and_the_context_of_each_sequence() -> None:
    graph = toy_graph("decode")
    table = next(weight for weight in graph.weights if weight.name == "embed")
    caches = [value.type for value in graph.inputs if value.type.layout]
    per_token = sum(type_.num_bytes({"P": 1}) // type_.size(2) for type_ in caches)
    row = table.type.num_bytes({}) // table.type.size(0)
    found = read_bytes(graph, {"T": 4, "B": 4, "C": 100})
    assert found == weight_bytes(graph, "embed") + 4 * row + 4 * 100 * per_token


def test_of_experts_a_step_reads_those_that_its_tokens_choose() -> None:
    graph = toy_graph(**EXPERTS)
    all_experts = weight_bytes(graph) - weight_bytes(graph, "experts_gate_up", "experts_down")
    few, many = (read_bytes(graph, {"T": rows, "B": rows, "C": 0}) for rows in (1, 400))
    touched = [expected_experts(16, 2, rows) / 16 for rows in (1, 400)]
    embedded = 399 * graph.type_of("@embed").size(1) * DTYPE_BYTES["f32"]
    expected = embedded + all_experts * (touched[1] - touched[0])
    assert abs(many - few - expected) < 0.001 * expected


def test_a_step_reads_one_latent_for_all_heads_and_each_projection_up_once() -> None:
    graph = toy_graph(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_key_value_heads=CONFIG["num_attention_heads"],
        num_experts_per_tok=2,
        n_routed_experts=4,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
    )
    short, long = (read_bytes(graph, {"T": 3, "B": 3, "C": context}) for context in (0, 100))
    assert long - short == 2 * 3 * 100 * (48 + 16) * DTYPE_BYTES["f32"]
    # One product reads the half that makes keys, another the half that makes values.
    halves = [op for op in graph.ops if op.kind == "head_linear"][:2]
    read = sum(op_cost(op, graph, {"T": 0, "B": 0, "C": 0}).bytes for op in halves)
    assert read == graph.type_of(halves[0].inputs[1]).num_bytes({})
