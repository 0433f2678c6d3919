"""How much of a multiprocessor a kernel fills: warps that can be resident, as a share of the most.

Source: the tables of technical specifications per compute capability in NVIDIA's CUDA C++
Programming Guide. Called by the report; must not know kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP_THREADS = 32
_REGISTER_UNIT = 256  # registers are given to a warp in units of as many
_PARTITIONS = 4  # of a multiprocessor, each with registers of its own
_SHARED_UNIT = 128
_RESERVED_SHARED_BYTES = 1024  # of each program, by the system


@dataclass(frozen=True)
class Multiprocessor:
    """Say what one multiprocessor holds."""

    warps: int
    programs: int
    shared_bytes: int
    registers: int = 65536


_BY_ARCHITECTURE = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_86": Multiprocessor(48, 16, 100 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90": Multiprocessor(64, 32, 228 * 1024),
    "sm_100": Multiprocessor(64, 32, 228 * 1024),
}


def occupancy(
    architecture: str, *, registers: int, shared_bytes: int, num_warps: int
) -> float | None:
    """Give the share of warps that can be resident; None where a figure or the GPU is unknown.

    `registers` are those of a thread, `shared_bytes` of a program. Warps that a kernel with
    specialised warps adds to its `num_warps` are not counted.
    """
    limits = _BY_ARCHITECTURE.get(architecture)
    if limits is None or not registers or not num_warps:
        return None
    of_a_warp = _round_up(registers * WARP_THREADS, _REGISTER_UNIT)
    warps = _PARTITIONS * (limits.registers // _PARTITIONS // of_a_warp)
    of_a_program = _round_up(shared_bytes + _RESERVED_SHARED_BYTES, _SHARED_UNIT)
    programs = min(
        limits.programs,
        limits.warps // num_warps,
        warps // num_warps,
        limits.shared_bytes // of_a_program,
    )
    return programs * num_warps / limits.warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
