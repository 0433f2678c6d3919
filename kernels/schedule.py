"""How a kernel is cut into programs: the schedules each template may have, the likeliest first.

The first one is used where nothing is tuned; the tuner times them all. Knows sizes and targets, not
graphs. Called by `lower.py`.

Measured choices cite the H200 unless said otherwise (4.65 TB/s read, 786 TFLOP/s bf16).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Schedule = dict[str, int | bool]

NUM_MULTIPROCESSORS = 132  # of an H100 or H200; a guess elsewhere
INTERPRETER = "interpret"  # the machine that is none: Triton's interpreter
HAS_TMA = ("sm_90", "sm_100")  # also programmatic dependent launch
JOINED_ROWS = 1  # up to here one kernel ropes, appends and attends: 1 to 5 % of a step at 1 row
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


def power_of_two(value: int) -> int:
    """Give the least power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def pdl_choices(machine: str) -> tuple[bool, ...]:
    """Give what USE_PDL may be on a machine: an architecture like `sm_90`, or the interpreter."""
    return (True, False) if machine in HAS_TMA else (False,)


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
# What one program may use; the H100's where a GPU is not listed.
_SHARED_BYTES = {"sm_80": 163 * 1024, "gfx942": 64 * 1024}
_SHARED_BYTES_HOPPER = 227 * 1024


def shared_room_bytes(machine: str) -> int:
    """Give the shared memory that a program may have on a machine."""
    return _SHARED_BYTES.get(machine, _SHARED_BYTES_HOPPER)


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
                    yield from _skinny_schedule(sizes, machine, tile, tile_m, split, use_pdl)


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
                    for schedule in _skinny_schedule(
                        sizes, "sm_90", tile, block_m, split, use_pdl=True, prefetch=prefetch
                    ):
                        yield template, schedule
        for tile in (*tiles[:2], (64, 128, 8, 4), (128, 64, 8, 6)):
            known = tile in tiles
            for split in _splits(sizes, tile)[2:3] if known else _splits(sizes, tile)[:1]:
                for schedule in _skinny_schedule(
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


def _skinny_schedule(
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
    (8, 512, 4, 1),
]


def _matmul_stream(sizes: Sizes) -> Iterator[Schedule]:
    block_m = max(16, power_of_two(sizes.rows))
    for block_n, block_k, stages, warps in _STREAM_TILES:
        stage_bytes = (block_m + block_n) * block_k * 2
        programs = -(-sizes.num_features // block_n)
        # So many programs run one after the other on a multiprocessor: tiny ones don't pay.
        waves = programs * stage_bytes * stages // (NUM_MULTIPROCESSORS * _SHARED_BYTES_HOPPER)
        if (
            block_n % sizes.feature_multiple
            or stage_bytes * stages > _SHARED_BYTES_HOPPER - 4096
            or block_k * (stages - 2) > sizes.num_inputs
            or (block_n < 32 and (waves > 2 or programs > 16 * NUM_MULTIPROCESSORS))
        ):
            continue
        yield {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
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


# --- mixtures of experts ------------------------------------------------------------------------

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
        yield from _row(machine, warps, BLOCK_CHOICES=block, CHUNK=size, ONE_BLOCK=one_block)


def expert_gemv_schedules(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    """Yield schedules of one choice's product: as a GEMV, of fewer features."""
    if machine == INTERPRETER:
        yield from _row(machine, 4, **_interpreted_tile(sizes))
        return
    shapes = [(16, 1024, 8), (16, 512, 8), (8, 1024, 8), (16, 512, 4), (8, 1024, 4), (32, 512, 8)]
    shapes += [(8, 512, 4), (16, 256, 4), (4, 1024, 4), (8, 2048, 8)]
    yield from _expert_rows(sizes, machine, shapes)


def expert_gemv_combine_schedules(sizes: Sizes, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a token's products: a program reads a few rows of every expert."""
    if machine == INTERPRETER:
        yield from _row(machine, 4, **_interpreted_tile(sizes))
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
        yield from _row(machine, warps, BLOCK_N=block_n, BLOCK_K=min(block_k, widest))


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
            yield "grouped_skinny", {"BLOCK_M": 16, **next(_row(machine, 4, **blocks))}
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
                    for schedule in _skinny_schedule(sizes, machine, tile, tile_m, 1, use_pdl):
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
        yield from _row(machine, 4, BLOCK_T=min(power_of_two(rows), 64), BLOCK_E=block_e)
        return
    for size, warps in ((block_e, 4), (block_e // 2, 2), (block_e // 4, 1), (2 * block_e, 8)):
        yield from _row(machine, warps, BLOCK_T=1, BLOCK_E=max(16, min(size, power_of_two(width))))


# --- attention ----------------------------------------------------------------------------------


def attention_decode_schedules(
    num_kv_heads: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of decode attention: more splits the fewer sequences fill the GPU."""
    if machine == INTERPRETER:
        yield _attention_decode(64, 2, 64, 4, 1)
        return
    programs = dims["B"] * num_kv_heads
    longest = power_of_two(-(-dims["C"] // 128))
    splits = max(1, min(power_of_two(4 * NUM_MULTIPROCESSORS // programs), longest, 64))
    if programs <= NUM_MULTIPROCESSORS // 4:
        shapes = [(64, 4, 3), (32, 1, 5), (64, 2, 3), (32, 2, 5), (32, 4, 3)]
    else:
        shapes = [(64, 4, 3), (64, 4, 2), (64, 2, 3), (128, 4, 3), (64, 8, 3), (32, 2, 7)]
    for index, (block_tokens, warps, stages) in enumerate(shapes):
        several = [splits, splits * 2, max(1, splits // 2)] if index < 3 else [splits]
        for number in dict.fromkeys(several):
            for use_pdl in pdl_choices(machine)[: 2 if number == splits else 1]:
                yield _attention_decode(block_tokens, number, 128, warps, stages, use_pdl=use_pdl)
    use_pdl = machine in HAS_TMA
    if use_pdl:
        # The weights that the next kernel fetches early come after this one's keys and values.
        for block_tokens, warps, stages in shapes[:3]:
            for number in dict.fromkeys((splits, splits * 2)):
                yield _attention_decode(
                    block_tokens, number, 128, warps, stages, use_pdl=True, late=True
                )
    if programs > NUM_MULTIPROCESSORS:
        # Sequences of uneven length: the long ones alone are cut, so that none runs on by itself.
        for number, chunk in ((4, 512), (8, 1024), (16, 1024)):
            for warps, stages in ((4, 3), (4, 2)):
                yield _attention_decode(64, number, chunk, warps, stages, use_pdl=use_pdl)


def rope_attention_decode_schedules(
    num_kv_heads: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of decode attention that also ropes and appends: as without, and early."""
    for schedule in attention_decode_schedules(num_kv_heads, dims, machine):
        yield schedule | {"LOAD_EARLY": False}
    if machine == INTERPRETER:
        return
    programs = dims["B"] * num_kv_heads
    splits = max(1, min(power_of_two(4 * NUM_MULTIPROCESSORS // programs), 64))
    # A tile of every split is read while the projection still runs: small chunks, all of them.
    for block_tokens, chunk, warps, stages in (
        (64, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (32, 64, 4, 3),
        (32, 32, 2, 3),
        (64, 64, 8, 2),
        (128, 128, 8, 2),
    ):
        for number in dict.fromkeys((splits, max(1, splits // 2))):
            for late in (False, True) if machine in HAS_TMA else (False,):
                early = _attention_decode(
                    block_tokens,
                    number,
                    chunk,
                    warps,
                    stages,
                    use_pdl=machine in HAS_TMA,
                    late=late,
                )
                yield early | {"LOAD_EARLY": True}


def _attention_decode(
    block_tokens: int,
    splits: int,
    chunk: int,
    warps: int,
    stages: int,
    *,
    use_pdl: bool = False,
    late: bool = False,
) -> Schedule:
    return {
        "BLOCK_TOKENS": block_tokens,
        "MAX_SPLITS": splits,
        "MIN_CHUNK_TOKENS": chunk,
        "USE_PDL": use_pdl,
        "TRIGGER_LATE": late,
        "num_warps": warps,
        "num_stages": stages,
    }


def attention_decode_quantised_schedules(
    num_kv_heads: int,
    page_size: int,
    kv_format: str,
    dims: Mapping[str, int],
    machine: str,
    *,
    is_limited: bool = False,
) -> Iterator[Schedule]:
    """Yield schedules of decode attention with a quantised cache: small tiles, few warps."""
    within = page_size & -page_size  # a tile lies in a page
    if machine == INTERPRETER:
        tile = _attention_decode(min(64, within), 2, 64, 4, 1)
        yield _quantised_decode(tile, kv_format, machine)
        return
    programs = dims["B"] * num_kv_heads
    longest = power_of_two(-(-dims["C"] // 128))
    splits = max(1, min(power_of_two(4 * NUM_MULTIPROCESSORS // programs), longest, 64))
    # Two tiles in flight leave room for most programs. By what a tile takes of instructions: int4,
    # which is bound by them, likes a warp by itself.
    shapes = [(64, 2, 3), (32, 1, 4), (32, 2, 3), (64, 2, 4), (64, 4, 3), (64, 2, 2), (32, 1, 3)]
    if kv_format == "int4":
        shapes = [
            (32, 1, 4),
            (32, 1, 3),
            (64, 2, 3),
            (64, 4, 3),
            (32, 2, 3),
            (32, 1, 5),
            (64, 2, 4),
        ]
    if is_limited:
        # A window, a cap and sinks take registers: more warps come first, for they don't spill.
        shapes.sort(key=lambda shape: -shape[1])
    fitting = [(tokens, warps, stages) for tokens, warps, stages in shapes if tokens <= within]
    if not fitting:
        fitting = [(within, 1, 6), (within, 2, 4)]
    for index, (block_tokens, warps, stages) in enumerate(fitting):
        several = [splits, splits * 2, max(1, splits // 2)] if index < 3 else [splits]
        for number in dict.fromkeys(several):
            for use_pdl in pdl_choices(machine)[: 2 if number == splits else 1]:
                schedule = _attention_decode(
                    block_tokens, number, 128, warps, stages, use_pdl=use_pdl
                )
                yield _quantised_decode(schedule, kv_format, machine)
    if machine in HAS_TMA:
        # The weights that the next kernel fetches early come after this one's keys and values.
        for block_tokens, warps, stages in fitting[:3]:
            for number in dict.fromkeys((splits, splits * 2)):
                schedule = _attention_decode(
                    block_tokens, number, 128, warps, stages, use_pdl=True, late=True
                )
                yield _quantised_decode(schedule, kv_format, machine)
    if programs > NUM_MULTIPROCESSORS:
        # Sequences of uneven length: the long ones alone are cut, so that none runs on by itself.
        for number, chunk in ((4, 512), (8, 1024), (16, 1024)):
            block_tokens, warps, stages = fitting[0]
            schedule = _attention_decode(
                block_tokens, number, chunk, warps, stages, use_pdl=machine in HAS_TMA
            )
            yield _quantised_decode(schedule, kv_format, machine)


def _quantised_decode(schedule: Schedule, kv_format: str, machine: str) -> Schedule:
    """Give a schedule of decode attention as its template of quantised caches takes it."""
    # AMD's matrix cores take 16 columns at a time, NVIDIA's 8.
    least_heads = 16 if machine.startswith("gfx") else 8
    use_ptx = _unpacks_by_ptx(kv_format, machine)
    return _quantised(schedule, use_ptx=use_ptx) | {"LEAST_HEADS": least_heads}


def _quantised(schedule: Schedule, *, use_ptx: bool) -> Schedule:
    """Give a schedule of attention as the templates of quantised caches take it."""
    return schedule | {"USE_PTX": use_ptx}


def _unpacks_by_ptx(kv_format: str, machine: str) -> bool:
    """Say whether codes become numbers by inline PTX: fp8's conversion came with sm_89."""
    return machine.startswith("sm_") and (kv_format != "fp8" or int(machine[3:]) >= 89)


def attention_prefill_quantised_schedules(
    page_size: int,
    kv_format: str,
    dims: Mapping[str, int],
    machine: str,
    *,
    is_limited: bool = False,
) -> Iterator[Schedule]:
    """Yield schedules of prefill attention with a quantised cache for what came before."""
    use_ptx = _unpacks_by_ptx(kv_format, machine)
    within = page_size & -page_size  # a tile lies in a page
    if machine == INTERPRETER:
        tile = min(64, within)
        yield _quantised(_attention_prefill(64, tile, 4, 1, pack_heads=True), use_ptx=use_ptx)
        return
    shapes = [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2)]
    if dims["T"] <= 64:
        shapes = [(64, 64, 4, 3), (16, 64, 4, 3), (32, 64, 4, 3)]
    if machine.startswith("gfx"):
        # Other tiles spill registers on gfx942, where a warp has 64 threads.
        shapes = [(64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 4, 3)]
    if is_limited:
        # A window, a cap and sinks take registers, of which a warp of an AMD GPU may have twice as
        # many in half as many warps: these tiles don't spill.
        shapes = [(64, 64, 4 if machine.startswith("gfx") else 8, 2), *shapes]
    for block_rows, most_tokens, warps, stages in shapes:
        block_tokens = min(most_tokens, within)
        for pack_heads in (True, False):
            schedule = _attention_prefill(
                block_rows, block_tokens, warps, stages, pack_heads=pack_heads
            )
            yield _quantised(schedule, use_ptx=use_ptx)


def attention_prefill_schedules(
    head_dim: int, dims: Mapping[str, int], machine: str, *, is_capped: bool = False
) -> Iterator[Schedule]:
    """Yield schedules of prefill attention: query heads of one KV head share each tile of keys."""
    if machine == INTERPRETER:
        yield _attention_prefill(64, 64, 4, 1, pack_heads=True)
        return
    shapes = [(64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2)]
    if dims["T"] <= 64:
        shapes = [(64, 64, 4, 3), (16, 64, 4, 3), (32, 64, 4, 3)]
    if head_dim > 128:
        # The sums of 64 rows are too much for the registers of four warps.
        shapes = [(64, 32, 8, 2), (64, 32, 8, 3), (16, 32, 4, 3), (32, 32, 4, 2)]
    elif is_capped:
        # A cap takes registers: smaller tiles come first, for they don't spill.
        shapes.sort(key=lambda shape: shape[1])
    for block_rows, block_tokens, warps, stages in shapes:
        for pack_heads in (True, False):
            yield _attention_prefill(block_rows, block_tokens, warps, stages, pack_heads=pack_heads)


def attention_prefill_tma_schedules(
    head_dim: int, page_size: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of prefill attention by TMA, where the machine and the pages allow it."""
    if machine not in HAS_TMA or dims["T"] <= 64 or head_dim < 16:
        return
    if power_of_two(head_dim) != head_dim:
        return
    shapes = [(128, 64, 8, 3, 128), (128, 64, 8, 2, 128), (128, 64, 8, 3, 255), (64, 64, 4, 3, 255)]
    shapes += [(128, 32, 8, 4, 128), (128, 128, 8, 2, 255)]
    for block_rows, block_tokens, warps, stages, max_registers in shapes:
        if page_size % block_tokens == 0:
            for pack_heads in (True, False):
                tile = _attention_prefill(
                    block_rows, block_tokens, warps, stages, pack_heads=pack_heads
                )
                yield tile | {"maxnreg": max_registers}


def _attention_prefill(
    block_rows: int, block_tokens: int, warps: int, stages: int, *, pack_heads: bool
) -> Schedule:
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_TOKENS": block_tokens,
        "PACK_HEADS": pack_heads,
        "num_warps": warps,
        "num_stages": stages,
    }


# Bytes of shared memory that one program may have, where they are fewer than an H200 gives.
_SHARED_BYTES = {"gfx942": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376}
_MOST_SHARED_BYTES = 232448


def within_shared_memory(
    schedules: Iterator[Schedule], head_dim: int, element_bytes: int, machine: str
) -> Iterator[Schedule]:
    """Yield schedules of attention with as many stages as the machine's shared memory holds.

    A stage holds a tile of keys and one of values; one less than there are stages is on its way.
    Beside them lie the weights of a tile, and, on NVIDIA GPUs, the queries.
    """
    width, limit = power_of_two(head_dim), _SHARED_BYTES.get(machine, _MOST_SHARED_BYTES)
    for schedule in schedules:
        tokens = int(schedule["BLOCK_TOKENS"])
        row = tokens if machine.startswith("gfx") else tokens + width
        free = limit - int(schedule.get("BLOCK_ROWS", 0)) * row * element_bytes
        stages = 1 + max(free // (2 * tokens * width * element_bytes), 0)
        yield schedule | {"num_stages": min(int(schedule["num_stages"]), stages)}


# --- rows ---------------------------------------------------------------------------------------


def _row(machine: str, warps: int, **blocks: int) -> Iterator[Schedule]:
    for use_pdl in pdl_choices(machine):
        yield {**blocks, "USE_PDL": use_pdl, "num_warps": warps, "num_stages": 1}


def norm_schedules(hidden: int, rows: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a norm: one row a program, or a few; in the interpreter many."""
    block_t = 8 if machine == INTERPRETER else 1
    yield from _row(machine, max(1, min(8, power_of_two(hidden) // 256)), BLOCK_T=block_t)
    if machine != INTERPRETER:
        # A row costs latency, not bandwidth: fewer warps sum it with fewer barriers.
        for block_t, warps in ((1, 4), (1, 2), (2, 8), (2, 4), (4, 8), (4, 4), (1, 16)):
            if block_t <= rows and hidden >= 32 * warps:
                yield from _row(machine, warps, BLOCK_T=block_t)


def embed_schedules(hidden: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the embedding: one row, or a part of it, a program."""
    yield from _row(machine, 4, BLOCK_E=min(power_of_two(hidden), 1024))


def pointwise_schedules(width: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a pointwise op: one row, or a part of it, a program."""
    yield from _row(machine, 4, BLOCK_F=min(power_of_two(width), 1024))


def rope_kv_write_schedules(num_heads: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of rope and append: a few of the heads of q, k and v a program."""
    if machine == INTERPRETER:
        yield from _row(machine, 1, BLOCK_HEADS=power_of_two(num_heads))
        return
    for block_heads in (4, 8, 2):
        yield from _row(machine, 1, BLOCK_HEADS=block_heads)


def sample_schedules(vocab: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of sampling: one program a sequence, large blocks of the vocabulary."""
    # Two blocks at least: Triton 3.6 can't compile the kernel when its loops have one round only.
    block_v = min(max(power_of_two(vocab) // 2, 16), 8192)
    yield from _row(machine, max(1, min(16, block_v // 256)), BLOCK_V=block_v)


def step_schedules(block: str, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the tiny kernels that prepare a step's inputs."""
    yield from _row(machine, 1, **{block: 256})
