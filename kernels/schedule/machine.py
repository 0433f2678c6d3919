"""What every schedule depends on: the machine's numbers, and its choices of dependent launch.

A machine is an architecture like `sm_90`, or the interpreter. Must not know templates or ops.

Measured choices cite the H200 unless said otherwise (4.65 TB/s read, 786 TFLOP/s bf16), here and
in the modules beside this one. They list what each template may have, the likeliest first: it is
used where nothing is tuned; the tuner times them all. They know sizes and machines, not graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

Schedule = dict[str, int | bool]

NUM_MULTIPROCESSORS = 132  # of an H100 or H200; a guess elsewhere
INTERPRETER = "interpret"  # the machine that is none: Triton's interpreter
HAS_TMA = ("sm_90", "sm_100")  # also programmatic dependent launch
# Bytes of shared memory that one program may have, where they are fewer than an H200 gives.
_SHARED_BYTES = {"gfx942": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376}
MOST_SHARED_BYTES = 232448  # of an H100 or H200; a guess elsewhere


def power_of_two(value: int) -> int:
    """Give the least power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def pdl_choices(machine: str) -> tuple[bool, ...]:
    """Give what USE_PDL may be on a machine: an architecture like `sm_90`, or the interpreter."""
    return (True, False) if machine in HAS_TMA else (False,)


def shared_room_bytes(machine: str) -> int:
    """Give the shared memory that a program may have on a machine."""
    return _SHARED_BYTES.get(machine, MOST_SHARED_BYTES)


def one_stage_schedules(machine: str, warps: int, **blocks: int) -> Iterator[Schedule]:
    """Yield schedules of a kernel without pipelined loads: its blocks with each USE_PDL."""
    for use_pdl in pdl_choices(machine):
        yield {**blocks, "USE_PDL": use_pdl, "num_warps": warps, "num_stages": 1}
