"""Engines without tokenizer, scheduler and checkpoint: random weights, real shapes, real programs.

The tuner times them, `verify` checks kernels with them, benchmarks measure them: what runs is what
`serve` runs. Speed does not depend on the weights' values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from treadle.ir.graph import Graph, Weight
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import Plan, bucket_dims
from treadle.runtime.state import DeviceState, allocate_state, cache_values
from treadle.runtime.triton_program import Capturable, Kernels, TritonProgram, Workspace
from treadle.runtime.weights import rope_table


@dataclass(frozen=True)
class Trial:
    """Programs, state and weights of an engine on trial."""

    engine: EngineConfig
    graphs: Mapping[str, Graph]
    state: DeviceState
    weights: Mapping[str, torch.Tensor]

    def programs(
        self, plan: Plan, kernels: Path, workspace: Workspace
    ) -> dict[tuple[str, int], TritonProgram]:
        """Build the programs of a plan, by step and bucket."""
        modules = Kernels(kernels)
        return {
            (each.step, each.bucket): TritonProgram(
                each,
                self.graphs[each.form],
                modules,
                self.state,
                self.weights,
                workspace,
                bucket_dims(self.engine, each.step, each.bucket),
            )
            for each in plan.programs
        }

    def fill(self, num_seqs: int, context_tokens: int) -> None:
        """Give the first rows scattered pages of random keys and values, and this many tokens."""
        state, device = self.state, self.state.packed.device
        pages = -(-(context_tokens + self.engine.page_size) // self.engine.page_size)
        order = torch.randperm(state.dims["P"], device=device)[: num_seqs * pages]
        table = state.tensors["block_table"]
        table[:num_seqs, :pages] = order.view(num_seqs, pages).to(table.dtype)
        state.tensors["length"].fill_(context_tokens)
        state.tensors["last_token"].random_(0, 256)
        state.write_decode(num_seqs)
        state.fill_caches()

    def fill_prompts(
        self, num_seqs: int, prompt_tokens: int, decoding: int = 0, context_tokens: int = 0
    ) -> None:
        """Write a mixed step of whole prompts of random tokens, beside rows that decode."""
        self.fill(decoding + num_seqs, max(prompt_tokens, context_tokens))
        prompts = torch.randint(0, 256, (num_seqs, prompt_tokens)).tolist()
        self.state.write_prompts(prompts, [context_tokens] * decoding)


class Replayable(Protocol):
    """Run a step whose sizes were fixed before."""

    def run(self, num_tokens: int, num_seqs: int) -> object:
        """Run it; the sizes are of no account."""


class FixedProgram:
    """Stand in for a captured program where there is no GPU: run it again at the same sizes."""

    def __init__(self, program: Capturable, sizes: tuple[int, int]) -> None:
        self._program, self._sizes = program, sizes
        program.run(*sizes)

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Run the step; sizes are those of the beginning."""
        self._program.run(*self._sizes)
        return self._program.values


class SelectedProgram:
    """Run some launches of a program only: to see what they cost, or what the others do."""

    def __init__(self, program: TritonProgram, indices: Sequence[int]) -> None:
        self.plan = program.plan
        self.values = program.values
        self._program = program
        self._indices = tuple(indices)

    def run(self, num_tokens: int, num_seqs: int) -> None:
        """Launch the kernels that are selected."""
        for index in self._indices:
            self._program.launch(index, num_tokens, num_seqs)


def random_weights(
    weights: tuple[Weight, ...], window: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Fill every declared weight: matrices and biases N(0, 0.02), norms near 1, tied heads shared.

    Biases near 1 would be most of the stream, and all tokens would choose the same experts.
    """
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
            is_norm = len(shape) == 1 and not source.endswith("bias")
            by_source[source] = values.normal_(1.0 if is_norm else 0.0, 0.02)
        made[weight.name] = by_source[source]
    return made


def make_trial(
    graphs: Mapping[str, Graph], engine: EngineConfig, num_pages: int, device: torch.device
) -> Trial:
    """Allocate state and random weights for the fused graphs of an engine."""
    graph = next(iter(graphs.values()))
    weights = random_weights(graph.weights, engine.max_context_tokens, device)
    state = allocate_state(cache_values(graph), engine, num_pages, device)
    return Trial(engine, graphs, state, weights)


def time_graph_ms(
    program: Replayable, trial: Trial, context_tokens: int, rounds: int
) -> list[float]:
    """Time replays of a captured decode step, each at the same context; milliseconds, in order."""
    length = trial.state.tensors["length"]
    if length.device.type != "cuda":
        return _time_plain_ms(program, length, context_tokens, rounds)
    stream = torch.cuda.current_stream()
    times = []
    for _ in range(rounds):
        length.fill_(context_tokens)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        program.run(0, 0)
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _time_plain_ms(
    program: Replayable, length: torch.Tensor, context_tokens: int, rounds: int
) -> list[float]:
    times = []
    for _ in range(rounds):
        length.fill_(context_tokens)
        began = time.perf_counter()
        program.run(0, 0)
        times.append(1e3 * (time.perf_counter() - began))
    return times
