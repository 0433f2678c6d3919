"""The kernels that a family has beyond Llama's, as emitted: their text, and that GPUs hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.kernels.test_cross_compile import SHARED_LIMIT
from tests.kernels.test_llama_kernels import CONFIG, ENGINE, MACHINES
from treadle.kernels.cross_compile import Job, Outcome, compile_many
from treadle.models.config import from_hf
from treadle.runtime import compiler, planner
from treadle.runtime.binaries import jobs_of
from treadle.runtime.plan import Plan

# Keys of the config that are not Llama-3.2-1B's, for the sizes of a model people run; for families
# with kernels that no other has.
CHANGES: dict[str, dict[str, object]] = {
    "gemma": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "head_dim": 256,
        "num_attention_heads": 16,
        "sliding_window": 1024,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "head_dim": 96,
        "partial_rotary_factor": 0.75,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "head_dim": 128},
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": 128,
    },
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 128,
        "num_hidden_layers": 3,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_local_experts": 32,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
    },
}
# Families whose kernels are those of another one, and perhaps more: only those are theirs.
LIKE = {
    "qwen3_moe": "qwen3",
    "mixtral": "qwen3_moe",
    "qwen2_moe": "qwen3_moe",
    "glm4_moe": "qwen3_moe",
    "deepseek": "qwen3_moe",
}


def plan_of(machine: str, **changes: object) -> tuple[Plan, compiler.Compilation]:
    # The layers are alike.
    compilation = compiler.build(from_hf({**CONFIG, "num_hidden_layers": 1, **changes}), ENGINE)
    return planner.plan_programs(compilation.fused, ENGINE, architecture=machine), compilation


def kinds_of(plan: Plan) -> dict[str, str]:
    """Give the first module of each kernel, by the kernel's name."""
    modules: dict[str, str] = {}
    for program in plan.programs:
        for one in program.launches:
            modules.setdefault(one.kernel.partition(".")[0], one.kernel)
    return modules


def own_kernels(plan: Plan, machine: str, family: str) -> dict[str, str]:
    """Give the modules of the kernels that neither Llama has nor the family that it is like."""
    like = CHANGES[LIKE[family]] if family in LIKE else {}
    known = {*kinds_of(plan_of(machine)[0]), *kinds_of(plan_of(machine, **like)[0])}
    return {name: module for name, module in kinds_of(plan).items() if name not in known}


@pytest.mark.parametrize("family", CHANGES)
def test_each_kernel_that_llama_lacks_is_as_its_golden(
    golden: Callable[[str], Golden], family: str
) -> None:
    plan, _ = plan_of("sm_90", **CHANGES[family])
    own = own_kernels(plan, "sm_90", family)
    for name, module in own.items():
        assert plan.modules[module] == golden(f"triton/{family}/{name}.py"), name
    folder = golden(f"triton/{family}/any").path.parent
    assert {path.stem for path in folder.glob("*.py")} == set(own)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Outcome]]:
    """Compile all kernels for all machines at once: by family, then by kernel and machine."""
    root = tmp_path_factory.mktemp("families")
    named: dict[Job, tuple[str, str]] = {}
    for family, machine in product(CHANGES, MACHINES):
        plan, compilation = plan_of(machine, **CHANGES[family])
        folder = root / family / machine
        folder.mkdir(parents=True)
        plan.write(folder)
        own = {module: name for name, module in own_kernels(plan, machine, family).items()}
        jobs = jobs_of(plan, compilation.fused, ENGINE, folder / "kernels", machine)
        wanted = {
            job: (family, f"{own[Path(job.path).stem]} {machine}")
            for job in jobs
            if Path(job.path).stem in own
        }
        assert len({job.path for job in wanted}) == len(own)
        named |= wanted
    found: dict[str, dict[str, Outcome]] = {family: {} for family in CHANGES}
    for outcome in compile_many(list(named), triton_cache=root / "cache"):
        family, name = named[outcome.job]
        assert not outcome.error, (family, name, outcome.error)
        found[family][name] = outcome
    return found


@pytest.mark.parametrize("family", CHANGES)
def test_each_kernel_that_llama_lacks_compiles_and_uses_what_is_recorded(
    outcomes: dict[str, dict[str, Outcome]], golden: Callable[[str], Golden], family: str
) -> None:
    rows = {}
    for name, outcome in outcomes[family].items():
        (kernel,) = outcome.kernels
        assert kernel.spill_bytes == 0, name
        assert kernel.shared_bytes <= SHARED_LIMIT[outcome.job.target], name
        rows[name] = {
            "registers": kernel.registers,
            "shared_bytes": kernel.shared_bytes,
            "spill_bytes": kernel.spill_bytes,
        }
    recorded = golden(f"triton/{family}/resources.json")
    text = json.dumps(dict(sorted(rows.items())), indent=1) + "\n"
    assert text == recorded if rows else not recorded.path.exists()
