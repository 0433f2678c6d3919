"""Decide the programs of an engine: which graph serves which bucket, by which kernels and buffers.

Called by the compiler; what it writes, `loading.py` reads. Knows kernels only through
`kernels/lower/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from treadle.ir.graph import Graph, Op, fingerprint
from treadle.ir.memory import plan_buffers
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.lower.dependent_launch import without_unsafe_pdl
from treadle.kernels.lower.header import local_name
from treadle.kernels.schedule.attention import JOINED_ROWS
from treadle.kernels.schedule.linears import GEMV_ROWS
from treadle.runtime.config import EngineConfig, decode_buckets, mixed_buckets
from treadle.runtime.plan import RESAMPLE, LaunchPlan, Plan, ProgramPlan, bucket_dims

Choose = Callable[[Op, Graph, Situation, Iterator[Candidate]], Candidate]


def first_candidate(
    op: Op, graph: Graph, where: Situation, candidates: Iterator[Candidate]
) -> Candidate:
    """Choose the default: what is used where nothing was tuned."""
    return next(candidates)


def plan_programs(
    graphs: Mapping[str, Graph],
    engine: EngineConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    architecture: str = "",
    choose: Choose = first_candidate,
    form_of: Callable[[int], str] | None = None,
) -> Plan:
    """Plan a program per bucket; lower and emit kernels unless the target is `reference`.

    `form_of` names the form of graph for a decode step of so many sequences, by default
    `decode_form`.
    Raises: LoweringError: an op that no template covers.
    """
    if engine.target == "reference":
        return Plan(
            (
                ProgramPlan("decode", engine.max_rows, "decode"),
                ProgramPlan("mixed", engine.max_step_tokens, "mixed"),
            ),
            ProgramPlan(RESAMPLE, engine.max_rows, RESAMPLE),
        )
    planner = _Planner(engine, architecture, choose)
    programs = []
    for rows in decode_buckets(engine.max_rows):
        form = (form_of or decode_form)(rows)
        report(f"planning the decode step of {rows} sequences")
        programs.append(planner.plan("decode", rows, form, graphs[form]))
    for tokens in mixed_buckets(engine.max_step_tokens):
        report(f"planning the mixed step of {tokens} tokens")
        programs.append(planner.plan("mixed", tokens, "mixed", graphs["mixed"]))
    resample = planner.plan(RESAMPLE, engine.max_rows, RESAMPLE, graphs[RESAMPLE])
    return Plan(tuple(programs), resample, planner.scratch, planner.modules)


def decode_form(rows: int) -> str:
    """Name the form of graph that a decode step of so many sequences uses."""
    form = "decode.few" if rows <= GEMV_ROWS else "decode"
    return f"{form}.joined" if rows <= JOINED_ROWS else form


def plan_one(
    engine: EngineConfig,
    step: str,
    bucket: int,
    form: str,
    graph: Graph,
    architecture: str,
    choose: Choose,
    *,
    reuse_memory: bool = True,
) -> Plan:
    """Plan a single program: what the tuner varies.

    Kernels that are to run by themselves need one without `reuse_memory`: what they read, indices
    of experts for example, must not be written over by those after them.
    """
    planner = _Planner(engine, architecture, choose, reuse_memory=reuse_memory)
    program = planner.plan(step, bucket, form, graph)
    return Plan((program,), None, planner.scratch, planner.modules)


class _Planner:
    """Collect modules and scratch over all programs."""

    def __init__(
        self,
        engine: EngineConfig,
        architecture: str,
        choose: Choose,
        *,
        reuse_memory: bool = True,
    ) -> None:
        self.engine = engine
        self.reuse_memory = reuse_memory
        self.architecture = architecture
        self.choose = choose
        self.modules: dict[str, str] = {}
        self.scratch: dict[str, tuple[str, int]] = {}

    def plan(self, step: str, bucket: int, form: str, graph: Graph) -> ProgramPlan:
        dims = bucket_dims(self.engine, step, bucket)
        where = Situation(dims, step, self.engine.target, self.architecture)
        launches = []
        previous = ""
        # Layers repeat the same ops under other names: each is lowered once.
        chosen: dict[object, tuple[tuple[str, ...], Candidate]] = {}
        of_the_step = {value.name for value in graph.inputs if not value.type.layout}
        for op in graph.ops:
            signature, names = _without_layer(op, graph, of_the_step)
            if signature not in chosen:
                choice = self.choose(op, graph, where, lower(op, graph, where))
                chosen[signature] = (names, choice)
            known, candidate = chosen[signature]
            candidate = _renamed(candidate, dict(zip(known, names, strict=True)))
            candidate = without_unsafe_pdl(candidate, previous)
            previous = candidate.template
            text = candidate.emit()
            name = f"{candidate.name}.{fingerprint(text)}"
            self.modules[name] = text
            for scratch in candidate.scratch:
                dtype, elements = self.scratch.get(scratch.name, (scratch.dtype, 0))
                assert dtype == scratch.dtype, f"scratch `{scratch.name}` has two dtypes"
                self.scratch[scratch.name] = (dtype, max(elements, scratch.elements))
            launches.append(LaunchPlan(op.name, name, candidate.arguments))
        if step == RESAMPLE:
            return ProgramPlan(step, bucket, form, tuple(launches))
        buffers = plan_buffers(graph, dims, reuse_memory=self.reuse_memory)
        return ProgramPlan(
            step, bucket, form, tuple(launches), buffers.offsets, buffers.total_bytes
        )


def _without_layer(op: Op, graph: Graph, of_the_step: Set[str]) -> tuple[object, tuple[str, ...]]:
    """Give all that lowering an op depends on but the layer of what it touches, and those names.

    Inputs of the step are no layer's own: their names stay.
    """
    numbers: dict[str, int] = {}

    def mark(name: str) -> object:
        if name in of_the_step:
            return name
        number = numbers.setdefault(name, len(numbers))
        return number, local_name(name), graph.type_of(name)

    marked = tuple(
        (each.kind, each.params, tuple(map(mark, each.inputs)), tuple(map(mark, each.outputs)))
        for each in (op, *op.body)
    )
    return marked, tuple(numbers)


def _renamed(candidate: Candidate, names: Mapping[str, str]) -> Candidate:
    """Give the candidate of an op for another one that differs in these names only."""
    arguments = {}
    for parameter, text in candidate.arguments.items():
        kind, _, name = text.partition(":")
        if kind not in ("size", "scratch", "none"):
            name = names.get(name, name)
        arguments[parameter] = f"{kind}:{name}"
    return replace(candidate, arguments=arguments)
