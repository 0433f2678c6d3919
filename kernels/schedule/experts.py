"""The schedules of mixtures of experts: the router, the sort, the products, the sum."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.kernels.schedule.linears import Sizes, skinny_schedule
from treadle.kernels.schedule.machine import (
    INTERPRETER,
    Schedule,
    one_stage_schedules,
    pdl_choices,
    power_of_two,
    shared_room_bytes,
)

SORTED_AT_ONCE = 2048  # up to so many choices one program counts and places


def router_schedules(
    num_experts: int, num_inputs: int, rows: int, machine: str
) -> Iterator[Schedule]:
    """Yield schedules of a router: parts of K fill the GPU at few tokens, blocks of many do."""
    widest = power_of_two(num_inputs)
    if machine == INTERPRETER:
        block_m = 1 if rows == 1 else max(16, min(power_of_two(rows), 64))
        # Two parts, so that adding them up is exercised too.
        block_k = max(16, min(widest // 2, 512))
        yield _router(block_m, block_k, 2 if rows <= 16 else 1, 1)
        return
    few = [(1, 128, 16, 4), (1, 64, 32, 4), (1, 256, 8, 8), (1, 128, 8, 4), (1, 64, 16, 2)]
    some = [(16, 128, 16, 4), (16, 64, 32, 4), (16, 64, 16, 4), (16, 128, 8, 8)]
    many = [(32, 64, 2, 4), (64, 64, 1, 4), (32, 64, 1, 4), (16, 64, 4, 4), (128, 64, 1, 8)]
    shapes = (few + some[:1]) if rows <= 4 else (some + few[:1]) if rows <= 64 else many
    for block_m, block_k, split, warps in shapes:
        # A tile of weights per stage: wide mixtures get a narrower one.
        block_k = max(16, min(block_k, widest, 16384 // power_of_two(num_experts)))
        split = min(split, -(-num_inputs // block_k))
        for use_pdl in pdl_choices(machine):
            yield _router(block_m, block_k, split, warps, use_pdl=use_pdl)


def _router(
    block_m: int, block_k: int, split: int, warps: int, *, use_pdl: bool = False
) -> Schedule:
    return {
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "SPLIT_K": split,
        "USE_PDL": use_pdl,
        "num_warps": warps,
        "num_stages": 2 if block_m > 1 else 1,
    }


def sort_schedules(num_experts: int, num_choices: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the sort by expert: one program while it is quick, then several."""
    one_block = num_choices <= SORTED_AT_ONCE
    block = max(16, power_of_two(num_choices)) if one_block else 1024
    # A chunk's table of choices by experts stays in registers.
    largest = 65536 if machine == INTERPRETER else 8192
    chunk = max(16, min(block, largest // power_of_two(num_experts)))
    for warps, size in ((4, chunk), (8, chunk), (4, max(16, chunk // 2))):
        yield from one_stage_schedules(
            machine, warps, BLOCK_CHOICES=block, CHUNK=size, ONE_BLOCK=one_block
        )


def expert_gemv_schedules(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    """Yield schedules of one choice's product: as a GEMV, of fewer features."""
    if machine == INTERPRETER:
        yield from one_stage_schedules(machine, 4, **_interpreted_tile(sizes))
        return
    shapes = [(16, 1024, 8), (16, 512, 8), (8, 1024, 8), (16, 512, 4), (8, 1024, 4), (32, 512, 8)]
    shapes += [(8, 512, 4), (16, 256, 4), (4, 1024, 4), (8, 2048, 8)]
    yield from _expert_rows(sizes, machine, shapes)


def expert_gemv_combine_schedules(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a token's products: a program reads a few rows of every expert."""
    if machine == INTERPRETER:
        yield from one_stage_schedules(machine, 4, **_interpreted_tile(sizes))
        return
    shapes = [(8, 512, 4), (8, 1024, 8), (8, 256, 4), (4, 1024, 4), (4, 512, 4), (16, 512, 8)]
    shapes += [(16, 256, 4), (4, 256, 2), (16, 1024, 8), (8, 512, 8)]
    yield from _expert_rows(sizes, machine, shapes)


def _interpreted_tile(sizes: Sizes) -> dict[str, int]:
    return {
        "BLOCK_N": max(16, min(power_of_two(sizes.num_features), 512)),
        "BLOCK_K": max(16, min(power_of_two(sizes.num_inputs), 512)),
    }


def _expert_rows(
    sizes: Sizes, machine: str, shapes: list[tuple[int, int, int]]
) -> Iterator[Schedule]:
    widest = power_of_two(sizes.num_inputs)
    for block_n, block_k, warps in shapes:
        block_n = max(block_n, sizes.feature_multiple)
        yield from one_stage_schedules(
            machine, warps, BLOCK_N=block_n, BLOCK_K=min(block_k, widest)
        )


# (BLOCK_N, BLOCK_K, warps, stages)
_GROUPED_SKINNY_TILES = [
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (128, 128, 8, 4),
    (128, 64, 4, 6),
    (32, 256, 4, 4),
    (64, 64, 4, 8),
    (64, 128, 4, 6),
]


def grouped_choices(sizes: Sizes, num_experts: int, machine: str) -> Iterator[tuple[str, Schedule]]:
    """Yield (template, schedule) for a product by expert; `sizes.rows` are choices, not tokens.

    What decides is the choices that an expert gets on average: few leave the left side to weights.
    """
    if machine == INTERPRETER:
        blocks = _interpreted_tile(sizes)
        if sizes.rows <= 64:
            yield (
                "grouped_skinny",
                {"BLOCK_M": 16, **next(one_stage_schedules(machine, 4, **blocks))},
            )
        else:
            yield "grouped_matmul", {"BLOCK_M": 64, **blocks, "num_warps": 4, "num_stages": 1}
        return
    each = -(-sizes.rows // num_experts)
    blocks_m = [16, 32] if each <= 16 else [32, 64, 16] if each <= 32 else [64, 32]
    if each <= 128:
        for index, tile_m in enumerate(blocks_m):
            for block_n, block_k, warps, stages in _GROUPED_SKINNY_TILES[: 7 if index == 0 else 3]:
                tile = (max(block_n, sizes.feature_multiple), block_k, warps, stages)
                for use_pdl in pdl_choices(machine):
                    for schedule in skinny_schedule(sizes, machine, tile, tile_m, 1, use_pdl):
                        dropped = ("SPLIT_K", "PREFETCH_TILES")
                        yield (
                            "grouped_skinny",
                            {name: v for name, v in schedule.items() if name not in dropped},
                        )
    if each > 16:
        shapes = [(128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3)]
        shapes += [(128, 128, 64, 4, 3), (128, 64, 64, 4, 4), (64, 256, 64, 8, 3)]
        if each <= 96:
            shapes = [shapes[1], *shapes]
        room = shared_room_bytes(machine)
        for block_m, block_n, block_k, warps, stages in dict.fromkeys(shapes):
            block_k = block_k * 2 // sizes.element_bytes
            tile_bytes = (block_m + block_n) * block_k * sizes.element_bytes
            yield (
                "grouped_matmul",
                {
                    "BLOCK_M": block_m,
                    "BLOCK_N": block_n,
                    "BLOCK_K": block_k,
                    "num_warps": warps,
                    "num_stages": max(1, min(stages, room // tile_bytes)),
                },
            )


def combine_schedules(width: int, rows: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the sum over a token's experts: a part of a row a program."""
    block_e = min(power_of_two(width), 1024)
    if machine == INTERPRETER:
        yield from one_stage_schedules(
            machine, 4, BLOCK_T=min(power_of_two(rows), 64), BLOCK_E=block_e
        )
        return
    for size, warps in ((block_e, 4), (block_e // 2, 2), (block_e // 4, 1), (2 * block_e, 8)):
        yield from one_stage_schedules(
            machine, warps, BLOCK_T=1, BLOCK_E=max(16, min(size, power_of_two(width)))
        )
