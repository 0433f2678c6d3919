"""The schedules of attention to pages of keys and values, and of the append to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.kernels.schedule.machine import (
    HAS_TMA,
    INTERPRETER,
    NUM_MULTIPROCESSORS,
    Schedule,
    one_stage_schedules,
    pdl_choices,
    power_of_two,
    shared_room_bytes,
)

JOINED_ROWS = 1  # up to here one kernel ropes, appends and attends: 1 to 5 % of a step at 1 row


def attention_decode_schedules(
    num_kv_heads: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of decode attention: more splits the fewer sequences fill the GPU."""
    if machine == INTERPRETER:
        yield _attention_decode(64, 2, 64, 4, 1)
        return
    programs = dims["B"] * num_kv_heads
    splits = _count_splits(programs, dims["C"])
    if programs <= NUM_MULTIPROCESSORS // 4:
        shapes = [(64, 4, 3), (32, 1, 5), (64, 2, 3), (32, 2, 5), (32, 4, 3)]
        small = []
    else:
        shapes = [(64, 4, 3), (64, 4, 2), (64, 2, 3), (128, 4, 3), (64, 8, 3), (32, 2, 7)]
        # Tiles that leave room for more programs, as quantised caches like it.
        small = [(32, 2, 3), (32, 1, 3), (32, 1, 4), (32, 2, 4), (64, 2, 2)]
    likely = [*shapes[:3], *small]
    for shape in (*shapes, *small):
        block_tokens, warps, stages = shape
        more = [splits * 2, max(1, splits // 2)] if shape in likely else []
        for number in dict.fromkeys([splits, *more]):
            for use_pdl in pdl_choices(machine)[: 2 if number == splits else 1]:
                yield _attention_decode(block_tokens, number, 128, warps, stages, use_pdl=use_pdl)
    use_pdl = machine in HAS_TMA
    if use_pdl:
        # The weights that the next kernel fetches early come after this one's keys and values.
        for block_tokens, warps, stages in likely[:6]:
            for number in dict.fromkeys((splits, splits * 2)):
                yield _attention_decode(
                    block_tokens, number, 128, warps, stages, use_pdl=True, late=True
                )
    if programs > NUM_MULTIPROCESSORS:
        # Sequences of uneven length: the long ones alone are cut, so that none runs on by itself.
        for number, chunk in ((4, 512), (8, 1024), (16, 1024)):
            for warps, stages in ((4, 3), (4, 2)):
                yield _attention_decode(64, number, chunk, warps, stages, use_pdl=use_pdl)


def _count_splits(programs: int, longest_tokens: int) -> int:
    """Give the splits of a sequence where so many programs would do without.

    Four programs a multiprocessor, of 128 tokens and more. Up to 16 splits are combined in one
    round; more only where one for each multiprocessor takes them.
    """
    enough = power_of_two(4 * NUM_MULTIPROCESSORS // programs)
    worth_combining = max(16, min(power_of_two(NUM_MULTIPROCESSORS // programs), 64))
    return max(1, min(enough, power_of_two(-(-longest_tokens // 128)), worth_combining))


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
    splits = _count_splits(programs, dims["C"])
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


# (BLOCK_TOKENS, STAGES, QUERY_STAGES) by head dim: rings of 160 to 200 KiB at most
_GLUON_TILES = {
    64: [(128, 4, 2), (128, 3, 2), (64, 6, 2)],
    128: [(128, 2, 2), (64, 4, 2), (64, 3, 2)],
}


def attention_prefill_gluon_schedules(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    element_bytes: int,
    dims: Mapping[str, int],
    machine: str,
) -> Iterator[Schedule]:
    """Yield schedules of prefill attention by specialised warps; none unless for Hopper."""
    if machine != "sm_90" or dims["T"] <= 64 or element_bytes != 2:
        return
    group_heads = num_heads // num_kv_heads
    for block_tokens, stages, query_stages in _GLUON_TILES.get(head_dim, []):
        # A tile is a part of a page, a page, or two pages.
        if page_size % block_tokens and block_tokens != 2 * page_size:
            continue
        for ping_pong in (True, False):
            # The heads of a group are packed where a consumer's 64 rows are whole groups.
            for pack_heads in (True, False) if 64 % group_heads == 0 else (False,):
                yield {
                    "BLOCK_TOKENS": block_tokens,
                    "STAGES": stages,
                    "QUERY_STAGES": query_stages,
                    "PACK_HEADS": pack_heads,
                    "PING_PONG": ping_pong,
                    "NUM_PROGRAMS": NUM_MULTIPROCESSORS,
                    "num_warps": 4,
                }


def attention_prefill_quantised_gluon_schedules(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    kv_format: str,
    element_bytes: int,
    dims: Mapping[str, int],
    machine: str,
) -> Iterator[Schedule]:
    """Yield schedules of prefill attention whose whole prompts have a kernel of their own."""
    # Its tiles are no pages: any number of tokens will do.
    for own in attention_prefill_gluon_schedules(
        num_heads, num_kv_heads, head_dim, 128, element_bytes, dims, machine
    ):
        for others in attention_prefill_quantised_schedules(page_size, kv_format, dims, machine):
            if others["PACK_HEADS"] == own["PACK_HEADS"]:
                own_tokens = {"OWN_TOKENS": own["BLOCK_TOKENS"]}
                yield {**own, **others, **own_tokens}
                break


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


def within_shared_memory(
    schedules: Iterator[Schedule], head_dim: int, element_bytes: int, machine: str
) -> Iterator[Schedule]:
    """Yield schedules of attention with as many stages as the machine's shared memory holds.

    A stage holds a tile of keys and one of values; one less than there are stages is on its way.
    Beside them lie the weights of a tile, and, on NVIDIA GPUs, the queries.
    """
    width, limit = power_of_two(head_dim), shared_room_bytes(machine)
    for schedule in schedules:
        tokens = int(schedule["BLOCK_TOKENS"])
        row = tokens if machine.startswith("gfx") else tokens + width
        free = limit - int(schedule.get("BLOCK_ROWS", 0)) * row * element_bytes
        stages = 1 + max(free // (2 * tokens * width * element_bytes), 0)
        yield schedule | {"num_stages": min(int(schedule["num_stages"]), stages)}


def rope_kv_write_schedules(num_heads: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of rope and append: a few of the heads of q, k and v a program."""
    if machine == INTERPRETER:
        yield from one_stage_schedules(machine, 1, BLOCK_HEADS=power_of_two(num_heads))
        return
    for block_heads in (4, 8, 2):
        yield from one_stage_schedules(machine, 1, BLOCK_HEADS=block_heads)
