"""Engines with random weights and real shapes, for benchmarks: speed does not depend on the values.

Called by the benchmarks of this folder; builds the very programs that `serve` runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.ir.graph import Graph, Weight
from treadle.models.config import from_hf
from treadle.runtime import compiler, planner
from treadle.runtime.config import EngineConfig
from treadle.runtime.state import DeviceState, allocate_state, cache_values
from treadle.runtime.triton_program import (
    GraphedProgram,
    TritonProgram,
    Workspace,
    allocate_workspace,
)
from treadle.runtime.weights import TORCH_DTYPES, rope_table

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
}


@dataclass(frozen=True)
class RandomEngine:
    """Programs, state and weights of a model, without scheduler or tokenizer."""

    config: EngineConfig
    graphs: Mapping[str, Graph]
    plan: planner.Plan
    programs: Mapping[tuple[str, int], TritonProgram]
    state: DeviceState
    weights: Mapping[str, torch.Tensor]
    workspace: Workspace

    def graphed(self, bucket: int) -> GraphedProgram:
        """Capture the decode program of a bucket."""
        return GraphedProgram(self.programs["decode", bucket], torch.cuda.graph_pool_handle())


def random_weights(weights: tuple[Weight, ...], window: int, device: str) -> dict[str, torch.Tensor]:
    """Fill every declared weight: matrices N(0, 0.02), norms near 1, tied heads shared."""
    made: dict[str, torch.Tensor] = {}
    by_source: dict[str, torch.Tensor] = {}
    for weight in weights:
        if weight.rope:
            made[weight.name] = rope_table(weight.rope, window).to(device)
            continue
        source = weight.fallback or weight.parts[0]
        if source not in by_source:
            shape = weight.type.bound_shape({})
            values = torch.empty(shape, dtype=TORCH_DTYPES[weight.type.dtype], device=device)
            is_norm = len(shape) == 1
            by_source[source] = values.normal_(1.0 if is_norm else 0.0, 0.02)
        made[weight.name] = by_source[source]
    return made


def build_engine(
    name: str,
    *,
    max_rows: int,
    window: int,
    target: str = "cuda",
    dtype: str = "bf16",
    page_size: int = 64,
    max_step_tokens: int = 8192,
    num_pages: int = 0,
    num_layers: int = 0,
    choose: planner.Choose = planner.first_candidate,
) -> RandomEngine:
    """Build a model's programs with random weights; `num_layers` cuts it for checks."""
    raw = dict(CONFIGS[name])
    raw["num_hidden_layers"] = num_layers or raw["num_hidden_layers"]
    engine = EngineConfig(target, dtype, page_size, max_rows, max_step_tokens, window)
    graphs = compiler.build(from_hf(raw), engine).fused
    plan = planner.plan_programs(graphs, engine, choose=choose)
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-"))
    plan.write(folder)
    device = "cuda" if target == "cuda" else "cpu"
    weights = random_weights(graphs["decode"].weights, window, device)
    pages = num_pages or max_rows * engine.pages_per_row
    state = allocate_state(cache_values(graphs["decode"]), engine, pages, torch.device(device))
    workspace = allocate_workspace(plan, torch.device(device))
    programs = {
        (program.step, program.bucket): TritonProgram(
            program,
            graphs[program.form],
            folder / "kernels",
            state,
            weights,
            workspace,
            planner.bucket_dims(engine, program.step, program.bucket),
        )
        for program in plan.programs
    }
    return RandomEngine(engine, graphs, plan, programs, state, weights, workspace)


def fill_rows(engine: RandomEngine, num_seqs: int, context_tokens: int) -> None:
    """Give the first rows random pages, keys and values, and this many tokens each."""
    state, config = engine.state, engine.config
    device = state.packed.device
    each = config.pages_per_row
    order = torch.randperm(num_seqs * each, device=device, dtype=torch.int32)
    state.tensors["block_table"][:num_seqs] = order.view(num_seqs, each)
    state.tensors["length"].fill_(context_tokens)
    state.tensors["last_token"].random_(0, 256)
    rows = state.tensors["seq_rows"]
    rows.fill_(-1)
    rows[:num_seqs] = torch.arange(num_seqs, device=device, dtype=torch.int32)
    for keys, values in state.caches.values():
        keys.normal_()
        values.normal_()
