"""What this machine offers: the default target, the GPU, the versions.

Called by the compiler, the loader and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from treadle.ir import knobs
from treadle.ir.errors import MachineError


@dataclass(frozen=True)
class Machine:
    """Describe the machine. `gpu` and `architecture` (`sm_90`) are empty without a usable GPU."""

    gpu: str
    architecture: str
    torch: str = torch.__version__
    triton: str = triton.__version__


def look() -> Machine:
    """Look at the machine."""
    if not torch.cuda.is_available():
        return Machine("", "")
    properties = torch.cuda.get_device_properties(0)
    return Machine(properties.name, f"sm_{properties.major}{properties.minor}")


def choose_target(asked: str) -> str:
    """Give the target to use: the one asked for, or `cuda` where there is a GPU, else `reference`.

    Raises: MachineError: the target asked for can't run here.
    """
    asked = knobs.target() if asked == "auto" else asked
    machine = look()
    if asked == "auto":
        return "cuda" if machine.gpu else "reference"
    if asked == "interpret" and not knobs.triton_interpret():
        raise MachineError(
            "The target `interpret` needs Triton's interpreter, which is off in this process.",
            remedy="Set TRITON_INTERPRET=1 before starting.",
        )
    return asked


def device_of(target: str) -> torch.device:
    """Give the device a target runs on. Raises: MachineError: `cuda` without a GPU."""
    if target != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            "The target `cuda` needs a GPU that torch can see; there is none.",
            remedy="Run `python cli.py check-env`, or use --target reference.",
        )
    return torch.device("cuda", torch.cuda.current_device())
