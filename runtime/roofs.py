"""What this machine can reach, measured: the roofs that kernels are compared with.

Called by the tuner's command and by benchmarks. Data sheets promise more than any kernel gets.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

_QUERY = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Roofs:
    """Hold the measured rates: bytes/s of reading and of copying (both ways), and FLOP/s."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """The memory's roof: the better of reading and copying."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def to_json(self) -> dict[str, float]:
        """Give the fields for a log."""
        return asdict(self)


def measure_roofs(device: torch.device, *, small: bool = False) -> Roofs:
    """Measure a device's roofs: memory by 2 GiB, matmul by 8192³ in bf16; `small` is for tests."""
    elements = 2**16 if small else 2**29
    size = 64 if small else 8192
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    read_s = best_seconds(source.sum, device)
    copy_s = best_seconds(lambda: target.copy_(source), device)
    matmul_s = best_seconds(lambda: torch.matmul(left, right, out=out), device)
    return Roofs(source.nbytes / read_s, 2 * source.nbytes / copy_s, 2 * size**3 / matmul_s)


def best_seconds(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Give the least time of a call, by events on a GPU, by the clock elsewhere."""
    call()
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    return min(found)


def gpu_state() -> dict[str, str]:
    """Tell driver, clocks, power limit and temperature; empty where the driver's tool is absent."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    done = subprocess.run(
        [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
    )
    values = [value.strip() for value in done.stdout.strip().split(",")]
    names = ("driver", "clock of the multiprocessors", "clock of the memory", "power limit", "heat")
    return dict(zip(names, values, strict=False)) if done.returncode == 0 else {}
