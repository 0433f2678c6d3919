"""The schedules of linears, of a matmul's every template, and of products of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from treadle.kernels.schedule.machine import (
    HAS_TMA,
    INTERPRETER,
    MOST_SHARED_BYTES,
    NUM_MULTIPROCESSORS,
    Schedule,
    pdl_choices,
    power_of_two,
    shared_room_bytes,
)

GEMV_ROWS = 1  # beyond it tensor cores win: at 2 rows by 5 %, at 4 by 30 % of an 8B step
STREAM_ROWS = 64  # beyond it reading x once per block of features costs more than w
SKINNY_ROWS = 256  # beyond it the tokens are the left operand


@dataclass(frozen=True)
class Sizes:
    """Give the sizes that a matmul's schedule depends on; `feature_multiple` divides BLOCK_N.

    `wide_out` says that results are wider than the operands: logits in f32.
    """

    rows: int
    num_features: int
    num_inputs: int
    feature_multiple: int = 1
    element_bytes: int = 2
    wide_out: bool = False


def matmul_choices(sizes: Sizes, machine: str) -> Iterator[tuple[str, Schedule]]:
    """Yield (template, schedule) for a linear of these sizes, the best guess first."""
    if machine == INTERPRETER:
        yield _interpreted_matmul(sizes)
        return
    has_tma = machine in HAS_TMA and sizes.num_inputs * sizes.element_bytes % 16 == 0
    if sizes.rows <= GEMV_ROWS:
        yield from (("gemv", schedule) for schedule in _gemv(sizes, machine))
    if sizes.rows <= SKINNY_ROWS:
        skinny = [
            ("matmul_skinny", schedule) for schedule in _skinny(sizes, machine, _POINTER_TILES)
        ]
        if has_tma:
            by_tma = [
                ("matmul_skinny_tma", schedule) for schedule in _skinny(sizes, machine, _TMA_TILES)
            ]
            if sizes.rows > 8:
                skinny = by_tma + skinny[:8]
            else:
                skinny = skinny[:12] + by_tma[:12]
        # Next to a GEMV a few are enough to see that tensor cores don't win.
        yield from skinny[:8] if sizes.rows <= GEMV_ROWS else skinny
        if has_tma and GEMV_ROWS < sizes.rows <= 64:
            yield from _skinny_more(sizes)
    if has_tma and sizes.element_bytes == 2 and sizes.rows <= STREAM_ROWS:
        yield from (("matmul_stream", schedule) for schedule in _matmul_stream(sizes))
    if sizes.rows > 64 or not has_tma:
        # Logits, in f32, take too much room to be stored: at 256 rows the TMA tiles win by 7 %.
        if machine == "sm_90" and has_tma and sizes.element_bytes == 2 and not sizes.wide_out:
            yield from (("matmul_gluon", schedule) for schedule in _matmul_gluon(sizes))
        if has_tma:
            yield from (("matmul_tma", schedule) for schedule in _matmul_tma(sizes, machine))
        yield from (("matmul", schedule) for schedule in _matmul(sizes, machine))


def _interpreted_matmul(sizes: Sizes) -> tuple[str, Schedule]:
    # The interpreter pays per program and per tensor op: as few and as large tiles as possible.
    block_n = max(16, min(power_of_two(sizes.num_features), 512))
    block_k = max(16, min(power_of_two(sizes.num_inputs), 512))
    common: Schedule = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4, "num_stages": 1}
    if sizes.rows <= GEMV_ROWS:
        return "gemv", {"ROWS": sizes.rows, "USE_PDL": False, **common}
    block_m = max(16, min(power_of_two(sizes.rows), 64))
    if sizes.rows <= 16:
        # Two splits, so that the reduction over splits is exercised too.
        split = {"SPLIT_K": 2, "PREFETCH_TILES": 0, "USE_PDL": False, "BLOCK_M": block_m}
        return "matmul_skinny", {**split, **common, "BLOCK_K": max(16, block_k // 2)}
    return "matmul", {"BLOCK_M": block_m, "GROUP_M": 1, "USE_PDL": False, **common}


def _gemv(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    """Tall tiles for wide rows: 4 to 32 bytes times 128 to 256 threads in flight per row."""
    widest = power_of_two(sizes.num_inputs)
    shapes = [(16, 512, 8), (16, 1024, 8), (16, 256, 4), (32, 512, 8), (8, 1024, 8), (32, 256, 4)]
    shapes += [(8, 512, 4), (4, 1024, 4), (16, 512, 4), (8, 1024, 4), (4, 2048, 8), (8, 2048, 8)]
    if sizes.num_inputs > 8192:
        shapes = [(16, 1024, 8), *shapes]
    if sizes.num_features > 16384:
        shapes = [(16, 256, 4), *shapes]
    chosen = dict.fromkeys(
        (max(block_n, sizes.feature_multiple), min(block_k, widest), warps)
        for block_n, block_k, warps in shapes
    )
    for block_n, block_k, warps in chosen:
        for use_pdl in pdl_choices(machine):
            yield {
                "ROWS": sizes.rows,
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "USE_PDL": use_pdl,
                "num_warps": warps,
                "num_stages": 1,
            }


# (BLOCK_N, BLOCK_K, warps, stages), the best over the projections of an 8B model first
_POINTER_TILES = [
    (64, 128, 4, 4),
    (128, 128, 8, 4),
    (64, 256, 4, 3),
    (128, 64, 4, 6),
    (32, 256, 4, 4),
    (64, 64, 4, 8),
]
_TMA_TILES = [
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (64, 128, 4, 6),
    (128, 64, 4, 6),
    (128, 128, 8, 4),
    (64, 64, 4, 8),
]


def _skinny(
    sizes: Sizes, machine: str, tiles: list[tuple[int, int, int, int]]
) -> Iterator[Schedule]:
    """Weights on the left; K is split where the features alone don't fill the GPU."""
    block_m = min(max(16, power_of_two(sizes.rows)), 128)
    blocks_m = [block_m]
    if sizes.rows <= 8:
        blocks_m = [block_m, 8]
    elif sizes.rows >= 128:
        blocks_m = [block_m, 64] if sizes.rows == 128 else [block_m, 256]
    for index, tile in enumerate(tiles):
        for tile_m in blocks_m if index < 3 else blocks_m[:1]:
            for split in _splits(sizes, tile)[:2]:
                for use_pdl in pdl_choices(machine)[::-1][: 2 if index < 3 else 1]:
                    yield from skinny_schedule(sizes, machine, tile, tile_m, split, use_pdl)


def _skinny_more(sizes: Sizes) -> Iterator[tuple[str, Schedule]]:
    """Yield what lies around the winners at 2 to 64 rows: L2 prefetch, other splits, more warps."""
    block_m = max(16, power_of_two(sizes.rows))
    near = {
        "matmul_skinny_tma": [(64, 128, 4, 4), (64, 256, 4, 3), (64, 128, 4, 6), (64, 64, 4, 8)],
        "matmul_skinny": [(64, 128, 4, 4), (128, 128, 8, 4), (64, 128, 4, 6)],
    }
    for template, tiles in near.items():
        for index, tile in enumerate(tiles):
            for split in _splits(sizes, tile)[:2]:
                for prefetch in (4, 2) if index == 0 else (4,):
                    for schedule in skinny_schedule(
                        sizes, "sm_90", tile, block_m, split, use_pdl=True, prefetch=prefetch
                    ):
                        yield template, schedule
        for tile in (*tiles[:2], (64, 128, 8, 4), (128, 64, 8, 6)):
            known = tile in tiles
            for split in _splits(sizes, tile)[2:3] if known else _splits(sizes, tile)[:1]:
                for schedule in skinny_schedule(
                    sizes, "sm_90", tile, block_m, split, use_pdl=False
                ):
                    yield template, schedule


def _splits(sizes: Sizes, tile: tuple[int, int, int, int]) -> list[int]:
    """Give the splits of K that a tile allows; the first fills the multiprocessors about twice."""
    block_n, block_k = tile[0], tile[1] * 2 // sizes.element_bytes
    programs = -(-sizes.num_features // block_n)
    fitting = [
        split for split in (1, 2, 4, 8) if sizes.num_inputs >= 2 * block_k * split or split == 1
    ]
    return sorted(fitting, key=lambda split: abs(programs * split - 2 * NUM_MULTIPROCESSORS))


def skinny_schedule(
    sizes: Sizes,
    machine: str,
    tile: tuple[int, int, int, int],
    block_m: int,
    split: int,
    use_pdl: bool,
    prefetch: int = 0,
) -> Iterator[Schedule]:
    """Yield the schedule of a tile, unless two stages of it are more than shared memory holds."""
    block_n, block_k, warps, stages = tile
    block_k = block_k * 2 // sizes.element_bytes
    # A tile of every stage and the result's staging must fit in shared memory.
    tile_bytes = (block_n + block_m) * block_k * sizes.element_bytes
    room = shared_room_bytes(machine) - 4 * block_n * block_m
    if room >= 2 * tile_bytes:
        yield {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": min(block_k, max(16, power_of_two(sizes.num_inputs))),
            "SPLIT_K": split,
            "PREFETCH_TILES": prefetch,
            "USE_PDL": use_pdl,
            "num_warps": warps,
            "num_stages": min(stages, room // tile_bytes),
        }


# (BLOCK_N, BLOCK_K, STAGES, warps): a program or a few on each multiprocessor, 24 to 200 KiB on
# their way to it
_STREAM_TILES = [
    (32, 256, 4, 4),
    (32, 256, 8, 4),
    (64, 256, 3, 4),
    (16, 256, 4, 2),
    (16, 256, 6, 2),
    (32, 256, 6, 4),
    (64, 128, 6, 4),
    (32, 128, 4, 4),
    (64, 128, 4, 4),
    (64, 128, 3, 4),
    (32, 256, 3, 4),
    (8, 512, 4, 1),
]
# (BLOCK_N, BLOCK_K, warps, programs on a multiprocessor) of programs with several parts, which
# are as many as run at once: no multiprocessor has a share more than another.
_EVEN_STREAM_TILES = [(16, 256, 2, 1), (16, 128, 2, 1), (16, 128, 2, 2)]
MOST_PARTS = 8


def _matmul_stream(sizes: Sizes) -> Iterator[Schedule]:
    block_m = max(16, power_of_two(sizes.rows))
    for block_n, block_k, stages, warps in _STREAM_TILES:
        stage_bytes = (block_m + block_n) * block_k * 2
        programs = -(-sizes.num_features // block_n)
        # So many programs run one after the other on a multiprocessor: tiny ones don't pay.
        waves = programs * stage_bytes * stages // (NUM_MULTIPROCESSORS * MOST_SHARED_BYTES)
        if (
            block_n % sizes.feature_multiple
            or stage_bytes * stages > MOST_SHARED_BYTES - 4096
            or block_k * (stages - 2) > sizes.num_inputs
            or (block_n < 32 and (waves > 2 or programs > 16 * NUM_MULTIPROCESSORS))
        ):
            continue
        yield _stream(block_m, block_n, block_k, 1, stages, warps)
    if sizes.rows > GEMV_ROWS:
        yield from _even_streams(sizes, block_m)


def _even_streams(sizes: Sizes, block_m: int) -> Iterator[Schedule]:
    """Yield programs of several parts, where nearly all multiprocessors get one of them."""
    for block_n, block_k, warps, at_once in _EVEN_STREAM_TILES:
        places = NUM_MULTIPROCESSORS * at_once
        parts = -(-sizes.num_features // (places * block_n))
        programs = -(-sizes.num_features // (parts * block_n))
        # A ring, and the results on their way to the layout in which they are stored.
        room_bytes = MOST_SHARED_BYTES // at_once - 4096 - 4 * block_m * block_n
        stages = min(8, room_bytes // ((block_m + parts * block_n) * block_k * 2))
        if (
            block_n % sizes.feature_multiple == 0
            and 1 < parts <= MOST_PARTS
            and programs >= 0.8 * places
            and stages >= 3
            and block_k * (stages - 2) <= sizes.num_inputs
        ):
            yield _stream(block_m, block_n, block_k, parts, stages, warps)


def _stream(
    block_m: int, block_n: int, block_k: int, parts: int, stages: int, warps: int
) -> Schedule:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "PARTS": parts,
        "STAGES": stages,
        "USE_PDL": True,
        "num_warps": warps,
    }


def _matmul(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    shapes = [(128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (64, 128, 64, 4, 4)]
    for block_m, block_n, block_k, warps, stages in shapes:
        block_k = block_k * 2 // sizes.element_bytes
        for use_pdl in pdl_choices(machine)[::-1]:
            yield {
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "GROUP_M": 8,
                "USE_PDL": use_pdl,
                "num_warps": warps,
                "num_stages": stages,
            }


# (BLOCK_M, BLOCK_N, stages, tiles of tokens per group, ping-pong); lab figures in bench/NOTES.md
_GLUON_TILES = [
    (64, 256, 3, 8, False),
    (128, 128, 5, 8, True),
    (64, 256, 3, 16, False),
    (64, 128, 6, 8, False),
    (128, 128, 3, 8, False),
]
# Of a gated matmul only half of the tile is stored, which leaves room for one more stage.
_GLUON_TILES_GATED = [(64, 256, 4, 8, False), (128, 128, 6, 8, True)]
_GLUON_TILES_FEW_ROWS = [(64, 128, 6, 8, False), (64, 64, 8, 8, False)]


def _matmul_gluon(sizes: Sizes) -> Iterator[Schedule]:
    """Specialised warps: two groups of consumers share a tile, or take turns (ping-pong)."""
    tiles = [*_GLUON_TILES]
    if sizes.feature_multiple > 1:
        tiles += _GLUON_TILES_GATED
    if sizes.rows <= 512:
        tiles = [*_GLUON_TILES_FEW_ROWS, *tiles]
    for block_m, block_n, stages, group_m, ping_pong in dict.fromkeys(tiles):
        for use_pdl in (False, True):
            yield {
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "BLOCK_K": 64,
                "STAGES": stages,
                "GROUP_M": group_m,
                "PING_PONG": ping_pong,
                "NUM_PROGRAMS": NUM_MULTIPROCESSORS,
                "USE_PDL": use_pdl,
                "num_warps": 4,
            }


def _matmul_tma(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    shapes = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 5), (128, 128, 64, 4, 4)]
    if sizes.rows <= 256:
        shapes = [(128, 128, 64, 8, 4), (128, 64, 64, 4, 5), *shapes]
    for block_m, block_n, block_k, warps, stages in dict.fromkeys(shapes):
        block_k = block_k * 2 // sizes.element_bytes
        for use_pdl in pdl_choices(machine)[::-1]:
            yield {
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "GROUP_M": 8,
                "NUM_PROGRAMS": NUM_MULTIPROCESSORS,
                "USE_PDL": use_pdl,
                "num_warps": warps,
                "num_stages": stages,
            }


def head_linear_schedules(
    num_inputs: int,
    num_outputs: int,
    element_bytes: int,
    num_heads: int,
    rows: int,
    machine: str,
) -> Iterator[Schedule]:
    """Yield schedules of a product of each head: for few tokens, blocks that fill the GPU."""
    widest, deepest = (max(16, power_of_two(size)) for size in (num_outputs, num_inputs))
    if machine == INTERPRETER:
        block_m = max(16, min(power_of_two(rows), 64))
        yield _head_linear(block_m, min(widest, 512), min(deepest, 512), 4, 1)
        return
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        filling = [n for n in (128, 64, 32) if -(-num_outputs // n) * num_heads >= 128]
        blocks_n = dict.fromkeys([*filling, 32, 16, 64])
        shapes = [(block_m, n, 128, 4 if n >= 64 else 2, 2) for n in blocks_n]
        shapes += [(block_m, n, 64, 4, 4) for n in blocks_n]
    else:
        shapes = [(64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 4)]
        shapes += [(32, 128, 64, 4, 3)] if rows <= 128 else [(128, 256, 64, 8, 3)]
    for block_m, block_n, block_k, warps, stages in shapes:
        block_n = min(block_n, widest)
        block_k = min(block_k * 2 // element_bytes, deepest)
        tile_bytes = (block_m + block_n) * block_k * element_bytes
        stages = max(1, min(stages, shared_room_bytes(machine) // tile_bytes))
        for use_pdl in pdl_choices(machine):
            schedule = _head_linear(block_m, block_n, block_k, warps, stages)
            for prefetch in (True, False) if use_pdl and rows <= 32 else (False,):
                yield schedule | {"USE_PDL": use_pdl, "PREFETCH": prefetch}


def _head_linear(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> Schedule:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "USE_PDL": False,
        "PREFETCH": False,
        "num_warps": warps,
        "num_stages": stages,
    }
