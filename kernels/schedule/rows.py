"""The schedules of kernels that take rows as they are: norms, pointwise ops, logits, inputs."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.kernels.schedule.machine import (
    INTERPRETER,
    Schedule,
    one_stage_schedules,
    power_of_two,
)


def norm_schedules(hidden: int, rows: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a norm: one row a program, or a few; in the interpreter many."""
    block_t = 8 if machine == INTERPRETER else 1
    yield from one_stage_schedules(
        machine, max(1, min(8, power_of_two(hidden) // 256)), BLOCK_T=block_t
    )
    if machine != INTERPRETER:
        # A row costs latency, not bandwidth: fewer warps sum it with fewer barriers.
        for block_t, warps in ((1, 4), (1, 2), (2, 8), (2, 4), (4, 8), (4, 4), (1, 16)):
            if block_t <= rows and hidden >= 32 * warps:
                yield from one_stage_schedules(machine, warps, BLOCK_T=block_t)


def embed_schedules(hidden: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the embedding: one row, or a part of it, a program."""
    yield from one_stage_schedules(machine, 4, BLOCK_E=min(power_of_two(hidden), 1024))


def pointwise_schedules(width: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of a pointwise op: one row, or a part of it, a program."""
    yield from one_stage_schedules(machine, 4, BLOCK_F=min(power_of_two(width), 1024))


def sample_schedules(vocab: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of sampling: one program a sequence, large blocks of the vocabulary."""
    # Two blocks at least: Triton 3.6 can't compile the kernel when its loops have one round only.
    block_v = min(max(power_of_two(vocab) // 2, 16), 8192)
    yield from one_stage_schedules(machine, max(1, min(16, block_v // 256)), BLOCK_V=block_v)


def step_schedules(block: str, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the tiny kernels that prepare a step's inputs."""
    yield from one_stage_schedules(machine, 1, **{block: 256})
