"""Say whether this machine can run Treadle, by trying it: the command `check-env`.

Asks torch and Triton in child processes (`env_probe.py`) and imports neither, so that it can tell
of a machine where they fail. Its output is meant for bug reports.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import treadle
from treadle.ir import knobs
from treadle.ir.errors import KernelError, MachineError, TreadleError
from treadle.runtime.console import print_json, print_table
from treadle.runtime.host_memory import MEMINFO, find_free_memory
from treadle.runtime.progress import Progress

PASS, FAIL, NOTE = "pass", "fail", "note"

MIN_PYTHON: Final = (3, 11)
# The lower bounds of setup.cfg for what everything else stands on.
MIN_VERSIONS: Final = {"torch": "2.11", "triton": "3.6", "transformers": "5.10"}
CROSS_TARGET: Final = 90
PROBE_TIMEOUT_S: Final = 300.0
MIN_FREE_MEMORY_BYTES: Final = 2 * 2**30
MIN_FREE_DISK_BYTES: Final = 2**30
# What NCCL wants for several processes on one host; containers often come with 64 MiB.
GOOD_SHARED_MEMORY_BYTES: Final = 2**30

_PROBE = Path(__file__).with_name("env_probe.py")


@dataclass(frozen=True)
class Step:
    """Tell how one check went. A `note` is worth reading and no failure."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    exit_code: int = MachineError.exit_code


@dataclass(frozen=True)
class Report:
    """Hold all checks; `settings` are the environment variables that are set."""

    steps: tuple[Step, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Step, ...]:
        """The checks that failed."""
        return tuple(step for step in self.steps if step.status == FAIL)

    def verdict(self) -> TreadleError | None:
        """Give the one clear line for a machine that fails: what is wrong first, and the remedy."""
        if not self.failed:
            return None
        first = self.failed[0]
        kind = KernelError if first.exit_code == KernelError.exit_code else MachineError
        message = f"{len(self.failed)} of {len(self.steps)} checks failed. {first.name}: "
        return kind(message + first.detail.rstrip(".") + ".", remedy=first.remedy)

    def to_json(self) -> dict[str, Any]:
        """Give the report for a machine to read."""
        return {
            "ok": not self.failed,
            "treadle": treadle.__version__,
            "steps": [
                {"name": s.name, "status": s.status, "detail": s.detail, "remedy": s.remedy}
                for s in self.steps
            ],
            "settings": dict(self.settings),
        }

    def markdown(self) -> str:
        """Give the report for a bug report."""
        lines = ["| check | result | found |", "|---|---|---|"]
        for step in self.steps:
            found = _without_home(step.detail).replace("|", "\\|")
            lines.append(f"| {step.name} | {step.status} | {found} |")
        for name, value in self.settings.items():
            lines.append(f"| `{name}` | set | `{_without_home(value)}` |")
        return "\n".join(lines) + "\n"


def run_check_env(need_gpu: bool, markdown: bool, as_json: bool, progress: str) -> None:
    """Try the machine and print what was found.

    Raises: MachineError, KernelError: a check failed.
    """
    with Progress(progress) as shown, shown.phases() as report:
        found = check(need_gpu, report)
    if as_json:
        print_json(found.to_json())
    elif markdown:
        print(found.markdown(), end="")
    else:
        print_table([(step.status, step.name, step.detail) for step in found.steps])
        for step in found.steps:
            if step.status == NOTE and step.remedy:
                print(f"\n{step.name}: {step.remedy}")
    if verdict := found.verdict():
        raise verdict


def check(need_gpu: bool, report: Callable[[str], None] = lambda phase: None) -> Report:
    """Try everything that running a model needs. Each check tells `report` that it begins.

    `need_gpu` makes a missing GPU a failure; else it is only noted.
    """
    steps: list[Step] = []

    def run(name: str, ask: Callable[[], Step]) -> Step:
        report(name)
        steps.append(ask())
        return steps[-1]

    run("Python", check_python)
    libraries = run("libraries", check_libraries)
    run("cache folder", functools.partial(check_cache_folder, knobs.cache_dir))
    run("memory", check_memory)
    run("shared memory", check_shared_memory)
    # Without them each probe would only fail in its own words.
    if libraries.status == PASS:
        gpu = run("GPU", functools.partial(check_gpu, need_gpu))
        if gpu.status == PASS:
            run("C compiler", check_c_compiler)
            run("kernel on the GPU", functools.partial(check_kernel, "cuda"))
        else:
            run("kernel in the interpreter", functools.partial(check_kernel, "cpu"))
        run("compile for another GPU", check_cross_compile)
    return Report(tuple(steps), _settings())


def check_python() -> Step:
    """Check Python's version, and name the machine that it runs on."""
    detail = f"{platform.python_version()} on {platform.platform()}, Treadle {treadle.__version__}"
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Step("Python", FAIL, detail, f"Use Python {wanted} or newer.")
    return Step("Python", PASS, detail)


def check_libraries() -> Step:
    """Check that the libraries are there and new enough."""
    found, wrong = [], []
    for name, least in MIN_VERSIONS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        found.append(f"{name} {version}")
        if _release(version) < _release(least):
            wrong.append(f"{name} {version} is older than {least}")
    if wrong:
        remedy = f"Install them for {sys.executable}: `make env`, or `pip install -e .`."
        return Step("libraries", FAIL, "; ".join(wrong), remedy)
    return Step("libraries", PASS, ", ".join(found))


def check_cache_folder(find: Callable[[], Path]) -> Step:
    """Check that the cache folder can be written and has room."""
    try:
        folder = find()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except TreadleError as error:
        return Step("cache folder", FAIL, error.message, error.remedy)
    except OSError as error:
        detail = f"{folder} can't be written: {error.strerror}"
        remedy = "Set TREADLE_CACHE_DIR to a folder that this user may write to."
        return Step("cache folder", FAIL, detail, remedy)
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{folder}, {_size(free_bytes)} free"
    if free_bytes < MIN_FREE_DISK_BYTES:
        remedy = "Free some space, or set TREADLE_CACHE_DIR to a folder on another disk."
        return Step("cache folder", FAIL, detail, remedy)
    return Step("cache folder", PASS, detail)


def check_memory(meminfo: Path = MEMINFO) -> Step:
    """Check the free main memory, of the machine or, where less, of the container."""
    found = find_free_memory(meminfo)
    if found is None:
        return Step("memory", NOTE, f"unknown, {meminfo} says nothing of it")
    free_bytes, where = found.num_bytes, " in this container" if found.in_container else ""
    detail = f"{_size(free_bytes)} free{where}, {len(os.sched_getaffinity(0))} CPU cores"
    if free_bytes < MIN_FREE_MEMORY_BYTES:
        remedy = (
            f"Loading a model needs {_size(MIN_FREE_MEMORY_BYTES)} and more: end other programs."
        )
        return Step("memory", FAIL, detail, remedy)
    return Step("memory", PASS, detail)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Step:
    """Look at the shared memory, which the processes of several GPUs need."""
    if not folder.is_dir():
        return Step("shared memory", NOTE, f"this system has no {folder}")
    total_bytes = shutil.disk_usage(folder).total
    detail = f"{_size(total_bytes)} at {folder}"
    if total_bytes < GOOD_SHARED_MEMORY_BYTES:
        remedy = (
            "Enough for one GPU. For several, start the container with --ipc=host or --shm-size."
        )
        return Step("shared memory", NOTE, f"{detail}, enough for one GPU only", remedy)
    return Step("shared memory", PASS, detail)


def check_gpu(need_gpu: bool) -> Step:
    """Check which GPUs torch sees. One that only the driver sees is a failure."""
    answer = _probe("gpu")
    if isinstance(answer, str):
        remedy = "torch itself fails on this machine; install it again."
        return Step("GPU", FAIL, answer, remedy)
    if answer["gpus"]:
        gpus = [
            f"{gpu['name']} ({gpu['architecture']}, {_size(gpu['free_bytes'])} of "
            f"{_size(gpu['total_bytes'])} free, {gpu['shared_bytes'] // 1024} KiB shared memory)"
            for gpu in answer["gpus"]
        ]
        return Step("GPU", PASS, "; ".join(gpus) + f"; CUDA {answer['cuda'] or answer['hip']}")
    build = f"torch is built for CUDA {answer['cuda']}" if answer["cuda"] else "torch has no CUDA"
    if Path("/dev/nvidia0").exists():
        detail = f"the driver has a GPU that torch can't use; {build}"
        remedy = "Install a torch build whose CUDA version the driver supports (see `nvidia-smi`)."
        return Step("GPU", FAIL, detail, remedy)
    if need_gpu:
        remedy = "Use a machine with a GPU; or leave --need-gpu out and run models on the CPU."
        return Step("GPU", FAIL, f"none found; {build}", remedy)
    return Step("GPU", NOTE, "none found: models run on the CPU, for trying out (target reference)")


def check_c_compiler() -> Step:
    """Check for the C compiler with which Triton builds its launchers."""
    for name in filter(None, (knobs.c_compiler(), "gcc", "clang", "cc")):
        if path := shutil.which(name):
            return Step("C compiler", PASS, path)
    return Step("C compiler", FAIL, "none found, and Triton needs one", "Install gcc.")


def check_kernel(device: str) -> Step:
    """Compile a small kernel, run it, and check its result."""
    name = "kernel on the GPU" if device == "cuda" else "kernel in the interpreter"
    answer = _probe("run", device, TRITON_INTERPRET=None if device == "cuda" else "1")
    if isinstance(answer, str):
        remedy = "Triton can't run here. TREADLE_DEBUG=1 shows its whole error."
        return Step(name, FAIL, answer, remedy)
    if answer["max_error"] != 0:
        remedy = "Report this with `check-env --markdown`: the machine or Triton computes wrongly."
        detail = f"a wrong result, off by up to {answer['max_error']}"
        return Step(name, FAIL, detail, remedy, KernelError.exit_code)
    return Step(name, PASS, "compiled, ran, and gave the right result")


def check_cross_compile() -> Step:
    """Compile the kernel for a GPU that need not be here."""
    name, target = "compile for another GPU", f"sm_{CROSS_TARGET}"
    answer = _probe("cross-compile", str(CROSS_TARGET), TRITON_INTERPRET=None)
    if isinstance(answer, str):
        return Step(name, FAIL, f"{target}: {answer}", "Install Triton again; it brings ptxas.")
    return Step(name, PASS, f"{target}, {answer['binary_bytes']} bytes of binary")


def _probe(*question: str, **variables: str | None) -> dict[str, Any] | str:
    """Give the answer to a question, or the last line of the error that came instead."""
    with tempfile.TemporaryDirectory() as fresh_cache:
        environment = knobs.child_environment(TRITON_CACHE_DIR=fresh_cache, **variables)
        try:
            # -P: the probe's own folder must not come first on its path.
            done = subprocess.run(
                [sys.executable, "-P", str(_PROBE), *question],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {PROBE_TIMEOUT_S:.0f} s"
    if done.returncode:
        if knobs.debug():
            print(done.stderr, file=sys.stderr)
        ended = f"the process ended with status {done.returncode}"
        return (done.stderr.strip().splitlines() or [ended])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _settings() -> dict[str, str]:
    """Give the variables that are set and mean something to us, less their secrets."""
    values = knobs.child_environment()
    return {
        knob.variable: "(hidden)" if knob.secret else values[knob.variable]
        for knob in sorted(knobs.ALL, key=lambda knob: knob.variable)
        if values.get(knob.variable)
    }


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def _size(count_bytes: int) -> str:
    if count_bytes < 2**30:
        return f"{count_bytes / 2**20:.0f} MiB"
    return f"{count_bytes / 2**30:.1f} GiB"
