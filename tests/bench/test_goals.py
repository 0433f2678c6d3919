"""Goals beside figures: what is met, missed and not measured, and how the program ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.bench import goals

CASES = {
    "decode": {"fast": {"goal": 2.0, "peers": {"A": 3.0, "B": 2.5}}, "slow": {"goal": 1.0}},
    "throughput": {"many": {"goal": 100, "unit": "tokens/s", "better": "higher"}},
}


def run(tmp_path: Path, values: dict[str, float], *options: str) -> int:
    (tmp_path / "goals.json").write_text(json.dumps(CASES))
    results = tmp_path / "results"
    results.mkdir()
    for bench, cases in CASES.items():
        rows = [{"case": case, "value": values[case]} for case in cases if case in values]
        (results / f"{bench}.json").write_text(json.dumps(rows))
    return goals.main(
        ["--goals", str(tmp_path / "goals.json"), "--results", str(results), *options]
    )


def test_all_met_ends_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"fast": 2.0, "slow": 0.5, "many": 100}) == 0
    assert "3 met, 0 missed, 0 not measured" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"slow": 1.01}, {"many": 99.0}])
def test_a_miss_ends_with_one(
    tmp_path: Path, changed: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {"fast": 2.0, "slow": 0.5, "many": 100} | changed) == 1
    assert "missed" in capsys.readouterr().out


def test_what_was_not_measured_is_told_and_fails_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {"fast": 2.0}) == 0
    out = capsys.readouterr().out
    assert "1 met, 0 missed, 2 not measured" in out
    assert "best peer 2.5 (B)" in out
    (tmp_path / "more").mkdir()
    assert run(tmp_path / "more", {"fast": 2.0}, "--strict") == 1


def test_a_goal_may_be_for_the_ratio_of_two_cases(tmp_path: Path) -> None:
    ratio = {"of": "slow", "over": "fast", "goal": 1.5, "unit": "×"}
    results = [{"case": "slow", "value": 3.0}, {"case": "fast", "value": 2.0}]
    (tmp_path / "decode.json").write_text(json.dumps(results))
    (found,) = goals.verdicts({"decode": {"slow over fast": ratio}}, tmp_path)
    assert (found.value, found.word) == (1.5, "met")
    (found,) = goals.verdicts({"decode": {"of one": {**ratio, "over": "absent"}}}, tmp_path)
    assert (found.value, found.word) == (None, "not measured")


def test_a_ratio_of_figures_of_two_commits_is_not_measured(tmp_path: Path) -> None:
    results = [
        {"case": "slow", "value": 3.0, "conditions": {"commit": "1234567"}},
        {"case": "fast", "value": 2.0, "conditions": {"commit": "89abcde"}},
    ]
    (tmp_path / "decode.json").write_text(json.dumps(results))
    ratio = {"of": "slow", "over": "fast", "goal": 1.5}
    (found,) = goals.verdicts({"decode": {"slow over fast": ratio}}, tmp_path)
    assert (found.value, found.word) == (None, "not measured")


def test_cases_that_failed_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more").mkdir()
    assert run(tmp_path / "more", {"fast": 2.0}) == 0
    failure = {"case": "slow", "trace": ["Traceback", "ValueError: too slow"]}
    (tmp_path / "more/results/decode.failures.json").write_text(json.dumps([failure]))
    goals.main(
        [
            "--goals",
            str(tmp_path / "more/goals.json"),
            "--results",
            str(tmp_path / "more/results"),
        ]
    )
    assert "failed: decode: slow: ValueError: too slow" in capsys.readouterr().out


def test_the_project_s_goals_are_complete() -> None:
    found = list(goals.verdicts(json.loads(goals.GOALS.read_text()), goals.RESULTS))
    assert {verdict.bench for verdict in found} == {
        "decode",
        "prefill",
        "kernels",
        "throughput",
        "startup",
        "host_time",
        "prefix_cache",
        "kv_attention",
    }
    assert {verdict.better for verdict in found} <= {"lower", "higher"}
