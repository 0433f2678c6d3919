"""What a tuning found, as data: kernels by program, their candidates, and what changed since.

Made from a log of timings, an artifact or a report's own JSON; rendered by `report_text.py` and
`report_html.py`, of which this must know nothing. Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from treadle.ir.cost import op_cost
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph
from treadle.ir.text import parse_graph
from treadle.kernels.occupancy import occupancy
from treadle.runtime.artifact import Artifact
from treadle.runtime.plan import bucket_dims, read_plan
from treadle.runtime.timings import Record, schedule_text

FORMAT = "treadle report 1"
LATENCY_SHARE = 0.3  # of both roofs: below it neither is what a kernel waits for


@dataclass(frozen=True)
class Attempt:
    """One candidate: the whole step's time with it, or why it failed. Times in µs."""

    schedule: str
    module: str = ""
    step_us: float | None = None
    spread_us: float = 0.0
    failure: str = ""
    error: float = 0.0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    is_default: bool = False
    is_winner: bool = False
    # The template and schedule as tables of tuned schedules hold them; empty where not known.
    choice: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_warps(self) -> int:
        """The warps of a program, 0 where not known."""
        return int(self.choice.get("schedule", {}).get("num_warps", 0))


@dataclass(frozen=True)
class Row:
    """One kernel in one program, with the winner first among its attempts.

    `us` is a launch of the winner by itself, p10 and p90 around it; None where it was not timed.
    `flops` and `bytes` are what one launch must compute and move at least.
    """

    program: str
    step: str
    kernel: str
    key: str
    launches: int
    flops: int = 0
    bytes: int = 0
    us: float | None = None
    us_low: float = 0.0
    us_high: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    timed_launches: int = 1  # in the step that the attempts' times are of

    @property
    def winner(self) -> Attempt:
        """The candidate that is used."""
        return next((a for a in self.attempts if a.is_winner), Attempt("default"))

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """The candidates that were thrown out."""
        return tuple(attempt for attempt in self.attempts if attempt.failure)

    def slower_us(self, other: Attempt) -> float | None:
        """Tell how much longer a launch takes with another candidate."""
        if other.step_us is None or self.winner.step_us is None:
            return None
        return (other.step_us - self.winner.step_us) / self.timed_launches

    @property
    def runner_up(self) -> Attempt | None:
        """The best of the others."""
        others = [a for a in self.attempts if not a.is_winner and a.step_us is not None]
        return min(others, key=lambda attempt: attempt.step_us or 0.0, default=None)

    @property
    def margin(self) -> float | None:
        """The runner-up's loss as a share of the winner's time."""
        if self.runner_up is None or not self.us:
            return None
        slower = self.slower_us(self.runner_up)
        return None if slower is None else slower / self.us

    @property
    def margin_is_noise(self) -> bool:
        """Say whether the margin is inside the spread: then either is fine."""
        second = self.runner_up
        if second is None or second.step_us is None or self.winner.step_us is None:
            return False
        spread = max(second.spread_us, self.winner.spread_us)
        return second.step_us - self.winner.step_us <= spread

    @property
    def default_us(self) -> float | None:
        """A launch of the default candidate."""
        default = next((a for a in self.attempts if a.is_default), None)
        if default is None or self.us is None:
            return None
        slower = self.slower_us(default)
        return None if slower is None else self.us + slower

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Report:
    """Hold the rows with what they were measured on.

    `header` says so in words, `roofs` are bytes/s and FLOP/s, 0 where not measured. `changed` names
    the keys whose winner is another than in the tuning before.
    """

    header: Mapping[str, str]
    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    rows: tuple[Row, ...] = ()
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def programs(self) -> dict[str, list[Row]]:
        """Give the rows by program, the largest share of the step first."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.program, []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: (-self.total_us(row), row.kernel, row.key))
        return found

    def total_us(self, row: Row) -> float:
        """Tell what all launches of a row take."""
        return (row.us or 0.0) * row.launches

    def share(self, row: Row) -> float | None:
        """Tell the row's share of its program's kernels."""
        whole = sum(self.total_us(other) for other in self.rows if other.program == row.program)
        return self.total_us(row) / whole if whole and row.us is not None else None

    def rates(self, row: Row) -> tuple[float, float]:
        """Give bytes/s and FLOP/s of a row; 0 where it was not timed."""
        return (row.bytes / row.us * 1e6, row.flops / row.us * 1e6) if row.us else (0.0, 0.0)

    def of_roofs(self, row: Row) -> tuple[float, float]:
        """Give the rates as shares of the measured roofs; 0 where either is unknown."""
        moved, computed = self.rates(row)
        return (
            moved / self.bytes_per_s if self.bytes_per_s else 0.0,
            computed / self.flops_per_s if self.flops_per_s else 0.0,
        )

    def bound(self, row: Row) -> str:
        """Say what a row waits for: memory, compute, or neither roof: latency."""
        moved, computed = self.of_roofs(row)
        if not moved and not computed:
            return ""
        if max(moved, computed) < LATENCY_SHARE:
            return "latency"
        return "memory" if moved >= computed else "compute"

    def occupancy(self, row: Row) -> float | None:
        """Tell the share of resident warps that the winner's resources allow, where known."""
        architecture = self.header.get("architecture") or self.header.get("target", "")
        used = row.winner
        return occupancy(
            architecture.rpartition(" ")[2],
            registers=used.registers,
            shared_bytes=used.shared_bytes,
            num_warps=used.num_warps,
        )

    def pin(self, row: Row) -> dict[str, Any]:
        """Give the row's winner as a table for `--pin`; empty where nothing was to be chosen."""
        choice = row.winner.choice
        return {"gpu": self.header.get("gpu", ""), "choices": {row.key: choice}} if choice else {}

    def gains(self) -> dict[str, float]:
        """Give each program's gain over the default schedules: 1.2 is a fifth faster."""
        found = {}
        for program, rows in self.programs().items():
            tuned = sum(self.total_us(row) for row in rows)
            default = sum(
                (row.us if row.default_us is None else row.default_us) * row.launches
                for row in rows
                if row.us is not None
            )
            if tuned:
                found[program] = default / tuned
        return found

    def verdict(self) -> list[str]:
        """Answer in three lines: what it gained, what changed, what failed."""
        gains = [f"{program} {gain:.3f}×" for program, gain in self.gains().items()]
        failed = sum(len(row.failed) for row in self.rows)
        tried = sum(len(row.attempts) for row in self.rows)
        return [
            "Against the default schedules: " + (", ".join(gains) or "not timed") + ".",
            f"Winners changed since the tuning before: {len(self.changed)}.",
            f"Candidates tried: {tried}, failed: {failed}.",
        ]


# --- from a log ---------------------------------------------------------------------------------


def from_log(records: Sequence[Record]) -> Report:
    """Make the report of a log: of each model and program what was found last."""
    session: Record = {}
    sessions: dict[str, Record] = {}  # identity of a program → the session that tuned it
    titles: dict[str, str] = {}  # identity → title
    models = {record.get("model", "") for record in records if record["record"] == "session"}
    for record in records:
        if record["record"] == "session":
            session = record
        elif record["record"] == "started":
            program = record["program"]
            titles.pop(program, None)  # the last one tuned is the last one told
            titles[program] = _title(record, session.get("model", "") if len(models) > 1 else "")
            sessions[program] = session
    latest = {title: program for program, title in titles.items()}
    rows, changed = [], []
    for title, program in latest.items():
        mine = [record for record in records if record.get("program") == program]
        rows += _rows_of(title, mine, sessions[program])
        ended = [
            record["winners"]
            for record in records
            if record["record"] == "finished" and titles.get(record["program"]) == title
        ]
        if len(ended) > 1:
            changed += [
                f"{title}: {key}" for key in ended[-1] if ended[-1][key] != ended[-2].get(key)
            ]
    roofs = session.get("roofs", {})
    moved = max(roofs.get("read_bytes_per_s", 0.0), roofs.get("copy_bytes_per_s", 0.0))
    return Report(
        _header({**session, "model": ", ".join(sorted(filter(None, models)))}),
        moved,
        roofs.get("matmul_flops_per_s", 0.0),
        tuple(rows),
        tuple(changed),
        _METHOD,
    )


_METHOD = (
    "A candidate's time is the median of whole steps, replayed as one CUDA graph, with only that "
    "kernel changed; the spread is the middle half of the rounds.",
    "A kernel's own µs are its launches alone in a graph, layer after layer, each on its own "
    "weights, so that the L2 cache is as cold as in a step; launch gaps are included.",
    "Roofs are measured on this machine: the better of reading and copying, and a bf16 matmul.",
)


def _title(record: Record, model: str) -> str:
    words = (record["step"], f"{record['num_seqs']}x{record['context_tokens']}", record["dtype"])
    return " ".join([*filter(None, [model]), *words])


def _header(session: Record) -> dict[str, str]:
    names = ("model", "gpu", "architecture", "torch", "triton", "autotune", "began")
    found = {name: str(session[name]) for name in names if session.get(name)}
    return found | {name: str(value) for name, value in session.get("state", {}).items()}


def _rows_of(title: str, records: Sequence[Record], session: Record) -> list[Row]:
    """Make a program's rows: kernels timed alone, and those of which candidates were timed."""
    step = next(r["step"] for r in records if r["record"] == "started")
    alone = {r["key"]: r for r in records if r["record"] == "kernel"}
    attempts: dict[str, dict[str, Record]] = {}
    for record in records:
        if record["record"] == "timing":
            attempts.setdefault(record["key"], {})[record["module"]] = record
    ended = [r["winners"] for r in records if r["record"] == "finished"]
    winners = ended[-1] if ended else {}
    rows = []
    for key in dict.fromkeys([*alone, *attempts]):
        single = alone.get(key, {})
        name = single.get("module", key.partition("/")[0])
        tried = _attempts(list(attempts.get(key, {}).values()), winners.get(key))
        tried = tried or (_only_one(name, single),)
        launches = single.get("launches", 1)
        rows.append(
            Row(
                title,
                step,
                name.partition(".")[0],
                key,
                _whole_launches(launches, session),
                single.get("flops", 0),
                single.get("bytes", 0),
                single.get("us"),
                single.get("us_low", 0.0),
                single.get("us_high", 0.0),
                tried,
                launches,
            )
        )
    return rows


def _only_one(module: str, record: Record) -> Attempt:
    """Give the candidate of a kernel that has no other: nothing was to be chosen."""
    return Attempt(
        "only one",
        module,
        registers=record.get("registers", 0),
        spill_bytes=record.get("spill_bytes", 0),
        shared_bytes=record.get("shared_bytes", 0),
        is_default=True,
        is_winner=True,
    )


def _whole_launches(launches: int, session: Record) -> int:
    """Tell the launches in the whole model, of which a few layers were timed."""
    layers = session.get("layers", 0)
    missing = session.get("model_layers", layers) - layers
    return launches + missing * round(launches / layers) if layers else launches


def _attempts(records: list[Record], winner: Mapping[str, Any] | None) -> tuple[Attempt, ...]:
    timed = [r for r in records if r["step_ms"] is not None]
    best = min(timed, key=lambda record: record["step_ms"], default=None)
    found = []
    for record in records:
        way = {"template": record["template"], "schedule": record["schedule"]}
        is_winner = way == winner if winner else record is best
        found.append(
            Attempt(
                schedule_text(record["template"], record["schedule"]),
                record["module"],
                None if record["step_ms"] is None else 1e3 * record["step_ms"],
                1e3 * record["spread_ms"],
                record["failure"],
                record["error"],
                record["registers"],
                record["spill_bytes"],
                record["shared_bytes"],
                record["is_default"],
                is_winner,
                way,
            )
        )
    found.sort(key=lambda a: (not a.is_winner, a.step_us is None, a.step_us or 0.0, a.schedule))
    return tuple(found)


# --- from an artifact ---------------------------------------------------------------------------


def from_artifact(artifact: Artifact, records: Sequence[Record]) -> Report:
    """Make the report of an artifact's programs, with what the log knows of its very kernels."""
    manifest = artifact.manifest
    plan = read_plan(artifact.json("plan.json"))
    forms = {program.form for program in plan.programs}
    graphs = {form: parse_graph(artifact.text(f"graph/{form}.ir")) for form in sorted(forms)}
    used: dict[str, Mapping[str, Any]] = {}
    if "report.json" in manifest.files:
        used = {kernel["module"]: kernel for kernel in artifact.json("report.json")["kernels"]}
    base = from_log(records)
    timed = {row.winner.module: row for row in base.rows if row.us is not None}
    timed |= {
        r["module"]: replace(row, us=r["us"], us_low=r["us_low"], us_high=r["us_high"])
        for r in records
        if r["record"] == "kernel"
        for row in base.rows
        if row.key == r["key"]
    }
    rows: list[Row] = []
    for program in plan.programs:
        counts: dict[str, int] = {}
        first: dict[str, str] = {}
        for launch in program.launches:
            counts[launch.kernel] = counts.get(launch.kernel, 0) + 1
            first.setdefault(launch.kernel, launch.op)
        dims = bucket_dims(manifest.engine, program.step, program.bucket)
        for module, launches in counts.items():
            known = timed.get(module)
            flops, moved = _cost(graphs[program.form], first[module], dims)
            resources = used.get(module, {})
            attempt = Attempt(
                "as compiled",
                module,
                registers=resources.get("registers", 0),
                spill_bytes=resources.get("spill_bytes", 0),
                shared_bytes=resources.get("shared_bytes", 0),
                is_winner=True,
            )
            row = Row(
                f"{program.step} {program.bucket}",
                program.step,
                module.partition(".")[0],
                module,
                launches,
                flops,
                moved,
                attempts=(attempt,),
            )
            if known is not None and known.step == program.step:
                row = replace(
                    row,
                    flops=known.flops,
                    bytes=known.bytes,
                    us=known.us,
                    us_low=known.us_low,
                    us_high=known.us_high,
                    attempts=known.attempts or row.attempts,
                    timed_launches=known.timed_launches,
                )
            rows.append(row)
    header = {
        "model": manifest.model_name,
        "target": f"{manifest.target} {manifest.architecture}".strip(),
        "gpu": manifest.gpu,
        "torch": manifest.torch,
        "triton": manifest.triton,
        "artifact": artifact.path.name,
    }
    header = {name: value for name, value in header.items() if value}
    notes = (*_METHOD, "Bytes and operations of kernels that were not timed are at a full window.")
    return Report(header, base.bytes_per_s, base.flops_per_s, tuple(rows), (), notes)


def _cost(graph: Graph, op_name: str, dims: Mapping[str, int]) -> tuple[int, int]:
    op = next(op for op in graph.ops if op.name == op_name)
    cost = op_cost(op, graph, dims)
    return cost.flops, cost.bytes


# --- JSON ---------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """Give the report for a machine, with what follows from its figures."""
    data = asdict(report) | {"format": FORMAT, "verdict": report.verdict()}
    for row, values in zip(report.rows, data["rows"], strict=True):
        moved, computed = report.of_roofs(row)
        values["derived"] = {
            "share": report.share(row),
            "margin": row.margin,
            "margin_is_noise": row.margin_is_noise,
            "default_us": row.default_us,
            "gb_per_s": report.rates(row)[0] / 1e9,
            "tflop_per_s": report.rates(row)[1] / 1e12,
            "of_memory_roof": moved,
            "of_compute_roof": computed,
            "bound": report.bound(row),
            "occupancy": report.occupancy(row),
        }
    return data


def from_json(data: Mapping[str, Any]) -> Report:
    """Read what `to_json` gave. Raises: ConfigError: it is something else."""
    if data.get("format") != FORMAT:
        raise ConfigError(
            f"Expected a report of the format `{FORMAT}`, found `{data.get('format')}`.",
            remedy="Make it with `treadle report SOURCE --json`.",
        )
    rows = tuple(
        Row(
            **{
                **{name: value for name, value in row.items() if name != "derived"},
                "attempts": tuple(Attempt(**attempt) for attempt in row["attempts"]),
            }
        )
        for row in data["rows"]
    )
    return Report(
        data["header"],
        data["bytes_per_s"],
        data["flops_per_s"],
        rows,
        tuple(data["changed"]),
        tuple(data["notes"]),
    )


def read_json(path: Path) -> Report:
    """Read a report's file. Raises: ConfigError: it can't be read."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The report {path} can't be read: {error!r}.",
            remedy="Name an artifact, a log of timings (.jsonl) or what `report --json` printed.",
        ) from None


# --- what changed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One kernel in two reports: `kind` is new, gone, same, noise, slower or faster."""

    kind: str
    program: str
    kernel: str
    key: str
    before: Row | None
    after: Row | None
    ratio: float | None = None

    @property
    def winner_changed(self) -> bool:
        """Say whether another candidate won."""
        if self.before is None or self.after is None:
            return False
        return self.before.winner.schedule != self.after.winner.schedule


def diff(before: Report, after: Report) -> list[Change]:
    """Compare two reports, kernel by kernel; a difference inside the joint spread is noise."""
    old = {(row.program, row.key): row for row in before.rows}
    new = {(row.program, row.key): row for row in after.rows}
    changes = []
    for place in dict.fromkeys([*old, *new]):
        left, right = old.get(place), new.get(place)
        program, key = place
        kernel = (right or left or Row("", "", "", "", 0)).kernel
        if left is None or right is None:
            kind = "new" if left is None else "gone"
            changes.append(Change(kind, program, kernel, key, left, right))
            continue
        kind, ratio = "same", None
        if left.us and right.us:
            ratio = right.us / left.us
            joint = (left.us_high - left.us_low + right.us_high - right.us_low) / 2
            if abs(right.us - left.us) <= joint:
                kind = "same" if right.us == left.us else "noise"
            else:
                kind = "slower" if right.us > left.us else "faster"
        changes.append(Change(kind, program, kernel, key, left, right, ratio))
    return changes


def regressions(changes: Iterable[Change], threshold: float) -> list[Change]:
    """Choose what became slower by more than the threshold (0.05 is 5 %) and than the spread."""
    return [c for c in changes if c.kind == "slower" and (c.ratio or 0.0) > 1.0 + threshold]
