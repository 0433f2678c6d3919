"""Benchmark rows: one form for all benchmarks, with conditions, written atomically.

Every row holds bench, case, value, unit, better, goal, floor, peers and conditions. Called by the
benchmarks of this folder.
"""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import triton

from treadle.ir.files import write_whole

BENCH = Path(__file__).resolve().parent
GOALS = BENCH / "goals.json"
RESULTS = BENCH / "results"


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
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "commit": _commit(),
        **extra,
    }


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=BENCH, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def with_goal(bench: str, case: str) -> tuple[float | None, dict[str, float]]:
    """Look up the goal and the peers' figures of a case."""
    entry = json.loads(GOALS.read_text()).get(bench, {}).get(case, {})
    return entry.get("goal"), entry.get("peers", {})


def write_rows(bench: str, rows: list[Row], folder: Path | None = None) -> Path:
    """Merge rows, by case, into the benchmark's results file of this machine."""
    machine = str(rows[0].conditions.get("gpu") or "cpu").replace(" ", "_")
    path = (folder or RESULTS / machine) / f"{bench}.json"
    known = {row["case"]: row for row in json.loads(path.read_text())} if path.is_file() else {}
    known.update({row.case: asdict(row) for row in rows})
    write_whole(path, json.dumps(list(known.values()), indent=1) + "\n")
    return path
