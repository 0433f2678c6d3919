"""Every kernel of the Llama spec as it is emitted by default: its text, and that GPUs can hold it.

Goldens are for sm_90; what is not emitted there (plain matmuls instead of TMA) is compiled too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden import Golden
from treadle.kernels.cross_compile import Job, Outcome, compile_many
from treadle.models.config import from_hf
from treadle.runtime import compiler, planner
from treadle.runtime.binaries import jobs_of
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import Plan

# One layer of Llama-3.2-1B: two heads of it, as it were, would emit the same text.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
ENGINE = EngineConfig("cuda", "bf16", 64, max_rows=8, max_step_tokens=256, max_context_tokens=4096)
MACHINES = ("sm_90", "sm_80", "gfx942")
JOINED = "rope__kv_write__attention"


def _plan(machine: str) -> tuple[Plan, compiler.Compilation]:
    compilation = compiler.build(from_hf(CONFIG), ENGINE)
    plan = planner.plan_programs(compilation.fused, ENGINE, architecture=machine)
    return plan, compilation


def _first_uses(plan: Plan) -> dict[str, str]:
    """Name each module by its kernel and the first bucket that uses it, for readable goldens."""
    names: dict[str, str] = {}
    for program in plan.all_programs:
        for launch in program.launches:
            kernel = launch.kernel.partition(".")[0]
            name = f"{kernel}.{program.step}_{program.bucket}"
            number = 2
            while name in names.values() and launch.kernel not in names:
                name = f"{kernel}.{program.step}_{program.bucket}_{number}"
                number += 1
            names.setdefault(launch.kernel, name)
    return names


def test_each_emitted_kernel_is_as_its_golden(golden: Callable[[str], Golden]) -> None:
    plan, _ = _plan("sm_90")
    for module, name in _first_uses(plan).items():
        assert plan.modules[module] == golden(f"triton/llama/{name}.py"), name


def test_no_golden_is_left_over(golden: Callable[[str], Golden]) -> None:
    plan, _ = _plan("sm_90")
    folder = golden("triton/llama/any").path.parent
    found = {path.stem for path in folder.glob("*.py")}
    assert found == set(_first_uses(plan).values())


def _joined_job(machine: str, folder: Path) -> Job:
    """Give a job of the kernel that appends and attends, which few buckets play by default."""
    compilation = compiler.build(from_hf(CONFIG), ENGINE)
    plan = planner.plan_programs(
        compilation.fused,
        ENGINE,
        architecture=machine,
        form_of=lambda rows: f"{planner.decode_form(rows).removesuffix('.joined')}.joined",
    )
    plan.write(folder)
    jobs = jobs_of(plan, compilation.fused, ENGINE, folder / "kernels", machine)
    return next(job for job in jobs if Path(job.path).stem.partition(".")[0] == JOINED)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Outcome]]:
    """Compile all kernels for all machines at once: by machine, then by the kernel's first use."""
    folder = tmp_path_factory.mktemp("llama")
    named: dict[Job, tuple[str, str]] = {}
    for machine in MACHINES:
        plan, compilation = _plan(machine)
        (folder / machine).mkdir()
        plan.write(folder / machine)
        names = _first_uses(plan)
        for job in jobs_of(plan, compilation.fused, ENGINE, folder / machine / "kernels", machine):
            named[job] = (machine, names[Path(job.path).stem])
        (folder / machine / "joined").mkdir()
        named[_joined_job(machine, folder / machine / "joined")] = (machine, JOINED)
    found: dict[str, dict[str, Outcome]] = {machine: {} for machine in MACHINES}
    for outcome in compile_many(list(named), triton_cache=folder / "cache"):
        machine, name = named[outcome.job]
        assert name not in found[machine], "a kernel has one set of arguments"
        found[machine][name] = outcome
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_each_emitted_kernel_compiles_and_uses_what_is_recorded(
    outcomes: dict[str, dict[str, Outcome]], golden: Callable[[str], Golden], machine: str
) -> None:
    plan, _ = _plan(machine)
    rows = {}
    for name in _first_uses(plan).values():
        for kernel in outcomes[machine][name].kernels:
            rows[name] = {
                "registers": kernel.registers,
                "shared_bytes": kernel.shared_bytes,
                "spill_bytes": kernel.spill_bytes,
            }
        assert not outcomes[machine][name].error, (name, outcomes[machine][name].error)
    spilling = {name for name, row in rows.items() if row["spill_bytes"]}
    assert not spilling, {name: rows[name] for name in spilling}
    text = json.dumps(dict(sorted(rows.items())), indent=1) + "\n"
    assert text == golden(f"triton/llama/resources.{machine}.json")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_that_appends_and_attends_compiles_without_spills(
    outcomes: dict[str, dict[str, Outcome]], machine: str
) -> None:
    outcome = outcomes[machine][JOINED]
    assert not outcome.error, outcome.error
    assert [kernel.spill_bytes for kernel in outcome.kernels] == [0]
