"""Artifact → loaded model: check it against the machine and the weights, then bring everything up.

Called in the engine's worker. Reports each phase; every phase has a line in the summary. Weights
come by threads of their own while this one does what needs their addresses only.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.runtime.cache import triton_key

from treadle.ir import knobs
from treadle.ir.errors import ArtifactError, ConfigError, MachineError
from treadle.ir.graph import Graph
from treadle.ir.text import parse_graph
from treadle.runtime import machine
from treadle.runtime.artifact import TOKENIZER, Artifact, open_artifact
from treadle.runtime.binaries import BINARIES, install_binaries, read_source_keys
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.config import WEIGHT_DTYPES, EngineConfig
from treadle.runtime.engine import LoadedModel
from treadle.runtime.executor import Executor, Program
from treadle.runtime.host_memory import find_free_memory
from treadle.runtime.host_pages import HostPages
from treadle.runtime.packed_weights import (
    PackedWeights,
    check_weight_dtype,
    find_narrow,
    pack_weights,
    tries_float16,
)
from treadle.runtime.page_copies import PageCopier
from treadle.runtime.pages import PagePool
from treadle.runtime.pending_weights import PendingWeights, can_be_pending
from treadle.runtime.plan import PLAN, RESAMPLE, Plan, bucket_dims, read_plan
from treadle.runtime.pooling import read_pooling
from treadle.runtime.reference_program import ReferenceProgram
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.state import (
    DeviceState,
    allocate_state,
    cache_values,
    open_page_bytes,
    page_bytes,
)
from treadle.runtime.tokenizer import Tokenizer
from treadle.runtime.triton_program import (
    Kernels,
    TritonProgram,
    allocate_workspace,
    capture_decode,
    capture_few_tokens,
)
from treadle.runtime.weights import plan_weights, read_weights
from treadle.runtime.worthwhile_rows import find_worthwhile_rows

logger = logging.getLogger("treadle.runtime")

# What one holds while allocating memory that another thread's capture must not see.
Allocating = AbstractContextManager[object]
# The programs by step and bucket, then what follows each.
Programs = Mapping[tuple[str, int], ReferenceProgram | TritonProgram]

CPU_POOL_BYTES = 2 * 2**30
# Rows that decode beside prompts cost more than a step of their own, which reads the weights again,
# from where their keys and values are a third of the weights' bytes (8B on an H200, bf16 to int4).
MIXED_SHARE = 1 / 3
GPU_RESERVE_BYTES = 3 * 2**30  # for graphs, cuBLAS-free workspace and what torch holds back


@dataclass(frozen=True)
class ServeOptions:
    """Say how to serve an artifact. `kv_bytes` or `num_pages` fix the pool; 0 means: what fits.

    `kv_host_bytes` of host memory keep the pages that the pool evicts; 0: none.
    `kv_dtype` is the KV cache's, one that the artifact was compiled for; empty for its first.
    `model_path` replaces the path in the manifest, for artifacts that moved with their weights.
    `pooling`: how hidden states become an embedding, last or mean; empty: as the model declares.
    `weight_dtype` is how the `reference` target holds the weights that it multiplies by in float32:
    float32, float16 (rounded to it), or auto: float16 where the checkpoint's numbers fit in it.
    Raises: ConfigError: host memory without the prefix cache, which is what finds pages again; an
    unknown `weight_dtype`.
    """

    kv_bytes: int = 0
    num_pages: int = 0
    kv_host_bytes: int = 0
    kv_dtype: str = ""
    prefix_cache: bool = True
    max_waiting: int = 1024
    model_path: str = ""
    pooling: str = ""
    weight_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise ConfigError(
                f"--weight-dtype is one of {', '.join(WEIGHT_DTYPES)}, not `{self.weight_dtype}`."
            )
        if self.kv_host_bytes and not self.prefix_cache:
            raise ConfigError(
                "--kv-host-memory keeps pages of the prefix cache, which is off.",
                remedy="Leave out one of --kv-host-memory and --no-prefix-cache.",
            )


def check_fits(artifact: Artifact, checkpoint: Checkpoint) -> None:
    """Refuse an artifact made for another machine or other weights. Raises: ArtifactError."""
    manifest, found = artifact.manifest, machine.look()
    if checkpoint.fingerprint() != manifest.model_fingerprint:
        raise ArtifactError(
            f"{artifact.path} was compiled for other weights than {checkpoint.path} holds now.",
            remedy=f"Compile again: python cli.py compile {checkpoint.path} -o {artifact.path}",
        )
    if manifest.target != "cuda":
        return
    machine.device_of("cuda")
    if manifest.architecture != found.architecture:
        raise ArtifactError(
            f"{artifact.path} was compiled for {manifest.architecture}, this GPU is {found.gpu} "
            f"({found.architecture}).",
            remedy="Compile it again on this machine, or with --arch " + found.architecture + ".",
        )
    if manifest.triton != found.triton:
        raise ArtifactError(
            f"{artifact.path} was compiled with Triton {manifest.triton}, this machine has "
            f"{found.triton}: its binaries would not be found, and kernels compile while serving.",
            remedy="Compile it again on this machine.",
        )


@dataclass(frozen=True)
class LoadedArtifact:
    """An artifact brought up as far as tensors and programs: what serving and `verify` share.

    `programs` are by step and bucket, decode programs not yet captured, and `resamples` follow the
    program of the same key; `packed` are the weights as the target `reference` multiplies by them,
    whose programs keep no others than they read; `warnings` say what is odd about the weights and
    yet usable. `weights_s` is the time of weights that came beside other phases, 0 for a phase of
    their own.
    """

    artifact: Artifact
    engine: EngineConfig
    checkpoint: Checkpoint
    graphs: Mapping[str, Graph]
    plan: Plan
    weights: Mapping[str, torch.Tensor]
    state: DeviceState
    programs: Programs
    resamples: Programs
    workspace_bytes: int
    packed: PackedWeights | None = None
    warnings: tuple[str, ...] = ()
    weights_s: float = 0.0

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights that programs keep, shared ones counted once."""
        kept: Iterable[torch.Tensor] = self.weights.values()
        if self.packed is not None:
            programs = [p for p in self.programs.values() if isinstance(p, ReferenceProgram)]
            kept = [weight for program in programs for weight in program.weights]
        num_bytes = sum({w.data_ptr(): w.nbytes for w in kept}.values())
        return num_bytes + (self.packed.num_bytes if self.packed is not None else 0)


def load_artifact(
    path: Path,
    options: ServeOptions,
    begin: Callable[[str], None] = lambda phase: None,
    on_open: Callable[[Artifact, Checkpoint], object] = lambda artifact, checkpoint: None,
    on_built: Callable[[LoadedArtifact, Allocating], object] = lambda loaded, allocating: None,
) -> LoadedArtifact:
    """Check an artifact, load weights, allocate state and build programs. `begin` hears each phase.

    `on_open` may begin what needs the files only. `on_built` may use programs and the weights'
    addresses; on a GPU their values are still on their way, and memory is allocated by the thread
    that brings them, while it holds what `on_built` is given.

    Raises: ArtifactError, CheckpointError: it does not fit. MachineError: too little memory.
    """
    begin("checking the artifact")
    artifact = open_artifact(path, later=BINARIES)  # which are read only to be installed
    config = artifact.engine(options.kv_dtype)
    check_weight_dtype(options.weight_dtype, config)
    checkpoint = open_checkpoint(
        options.model_path or artifact.manifest.model_path,
        if_missing=""
        if options.model_path
        else f"{path} was compiled from it. Where it has moved, say so: treadle serve {path} "
        "--model-path MODEL",
    )
    check_fits(artifact, checkpoint)
    on_open(artifact, checkpoint)
    device = machine.device_of(config.target)
    plan = read_plan(artifact.json(artifact.part(config, PLAN)))

    def read_graph(form: str) -> Graph:
        return parse_graph(artifact.text(artifact.part(config, f"graph/{form}.ir")))

    first_form = plan.programs[0].form
    any_graph = read_graph(first_form)
    warnings: list[str] = []
    recipes = plan_weights(any_graph.weights, checkpoint, warnings.append)
    declared, window = any_graph.weights, config.max_context_tokens
    pending = None
    if config.target != "reference" and can_be_pending(recipes, checkpoint):
        begin("allocating weights")
        pending = PendingWeights(
            declared, recipes, checkpoint, device=device, max_context_tokens=window
        )
        weights = pending.tensors
    else:
        begin("loading weights")
        weights = read_weights(
            declared, recipes, checkpoint, device=device, max_context_tokens=window
        )
    begin("allocating the KV cache")
    passing_bytes = pending.passing_bytes if pending else 0
    num_pages = decide_pages(any_graph, config, options, device, passing_bytes)
    allocating = threading.Lock()
    with _filling(pending, allocating) as wait_for_weights:
        graphs = {first_form: any_graph}
        for program in plan.all_programs:
            if program.form not in graphs:
                graphs[program.form] = read_graph(program.form)
        packed = None
        if config.target == "reference":
            narrow = find_narrow(recipes, checkpoint)
            is_half = tries_float16(options.weight_dtype, config, narrow)
            begin("packing weights as float16" if is_half else "packing weights")
            packed = pack_weights(any_graph, weights, options.weight_dtype, narrow)
        vocab_size = graphs[RESAMPLE].type_of("logits").size(1)
        state = allocate_state(cache_values(any_graph), config, num_pages, device, vocab_size)
        programs, resamples, workspace_bytes = _build_programs(
            artifact, config, plan, graphs, state, weights, packed, begin
        )
        loaded = LoadedArtifact(
            artifact,
            config,
            checkpoint,
            graphs,
            plan,
            weights,
            state,
            programs,
            resamples,
            workspace_bytes,
            packed,
            tuple(warnings),
        )
        on_built(loaded, allocating)
        if pending is not None:
            begin("waiting for the weights")
        weights_s = wait_for_weights()
    if passing_bytes and device.type == "cuda":
        torch.cuda.empty_cache()  # what the weights passed through is of no use to other streams
    return replace(loaded, weights_s=weights_s)


@contextmanager
def _filling(
    pending: PendingWeights | None, allocating: Allocating
) -> Iterator[Callable[[], float]]:
    """Fill weights by a thread of their own; give what waits for them and tells their seconds.

    It ends with the block: early, where that fails.
    """
    if pending is None:
        yield lambda: 0.0
        return
    is_over = threading.Event()

    def fill() -> float:
        began_s = time.perf_counter()
        pending.fill(allocating, is_over.is_set)
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(1, thread_name_prefix="treadle-weights") as aside:
        coming = aside.submit(fill)
        try:
            yield coming.result
        finally:
            is_over.set()


def _build_programs(
    artifact: Artifact,
    config: EngineConfig,
    plan: Plan,
    graphs: Mapping[str, Graph],
    state: DeviceState,
    weights: Mapping[str, torch.Tensor],
    packed: PackedWeights | None,
    begin: Callable[[str], None],
) -> tuple[Programs, Programs, int]:
    """Build the programs, what follows each, and the workspace of all; give that one's bytes."""
    assert plan.resample is not None, "an artifact has the programs of all steps"
    programs: dict[tuple[str, int], ReferenceProgram | TritonProgram] = {}
    resamples: dict[tuple[str, int], ReferenceProgram | TritonProgram] = {}
    if config.target == "reference":
        for each in plan.programs:
            graph = graphs[each.form]
            program = ReferenceProgram(graph, state, weights, packed)
            programs[each.step, each.bucket] = program
            resamples[each.step, each.bucket] = ReferenceProgram(
                graphs[RESAMPLE], state, {}, follows=program
            )
        return programs, resamples, 0
    begin("loading kernels")
    source_keys: Mapping[str, Mapping[str, str]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="treadle-triton") as aside:
        if config.target == "cuda":
            knobs.use_triton_cache(install_binaries(artifact))
            # Before its first launch Triton hashes its own library, 0.3 s without Python's lock.
            hashing = aside.submit(triton_key)
            source_keys = read_source_keys(artifact)
        kernels = Kernels(artifact.path / "kernels", source_keys)
        workspace = allocate_workspace(plan, state.packed.device)
        for each in plan.programs:
            dims = bucket_dims(config, each.step, each.bucket)
            found = TritonProgram(each, graphs[each.form], kernels, state, weights, workspace, dims)
            programs[each.step, each.bucket] = found
            resamples[each.step, each.bucket] = TritonProgram(
                plan.resample, graphs[RESAMPLE], kernels, state, {}, workspace, dims, follows=found
            )
        if config.target == "cuda":
            hashing.result()
    return programs, resamples, workspace.num_bytes


def load_model(
    path: Path,
    options: ServeOptions,
    report: Callable[[str], None] = lambda phase: None,
    before_s: Mapping[str, float] | None = None,
) -> LoadedModel:
    """Load an artifact for serving. `before_s` are phases that are over, which the summary names.

    Raises: see `load_artifact`. MachineError: there is not so much host memory. ConfigError: it
    holds not even a page.
    """
    check_host_memory(options.kv_host_bytes)
    timer = _PhaseTimer(report, before_s or {})
    tokenizers: list[Future[Tokenizer]] = []
    captured: dict[str, Mapping[int, Program]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="treadle-tokenizer") as aside:

        def load_aside(artifact: Artifact, checkpoint: Checkpoint) -> None:
            tokenizers.append(aside.submit(_load_tokenizer, artifact, checkpoint))

        def capture(built: LoadedArtifact, allocating: Allocating) -> None:
            if built.engine.target != "cuda":
                return
            timer.begin("capturing CUDA graphs")
            stream = torch.cuda.Stream()
            captured["steps"] = capture_decode(built.programs, stream, allocating)
            captured["resamples"] = capture_decode(built.resamples, stream, allocating)
            captured["few tokens"] = capture_few_tokens(
                built.programs, built.engine.max_rows, stream, allocating
            )
            timer.begin("warming up")
            _warm_up(built)

        loaded = load_artifact(path, options, timer.begin, load_aside, capture)
        timer.begin("waiting for the tokenizer")
        tokenizer = tokenizers[0].result()
    manifest, state = loaded.artifact.manifest, loaded.state
    config = loaded.engine
    steps, resamples = _by_step(loaded.programs), _by_step(loaded.resamples)
    if captured:
        steps["decode"], resamples["decode"] = captured["steps"], captured["resamples"]
    warnings = [*loaded.warnings]
    pooling = options.pooling or read_pooling(loaded.checkpoint.path, warnings.append)
    host = copier = None
    if options.kv_host_bytes:
        timer.begin("allocating host memory")
        host = HostPages(decide_host_pages(state, options.kv_host_bytes), state.page_bytes)
        copier = PageCopier(state, host)
    pool = PagePool(state.dims["P"], config.page_size, prefix_cache=options.prefix_cache, host=host)
    scheduler = Scheduler(
        pool,
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        max_model_len=config.max_context_tokens,
        eos_token_ids=tokenizer.eos_token_ids,
        max_waiting=options.max_waiting,
        max_in_flight=2 if config.target == "cuda" else 1,
        quantises_pages=bool(config.kv_format),
        **limit_mixed_steps(loaded),
        worthwhile_rows=(
            find_worthwhile_rows(loaded.plan, loaded.graphs, config)
            if config.target == "cuda"
            else None
        ),
    )
    summary = {
        "model": f"{manifest.model_name} ({manifest.model_architecture}, {config.dtype})",
        "target": f"{config.target} {manifest.gpu or manifest.architecture}".strip(),
        "window": f"{config.max_context_tokens} tokens",
        "weights": _describe_weights(loaded),
        "workspace": f"{(loaded.workspace_bytes + state.num_bytes) / 2**20:.0f} MiB",
        "KV cache": _describe_cache(state, config),
        **({} if host is None else {"KV host memory": _describe_host(host, config)}),
        "largest batch": f"{config.max_rows} requests, {config.max_step_tokens} tokens a step",
        "start-up": timer.finish(),
    }
    if pooling:
        summary["embeddings"] = f"{pooling} of the hidden states"
    if warnings:
        summary["warning"] = "; ".join(warnings)
    return LoadedModel(
        name=manifest.model_name,
        tokenizer=tokenizer,
        executor=Executor(state, steps, resamples, copier, captured.get("few tokens")),
        scheduler=scheduler,
        max_model_len=config.max_context_tokens,
        vocab_size=int(loaded.checkpoint.config["vocab_size"]),
        hidden_size=loaded.graphs["mixed"].type_of("normed").size(1),
        pooling=pooling,
        summary=summary,
        count_jit_compiles=count_compiles(),
        release_memory=_release_memory,
    )


def _release_memory() -> None:
    """Give back what freed tensors and graphs still hold."""
    gc.collect()  # programs and state refer to each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _by_step(
    programs: Programs,
) -> dict[str, Mapping[int, Program]]:
    found: dict[str, dict[int, Program]] = {"decode": {}, "mixed": {}}
    for (step, bucket), program in programs.items():
        found[step][bucket] = program
    return dict(found.items())


def _describe_weights(loaded: LoadedArtifact) -> str:
    """Say what the weights take and how they are held, and their time where no phase says it."""
    size = f"{loaded.weight_bytes / 2**20:.0f} MiB"
    if loaded.packed is not None and (held := loaded.packed.describe()):
        size += f", {held}"
    if not loaded.weights_s:
        return size
    return f"{size}, read in {loaded.weights_s:.2f} s beside the phases from `loading kernels` on"


def _describe_cache(state: DeviceState, config: EngineConfig) -> str:
    """Say what the pages hold and cost: dtype, bytes per token, pages, full windows."""
    num_pages = state.dims["P"]
    token_bytes = state.cache_bytes / (num_pages * config.page_size)
    open_pages = ""
    if state.open_bytes:
        open_pages = f" and {state.open_bytes / 2**20:.0f} MiB for pages not yet full"
    return (
        f"{config.kv_format or config.dtype}, {token_bytes / 2**10:.1f} KiB a token, "
        f"{state.cache_bytes / 2**20:.0f} MiB = {num_pages} pages of {config.page_size} tokens"
        f"{open_pages}, "
        f"{num_pages // config.pages_per_row} requests of the full window"
    )


def _describe_host(host: HostPages, config: EngineConfig) -> str:
    """Say what host memory holds: bytes, pages, tokens; and how fast it is copied."""
    return (
        f"{host.num_pages * host.page_bytes / 2**20:.0f} MiB = {host.num_pages} pages, "
        f"{host.num_pages * config.page_size} tokens, copied at {host.copies.per_s / 1e9:.1f} GB/s"
    )


def _warm_up(loaded: LoadedArtifact) -> None:
    """Launch every kernel of the mixed programs once, for one token of a padding sequence.

    Decode programs were launched when they were captured. After this nothing is loaded, built or
    compiled while serving.
    """
    loaded.state.tensors["seq_rows"].fill_(-1)
    for (step, bucket), program in loaded.programs.items():
        if step == "mixed":
            program.run(1, 1)
            loaded.resamples[step, bucket].run(1, 1)
    torch.cuda.current_stream().synchronize()  # this one's: weights may still be on their way


def _load_tokenizer(artifact: Artifact, checkpoint: Checkpoint) -> Tokenizer:
    folder = artifact.path / TOKENIZER
    if not folder.is_dir():  # the checkpoint had none when it was compiled: let it say so
        return Tokenizer.from_source(checkpoint)
    return Tokenizer.from_path(
        folder, config=checkpoint.config, generation_config=checkpoint.generation_config
    )


def decide_pages(
    graph: Graph,
    config: EngineConfig,
    options: ServeOptions,
    device: torch.device,
    spare_bytes: int = 0,
) -> int:
    """Give the number of pages: as asked, or as many as fit after weights and a reserve.

    `spare_bytes` are left free on a GPU beside that reserve.

    Raises: ConfigError: the pool asked for holds not even one request of the window's pages.
    MachineError: nothing fits.
    """
    each = page_bytes(graph)
    most = config.max_rows * config.pages_per_row
    if options.num_pages:
        return options.num_pages
    if options.kv_bytes:
        pages = options.kv_bytes // each
        if pages < 1:
            raise ConfigError(
                f"--kv-memory {options.kv_bytes} bytes is less than one page of {each} bytes.",
                remedy=f"Give at least {each * config.pages_per_row} bytes: one request's window.",
            )
        return min(pages, most)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = free - GPU_RESERVE_BYTES - spare_bytes - open_page_bytes(graph, config)
    else:
        room, total = CPU_POOL_BYTES, CPU_POOL_BYTES
    pages = room // each
    if pages < config.pages_per_row:
        fits = max(room // each, 0) * config.page_size
        raise MachineError(
            f"The window of {config.max_context_tokens} tokens needs "
            f"{config.pages_per_row * each / 2**30:.1f} GiB of KV cache, {room / 2**30:.1f} GiB of "
            f"{total / 2**30:.1f} are left.",
            remedy=f"Compile with --max-context-tokens {fits} or less.",
        )
    return int(min(pages, most))


def limit_mixed_steps(loaded: LoadedArtifact) -> dict[str, int]:
    """Say how much context may be decoded in a step with prompts; see `Scheduler`."""
    if loaded.engine.target != "cuda":
        return {}
    state = loaded.state
    token_bytes = state.page_bytes / loaded.engine.page_size
    num_heads = min(cache[0].shape[1] for cache in state.caches.values())
    processors = torch.cuda.get_device_properties(state.packed.device).multi_processor_count
    return {
        "max_mixed_context_tokens": int(MIXED_SHARE * loaded.weight_bytes / token_bytes),
        # A program of its own, on a multiprocessor, for each KV head of a row.
        "rows_at_once": max(1, processors // num_heads),
    }


def check_host_memory(num_bytes: int) -> None:
    """Refuse more host memory than is free. Raises: MachineError."""
    free = find_free_memory()
    if free is not None and num_bytes > free.num_bytes:
        where = "this container" if free.in_container else "this machine"
        raise MachineError(
            f"--kv-host-memory asks for {num_bytes / 2**30:.1f} GiB, "
            f"{free.num_bytes / 2**30:.1f} GiB of {where}'s memory are free.",
            remedy="Ask for less: weights and the server itself need some of it too.",
        )


def decide_host_pages(state: DeviceState, num_bytes: int) -> int:
    """Give the pages that so much host memory holds. Raises: ConfigError: not even one."""
    pages = num_bytes // state.page_bytes
    if pages < 1:
        raise ConfigError(
            f"--kv-host-memory {num_bytes} bytes is less than one page of {state.page_bytes} "
            "bytes.",
            remedy="Give more, or 0 for none.",
        )
    return pages


def count_compiles() -> Callable[[], int]:
    """Count and tell, from now on, the kernels that Triton compiles because no binary was found."""
    compiled = itertools.count()
    seen = [next(compiled)]

    def note(*, cache_hit: bool, metadata: Mapping[str, object], **_facts: object) -> None:
        if not cache_hit:
            seen[0] = next(compiled)
            logger.warning("compiled while serving: kernel %s", metadata.get("name"))

    triton.knobs.compilation.listener = note
    return lambda: seen[0]


class _PhaseTimer:
    """Report phases and remember how long each took."""

    def __init__(self, report: Callable[[str], None], before_s: Mapping[str, float]) -> None:
        self._report = report
        self._before_s = before_s
        self._phases: list[tuple[str, float]] = []

    def begin(self, phase: str) -> None:
        self._report(phase)
        self._phases.append((phase, time.perf_counter()))

    def finish(self) -> str:
        """Give `phase seconds, …` over all phases."""
        starts = [start for _, start in self._phases] + [time.perf_counter()]
        took_s = [
            (phase, starts[index + 1] - start) for index, (phase, start) in enumerate(self._phases)
        ]
        told = [*self._before_s.items(), *took_s]
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in told)
