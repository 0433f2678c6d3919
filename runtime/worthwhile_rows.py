"""How many rows make the next larger decode program worth its steps.

A step costs all rows of its program, whether they are there or not: where arithmetic binds, the
129th row of an engine whose programs have 128 and 256 makes a step half as long again. Called when
an artifact is loaded; `admission` follows what is found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from treadle.ir.cost import op_cost
from treadle.ir.graph import Graph
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import Plan, bucket_dims

# That a GPU computes in the time of reading one: 170 on an H200 and 155 on an A100, as measured.
OPERATIONS_PER_BYTE = 170.0


def find_worthwhile_rows(
    plan: Plan, graphs: Mapping[str, Graph], engine: EngineConfig
) -> dict[int, int]:
    """Give, for the rows of each decode program but the largest, the rows worth the next one.

    With that many or more a step of the next program gives more tokens in its time than one of this
    program does full. Contexts don't matter: each row has its own in either.
    """
    costs = {
        each.bucket: step_cost(graphs[each.form], bucket_dims(engine, each.step, each.bucket))
        for each in plan.programs
        if each.step == "decode"
    }
    return {
        rows: max(rows + 1, math.ceil(rows * costs[more_rows] / costs[rows]))
        for rows, more_rows in pairwise(sorted(costs))
    }


def step_cost(graph: Graph, dims: Mapping[str, int]) -> float:
    """Give what a step costs without its contexts, in bytes read, or computed in their time."""
    costs = [op_cost(op, graph, {**dims, "C": 0}) for op in graph.ops]
    return sum(max(cost.bytes, cost.flops / OPERATIONS_PER_BYTE) for cost in costs)
