"""Compile emitted kernels for a GPU that need not be there, and tell what they use.

A module's own `launch` says what its kernels are called with: it runs on tensors without data while
stand-ins note the calls. Binaries land in Triton's cache, where serving finds them. Must not know
graphs. Called by `compile`, the tuner and tests, also as a program (see `main`).
"""

from __future__ import annotations

import ctypes.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import CompiledKernel
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

import treadle
from treadle.ir import knobs
from treadle.ir.errors import KernelError, MachineError
from treadle.ir.types import parse_type
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.kernels.load import load_module

Argument = str | int | None


@dataclass(frozen=True)
class Job:
    """Ask for the kernels of the module at `path`, for `target` (`sm_90`, `gfx942`).

    `arguments` are those of its `launch`: tensors as types without symbols, like `bf16[8, 4096]`,
    whole numbers, and None where a tensor is left out.
    """

    path: str
    target: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Resources:
    """Say what a kernel uses: registers and spilled bytes per thread, shared bytes per program.

    `source_key` is Triton's digest of the kernel's source, part of its binary's name.
    """

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    seconds: float
    source_key: str = ""


@dataclass(frozen=True)
class Outcome:
    """The end of one job: its kernels, in the order of their launch, or the reason it failed.

    `blames_machine` says that the kernel is not at fault: a full disk, for example.
    """

    job: Job
    kernels: tuple[Resources, ...] = ()
    error: str = ""
    blames_machine: bool = False


def compile_module(path: Path, arguments: Sequence[Argument], target: str) -> tuple[Resources, ...]:
    """Compile the kernels that the module's `launch` starts when it is given these arguments.

    The specialisation is what the run time chooses for 16-byte aligned tensors, so a later launch
    with the same Triton version and cache folder finds the binary.
    Raises: MachineError: this process has the interpreter on. KernelError: a kernel is illegal.
    """
    if knobs.triton_interpret():
        raise MachineError(
            "Kernels can't be compiled in a process that has Triton's interpreter on.",
            remedy="Use `compile_many`, which starts a process of its own.",
        )
    module = load_module(path, path.stem.partition(".")[0])
    calls = record_calls(module, arguments)
    driver = triton.runtime.driver
    previous = driver._active
    driver.set_active(_NoDevice(parse_target(target)))
    try:
        return tuple(_compile_call(path, call) for call in calls)
    finally:
        driver._active = previous


@dataclass(frozen=True)
class Call:
    """One launch of a kernel: `kernel[grid](*positional, **named)`."""

    kernel: JITFunction
    grid: Any
    positional: tuple[Any, ...]
    named: dict[str, Any]


def record_calls(module: ModuleType, arguments: Sequence[Argument]) -> tuple[Call, ...]:
    """Run the module's `launch` on tensors without data and note the kernels it would start."""
    calls: list[Call] = []
    kernels = {name: v for name, v in vars(module).items() if isinstance(v, JITFunction)}
    # Kernels look their globals up when they are compiled: the stand-ins must be gone by then.
    vars(module).update({name: _StandIn(kernel, calls) for name, kernel in kernels.items()})
    try:
        module.launch(*(_without_data(argument) for argument in arguments))
    finally:
        vars(module).update(kernels)
    return tuple(calls)


def parse_target(text: str) -> GPUTarget:
    """Read `sm_90` or `gfx942` as Triton's name of a GPU. Raises: KernelError: it is neither."""
    if found := re.fullmatch(r"sm_(\d+)", text):
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx9\w+", text):
        return GPUTarget("hip", text, 64)
    raise KernelError(f"`{text}` is no target; expected something like `sm_90` or `gfx942`.")


# --- one kernel ---------------------------------------------------------------------------------


class _StandIn:
    """Take a kernel's place in its module: note its launches instead of running it."""

    def __init__(self, kernel: JITFunction, calls: list[Call]) -> None:
        self.kernel = kernel
        self.calls = calls

    def __getitem__(self, grid: Any) -> partial[None]:
        return partial(self._note, grid)

    def _note(self, grid: Any, *positional: Any, **named: Any) -> None:
        self.calls.append(Call(self.kernel, grid, positional, named))


class _NoDevice:
    """Answer what Triton asks of a driver before it compiles; there is nothing to run on."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: one per architecture, none a real one's number.
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def set_current_device(self, device: object) -> None:
        pass

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _without_data(argument: Argument) -> torch.Tensor | int | None:
    if argument is None or isinstance(argument, int):
        return argument
    type_ = parse_type(argument)
    return torch.empty(type_.bound_shape({}), dtype=TORCH_DTYPES[type_.dtype], device="meta")


def _compile_call(path: Path, call: Call) -> Resources:
    started = time.perf_counter()
    name = call.kernel.fn.__name__
    try:
        kernel = call.kernel.warmup(*call.positional, grid=call.grid, **call.named)
    except OSError as error:
        raise MachineError(
            f"Kernel `{name}` can't be compiled: {error.strerror or error}, at "
            f"{error.filename or 'a temporary file'}."
        ) from error
    except Exception as error:
        # Triton raises many kinds, its own and LLVM's; they all mean an illegal kernel.
        raise KernelError(f"Kernel `{name}` in `{path}` does not compile: {error}") from error
    _build_launcher(kernel)
    registers, spill_bytes = _usage(kernel)
    return Resources(
        name,
        registers,
        spill_bytes,
        kernel.metadata.shared,
        time.perf_counter() - started,
        call.kernel.cache_key,
    )


def _build_launcher(kernel: CompiledKernel) -> None:
    """Build the C launcher that Triton before 3.7 makes for each signature at its first launch.

    It needs the CUDA driver's library, so without one it is left to the machine that will serve.
    """
    if not hasattr(nvidia_driver, "make_launcher") or "cubin" not in kernel.asm:
        return
    if ctypes.util.find_library("cuda") is not None:
        nvidia_driver.CudaLauncher(kernel.src, kernel.metadata)


def _usage(kernel: CompiledKernel) -> tuple[int, int]:
    """Read registers and spilled bytes per thread from a compiled kernel."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text))
        return int(counts["vgpr_count"]), 4 * int(counts["vgpr_spill_count"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise MachineError(f"`{tool}` did not tell what a kernel uses: {done.stderr.strip()}.")
    return int(found[1]), int(found[2]) + int(found[3])


# --- many kernels -------------------------------------------------------------------------------


def compile_many(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    timeout_s: float = 120.0,
    triton_cache: Path | None = None,
) -> Generator[Outcome, None, None]:
    """Compile jobs in parallel, in processes of their own, and yield outcomes as they come.

    A job that fails, crashes the compiler or takes too long has an error and leaves others alone.
    `triton_cache` is where binaries go, by default where this process's Triton looks for them.
    Whoever stops early closes it: then all processes are gone, and nobody writes there any more.
    Raises: MachineError: the processes could not be run.
    """
    request = {
        "jobs": [asdict(job) for job in jobs],
        "workers": workers or len(os.sched_getaffinity(0)),
        "timeout_s": timeout_s,
    }
    changes: dict[str, str | None] = {"TRITON_INTERPRET": None}
    if triton_cache is not None:
        changes["TRITON_CACHE_DIR"] = str(triton_cache)
    environment = knobs.child_environment(**changes)
    paths = [str(Path(treadle.__file__).parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "jobs.json", Path(folder) / "errors.txt"
        file.write_text(json.dumps(request), encoding="utf-8")
        with errors.open("w") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "treadle.kernels.cross_compile", str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                process_group=0,
            )
            try:
                assert child.stdout is not None, "the child's output was asked for"
                for line in child.stdout:
                    yield _outcome_from(json.loads(line))
                if child.wait() != 0:
                    raise MachineError(
                        f"The compiling process ended with {child.returncode}: "
                        f"{errors.read_text()[-2000:].strip()}"
                    )
            finally:
                _end_group(child)


def _end_group(child: subprocess.Popen[str]) -> None:
    """End a process and those it has forked, and wait until none of them is left."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # The forked ones are no children of ours, but they hold the pipe as long as they live.
    assert child.stdout is not None, "its output was asked for"
    child.stdout.read()
    child.stdout.close()
    child.wait()


def _outcome_from(record: dict[str, Any]) -> Outcome:
    return Outcome(
        _job_from(record["job"]),
        tuple(Resources(**kernel) for kernel in record["kernels"]),
        record["error"],
        record["blames_machine"],
    )


def _job_from(record: dict[str, Any]) -> Job:
    return Job(record["path"], record["target"], tuple(record["arguments"]))


def _run_job(job: Job, sender: Connection) -> None:
    try:
        outcome = Outcome(job, compile_module(Path(job.path), job.arguments, job.target))
    except MachineError as error:
        outcome = Outcome(job, error=error.message, blames_machine=True)
    except Exception as error:
        # The boundary of one job: whatever went wrong is its outcome.
        outcome = Outcome(job, error=f"{type(error).__name__}: {error}")
    sender.send(outcome)


def _run_jobs(jobs: Sequence[Job], workers: int, timeout_s: float) -> Iterator[Outcome]:
    """Fork a process per job, `workers` at a time: a crash in the compiler ends one job only."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[Connection, tuple[Job, multiprocessing.process.BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run_job, args=(job, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (job, process, time.monotonic() + timeout_s)
        next_deadline = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), timeout=max(next_deadline - time.monotonic(), 0.0))
        now = time.monotonic()
        done = [r for r, (_, _, deadline) in running.items() if r in ready or deadline <= now]
        for connection in done:
            job, child, _ = running.pop(connection)
            yield _take_outcome(job, connection, child, timeout_s)
            connection.close()


def _take_outcome(
    job: Job,
    receiver: Connection,
    process: multiprocessing.process.BaseProcess,
    timeout_s: float,
) -> Outcome:
    if receiver.poll():
        try:
            outcome = receiver.recv()
            assert isinstance(outcome, Outcome), "a job sends its outcome"
        except EOFError:
            process.join()
            outcome = Outcome(job, error=f"the compiler ended with exit code {process.exitcode}")
    else:
        process.kill()
        outcome = Outcome(job, error=f"not compiled after {timeout_s:g} s")
    process.join()
    return outcome


def main(arguments: Sequence[str]) -> int:
    """Compile the jobs of a file and print one JSON line for each outcome."""
    if len(arguments) != 1:
        print("usage: python -m treadle.kernels.cross_compile JOBS.json", file=sys.stderr)
        return 2
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    jobs = [_job_from(record) for record in request["jobs"]]
    # Triton hashes itself for every cache key: once here, not once in each process.
    triton_key()
    for outcome in _run_jobs(jobs, request.get("workers", 2), request.get("timeout_s", 120.0)):
        print(json.dumps(asdict(outcome)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
