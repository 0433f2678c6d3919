"""Tune programs: time each kernel's candidates inside the whole step, where they will run.

A kernel timed alone misleads: dependent launch, the cache and the neighbours' tails decide between
candidates that are a few percent apart. So a step of a few layers is captured with one candidate
changed, replayed, and the best is kept, kernel after kernel. Candidates are compiled in parallel
processes before any is timed, and one that gives a wrong result is thrown out.
Called by the benchmark that makes the shipped tables.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from treadle.ir.errors import KernelError
from treadle.ir.graph import Graph, Op
from treadle.kernels.cross_compile import Job, compile_many
from treadle.kernels.lower import Candidate, Situation, lower
from treadle.kernels.tuned import TunedTable, tuning_key
from treadle.runtime import planner
from treadle.runtime.binaries import launch_arguments
from treadle.runtime.config import EngineConfig
from treadle.runtime.trial import Trial, make_trial, time_graph_ms
from treadle.runtime.triton_program import GraphedProgram, allocate_workspace
from treadle.runtime.verify import TOLERANCES, relative_error

ROUNDS = 15
Report = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Tell a candidate's median and spread over whole steps, or why it was thrown out."""

    template: str
    schedule: Mapping[str, int | bool]
    step_ms: float = float("inf")
    spread_ms: float = 0.0
    failure: str = ""


@dataclass
class KernelTuning:
    """Collect the timings of one kernel in one bucket; the first is the winner's."""

    key: str
    kernel: str
    launches: int
    timings: list[Timing] = field(default_factory=list)

    @property
    def winner(self) -> Timing:
        """The candidate that was kept: the fastest, unless its gain was noise."""
        return self.timings[0]


@dataclass(frozen=True)
class Workload:
    """What a program is tuned on: decode steps at a context, or prompts of so many tokens each."""

    step: str
    num_seqs: int
    context_tokens: int

    @property
    def bucket(self) -> int:
        """The bucket of the program: sequences of a decode step, tokens of a mixed one."""
        return self.num_seqs * (1 if self.step == "decode" else self.context_tokens)

    @property
    def form(self) -> str:
        """The form of graph that plays it."""
        return planner.decode_form(self.num_seqs) if self.step == "decode" else "mixed"


def tune_program(
    graphs: Mapping[str, Graph],
    engine: EngineConfig,
    work: Workload,
    table: TunedTable,
    architecture: str,
    report: Report = lambda phase: None,
) -> tuple[TunedTable, list[KernelTuning]]:
    """Tune the program that plays `work` and give the table with the winners added.

    `graphs` are the fused graphs of a model cut to a few layers: enough that its weights exceed the
    L2 cache, few enough that a step is short.
    """
    sized = replace(engine, max_rows=work.num_seqs, max_step_tokens=max(work.bucket, 16))
    pages = work.num_seqs * (-(-(work.context_tokens + engine.page_size) // engine.page_size) + 1)
    trial = make_trial({work.form: graphs[work.form]}, sized, pages, torch.device("cuda"))
    if work.step == "decode":
        trial.fill(work.num_seqs, work.context_tokens)
    else:
        trial.fill_prompts(work.num_seqs, work.context_tokens)
    with tempfile.TemporaryDirectory(prefix="treadle-tune-") as folder:
        session = _Session(trial, work, table, architecture, Path(folder), report)
        for tuning in session.tunings.values():
            session.tune(tuning)
    for tuning in session.tunings.values():
        if tuning.timings and not tuning.winner.failure:
            table = table.with_choice(tuning.key, tuning.winner.template, tuning.winner.schedule)
    return table, list(session.tunings.values())


class _Session:
    """Hold one program's trial: current choices, compiled candidates, the step's time so far."""

    def __init__(
        self,
        trial: Trial,
        work: Workload,
        table: TunedTable,
        architecture: str,
        folder: Path,
        report: Report,
    ) -> None:
        self.trial, self.work, self.table = trial, work, table
        self.architecture, self.folder, self.report = architecture, folder, report
        self.graph = trial.graphs[work.form]
        dims = planner.bucket_dims(trial.engine, work.step, work.bucket)
        self.where = Situation(dims, work.step, "cuda", architecture)
        self.tunings: dict[str, KernelTuning] = {}
        self.candidates: dict[str, list[Candidate]] = {}
        self.chosen: dict[str, int] = {}
        self._collect()
        self.bad: dict[str, str] = {}
        self._compile()
        self.expected = self._logits(self._capture())

    def _collect(self) -> None:
        for op in self.graph.ops:
            candidates = list(lower(op, self.graph, self.where))
            key = tuning_key(candidates[0], op, self.graph, self.where)
            if key in self.tunings:
                self.tunings[key].launches += 1
                continue
            self.tunings[key] = KernelTuning(key, candidates[0].name, 1)
            # What an earlier session found is where this one starts.
            known = self.table.choose(
                op, self.graph, self.where, iter(candidates), on_stale=self.report
            )
            candidates.insert(0, candidates.pop(candidates.index(known)))
            self.candidates[key] = candidates
            self.chosen[key] = 0

    def _choose(
        self, op: Op, graph: Graph, where: Situation, candidates: Iterator[Candidate]
    ) -> Candidate:
        key = tuning_key(next(candidates), op, graph, where)
        wanted = self.candidates[key][self.chosen[key]]
        # The candidate of this very op, whose arguments are its own.
        same = (c for c in lower(op, graph, where) if c.template == wanted.template)
        return next(c for c in same if c.schedule == wanted.schedule)

    def _plan(self) -> planner.Plan:
        return planner.plan_one(
            self.trial.engine,
            self.work.step,
            self.work.bucket,
            self.work.form,
            self.graph,
            self.architecture,
            self._choose,
        )

    def _compile(self) -> None:
        """Compile every candidate of every kernel, in parallel; note those that fail."""
        jobs: dict[str, Job] = {}
        total = max(len(candidates) for candidates in self.candidates.values())
        for index in range(total):
            previous = dict(self.chosen)
            self.chosen = {
                key: min(index, len(candidates) - 1) for key, candidates in self.candidates.items()
            }
            plan = self._plan()
            plan.write(self.folder)
            for launch in plan.programs[0].launches:
                if launch.kernel not in jobs:
                    path = self.folder / "kernels" / f"{launch.kernel}.py"
                    arguments = launch_arguments(
                        launch, path, self.graph, plan.scratch, self.where.dims
                    )
                    jobs[launch.kernel] = Job(str(path), self.architecture, arguments)
            self.chosen = previous
        for number, outcome in enumerate(compile_many(list(jobs.values())), start=1):
            if outcome.error:
                self.bad[Path(outcome.job.path).stem] = outcome.error
            self.report(f"compiling candidates ({number} of {len(jobs)})")

    def _capture(self) -> GraphedProgram:
        plan = self._plan()
        for launch in plan.programs[0].launches:
            if launch.kernel in self.bad:
                raise KernelError(self.bad[launch.kernel])
        plan.write(self.folder)
        workspace = allocate_workspace(plan, self.trial.state.packed.device)
        programs = self.trial.programs(plan, self.folder / "kernels", workspace)
        program = programs[self.work.step, self.work.bucket]
        self.trial.state.tensors["length"].fill_(self.work.context_tokens)
        pool = torch.cuda.graph_pool_handle()
        return GraphedProgram(program, pool, (self.work.bucket, self.work.num_seqs))

    def _logits(self, program: GraphedProgram) -> torch.Tensor:
        """Give the logits of a step from one fixed state, to compare candidates by."""
        tensors = self.trial.state.tensors
        tensors["length"].fill_(self.work.context_tokens)
        tensors["last_token"].copy_(torch.arange(self.work.num_seqs) % 256)
        values = program.run(0, 0)
        torch.cuda.synchronize()
        return values["logits"].clone()

    def tune(self, tuning: KernelTuning) -> None:
        """Time every candidate of one kernel in the step as it stands; keep the best."""
        candidates = self.candidates[tuning.key]
        if len(candidates) == 1:
            return
        current = self.chosen[tuning.key]
        timings = []
        for index, candidate in enumerate(candidates):
            self.chosen[tuning.key] = index
            timings.append(self._time(candidate))
        best = min(range(len(timings)), key=lambda index: timings[index].step_ms)
        # A gain inside the spread is noise: then what stands stays.
        gain = timings[current].step_ms - timings[best].step_ms
        if gain <= min(timings[best].spread_ms, 0.002 * timings[best].step_ms):
            best = current
        self.chosen[tuning.key] = best
        tuning.timings = [timings[best], *(t for i, t in enumerate(timings) if i != best)]
        self.report(
            f"tuned {tuning.kernel} ×{tuning.launches}: {timings[best].step_ms:.4f} ms a step, "
            f"before {timings[current].step_ms:.4f}, {candidates[best].template} "
            f"{candidates[best].schedule}"
        )

    def _time(self, candidate: Candidate) -> Timing:
        try:
            program = self._capture()
            found = self._logits(program)
            error = relative_error(found, self.expected)
            if not error <= TOLERANCES[torch.bfloat16] * 3:
                reason = f"wrong logits, relative error {error:.3g}"
                return Timing(candidate.template, candidate.schedule, failure=reason)
            times = sorted(time_graph_ms(program, self.trial, self.work.context_tokens, ROUNDS))
        except KernelError as error:
            return Timing(candidate.template, candidate.schedule, failure=str(error)[:300])
        spread = times[int(0.75 * ROUNDS)] - times[int(0.25 * ROUNDS)]
        return Timing(candidate.template, candidate.schedule, statistics.median(times), spread)
