"""Tune programs: time each kernel's candidates inside the whole step, where they will run.

A kernel timed alone misleads: dependent launch, the cache and the neighbours' tails decide between
candidates that are a few percent apart. So a step of a few layers is captured with one candidate
changed, replayed, and the best is kept, kernel after kernel. Candidates are compiled in parallel
processes before any is timed, and one that gives a wrong result is thrown out. What was timed is in
the log at once; what the log knows is not timed again.
Called by the command that tunes and by the benchmark that makes the shipped tables.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from treadle.ir.cost import op_cost
from treadle.ir.errors import KernelError
from treadle.ir.graph import Graph, Op, fingerprint
from treadle.kernels.cross_compile import Job, Outcome, compile_many
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.tuned import TunedTable, tuning_key
from treadle.runtime import planner
from treadle.runtime.binaries import launch_arguments
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import Plan, bucket_dims
from treadle.runtime.timings import Record, TimingLog
from treadle.runtime.trial import (
    FixedProgram,
    SelectedProgram,
    Trial,
    make_trial,
    time_graph_ms,
)
from treadle.runtime.triton_program import (
    Capturable,
    GraphedProgram,
    TritonProgram,
    allocate_workspace,
)
from treadle.runtime.verify import TOLERANCES, relative_error

ROUNDS = 15
QUICK_CANDIDATES = 6  # of each kernel, the likeliest; full times them all
NEAR = 1.03  # a full search's last look: what came within this of the best step
Report = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Tell a candidate's median and spread over whole steps, or why it was thrown out.

    `spread_ms` is the middle half of the rounds; `error` the logits' relative error; registers and
    bytes are the largest of the candidate's kernels.
    """

    template: str
    schedule: Mapping[str, int | bool]
    step_ms: float = float("inf")
    spread_ms: float = 0.0
    failure: str = ""
    error: float = 0.0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0


@dataclass
class KernelTuning:
    """Collect the timings of one kernel in one bucket; the first is the winner's."""

    key: str
    kernel: str
    launches: int
    flops: int = 0
    bytes: int = 0
    timings: list[Timing] = field(default_factory=list)

    @property
    def winner(self) -> Timing:
        """The candidate that was kept: the fastest, unless its gain was noise."""
        return self.timings[0]


@dataclass(frozen=True)
class Workload:
    """What a program is tuned on: decode steps at a context, or prompts of so many tokens each.

    `other_form` names a form of graph that the planner would not choose.
    """

    step: str
    num_seqs: int
    context_tokens: int
    other_form: str = ""

    @property
    def bucket(self) -> int:
        """The bucket of the program: sequences of a decode step, tokens of a mixed one."""
        return self.num_seqs * (1 if self.step == "decode" else self.context_tokens)

    @property
    def form(self) -> str:
        """The form of graph that plays it."""
        if self.other_form:
            return self.other_form
        return planner.decode_form(self.num_seqs) if self.step == "decode" else "mixed"

    def __str__(self) -> str:
        sizes = f"{self.step} {self.num_seqs}x{self.context_tokens}"
        return f"{sizes} as {self.other_form}" if self.other_form else sizes


@dataclass(frozen=True)
class Effort:
    """Say how much to try: `quick` or `full`, and until when, by the clock that `search` is given.

    A program that was tuned to its end is left alone, and what was timed is not timed again,
    unless `again` says so. `only_new` leaves kernels alone that the table has a choice for.
    """

    autotune: str = "full"
    deadline_s: float = float("inf")
    again: bool = False
    only_new: bool = False


class Space:
    """Hold a program's kernels, their candidates and the choices of the moment. Needs no GPU.

    The keys in `kept` stay as the table says.
    """

    def __init__(
        self,
        graph: Graph,
        engine: EngineConfig,
        work: Workload,
        table: TunedTable,
        architecture: str,
        autotune: str = "full",
        report: Report = lambda phase: None,
        *,
        kept: Set[str] = frozenset(),
    ) -> None:
        self.graph, self.engine, self.work, self.kept = graph, engine, work, kept
        self.architecture, self.autotune, self.gpu = architecture, autotune, table.gpu
        dims = bucket_dims(engine, work.step, work.bucket)
        self.where = Situation(dims, work.step, engine.target, architecture)
        self.tunings: dict[str, KernelTuning] = {}
        self.candidates: dict[str, list[Candidate]] = {}
        self.chosen: dict[str, int] = {}
        self.defaults: dict[str, int] = {}  # what would run if nothing was tuned
        self.keys: list[str] = []  # of the ops, in their order
        self._by_op: dict[str, tuple[str, list[Candidate]]] = {}
        self._identities: dict[str, tuple[str, ...]] = {}
        for op in graph.ops:
            self._add(op, table, report)

    def _add(self, op: Op, table: TunedTable, report: Report) -> None:
        candidates = list(lower(op, self.graph, self.where))
        key = tuning_key(candidates[0], op, self.graph, self.where)
        self.keys.append(key)
        self._by_op[op.name] = key, candidates[:]
        if key in self.tunings:
            self.tunings[key].launches += 1
            return
        # Of a causal score half is computed.
        context = self.work.context_tokens // (2 if self.work.step == "mixed" else 1)
        dims = {**self.where.dims, "C": context}
        cost = op_cost(op, self.graph, dims)
        self.tunings[key] = KernelTuning(key, candidates[0].name, 1, cost.flops, cost.bytes)
        self._identities[key] = tuple(
            fingerprint(next(c for c in candidates if c.template == template).emit())
            for template in dict.fromkeys(c.template for c in candidates)
        ) + tuple(str(c.schedule) for c in candidates)
        # What an earlier session found is where this one starts.
        known = table.choose(op, self.graph, self.where, iter(candidates), on_stale=report)
        if key in self.kept:
            candidates = [known]
        elif self.autotune == "quick":
            likely = candidates[:QUICK_CANDIDATES]
            candidates = likely if known in likely else [*likely, known]
        default = candidates[0]
        candidates.insert(0, candidates.pop(candidates.index(known)))
        self.candidates[key] = candidates
        self.chosen[key] = 0
        self.defaults[key] = candidates.index(default)

    def all_dependent(self) -> dict[str, int]:
        """Choose what is most like what is chosen now, but launched dependently."""
        return {key: self._dependent(key, index) for key, index in self.chosen.items()}

    def _dependent(self, key: str, current: int) -> int:
        candidates = self.candidates[key]
        wanted = candidates[current]

        def likeness(index: int) -> int:
            schedule = candidates[index].schedule
            return sum(schedule[name] == value for name, value in wanted.schedule.items())

        dependent = [
            index
            for index, candidate in enumerate(candidates)
            if candidate.template == wanted.template and candidate.schedule.get("USE_PDL")
        ]
        return max(dependent, key=likeness, default=current)

    def choose(
        self, op: Op, graph: Graph, where: Situation, candidates: Iterator[Candidate]
    ) -> Candidate:
        """Choose for the planner what is chosen now."""
        key, own = self._by_op[op.name]
        wanted = self.candidates[key][self.chosen[key]]
        # The candidate of this very op, whose arguments are its own.
        return next(
            c for c in own if (c.template, c.schedule) == (wanted.template, wanted.schedule)
        )

    def plan(self, *, reuse_memory: bool = True) -> Plan:
        """Plan the program with the choices of the moment."""
        return planner.plan_one(
            self.engine,
            self.work.step,
            self.work.bucket,
            self.work.form,
            self.graph,
            self.architecture,
            self.choose,
            reuse_memory=reuse_memory,
        )

    def modules(self, plan: Plan) -> dict[str, str]:
        """Give the kernel that each key has in a plan of this space."""
        launches = plan.programs[0].launches
        return {k: each.kernel for k, each in zip(self.keys, launches, strict=True)}

    def identity(self) -> str:
        """Name all that a tuning of this program depends on: kernels' sources, GPU, versions."""
        facts = [self._conditions(), self.autotune, sorted(self.kept), self.keys, self._identities]
        return fingerprint(json.dumps(facts))

    def context(self, key: str, modules: Mapping[str, str]) -> str:
        """Name what a timing of this key's kernel depends on besides the kernel itself."""
        others = sorted((k, name) for k, name in modules.items() if k != key)
        return fingerprint(json.dumps([self._conditions(), self.tunings[key].launches, others]))

    def _conditions(self) -> list[object]:
        engine = self.engine
        return [
            str(self.work),
            engine.dtype,
            engine.page_size,
            self.gpu,
            torch.__version__,
            triton.__version__,
        ]


class Measure(Protocol):
    """Time a space's step as it is chosen now."""

    def prepare(self, space: Space) -> None:
        """Make ready to time every candidate."""

    def __call__(self, space: Space, key: str) -> Timing:
        """Time the step; `key` is the kernel that was changed."""


@dataclass(frozen=True)
class Tuned:
    """Tell what a search came to: the table with the winners, the kernels, and its end."""

    table: TunedTable
    tunings: list[KernelTuning]
    finished: bool
    timed: int = 0
    known: int = 0


def search(
    space: Space,
    measure: Measure,
    log: TimingLog,
    effort: Effort = Effort(),
    report: Report = lambda phase: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[bool, int, int]:
    """Time every candidate of every kernel in the step as it stands; keep the best of each.

    One kernel is changed at a time, so a gain that two need to have in common is never found from
    where neither has it: dependent launch pays when the kernel before lets the next one begin and
    the next one has something to fetch meanwhile. A full search therefore begins a second time with
    dependent launch everywhere, keeps the better of both ends, and looks once more at the
    candidates that came near. Gives whether it came to its end, and how many timings were made and
    were known before. Past the deadline what stands stays.
    """
    program = space.identity()
    log.append("started", program=program, **_describe(space), base=choices(space))
    stopwatch = _Logged(space, measure, log, effort, clock)
    starts = [dict(space.chosen)]
    if effort.autotune == "full" and space.autotune == "full":
        starts += [each for each in [space.all_dependent()] if each not in starts]
    finished = _descend(space, stopwatch, report)
    ends = dict(space.chosen)
    for start in starts[1:] if finished else ():
        first_ms, first = _last_ms(space), [tuning.timings for tuning in space.tunings.values()]
        space.chosen = dict(start)
        finished = _descend(space, stopwatch, report)
        if finished and _last_ms(space) < first_ms:
            ends = dict(space.chosen)
        else:
            for tuning, timings in zip(space.tunings.values(), first, strict=True):
                tuning.timings = timings
    space.chosen = ends
    if finished and len(starts) > 1:
        finished = _descend(space, stopwatch, report, near=NEAR)
    if finished:
        log.append("finished", program=program, winners=choices(space))
    return finished, stopwatch.timed, stopwatch.known


def _last_ms(space: Space) -> float:
    """Give the step's time as it was last measured: with every choice of a descent."""
    timings = [tuning.timings for tuning in space.tunings.values() if tuning.timings]
    return timings[-1][0].step_ms if timings else float("inf")


def _descend(space: Space, stopwatch: _Logged, report: Report, near: float = float("inf")) -> bool:
    """Keep the best candidate of one kernel after the other; say whether time allowed it.

    Only candidates are timed whose last timing came within the factor `near` of the best.
    """
    for tuning in space.tunings.values():
        candidates = space.candidates[tuning.key]
        if len(candidates) == 1:
            continue
        current = space.chosen[tuning.key]
        last = {(t.template, str(t.schedule)): t.step_ms for t in tuning.timings}
        limit_ms = near * min(last.values(), default=float("inf"))
        timings: dict[int, Timing] = {}
        for index, candidate in enumerate(candidates):
            known_ms = last.get((candidate.template, str(candidate.schedule)), 0.0)
            if index != current and known_ms > limit_ms:
                continue
            space.chosen[tuning.key] = index
            timing = stopwatch.time(
                tuning.key, candidate, is_default=index == space.defaults[tuning.key]
            )
            if timing is None:
                space.chosen[tuning.key] = current
                return False
            timings[index] = timing
        best = _best(timings, current)
        space.chosen[tuning.key] = best
        others = [t for i, t in timings.items() if i != best]
        timed = {(t.template, str(t.schedule)) for t in timings.values()}
        far = [t for t in tuning.timings if (t.template, str(t.schedule)) not in timed]
        tuning.timings = [timings[best], *others, *far]
        report(
            f"tuned {tuning.kernel} ×{tuning.launches}: {timings[best].step_ms:.4f} ms a step, "
            f"before {timings[current].step_ms:.4f}, {candidates[best].template} "
            f"{candidates[best].schedule}"
        )
    return True


class _Logged:
    """Time candidates that the log does not know, until the deadline; count both kinds."""

    def __init__(
        self,
        space: Space,
        measure: Measure,
        log: TimingLog,
        effort: Effort,
        clock: Callable[[], float],
    ) -> None:
        self._space, self._measure, self._log = space, measure, log
        self._effort, self._clock = effort, clock
        self._program = space.identity()
        self._is_prepared = False
        self._made: set[tuple[str, str]] = set()
        self._found: set[tuple[str, str]] = set()

    @property
    def timed(self) -> int:
        """How many timings were made."""
        return len(self._made)

    @property
    def known(self) -> int:
        """How many timings that were wanted the log had before."""
        return len(self._found)

    def time(self, key: str, candidate: Candidate, *, is_default: bool) -> Timing | None:
        """Time the step with what is chosen now, `candidate` for `key`; None past the deadline."""
        modules = self._space.modules(self._space.plan())
        context = self._space.context(key, modules)
        wanted = context, modules[key]
        if wanted in self._made or not self._effort.again:
            record = self._log.timed(*wanted)
            if record is not None:
                self._found |= {wanted} - self._made
                return _timing(candidate, record)
        if self._clock() >= self._effort.deadline_s:
            return None
        if not self._is_prepared:
            self._measure.prepare(self._space)
            self._is_prepared = True
        timing = self._measure(self._space, key)
        self._made.add(wanted)
        record = self._log.append(
            "timing",
            program=self._program,
            key=key,
            context=context,
            module=modules[key],
            is_default=is_default,
            **_finite(asdict(timing)),
        )
        return _timing(candidate, record)


def _best(timings: Mapping[int, Timing], current: int) -> int:
    best = min(timings, key=lambda index: timings[index].step_ms)
    # A gain inside the spread is noise: then what stands stays.
    gain = timings[current].step_ms - timings[best].step_ms
    noise = min(timings[best].spread_ms, 0.002 * timings[best].step_ms)
    return current if gain <= noise else best


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Leave a failed candidate's time out: JSON has no infinity."""
    return {name: None if value == float("inf") else value for name, value in values.items()}


def _timing(candidate: Candidate, record: Record) -> Timing:
    found = {name: record[name] for name in Timing.__dataclass_fields__ if name in record}
    found |= {"template": candidate.template, "schedule": candidate.schedule}
    if found["step_ms"] is None:
        found["step_ms"] = float("inf")
    return Timing(**found)


def choices(space: Space) -> dict[str, dict[str, Any]]:
    """Give what is chosen now, by key, in a table's form."""
    return {
        key: {
            "template": space.candidates[key][index].template,
            "schedule": dict(space.candidates[key][index].schedule),
        }
        for key, index in space.chosen.items()
    }


def _describe(space: Space) -> dict[str, Any]:
    return {
        "step": space.work.step,
        "num_seqs": space.work.num_seqs,
        "context_tokens": space.work.context_tokens,
        "autotune": space.autotune,
        "gpu": space.gpu,
        "dtype": space.engine.dtype,
    }


def base_of(log: TimingLog, program: str, table: TunedTable) -> TunedTable:
    """Give the table that an unfinished tuning of a program began from, to go on with it."""
    started = log.of_program(program, "started")
    if not started:
        return table
    for key, choice in started[0]["base"].items():
        table = table.with_choice(key, choice["template"], choice["schedule"])
    return table


def tune_program(
    graphs: Mapping[str, Graph],
    engine: EngineConfig,
    work: Workload,
    table: TunedTable,
    architecture: str,
    report: Report = lambda phase: None,
    *,
    log: TimingLog | None = None,
    effort: Effort = Effort(),
    measure: Measure | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Tune the program that plays `work` and give the table with the winners added.

    `graphs` are the fused graphs of a model cut to a few layers: enough that its weights exceed the
    L2 cache, few enough that a step is short. `measure` is the GPU unless given.
    """
    log = log or TimingLog(None)
    sized = replace(engine, max_rows=work.num_seqs, max_step_tokens=max(work.bucket, 16))
    graph = graphs[work.form]
    kept = frozenset(table.choices if effort.only_new else ())
    space = Space(graph, sized, work, table, architecture, effort.autotune, report, kept=kept)
    program = space.identity()
    finished = log.of_program(program, "finished")
    if finished and not effort.again:
        for key, choice in finished[-1]["winners"].items():
            table = table.with_choice(key, choice["template"], choice["schedule"])
        report(f"{work} was tuned before")
        return Tuned(table, list(space.tunings.values()), True)
    if not finished:
        base = base_of(log, program, table)
        space = Space(graph, sized, work, base, architecture, effort.autotune, report, kept=kept)
    with tempfile.TemporaryDirectory(prefix="treadle-tune-") as folder:
        device = torch.device("cuda" if engine.target == "cuda" else "cpu")
        on_gpu = measure or Stopwatch(sized, graphs, Path(folder), report, device)
        done, timed, known = search(space, on_gpu, log, effort, report, clock)
        if isinstance(on_gpu, Stopwatch) and on_gpu.is_prepared:
            on_gpu.log_kernels(space, log)
    for tuning in space.tunings.values():
        if tuning.timings and not tuning.winner.failure:
            table = table.with_choice(tuning.key, tuning.winner.template, tuning.winner.schedule)
    return Tuned(table, list(space.tunings.values()), done, timed, known)


class Stopwatch:
    """Time steps on the GPU: compile all candidates, capture, compare logits, replay."""

    def __init__(
        self,
        engine: EngineConfig,
        graphs: Mapping[str, Graph],
        folder: Path,
        report: Report = lambda phase: None,
        device: torch.device = torch.device("cuda"),
    ) -> None:
        self.engine, self.graphs, self.folder, self.report = engine, graphs, folder, report
        self.device = device
        self.outcomes: dict[str, Outcome] = {}
        self.is_prepared = False

    def prepare(self, space: Space) -> None:
        """Allocate, compile every candidate, and note the logits of the step as it stands."""
        work = space.work
        pages_each = -(-(work.context_tokens + self.engine.page_size) // self.engine.page_size) + 1
        graphs = {work.form: self.graphs[work.form]}
        self.trial: Trial = make_trial(graphs, self.engine, work.num_seqs * pages_each, self.device)
        if work.step == "decode":
            self.trial.fill(work.num_seqs, work.context_tokens)
        else:
            self.trial.fill_prompts(work.num_seqs, work.context_tokens)
        current = dict(space.chosen)
        space.chosen.update(dict.fromkeys(space.chosen, 0))
        if self.device.type == "cuda":
            self._compile(space)
        self.expected = self._logits(space, self._capture(space))
        space.chosen.update(current)
        self.is_prepared = True

    def _compile(self, space: Space) -> None:
        """Compile every candidate of every kernel, in parallel; those that fail have an error."""
        jobs: dict[str, Job] = {}
        total = max(len(candidates) for candidates in space.candidates.values())
        previous = dict(space.chosen)
        for index in range(total):
            space.chosen = {
                key: min(index, len(candidates) - 1) for key, candidates in space.candidates.items()
            }
            plan = space.plan()
            plan.write(self.folder)
            for launch in plan.programs[0].launches:
                if launch.kernel not in jobs:
                    path = self.folder / "kernels" / f"{launch.kernel}.py"
                    arguments = launch_arguments(
                        launch, path, space.graph, plan.scratch, space.where.dims
                    )
                    jobs[launch.kernel] = Job(str(path), space.architecture, arguments)
        space.chosen = previous
        with closing(compile_many(list(jobs.values()))) as outcomes:
            for number, outcome in enumerate(outcomes, start=1):
                self.outcomes[Path(outcome.job.path).stem] = outcome
                if number % max(1, len(jobs) // 10) == 0:
                    self.report(f"compiling candidates ({number} of {len(jobs)})")

    def _program(self, space: Space, *, reuse_memory: bool = True) -> TritonProgram:
        plan = space.plan(reuse_memory=reuse_memory)
        for launch in plan.programs[0].launches:
            if launch.kernel in self.outcomes and self.outcomes[launch.kernel].error:
                raise KernelError(self.outcomes[launch.kernel].error)
        plan.write(self.folder)
        workspace = allocate_workspace(plan, self.trial.state.packed.device)
        programs = self.trial.programs(plan, self.folder / "kernels", workspace)
        return programs[space.work.step, space.work.bucket]

    def _capture(self, space: Space) -> GraphedProgram | FixedProgram:
        return self._fix(self._program(space), space)

    def _fix(self, program: Capturable, space: Space) -> GraphedProgram | FixedProgram:
        """Capture a program at the work's sizes; the interpreter just runs it again."""
        self.trial.state.tensors["length"].fill_(space.work.context_tokens)
        sizes = (space.work.bucket, space.work.num_seqs)
        if self.device.type != "cuda":
            return FixedProgram(program, sizes)
        return GraphedProgram(program, torch.cuda.graph_pool_handle(), sizes)

    def _logits(self, space: Space, program: GraphedProgram | FixedProgram) -> torch.Tensor:
        """Give the logits of a step from one fixed state, to compare candidates by."""
        tensors = self.trial.state.tensors
        tensors["length"].fill_(space.work.context_tokens)
        tensors["last_token"].copy_(torch.arange(space.work.num_seqs) % 256)
        values = program.run(0, 0)
        return values["logits"].clone()

    def __call__(self, space: Space, key: str) -> Timing:
        """Time the step with the candidate that is chosen for `key`."""
        candidate = space.candidates[key][space.chosen[key]]
        module = space.modules(space.plan())[key]
        registers, spill_bytes, shared_bytes = self._usage(module).values()
        timing = Timing(
            candidate.template,
            candidate.schedule,
            registers=registers,
            spill_bytes=spill_bytes,
            shared_bytes=shared_bytes,
        )
        try:
            program = self._capture(space)
            wrong = relative_error(self._logits(space, program), self.expected)
            if not wrong <= TOLERANCES[torch.bfloat16] * 3:
                return replace(timing, failure=f"wrong logits, relative error {wrong:.3g}")
            times = time_graph_ms(program, self.trial, space.work.context_tokens, ROUNDS)
        except KernelError as error:
            return replace(timing, failure=str(error)[:300])
        times.sort()
        spread = times[int(0.75 * ROUNDS)] - times[int(0.25 * ROUNDS)]
        return replace(
            timing, step_ms=statistics.median(times), spread_ms=spread, error=float(wrong)
        )

    def _usage(self, module: str) -> dict[str, int]:
        """Tell what a compiled module uses: the largest of its kernels."""
        outcome = self.outcomes.get(module)
        kernels = outcome.kernels if outcome is not None else ()
        return {
            "registers": max((kernel.registers for kernel in kernels), default=0),
            "spill_bytes": max((kernel.spill_bytes for kernel in kernels), default=0),
            "shared_bytes": max((kernel.shared_bytes for kernel in kernels), default=0),
        }

    def log_kernels(self, space: Space, log: TimingLog) -> None:
        """Time each kernel of the winners by itself, over the layers' own weights, and log it."""
        program = self._program(space, reuse_memory=False)
        program.run(space.work.bucket, space.work.num_seqs)  # each finds what those before it leave
        modules = space.modules(space.plan())
        step = statistics.median(
            time_graph_ms(self._capture(space), self.trial, space.work.context_tokens, ROUNDS)
        )
        for tuning in space.tunings.values():
            indices = [index for index, key in enumerate(space.keys) if key == tuning.key]
            graphed = self._fix(SelectedProgram(program, indices), space)
            times = time_graph_ms(graphed, self.trial, space.work.context_tokens, 2 * ROUNDS)
            each_us = sorted(1e3 * ms / len(indices) for ms in times)
            log.append(
                "kernel",
                program=space.identity(),
                key=tuning.key,
                kernel=tuning.kernel,
                module=modules[tuning.key],
                launches=tuning.launches,
                flops=tuning.flops,
                bytes=tuning.bytes,
                us=statistics.median(each_us),
                us_low=each_us[len(each_us) // 10],
                us_high=each_us[-1 - len(each_us) // 10],
                step_us=1e3 * step,
                **self._usage(modules[tuning.key]),
            )
