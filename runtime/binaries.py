"""Planned launches → compile jobs, and the binaries that an artifact carries.

Called by the compiler, the tuner and the loader. Needs no GPU: the jobs say types, not tensors.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from treadle.ir import knobs
from treadle.ir.errors import KernelError, MachineError
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernels.cross_compile import Argument, Job, Outcome, compile_many
from treadle.kernels.load import load_module
from treadle.runtime.artifact import Artifact, check_files, write_error
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import LaunchPlan, Plan, bucket_dims

BINARIES = "binaries"
# What Triton keeps of each stage of a compilation, and would read again with the kernel's binary.
STAGE_TEXTS = ("*.source", "*.ir", "*.glir", "*.ttir", "*.ttgir", "*.llir", "*.ptx", "*.amdgcn")


def launch_arguments(
    launch: LaunchPlan,
    path: Path,
    graph: Graph,
    scratch: Mapping[str, tuple[str, int]],
    dims: Mapping[str, int],
) -> tuple[Argument, ...]:
    """Give the types that a launch passes to its module, in the order of its parameters."""
    module = load_module(path, launch.kernel.partition(".")[0])
    found: list[Argument] = []
    for parameter in inspect.signature(module.launch).parameters:
        kind, _, name = launch.arguments[parameter].partition(":")
        if kind == "size":
            found.append(dims[name])
        elif kind == "none":
            found.append(None)
        elif kind == "scratch":
            dtype, elements = scratch[name]
            found.append(str(TensorType((elements,), dtype)))
        elif graph.types[name].layout:
            found.append(str(graph.types[name].stored_parts(dims)[kind]))
        else:
            type_ = graph.types[name]
            found.append(str(TensorType(type_.bound_shape(dims), type_.dtype)))
    return tuple(found)


def jobs_of(
    plan: Plan,
    graphs: Mapping[str, Graph],
    engine: EngineConfig,
    kernels: Path,
    architecture: str,
) -> list[Job]:
    """Give one job per module of the plan, of which several launches may share one."""
    jobs: dict[str, Job] = {}
    for program in plan.all_programs:
        dims = bucket_dims(engine, program.step, program.bucket)
        for launch in program.launches:
            if launch.kernel in jobs:
                continue
            path = kernels / f"{launch.kernel}.py"
            arguments = launch_arguments(launch, path, graphs[program.form], plan.scratch, dims)
            jobs[launch.kernel] = Job(str(path), architecture, arguments)
    return list(jobs.values())


def compile_binaries(
    jobs: Sequence[Job],
    triton_cache: Path,
    report: Callable[[str], None] = lambda phase: None,
) -> Generator[Outcome, None, None]:
    """Compile all jobs in parallel into a Triton cache folder and yield their outcomes.

    Whoever stops early closes it, as `compile_many`.
    Raises: KernelError: the first kernel that does not compile; names it and why. MachineError: the
    disk is full.
    """
    report(f"compiling {len(jobs)} kernels")
    with closing(compile_many(jobs, triton_cache=triton_cache)) as outcomes:
        for number, outcome in enumerate(outcomes, start=1):
            if outcome.blames_machine:
                raise MachineError(
                    outcome.error,
                    remedy="Free some space, or choose another folder with -o (for temporary "
                    "files: TMPDIR).",
                )
            if outcome.error:
                raise KernelError(
                    f"{Path(outcome.job.path).stem} does not compile for {outcome.job.target}: "
                    f"{outcome.error}",
                    remedy="This is a fault of Treadle; please report it with the kernel's file.",
                )
            if number * 4 // len(jobs) > (number - 1) * 4 // len(jobs):  # four lines, not hundreds
                report(f"compiling kernels ({number} of {len(jobs)} done)")
            yield outcome


def install_binaries(artifact: Artifact) -> Path:
    """Copy an artifact's binaries into the user's cache and give that Triton cache folder.

    Triton notes absolute paths in its cache and adds launchers to it, so it can neither run from an
    artifact that was moved nor leave one unchanged. The key of the manifest names the artifact's
    content: what is there already is used again.
    Raises: ArtifactError: a binary is missing or was changed. MachineError: the cache can't be
    written.
    """
    folder = knobs.cache_dir() / BINARIES / artifact.manifest.key
    if not folder.is_dir():
        check_files(artifact, [n for n in artifact.manifest.files if n.startswith(f"{BINARIES}/")])
        try:
            _copy_binaries(artifact.path, folder)
        except OSError as error:
            raise write_error(folder, error) from error
    return folder


def read_source_keys(artifact: Artifact) -> dict[str, dict[str, str]]:
    """Give the digests of the kernels' sources by module and kernel, see `tell_source_keys`."""
    found: dict[str, dict[str, str]] = {}
    for row in artifact.json("report.json")["kernels"]:
        found.setdefault(row["module"], {})[row["kernel"]] = row["source_key"]
    return found


def _copy_binaries(artifact: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}.", dir=folder.parent))
    try:
        unread = shutil.ignore_patterns(*STAGE_TEXTS)
        shutil.copytree(artifact / BINARIES, temporary, dirs_exist_ok=True, ignore=unread)
        for group in temporary.rglob("__grp__*.json"):
            data = json.loads(group.read_text())
            home = folder / group.parent.relative_to(temporary)
            data["child_paths"] = {
                name: str(home / Path(path).name)
                for name, path in data["child_paths"].items()
                if (group.parent / Path(path).name).is_file()
            }
            group.write_text(json.dumps(data))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
