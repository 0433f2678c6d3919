"""The schedules of attention to latents, of attention within prompts, and of the append."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.kernels.schedule.machine import (
    HAS_TMA,
    INTERPRETER,
    NUM_MULTIPROCESSORS,
    Schedule,
    pdl_choices,
    power_of_two,
)


def latent_decode_schedules(
    num_heads: int, element_bytes: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of decode attention: more splits the fewer sequences fill the GPU.

    A block of 64 heads by 512 features of f32 sums does not fit registers without spills.
    """
    if machine == INTERPRETER:
        yield _decode(max(16, min(power_of_two(num_heads), 64)), 64, 2, 64, 4, 1)
        return
    if element_bytes == 4:
        shapes = [(16, 16, 8, 1)]
    elif machine == "gfx942":  # 64 KiB of shared memory hold one tile of 32 latents
        shapes = [(16, 32, 4, 2), (16, 32, 8, 2), (16, 32, 4, 1)]
    else:
        shapes = [(16, 64, 4, 2), (16, 32, 4, 3), (16, 64, 8, 2), (16, 32, 4, 2), (16, 32, 8, 3)]
        if num_heads > 16:
            shapes = [(32, 32, 8, 2), (32, 64, 8, 2), *shapes[:3], (64, 32, 8, 2)]
    for index, (block_heads, block_tokens, warps, stages) in enumerate(shapes):
        programs = dims["B"] * -(-num_heads // block_heads)
        longest = power_of_two(-(-dims["C"] // 128))
        splits = max(1, min(power_of_two(2 * NUM_MULTIPROCESSORS // programs), longest, 32))
        several = [splits, max(1, splits // 2), splits * 2] if index < 2 else [splits]
        for number in dict.fromkeys(several):
            for use_pdl in pdl_choices(machine)[: 2 if number == splits else 1]:
                schedule = _decode(block_heads, block_tokens, number, 128, warps, stages)
                yield schedule | {"USE_PDL": use_pdl}
        if programs > NUM_MULTIPROCESSORS and index == 0:
            # Sequences of uneven length: the long ones alone are cut.
            for number, chunk in ((4, 512), (8, 1024)):
                schedule = _decode(block_heads, block_tokens, number, chunk, warps, stages)
                yield schedule | {"USE_PDL": machine in HAS_TMA}


def _decode(
    block_heads: int, block_tokens: int, splits: int, chunk: int, warps: int, stages: int
) -> Schedule:
    return {
        "BLOCK_HEADS": block_heads,
        "BLOCK_TOKENS": block_tokens,
        "MAX_SPLITS": splits,
        "MIN_CHUNK_TOKENS": chunk,
        "USE_PDL": False,
        "num_warps": warps,
        "num_stages": stages,
    }


def latent_prefill_schedules(element_bytes: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of attention for many tokens: the sums of 64 rows spill some registers."""
    shapes = [(32, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2), (16, 32, 4, 2), (64, 64, 8, 2)]
    if machine == INTERPRETER:
        shapes = [(64, 64, 4, 1)]
    elif element_bytes == 4:
        shapes = [(16, 16, 8, 1)]
    elif machine == "gfx942":
        shapes = [(32, 32, 4, 2), (16, 32, 4, 2)]
    elif machine == "sm_80":
        shapes = shapes[:4]
    for block_rows, block_tokens, warps, stages in shapes:
        yield {
            "BLOCK_ROWS": block_rows,
            "BLOCK_TOKENS": block_tokens,
            "num_warps": warps,
            "num_stages": stages,
        }


def prompt_attention_schedules(element_bytes: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of attention within prompts: those that don't spill first."""
    shapes = [(128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)]
    if machine == INTERPRETER:
        shapes = [(64, 64, 4, 1)]
    elif element_bytes == 4:
        shapes = [(32, 16, 4, 1)]
    elif machine == "sm_90":  # wgmma keeps operands in shared memory: wider tiles fit registers
        shapes = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 32, 8, 2)]
    for block_queries, block_tokens, warps, stages in shapes:
        yield {
            "BLOCK_QUERIES": block_queries,
            "BLOCK_TOKENS": block_tokens,
            "num_warps": warps,
            "num_stages": stages,
        }


def latent_write_schedules(num_heads: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the append: a few query heads a program, and the latent one more."""
    shapes = [(4, 2), (8, 4), (2, 1)]
    if machine == INTERPRETER:
        shapes = [(power_of_two(num_heads), 2)]
    for block_heads, warps in shapes:
        for use_pdl in pdl_choices(machine):
            yield {
                "BLOCK_HEADS": block_heads,
                "USE_PDL": use_pdl,
                "num_warps": warps,
                "num_stages": 1,
            }
