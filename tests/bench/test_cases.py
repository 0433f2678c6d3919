"""Cases in a row: each figure is kept at once, a failure is written down and stops nothing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.bench.cases import play
from treadle.bench.rows import Row, conditions


def ask(folder: Path, budget: float = 60.0) -> argparse.Namespace:
    return argparse.Namespace(out=folder, budget=budget)


def one(case: str) -> Iterator[Row]:
    yield Row("toy", case, 1.5, "ms", "lower", conditions=conditions())


def breaks(case: str) -> Iterator[Row]:
    yield from one(case)
    raise ValueError("no such thing")


def test_a_case_that_fails_keeps_its_rows_and_those_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"bad": lambda: breaks("begun"), "good": lambda: one("good")}
    ends = play("toy", cases.items(), ask(tmp_path), time.monotonic())
    assert ends.exit_code == 1 and ends.done == ["good"]
    assert ends.failed == {"bad": "ValueError: no such thing"}
    rows = json.loads((tmp_path / "toy.json").read_text())
    assert [row["case"] for row in rows] == ["begun", "good"]
    (failure,) = json.loads((tmp_path / "toy.failures.json").read_text())
    assert failure["case"] == "bad" and failure["trace"][-1] == "ValueError: no such thing"
    assert "toy: 1 done, 1 failed, 0 left out" in capsys.readouterr().out


def test_a_failure_is_forgotten_once_its_case_passes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        play("toy", [(name, lambda: breaks("x"))], ask(tmp_path), time.monotonic())
    play("toy", [("a", lambda: one("x"))], ask(tmp_path), time.monotonic())
    (failure,) = json.loads((tmp_path / "toy.failures.json").read_text())
    assert failure["case"] == "b"
    play("toy", [("b", lambda: one("x"))], ask(tmp_path), time.monotonic())
    assert not (tmp_path / "toy.failures.json").exists()


def test_rows_are_written_before_the_next_is_measured(tmp_path: Path) -> None:
    def two() -> Iterator[Row]:
        yield from one("first")
        assert "first" in (tmp_path / "toy.json").read_text()
        yield from one("second")

    assert play("toy", [("both", two)], ask(tmp_path), time.monotonic()).exit_code == 0


def test_no_case_begins_after_the_time_and_that_is_no_failure(tmp_path: Path) -> None:
    began_s = time.monotonic() - 61
    ends = play("toy", [("late", lambda: one("late"))], ask(tmp_path), began_s)
    assert ends.left_out == ["late"] and ends.exit_code == 0
    assert not (tmp_path / "toy.json").exists()
