"""The models that benchmarks measure, by shape: configs of public models, random weights.

Called by the benchmarks of this folder; builds the very programs that `serve` runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from treadle.ir.errors import KernelError
from treadle.ir.graph import Graph
from treadle.kernels.cross_compile import compile_many
from treadle.kernels.tuned import TunedTable, shipped_table
from treadle.models.config import from_hf
from treadle.runtime import compiler, machine, planner
from treadle.runtime.binaries import jobs_of
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import Plan
from treadle.runtime.trial import Trial, make_trial
from treadle.runtime.triton_program import GraphedProgram, TritonProgram, allocate_workspace

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
CONFIGS: dict[str, dict[str, object]] = {
    "llama-3.2-1b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    # Qwen3-0.6B's sizes without its norms of q and k, which the Llama spec does not have.
    "qwen3-0.6b-shapes": _LLAMA
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "smollm2-135m": _LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "torch_dtype": "bfloat16",
    },
    # Of the text model; what is said of images is left out.
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "torch_dtype": "bfloat16",
    },
    # With the experts in bf16, to which a checkpoint in MXFP4 is widened.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    # For trying the benchmarks themselves, on any machine.
    "tiny": _LLAMA
    | {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    },
}


@dataclass(frozen=True)
class BenchEngine:
    """A trial with its programs built; `kernels` is the folder of their modules."""

    trial: Trial
    plan: Plan
    programs: dict[tuple[str, int], TritonProgram]
    kernels: Path

    def graphed(self, bucket: int) -> GraphedProgram:
        """Capture the decode program of a bucket, its kernels compiled in parallel before."""
        program = self.programs["decode", bucket].plan
        one = Plan((program,), scratch=self.plan.scratch)
        compile_plan(one, self.trial.graphs, self.trial.engine, self.kernels)
        return GraphedProgram(self.programs["decode", bucket], torch.cuda.graph_pool_handle())


def build_graphs(name: str, engine: EngineConfig, num_layers: int = 0) -> compiler.Compilation:
    """Build and fuse a model's graphs; `num_layers` cuts it, 0 leaves it whole."""
    config = from_hf(CONFIGS[name])
    return compiler.build(replace(config, num_layers=num_layers or config.num_layers), engine)


def build_engine(
    name: str,
    *,
    max_rows: int,
    window: int,
    target: str = "cuda",
    dtype: str = "bf16",
    kv_format: str = "",
    page_size: int = 64,
    max_step_tokens: int = 8192,
    num_pages: int = 0,
    num_layers: int = 0,
    table: TunedTable | None = None,
    form_of: Callable[[int], str] | None = None,
    only: tuple[str, int] | None = None,
    choose: planner.Choose | None = None,
    reuse_memory: bool = True,
) -> BenchEngine:
    """Build a model's programs with random weights, by the shipped tuned table unless given one.

    `form_of` names the form of graph for a decode step of so many sequences. `only` names the step
    and bucket of one program: no other is made, and on a GPU its kernels are compiled in parallel
    first, and without `reuse_memory` each of them can be run by itself. `choose` decides instead of
    any table.
    """
    engine = EngineConfig(
        target, dtype, page_size, max_rows, max_step_tokens, window, kv_format=kv_format
    )
    graphs = build_graphs(name, engine, num_layers).fused
    found = machine.look()
    chosen = shipped_table(found.gpu) if table is None else table
    choose = choose or partial(chosen.choose, on_stale=print)
    if only is None:
        plan = planner.plan_programs(
            graphs, engine, architecture=found.architecture, choose=choose, form_of=form_of
        )
    else:
        step, bucket = only
        form = (form_of or planner.decode_form)(bucket) if step == "decode" else "mixed"
        plan = planner.plan_one(
            engine,
            step,
            bucket,
            form,
            graphs[form],
            found.architecture,
            choose,
            reuse_memory=reuse_memory,
        )
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    plan.write(folder)
    if only is not None and target == "cuda":
        compile_plan(plan, graphs, engine, folder / "kernels")
    device = torch.device("cuda" if target == "cuda" else "cpu")
    trial = make_trial(graphs, engine, num_pages or max_rows * engine.pages_per_row, device)
    workspace = allocate_workspace(plan, device)
    programs = trial.programs(plan, folder / "kernels", workspace)
    return BenchEngine(trial, plan, programs, folder / "kernels")


def compile_plan(
    plan: Plan, graphs: Mapping[str, Graph], engine: EngineConfig, kernels: Path
) -> None:
    """Compile a plan's kernels in parallel to where this process's Triton looks for them.

    Raises: KernelError: one does not compile; names it.
    """
    jobs = jobs_of(plan, graphs, engine, kernels, machine.look().architecture)
    for outcome in compile_many(jobs):
        if outcome.error:
            raise KernelError(f"{outcome.job.path} does not compile: {outcome.error}")
