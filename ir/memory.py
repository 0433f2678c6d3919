"""The memory plan: where each value of a step lives in one arena, reusing what is no longer read.

Called by the runtime's program builder and by `show --plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.ir.graph import Graph

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class BufferPlan:
    """Place each value at `offsets[name]` bytes of an arena of `total_bytes`."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    total_bytes: int


def plan_buffers(graph: Graph, dims: Mapping[str, int], *, reuse_memory: bool = True) -> BufferPlan:
    """Give every value a step's ops produce a place, first fit in order of production.

    `dims` are the largest dims that will run with this plan. A value lives from its op to its last
    reader; an output of the graph to the end. An op's outputs never share bytes with its inputs.
    Without `reuse_memory` every value lives to the end, so that any op can run again by itself.
    """
    end = len(graph.ops)
    last_use = {name: index for index, op in enumerate(graph.ops) for name in op.inputs}
    last_use.update(dict.fromkeys(graph.outputs, end))
    if not reuse_memory:
        last_use = dict.fromkeys((name for op in graph.ops for name in op.outputs), end)
    live: list[tuple[int, int, int]] = []  # (offset, size, last use), by offset
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    total = 0
    for index, op in enumerate(graph.ops):
        live = [block for block in live if block[2] >= index]
        for name in op.outputs:
            size = -(-graph.types[name].num_bytes(dims) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            offset = 0
            for start, length, _ in live:
                if offset + size <= start:
                    break
                offset = max(offset, start + length)
            offsets[name], sizes[name] = offset, size
            live.append((offset, size, last_use.get(name, index)))
            live.sort()
            total = max(total, offset + size)
    return BufferPlan(offsets, sizes, total)
