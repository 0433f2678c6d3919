"""The search with a clockwork instead of a GPU: the best is kept, nothing is timed twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.ir.toy import toy_graph
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Op
from treadle.ir.pipeline import run_passes
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Candidate
from treadle.kernels.tuned import TunedTable
from treadle.runtime import tuner
from treadle.runtime.config import EngineConfig
from treadle.runtime.report import from_log
from treadle.runtime.timings import TimingLog, read_log, schedule_text
from treadle.runtime.tuner import Effort, Space, Timing, Tuned, Workload, tune_program

WORK = Workload("decode", 32, 64)
ENGINE = EngineConfig("cuda", "bf16", 16, 32, 32, 512)
GRAPHS = {"decode": run_passes(toy_graph("decode"), few_tokens=False)[0]}


@dataclass
class Clockwork:
    """Give each candidate a time of its own: the step is their sum, whoever runs beside it."""

    seed: int
    stop_after: int = 10**9
    prepared: int = 0
    timed: list[tuple[str, str]] = field(default_factory=list)
    steps: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    failing: frozenset[str] = frozenset()

    def prepare(self, space: Space) -> None:
        self.prepared += 1

    def cost(self, module: str) -> float:
        return random.Random(f"{self.seed} {module}").uniform(1.0, 2.0)

    def __call__(self, space: Space, key: str) -> Timing:
        modules = space.modules(space.plan())
        candidate = space.candidates[key][space.chosen[key]]
        self.timed.append((key, modules[key]))
        self.steps.append((key, tuple(modules.values())))
        if len(self.timed) > self.stop_after:
            raise KeyboardInterrupt
        if candidate.template in self.failing:
            return Timing(candidate.template, candidate.schedule, failure="out of shared memory")
        return Timing(candidate.template, candidate.schedule, sum(map(self.cost, modules.values())))


def tune(
    log: TimingLog,
    watch: Clockwork,
    effort: Effort = Effort(),
    table: TunedTable = TunedTable("GPU of tests"),
) -> Tuned:
    """Tune the toy; the clock ticks once for every look at it."""
    now = iter(range(10**9))
    return tune_program(
        GRAPHS,
        ENGINE,
        WORK,
        table,
        "sm_90",
        log=log,
        effort=effort,
        measure=watch,
        clock=lambda: next(now),
    )


@pytest.fixture(autouse=True)
def fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer every fourth candidate: how many there are is of no account to the search."""
    monkeypatch.setattr(tuner, "lower", lambda *facts: islice(lower(*facts), 0, 40, 4))


@pytest.fixture
def seed() -> int:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return seed


def test_the_fastest_candidate_of_each_kernel_wins(seed: int) -> None:
    watch = Clockwork(seed)
    done = tune(TimingLog(None), watch)
    assert done.finished and watch.prepared == 1
    tuned = [tuning for tuning in done.tunings if tuning.timings]
    assert tuned
    for tuning in tuned:
        modules = [module for key, module in watch.timed if key == tuning.key]
        best = min(modules, key=watch.cost)
        choice = done.table.choices[tuning.key]
        assert choice.template == tuning.winner.template
        assert (choice.template, choice.schedule) == (
            tuning.winner.template,
            tuning.winner.schedule,
        )
        assert tuning.winner.step_ms < 1e3 and best in modules
    assert len(set(watch.steps)) == len(watch.steps)


def test_a_failed_candidate_is_logged_with_its_reason_and_never_wins(seed: int) -> None:
    log = TimingLog(None)
    done = tune(log, Clockwork(seed, failing=frozenset({"matmul_skinny"})))
    failed = [record for record in log.records if record.get("failure")]
    assert {record["failure"] for record in failed} == {"out of shared memory"}
    assert all(record["step_ms"] is None for record in failed)
    winners = [done.table.choices[tuning.key] for tuning in done.tunings if tuning.timings]
    assert "matmul_skinny" not in {choice.template for choice in winners}


def test_after_a_stop_the_rest_is_timed_and_no_candidate_twice(tmp_path: Path, seed: int) -> None:
    whole = Clockwork(seed)
    expected = tune(TimingLog(None), whole)
    stop = random.Random(seed).randrange(1, len(whole.timed))
    first = Clockwork(seed, stop_after=stop)
    with pytest.raises(KeyboardInterrupt):
        tune(TimingLog(tmp_path / "log.jsonl"), first)
    second = Clockwork(seed)
    done = tune(TimingLog(tmp_path / "log.jsonl"), second)
    assert first.timed[:stop] + second.timed == whole.timed
    assert (done.table, done.known, done.timed) == (expected.table, stop, len(second.timed))


def test_what_is_tuned_is_not_tuned_again_unless_asked(tmp_path: Path, seed: int) -> None:
    expected = tune(TimingLog(tmp_path / "log.jsonl"), Clockwork(seed)).table
    idle = Clockwork(seed)
    found = tune(TimingLog(tmp_path / "log.jsonl"), idle).table
    assert found.choices.items() >= expected.choices.items()
    assert (idle.prepared, idle.timed) == (0, [])
    again = Clockwork(seed)
    tune(TimingLog(tmp_path / "log.jsonl"), again, Effort(again=True))
    assert again.prepared == 1 and again.timed


def test_past_the_deadline_what_stands_stays(tmp_path: Path, seed: int) -> None:
    watch = Clockwork(seed)
    done = tune(TimingLog(tmp_path / "log.jsonl"), watch, Effort(deadline_s=3))
    assert (done.finished, done.timed, watch.prepared) == (False, 3, 1)
    assert [t.key for t in done.tunings if t.timings] == list(done.table.choices)
    nothing = Clockwork(seed)
    assert not tune(TimingLog(None), nothing, Effort(deadline_s=0)).finished
    assert nothing.prepared == 0


def test_quick_times_fewer(seed: int) -> None:
    quick, full = Clockwork(seed), Clockwork(seed)
    tune(TimingLog(None), quick, Effort("quick"))
    tune(TimingLog(None), full, Effort("full"))
    assert 0 < len(quick.timed) < len(full.timed)


def test_what_a_table_has_may_be_left_as_it_is(tmp_path: Path, seed: int) -> None:
    first = Clockwork(seed)
    key, *others = dict.fromkeys(key for key, _ in first_timed(first))
    choice = tune(TimingLog(None), Clockwork(seed)).table.choices[key]
    table = TunedTable("GPU of tests", {key: choice})
    watch, log = Clockwork(seed + 1, stop_after=3), TimingLog(tmp_path / "log.jsonl")
    with pytest.raises(KeyboardInterrupt):
        tune(log, watch, Effort(only_new=True), table)
    rest = Clockwork(seed + 1)
    done = tune(TimingLog(tmp_path / "log.jsonl"), rest, Effort(only_new=True), table)
    assert {key for key, _ in watch.timed[:3] + rest.timed} == set(others)
    assert done.table.choices[key] == choice


def first_timed(watch: Clockwork) -> list[tuple[str, str]]:
    """Tune from nothing and give what was timed."""
    tune(TimingLog(None), watch)
    return watch.timed


def test_a_line_cut_off_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = TimingLog(path)
    log.append("started", program="a")
    log.append("finished", program="a")
    whole = path.read_text()
    path.write_text(whole + '{"record": "tim')
    assert [record["record"] for record in read_log(path)] == ["started", "finished"]
    path.write_text("nonsense\n" + whole)
    with pytest.raises(ConfigError, match=r"log\.jsonl:1 "):
        TimingLog(path)


def test_a_schedule_is_written_short() -> None:
    schedule = {"ROWS": 1, "BLOCK_N": 16, "USE_PDL": True, "GATED": False, "num_warps": 8}
    assert schedule_text("gemv", schedule) == "gemv ROWS=1 N=16 pdl w8"


@pytest.mark.interpreted
def test_the_stopwatch_times_interpreted_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = run_passes(toy_graph("decode"), few_tokens=False)[0]

    def offer_twice(op: Op, *rest: Any) -> Iterator[Candidate]:
        """Offer one kernel twice: what the interpreter does not look at differs."""
        for candidate in lower(op, *rest):
            yield candidate
            if op.name.endswith("after_mlp"):
                yield replace(candidate, schedule=candidate.schedule | {"num_warps": 8})

    monkeypatch.setattr(tuner, "lower", offer_twice)
    monkeypatch.setattr(tuner, "ROUNDS", 2)
    log = TimingLog(None)
    engine = EngineConfig("interpret", "f32", 16, 2, 16, 32)
    done = tune_program(
        {"decode": graph}, engine, Workload("decode", 2, 8), TunedTable(""), "", log=log
    )
    assert done.finished and done.timed == 2
    timed = [record for record in log.records if record["record"] == "timing"]
    assert all(record["step_ms"] > 0 and record["error"] < 1e-3 for record in timed)
    alone = {r["key"]: r for r in log.records if r["record"] == "kernel"}
    assert set(alone) == {tuning.key for tuning in done.tunings}
    assert all(record["us"] > 0 for record in alone.values())
    report = from_log(log.records)
    assert sum(report.share(row) or 0 for row in report.rows) == pytest.approx(1)
