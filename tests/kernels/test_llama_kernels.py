"""Every kernel of the Llama spec as it is emitted by default: its text, and that GPUs can hold it.

Goldens are for sm_90; what is not emitted there (plain matmuls instead of TMA) is compiled too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden import Golden
from treadle.kernels.cross_compile import compile_many
from treadle.models.config import from_hf
from treadle.runtime import compiler, planner
from treadle.runtime.binaries import jobs_of
from treadle.runtime.config import EngineConfig

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


def _plan(machine: str) -> tuple[planner.Plan, compiler.Compilation]:
    compilation = compiler.build(from_hf(CONFIG), ENGINE)
    plan = planner.plan_programs(compilation.fused, ENGINE, architecture=machine)
    return plan, compilation


def _first_uses(plan: planner.Plan) -> dict[str, str]:
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


@pytest.mark.parametrize("machine", MACHINES)
def test_each_emitted_kernel_compiles_and_uses_what_is_recorded(
    tmp_path: Path, golden: Callable[[str], Golden], machine: str
) -> None:
    plan, compilation = _plan(machine)
    plan.write(tmp_path)
    names = _first_uses(plan)
    jobs = jobs_of(plan, compilation.fused, ENGINE, tmp_path / "kernels", machine)
    rows = {}
    for outcome in compile_many(jobs, triton_cache=tmp_path / "cache"):
        assert not outcome.error, (outcome.job.path, outcome.error)
        for kernel in outcome.kernels:
            rows[names[Path(outcome.job.path).stem]] = {
                "registers": kernel.registers,
                "shared_bytes": kernel.shared_bytes,
                "spill_bytes": kernel.spill_bytes,
            }
    assert set(rows) == set(names.values())
    spilling = {name for name, row in rows.items() if row["spill_bytes"]}
    assert not spilling, {name: rows[name] for name in spilling}
    text = json.dumps(dict(sorted(rows.items())), indent=1) + "\n"
    assert text == golden(f"triton/llama/resources.{machine}.json")


# --- forms that no bucket plays by default --------------------------------------------------------


def _joined(machine: str) -> tuple[planner.Plan, compiler.Compilation]:
    """Plan decode steps in the form whose kernels append and attend."""
    compilation = compiler.build(from_hf(CONFIG), ENGINE)
    plan = planner.plan_programs(
        compilation.fused,
        ENGINE,
        architecture=machine,
        form_of=lambda rows: f"{planner.decode_form(rows).removesuffix('.joined')}.joined",
    )
    return plan, compilation


def _split_norms(machine: str) -> tuple[planner.Plan, compiler.Compilation]:
    """Plan decode steps in the form whose norms are halves of the linears around them."""
    compilation = compiler.build(from_hf(CONFIG), ENGINE)
    plan = planner.plan_programs(
        compilation.fused,
        ENGINE,
        architecture=machine,
        form_of=lambda rows: "decode.split_norms",
    )
    return plan, compilation


@pytest.mark.parametrize("kernel", ["linear__add__rms_begin", "linear__rms_finish__glu"])
def test_a_linear_with_half_a_norm_is_as_its_golden(
    golden: Callable[[str], Golden], kernel: str
) -> None:
    plan, _ = _split_norms("sm_90")
    (program,) = [each for each in plan.programs if (each.step, each.bucket) == ("decode", 8)]
    texts = [plan.modules[each.kernel] for each in program.launches]
    text = next(text for text in texts if f"def {kernel}(" in text)
    assert text == golden(f"triton/split_norms/{kernel}.py")


@pytest.mark.parametrize("machine", MACHINES)
def test_linears_with_halves_of_norms_compile_without_spills(tmp_path: Path, machine: str) -> None:
    plan, compilation = _split_norms(machine)
    plan.write(tmp_path)
    jobs = [
        job
        for job in jobs_of(plan, compilation.fused, ENGINE, tmp_path / "kernels", machine)
        if "__rms_" in Path(job.path).stem
    ]
    assert jobs
    for outcome in compile_many(jobs, triton_cache=tmp_path / "cache"):
        assert not outcome.error, outcome.error
        assert {kernel.spill_bytes for kernel in outcome.kernels} == {0}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_that_appends_and_attends_compiles_without_spills(
    tmp_path: Path, machine: str
) -> None:
    plan, compilation = _joined(machine)
    plan.write(tmp_path)
    jobs = [
        job
        for job in jobs_of(plan, compilation.fused, ENGINE, tmp_path / "kernels", machine)
        if Path(job.path).stem.startswith("rope__kv_write__attention")
    ]
    for outcome in compile_many(jobs[:1], triton_cache=tmp_path / "cache"):
        assert not outcome.error, outcome.error
        assert [kernel.spill_bytes for kernel in outcome.kernels] == [0]
