"""What this machine offers: the default target, the GPU, the versions.

Called by the compiler, the loader and benchmarks. Loads no library before it is asked something
that needs one, so that what only compares can do without.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.ir import knobs
from treadle.ir.errors import MachineError

if TYPE_CHECKING:
    import torch

DRIVER = "libcuda.so.1"
# Numbers of the driver's `CUdevice_attribute`.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_NAME_BYTES = 256


@dataclass(frozen=True)
class Machine:
    """Describe the machine. `gpu` and `architecture` (`sm_90`) are empty without a usable GPU."""

    gpu: str
    architecture: str
    torch: str = ""
    triton: str = ""


def look() -> Machine:
    """Look at the machine, with the eyes of torch and Triton."""
    import torch
    import triton

    versions = (str(torch.__version__), triton.__version__)
    if not torch.cuda.is_available():
        return Machine("", "", *versions)
    properties = torch.cuda.get_device_properties(0)
    return Machine(properties.name, f"sm_{properties.major}{properties.minor}", *versions)


def glance() -> Machine:
    """Look at the machine without torch and Triton, which take seconds to import.

    Good for comparing alone: without a GPU's driver, or with packages of other names, it sees less
    than `look` does, and a driver that is too old for torch it sees all the same.
    """
    versions = (_installed_version("torch"), _installed_version("triton"))
    try:
        name, major, minor = _first_gpu(ctypes.CDLL(DRIVER))
    except (OSError, AttributeError):  # no driver, or one that lacks a function
        return Machine("", "", *versions)
    return Machine(name, f"sm_{major}{minor}", *versions)


def begin_context() -> threading.Thread:
    """Have the driver make the first GPU's context in a thread, while Python imports; give that.

    CUDA's runtime, and so torch, takes the context that is there. Without a usable GPU nothing
    comes of it: who needs one says so.
    """

    def make() -> None:
        try:
            driver = ctypes.CDLL(DRIVER)
            device, context = _first_device(driver), ctypes.c_void_p()
            _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except (OSError, AttributeError):
            pass

    thread = threading.Thread(target=make, name="treadle-context", daemon=True)
    thread.start()
    return thread


def _installed_version(package: str) -> str:
    """Give what the package calls its version, as its `version.py` says if it has one.

    A build of torch says more there (`2.11.0+cu130`) than the metadata it was installed with.
    """
    return _own_version(package) or _metadata_version(package)


def _own_version(package: str) -> str:
    """Read `__version__ = "…"` of a package's `version.py` without importing it; empty if none."""
    try:
        spec = importlib.util.find_spec(package)  # imports parents only, and this has none
        folders = (spec and spec.submodule_search_locations) or ()
        texts = [(Path(folder) / "version.py").read_text(encoding="utf-8") for folder in folders]
        statements = [statement for text in texts for statement in ast.parse(text).body]
    except (OSError, ValueError, SyntaxError):  # none, or nothing that can be read
        return ""
    for statement in statements:
        if isinstance(statement, ast.AnnAssign):
            targets: list[ast.expr] = [statement.target]
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        else:
            continue
        value = statement.value
        named = any(isinstance(t, ast.Name) and t.id == "__version__" for t in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


def _metadata_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call a function of the driver. Raises: OSError: it gives an error."""
    if error := getattr(driver, function)(*arguments):
        raise OSError(f"{function} gives {error}")


def _first_device(driver: ctypes.CDLL) -> ctypes.c_int:
    """Initialise the driver and give its first GPU. Raises: OSError: there is none."""
    device = ctypes.c_int()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    return device


def _first_gpu(driver: ctypes.CDLL) -> tuple[str, int, int]:
    """Give name and compute capability of the first GPU. Raises: OSError: there is none."""
    device, major, minor = _first_device(driver), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_MAX_NAME_BYTES)
    attribute = "cuDeviceGetAttribute"
    _call(driver, "cuDeviceGetName", name, _MAX_NAME_BYTES, device)
    _call(driver, attribute, ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(driver, attribute, ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return name.value.decode(), major.value, minor.value


def choose_target(asked: str, machine: Machine) -> str:
    """Give the target to use: the one asked for, or `cuda` where there is a GPU, else `reference`.

    Raises: MachineError: the target asked for can't run here.
    """
    asked = knobs.target() if asked == "auto" else asked
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
    import torch

    if target != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            "The target `cuda` needs a GPU that torch can see; there is none.",
            remedy="Run `python cli.py check-env`, or use --target reference.",
        )
    return torch.device("cuda", torch.cuda.current_device())
