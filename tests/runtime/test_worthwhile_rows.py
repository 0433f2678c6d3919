"""How many rows are worth a larger decode program."""

from __future__ import annotations

import pytest

from treadle.bench.random_models import build_graphs
from treadle.runtime.config import EngineConfig
from treadle.runtime.planner import plan_programs
from treadle.runtime.worthwhile_rows import OPERATIONS_PER_BYTE, find_worthwhile_rows


def of_model(name: str, max_rows: int) -> dict[int, int]:
    engine = EngineConfig("cuda", "bf16", max_rows=max_rows)
    graphs = build_graphs(name, engine, num_layers=2).fused
    plan = plan_programs(
        graphs, engine, architecture="sm_90", choose=lambda op, graph, where, found: next(found)
    )
    return find_worthwhile_rows(plan, graphs, engine)


def test_where_reading_weights_binds_one_row_more_is_worth_it() -> None:
    found = of_model("llama-3.1-8b", 128)
    assert list(found) == [1, 2, 4, 8, 16, 32, 64]  # the largest has none to follow
    assert all(rows < worthwhile <= 1.1 * rows + 1 for rows, worthwhile in found.items())


def test_where_arithmetic_binds_a_program_is_worth_the_rows_that_cost_as_much() -> None:
    # Of 170 rows on a weight of 16 bits takes longer to compute than to read.
    balance = OPERATIONS_PER_BYTE
    found = of_model("llama-3.1-8b", 512)
    assert found[128] == pytest.approx(128 * 256 / balance, rel=0.05)
    assert found[256] == pytest.approx(512, rel=0.05)


def test_experts_that_few_tokens_each_choose_are_read_not_computed() -> None:
    assert of_model("qwen3-30b-a3b", 256)[128] < 1.2 * 128
