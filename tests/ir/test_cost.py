"""Costs of fused ops: what their bodies read of the cache counts, what stays inside does not."""

from __future__ import annotations

from dataclasses import replace

from tests.ir.toy import toy_graph
from treadle.ir.cost import op_cost
from treadle.ir.types import DTYPE_BYTES

DIMS = {"T": 4, "B": 4, "R": 4, "M": 8, "P": 32}


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
