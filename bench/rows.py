"""Benchmark rows: one form for all benchmarks, with conditions, written atomically.

Every row holds bench, case, value, unit, better, goal, floor, peers and conditions. Called by the
benchmarks of this folder.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import triton

from treadle.ir.files import write_whole

BENCH = Path(__file__).resolve().parent
GOALS = BENCH / "goals.json"
RESULTS = BENCH / "results"
FAILURES = ".failures.json"


@dataclass(frozen=True)
class Row:
    """Hold one figure. `better` is `lower` or `higher`; goal and floor are in its unit."""

    bench: str
    case: str
    value: float
    unit: str
    better: str
    goal: float | None = None
    floor: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, object] = field(default_factory=dict)


def conditions(**extra: object) -> dict[str, object]:
    """Give what a figure depends on: machine, versions, date, commit, and `extra`."""
    return {
        "gpu": _gpu_name(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "commit": _commit(),
        **extra,
    }


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def with_goal(bench: str, case: str) -> tuple[float | None, dict[str, float]]:
    """Look up the goal and the peers' figures of a case."""
    entry = json.loads(GOALS.read_text()).get(bench, {}).get(case, {})
    return entry.get("goal"), entry.get("peers", {})


def write_rows(bench: str, rows: list[Row], folder: Path | None = None) -> Path:
    """Merge rows, by case, into the benchmark's results file of this machine."""
    path = _home(folder) / f"{bench}.json"
    _merge(path, {row.case: asdict(row) for row in rows})
    return path


def write_failure(bench: str, case: str, trace: str, folder: Path | None = None) -> Path:
    """Write down that a case failed and where, beside the rows; an older figure of it stays."""
    path = _home(folder) / f"{bench}{FAILURES}"
    trouble = {"bench": bench, "case": case, "trace": trace.splitlines()}
    _merge(path, {case: {**trouble, "conditions": conditions()}})
    return path


def forget_failure(bench: str, case: str, folder: Path | None = None) -> None:
    """Take back what `write_failure` wrote of a case; a file without failures goes."""
    path = _home(folder) / f"{bench}{FAILURES}"
    known = _read(path)
    if known.pop(case, None) is None:
        return
    if known:
        write_whole(path, json.dumps(list(known.values()), indent=1) + "\n")
    else:
        path.unlink()


def _home(folder: Path | None) -> Path:
    """Give the folder of this machine's results, or the one that was asked for."""
    return folder or RESULTS / (_gpu_name().replace(" ", "_") or "cpu")


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _read(path: Path) -> dict[str, object]:
    return {row["case"]: row for row in json.loads(path.read_text())} if path.is_file() else {}


def _merge(path: Path, by_case: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(list({**_read(path), **by_case}.values()), indent=1) + "\n")
