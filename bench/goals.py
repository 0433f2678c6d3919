"""Print each goal beside the latest figure of this machine's results; exit 1 where one is missed.

Run: make goals, or python bench/goals.py --results bench/results/NVIDIA_H200
A goal without a figure is told as `not measured`, and is no miss unless `--strict` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.ir.errors import ConfigError  # noqa: E402
from treadle.runtime.console import print_table  # noqa: E402

GOALS = ROOT / "bench" / "goals.json"
RESULTS = ROOT / "bench" / "results" / "NVIDIA_H200"
FAILURES = ".failures.json"  # as `rows.py` names them, which needs torch


@dataclass(frozen=True)
class Verdict:
    """Hold one goal and what was measured, in its unit; None where nothing was."""

    bench: str
    case: str
    goal: float
    unit: str
    better: str
    value: float | None = None
    peers: Mapping[str, float] | None = None
    date: str = ""

    @property
    def word(self) -> str:
        """Say how it stands: `met`, `missed` or `not measured`."""
        if self.value is None:
            return "not measured"
        met = self.value <= self.goal if self.better == "lower" else self.value >= self.goal
        return "met" if met else "missed"

    def cells(self) -> tuple[str, ...]:
        """Give the columns of the table."""
        sign = "≤" if self.better == "lower" else "≥"
        value = "–" if self.value is None else f"{self.value:.4g}"
        best = ""
        if self.peers:
            choose = min if self.better == "lower" else max
            name = choose(self.peers, key=lambda peer: (self.peers or {})[peer])
            best = f"best peer {self.peers[name]:g} ({name})"
        return (
            self.bench,
            self.case,
            value,
            f"{sign} {self.goal:g} {self.unit}",
            self.word,
            self.date,
            best,
        )


def verdicts(goals: Mapping[str, Any], folder: Path) -> Iterator[Verdict]:
    """Join the goals with the rows of a results folder.

    A goal with `of` and `over` is one for the ratio of these two cases, of one commit.
    Raises: ConfigError: a file is damaged.
    """
    for bench, cases in goals.items():
        rows = _rows(folder / f"{bench}.json")
        for case, entry in cases.items():
            row = rows.get(entry.get("of", case), {})
            value = row.get("value")
            if "over" in entry:
                value = _ratio(row, rows.get(entry["over"], {}))
            yield Verdict(
                bench,
                case,
                entry["goal"],
                entry.get("unit", "ms"),
                entry.get("better", "lower"),
                value,
                entry.get("peers", {}),
                row.get("conditions", {}).get("date", ""),
            )


def _ratio(row: Mapping[str, Any], over: Mapping[str, Any]) -> float | None:
    """Give the ratio of two figures, or None where they are not of one commit."""
    commits = [each.get("conditions", {}).get("commit") for each in (row, over)]
    if not row or not over or commits[0] != commits[1]:
        return None
    return float(row["value"] / over["value"])


def _rows(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return {row["case"]: row for row in json.loads(path.read_text())}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The results {path} can't be read: {error!r}.", remedy="Run the benchmark again."
        ) from None


def failures(goals: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Tell which cases failed when they were last measured, and with what."""
    for bench in goals:
        for case, failure in _rows(folder / f"{bench}{FAILURES}").items():
            yield f"failed: {bench}: {case}: {failure['trace'][-1]}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goals", type=Path, default=GOALS, help="the data file of the goals")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a machine's results folder")
    parser.add_argument("--strict", action="store_true", help="not measured counts as missed")
    asked = parser.parse_args(arguments)
    goals = json.loads(asked.goals.read_text())
    found = list(verdicts(goals, asked.results))
    header = ("bench", "case", "measured", "goal", "verdict", "date", "")
    print_table([header, *(verdict.cells() for verdict in found)])
    for line in failures(goals, asked.results):
        print(line)
    counts = {
        word: sum(verdict.word == word for verdict in found)
        for word in ("met", "missed", "not measured")
    }
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(bool(counts["missed"] or (asked.strict and counts["not measured"])))


if __name__ == "__main__":
    sys.exit(main())
