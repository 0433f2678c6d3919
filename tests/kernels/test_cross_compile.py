"""Compiling emitted kernels for GPUs that are not there, in processes without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from treadle.ir.errors import MachineError
from treadle.kernels.cross_compile import Job, Outcome, compile_many, compile_module
from treadle.kernels.emit import Header, emit_module, read_template
from treadle.kernels.epilogue import TILES
from treadle.kernels.schedule.attention import attention_prefill_gluon_schedules

from .linear_cases import Case, emit_case

SPLIT = ("matmul_skinny", "matmul_skinny_tma")
HOPPER_ONLY = (
    "matmul_tma",
    "matmul_skinny_tma",
    "matmul_gluon",
    "matmul_stream",
)
SEVEN_PARTS = {"BLOCK_M": 32, "BLOCK_K": 64, "PARTS": 7, "STAGES": 6, "USE_PDL": True}
# Bytes of shared memory that one program may have.
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


def write_job(
    folder: Path, template: str, form: str, target: str, tokens: int, **schedule: int | bool
) -> Job:
    """Emit a bf16 case with the sizes of an 8B model's gate-up projection, and ask for `target`."""
    case = Case(form, dtype="bf16", N=28672, K=4096)
    text, fused = emit_case(template, case, **schedule)
    path = folder / f"{template}_{'_'.join(form.split())}_{target}.py"
    path.write_text(text)
    shapes = {name: type_.bound_shape({"T": tokens}) for name, type_ in case.types.items()}
    names = [*fused.inputs, case.op.outputs[0]]
    tensors = [f"{case.types[name].dtype}[{', '.join(map(str, shapes[name]))}]" for name in names]
    extra = ["f32[1024]", "i32[1024]"] if template in SPLIT else []
    return Job(str(path), target, (*tensors, *extra, tokens))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Compile one job of each kind, once for all tests."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = {
        "gemv": write_job(folder, "gemv", "norm glu", "sm_90", 1, USE_PDL=True),
        "ampere": write_job(folder, "matmul", "bias add", "sm_80", 512, BLOCK_M=64, num_warps=4),
        "amd": write_job(folder, "matmul_skinny", "glu", "gfx942", 16, SPLIT_K=2, num_stages=2),
        "tma": write_job(folder, "matmul_skinny_tma", "glu", "sm_90", 32, USE_PDL=True, SPLIT_K=2),
        "gluon": write_job(folder, "matmul_gluon", "glu", "sm_90", 512, USE_PDL=True),
        "stream": write_job(folder, "matmul_stream", "glu", "sm_90", 8, USE_PDL=True),
        "parts": write_job(folder, "matmul_stream", "glu", "sm_90", 32, **SEVEN_PARTS),
    }
    found = {outcome.job: outcome for outcome in compile_many(list(jobs.values()))}
    return {name: found[job] for name, job in jobs.items()}


@pytest.mark.parametrize("name", ["gemv", "ampere", "amd", "tma", "gluon", "stream", "parts"])
def test_kernel_compiles_without_spills(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert not outcome.error, outcome.error
    (kernel,) = outcome.kernels
    assert kernel.registers > 0
    assert kernel.spill_bytes == 0
    assert 0 < kernel.shared_bytes <= SHARED_LIMIT[outcome.job.target]


def test_kernels_have_the_names_of_their_module(outcomes: dict[str, Outcome]) -> None:
    assert [kernel.kernel for kernel in outcomes["gemv"].kernels] == ["gemv__norm__glu"]


# Finds the binary of a module of which Triton may not read the source.
FIND_BINARY = """
import sys
from pathlib import Path
from triton.runtime.jit import JITCallable
from treadle.kernels.cross_compile import compile_module
from treadle.kernels.load import load_module, tell_source_keys

def fail(kernel):
    raise AssertionError("it reads the source")

path, kernel, key, target, *arguments = sys.argv[1:]
module = load_module(Path(path), Path(path).stem)
if key:
    tell_source_keys(module, {kernel: key})
JITCallable.parse = fail
types = [int(each) if each.isdecimal() else each for each in arguments]
print(*(found.source_key for found in compile_module(Path(path), types, target)))
"""


@pytest.mark.parametrize("template", ["gemv", "matmul_gluon"])
def test_the_key_of_a_source_finds_its_binary_without_reading_the_source(
    template: str, tmp_path: Path
) -> None:
    job = write_job(tmp_path, template, "glu", "sm_90", 1, USE_PDL=True)
    (outcome,) = compile_many([job], triton_cache=tmp_path / "cache")
    (kernel,) = outcome.kernels
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)

    def find(key: str) -> subprocess.CompletedProcess[str]:
        arguments = [job.path, kernel.kernel, key, job.target, *map(str, job.arguments)]
        return subprocess.run(
            [sys.executable, "-c", FIND_BINARY, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )

    done = find(kernel.source_key)
    assert done.stdout.strip() == kernel.source_key, done.stderr
    assert "it reads the source" in find("").stderr
    assert "it reads the source" in find("0" * 64).stderr


def test_failed_jobs_tell_why_and_leave_others_alone(tmp_path: Path) -> None:
    texts = {
        "broken": "import no_such_module_anywhere\n",
        "crash": "import os\n\n\ndef launch() -> None:\n    os._exit(11)\n",
        "endless": "import time\n\n\ndef launch() -> None:\n    time.sleep(60)\n",
        "empty": "def launch() -> None:\n    pass\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    jobs = [Job(str(tmp_path / f"{name}.py"), "sm_90", ()) for name in texts]
    jobs.append(Job(jobs[-1].path, "sm_banana", ()))
    errors = {
        (Path(o.job.path).stem, o.job.target): o.error for o in compile_many(jobs, timeout_s=2)
    }
    assert "no_such_module_anywhere" in errors["broken", "sm_90"]
    assert "exit code 11" in errors["crash", "sm_90"]
    assert "not compiled after 2 s" in errors["endless", "sm_90"]
    assert "`sm_banana` is no target" in errors["empty", "sm_banana"]
    assert not errors["empty", "sm_90"]


def test_who_stops_early_leaves_no_process_that_goes_on(tmp_path: Path) -> None:
    ended, marker = tmp_path / "ended.py", tmp_path / "marker"
    ended.write_text("def launch() -> None:\n    pass\n")
    going_on = tmp_path / "going_on.py"
    going_on.write_text(
        f"import time\nfrom pathlib import Path\n\ntime.sleep(1.5)\nPath({str(marker)!r}).touch()\n"
    )
    jobs = [Job(str(path), "sm_90", ()) for path in (ended, going_on)]
    with closing(compile_many(jobs, workers=2)) as outcomes:
        assert Path(next(outcomes).job.path) == ended
    time.sleep(2.0)
    assert not marker.exists()


def test_interpreting_process_is_told_to_use_another() -> None:
    with pytest.raises(MachineError, match="compile_many"):
        compile_module(Path("kernel.py"), (), "sm_90")


def test_other_sizes_of_a_step_find_the_same_binary(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    jobs = [write_job(tmp_path, "gemv", "", "sm_90", tokens, ROWS=2) for tokens in (1, 7, 16)]
    for outcome in compile_many(jobs, workers=1, triton_cache=cache):
        assert not outcome.error, outcome.error
    assert len(list(cache.rglob("*.cubin"))) == 1


@pytest.mark.parametrize(("head_dim", "first"), [(128, True), (128, False), (64, True)])
def test_specialised_warps_of_attention_compile_without_spills(
    head_dim: int, first: bool, tmp_path: Path
) -> None:
    read = read_template("attention_prefill_gluon")
    sizes = {"T": 8192, "B": 8, "C": 1024}
    schedules = list(attention_prefill_gluon_schedules(32, 8, head_dim, 64, 2, sizes, "sm_90"))
    facts = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "PAGE_SIZE": 64}
    text = emit_module(
        read,
        name="attention_prefill",
        shape={**facts, "SCALE": 0.125},
        schedule=schedules[0 if first else -1],
        header=Header("a test."),
    )
    path = tmp_path / "attention_prefill.py"
    path.write_text(text)
    cache = f"bf16[200, 8, 64, {head_dim}]"
    tensors = (f"bf16[8192, 32, {head_dim}]", cache, cache, "i32[8, 17]", "i32[8]", "i32[9]")
    arguments = (*tensors, "i32[8]", f"bf16[8192, {32 * head_dim}]", "i32[2]", 8192, 8)
    (outcome,) = compile_many([Job(str(path), "sm_90", arguments)])
    assert not outcome.error, outcome.error
    (kernel,) = outcome.kernels
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT["sm_90"]


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(SHARED_LIMIT))
def test_every_template_and_form_compiles(target: str, tmp_path: Path) -> None:
    jobs = []
    for template in sorted(TILES):
        if template in HOPPER_ONLY and target not in ("sm_90", "sm_100"):
            continue
        if template == "matmul_gluon" and target != "sm_90":
            continue
        for form in ("", "bias add", "glu"):
            tokens = {"gemv": 1, "matmul_skinny": 16, "matmul_skinny_tma": 16}.get(template, 512)
            stages = {"num_stages": 2} if target == "gfx942" else {}
            jobs.append(write_job(tmp_path, template, form, target, tokens, **stages))
    for outcome in compile_many(jobs):
        assert not outcome.error, f"{outcome.job.path}: {outcome.error}"
        for kernel in outcome.kernels:
            assert kernel.spill_bytes == 0, kernel
            assert kernel.shared_bytes <= SHARED_LIMIT[target], kernel
