"""Programs of the `cuda` and `interpret` targets: planned launches of emitted kernels, in order.

On a GPU a decode program is captured once in a CUDA graph and replayed. Called by the executor;
made from an artifact's plan by `loading.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from treadle.ir.errors import ArtifactError, KernelError
from treadle.ir.graph import Graph
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.kernels.load import load_module, tell_source_keys
from treadle.runtime.plan import Plan, ProgramPlan
from treadle.runtime.state import DeviceState

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE  # torch has no public name for it

FEW_TOKENS = 256  # up to here a step's launches, one by one, take longer than its kernels


@dataclass(frozen=True)
class Workspace:
    """Memory that all programs share: the arena of a step's values and the kernels' scratch."""

    arena: torch.Tensor
    scratch: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """The bytes of both."""
        return self.arena.nbytes + sum(tensor.nbytes for tensor in self.scratch.values())


def allocate_workspace(plan: Plan, device: torch.device) -> Workspace:
    """Allocate what the largest program of the plan needs."""
    size = max(program.arena_bytes for program in plan.programs)
    scratch = {
        name: torch.zeros(elements, dtype=TORCH_DTYPES[dtype], device=device)
        for name, (dtype, elements) in plan.scratch.items()
    }
    return Workspace(torch.zeros(size, dtype=torch.uint8, device=device), scratch)


class Kernels:
    """The modules of a folder, each looked at once though every layer of every program asks for it.

    Files must stay as they are for as long as it is used. `source_keys` has, by module and kernel,
    what Triton need not find out again, see `tell_source_keys`.
    """

    def __init__(
        self, folder: Path, source_keys: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._folder = folder
        self._source_keys = source_keys or {}
        self._found: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {}

    def launch_of(self, kernel: str) -> tuple[Callable[..., None], tuple[str, ...]]:
        """Give a module's `launch` and the names of its parameters.

        Raises: ArtifactError: there is no such module.
        """
        if kernel not in self._found:
            path = self._folder / f"{kernel}.py"
            if not path.is_file():
                raise ArtifactError(
                    f"The plan launches `{kernel}`, but there is no {path}.",
                    remedy="Compile the model again.",
                )
            module = load_module(path, kernel.partition(".")[0])
            tell_source_keys(module, self._source_keys.get(kernel, {}))
            function = module.launch
            self._found[kernel] = function, tuple(inspect.signature(function).parameters)
        return self._found[kernel]


class TritonProgram:
    """Launch a program's kernels. Every argument but the sizes is bound once.

    `values` are what its ops produce, `tensors` all that they touch but the caches, by the graph's
    names. A program that `follows` another changes that one's values, and draws tokens of its own.
    Raises: ArtifactError: a kernel's module is missing.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        graph: Graph,
        kernels: Kernels,
        state: DeviceState,
        weights: Mapping[str, torch.Tensor],
        workspace: Workspace,
        dims: Mapping[str, int],
        follows: TritonProgram | None = None,
    ) -> None:
        self.plan = plan
        if follows is None:
            self.values = _place_values(plan, graph, workspace.arena, dims)
        else:
            drawn = follows.values["tokens"]
            self.values = {
                **follows.values,
                "sample_index": drawn,
                "tokens": torch.empty_like(drawn),
            }
        self.tensors = {
            **state.tensors,
            **{f"@{name}": tensor for name, tensor in weights.items()},
            **self.values,
        }
        self._launches: list[tuple[str, Callable[..., None], list[object], tuple[bool, ...]]] = []
        for launch in plan.launches:
            function, parameters = kernels.launch_of(launch.kernel)
            bound: list[object] = []
            sizes: list[str] = []
            for parameter in parameters:  # the sizes come last
                kind, _, name = launch.arguments[parameter].partition(":")
                if kind == "size":
                    sizes.append(name)
                elif kind == "none":
                    bound.append(None)
                elif kind == "scratch":
                    bound.append(workspace.scratch[name])
                elif kind in ("keys", "values", "latents"):
                    bound.append(state.caches[name][kind == "values"])
                elif kind in ("open_keys", "open_values"):
                    bound.append(state.open_pages[name][kind == "open_values"])
                else:
                    bound.append(self.tensors[name])
            by_token = tuple(size == "T" for size in sizes)
            self._launches.append((f"{launch.op}: {launch.kernel}", function, bound, by_token))

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Launch every kernel for a step of these sizes; the values lie in the arena.

        Raises: KernelError: a launch failed; names the op and the kernel.
        """
        for index in range(len(self._launches)):
            self.launch(index, num_tokens, num_seqs)
        return self.values

    def launch(self, index: int, num_tokens: int, num_seqs: int) -> None:
        """Launch one kernel of the program. Raises: KernelError: see `run`."""
        name, function, bound, by_token = self._launches[index]
        sizes = [num_tokens if is_token else num_seqs for is_token in by_token]
        try:
            function(*bound, *sizes)
        except Exception as error:
            raise KernelError(
                f"Launching {name} failed: {type(error).__name__}: {error}.",
                remedy="Run `python cli.py verify` on the model to check every kernel.",
            ) from error


class Capturable(Protocol):
    """Launch kernels, always the same ones at the same addresses."""

    @property
    def plan(self) -> ProgramPlan:
        """The plan that it follows."""

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """The values that it leaves."""

    def run(self, num_tokens: int, num_seqs: int) -> object:
        """Launch the kernels for a step of these sizes."""


class GraphedProgram:
    """Replay a program as one CUDA graph, captured at given sizes (by default its bucket's).

    Other threads may copy and compute meanwhile, but not on `stream`, and may allocate memory only
    where they hold `allocating`: a capture owns what the allocator gives out.
    """

    def __init__(
        self,
        program: Capturable,
        pool: _POOL_HANDLE,
        sizes: tuple[int, int] | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        allocating: AbstractContextManager[object] | None = None,
    ) -> None:
        self._program = program
        self._graph = torch.cuda.CUDAGraph()
        sizes = sizes or (program.plan.bucket, program.plan.bucket)
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Uncaptured once: kernels are loaded, and a fault shows its own name.
            program.run(*sizes)
            stream.synchronize()
            # Not by `torch.cuda.graph`, which waits for all of the device and gives the allocator's
            # memory back before each capture: both disturb who uploads weights meanwhile.
            with allocating or nullcontext():
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    program.run(*sizes)
                finally:
                    self._graph.capture_end()

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Replay; sequences beyond the step's own are padding rows."""
        self._graph.replay()
        return self._program.values


def capture_decode(
    programs: Mapping[tuple[str, int], object],
    stream: torch.cuda.Stream,
    allocating: AbstractContextManager[object] | None = None,
) -> Mapping[int, GraphedProgram]:
    """Capture a graph per decode bucket, the largest first: the smaller ones reuse its memory.

    `programs` are those of the steps, or those that follow them; `allocating` is what other threads
    hold that allocate memory meanwhile.
    """
    pool = torch.cuda.graph_pool_handle()
    return {
        bucket: GraphedProgram(
            program, pool, (bucket, bucket), stream=stream, allocating=allocating
        )
        for (step, bucket), program in sorted(programs.items(), key=itemgetter(0), reverse=True)
        if step == "decode" and isinstance(program, TritonProgram)
    }


def capture_few_tokens(
    programs: Mapping[tuple[str, int], object],
    max_rows: int,
    stream: torch.cuda.Stream,
    allocating: AbstractContextManager[object] | None = None,
) -> Mapping[int, GraphedProgram]:
    """Capture a graph per mixed bucket whose launches would take longer than its kernels."""
    pool = torch.cuda.graph_pool_handle()
    return {
        bucket: GraphedProgram(
            program, pool, (bucket, min(bucket, max_rows)), stream=stream, allocating=allocating
        )
        for (step, bucket), program in sorted(programs.items(), key=itemgetter(0), reverse=True)
        if step == "mixed" and bucket <= FEW_TOKENS and isinstance(program, TritonProgram)
    }


def _place_values(
    plan: ProgramPlan, graph: Graph, arena: torch.Tensor, dims: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Give every value of the program as a view of the arena, at its bucket's size."""
    values = {}
    for name, offset in plan.offsets.items():
        type_ = graph.types[name]
        size = type_.num_bytes(dims)
        flat = arena[offset : offset + size].view(TORCH_DTYPES[type_.dtype])
        values[name] = flat.view(type_.bound_shape(dims))
    return values
