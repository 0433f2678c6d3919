"""The table of tuned schedules: which template and schedule won, by kernel, sizes, bucket and GPU.

Tables for known GPUs ship in `kernels/tuned/`; a user's own lie in the cache. Called by the tuner,
which adds to it, and by the planner, which looks up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Op
from treadle.kernels.lower import Candidate, Situation

SHIPPED = Path(__file__).parent / "tuned_tables"
# What to take for a GPU that is named by its architecture only, when compiling ahead of time.
TYPICAL_GPU = {"sm_90": "NVIDIA H200"}


@dataclass(frozen=True)
class Choice:
    """The template and schedule that won for one key."""

    template: str
    schedule: Mapping[str, int | bool]


@dataclass(frozen=True)
class TunedTable:
    """Hold choices by key for one GPU and Triton version. Immutable; `with_choice` gives a new one."""

    gpu: str
    choices: Mapping[str, Choice] = field(default_factory=dict)

    def with_choice(
        self, key: str, template: str, schedule: Mapping[str, int | bool]
    ) -> TunedTable:
        """Give the table with one choice added or replaced."""
        return TunedTable(self.gpu, {**self.choices, key: Choice(template, dict(schedule))})

    def choose(
        self, op: Op, graph: Graph, where: Situation, candidates: Iterator[Candidate]
    ) -> Candidate:
        """Choose the tuned candidate, or the default where this key was never tuned."""
        first = next(candidates)
        choice = self.choices.get(tuning_key(first, op, graph, where))
        if choice is None or _is(first, choice):
            return first
        return next((c for c in candidates if _is(c, choice)), first)

    def write(self, path: Path) -> None:
        """Write the table atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "gpu": self.gpu,
            "choices": {
                key: {"template": choice.template, "schedule": dict(choice.schedule)}
                for key, choice in sorted(self.choices.items())
            },
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)


def read_table(path: Path) -> TunedTable:
    """Read a table. Raises: ConfigError: the file can't be read; names it."""
    try:
        data = json.loads(path.read_text())
        choices = {key: Choice(**choice) for key, choice in data["choices"].items()}
        return TunedTable(data["gpu"], choices)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The tuned table {path} can't be read: {error}.", remedy="Remove it and tune again."
        ) from None


def shipped_table(gpu: str, architecture: str = "") -> TunedTable:
    """Give the table that ships for a GPU, or for a typical one of the architecture; may be empty."""
    gpu = gpu or TYPICAL_GPU.get(architecture, "")
    path = SHIPPED / f"{gpu.replace(' ', '_')}.json"
    return read_table(path) if path.is_file() else TunedTable(gpu)


def tuning_key(candidate: Candidate, op: Op, graph: Graph, where: Situation) -> str:
    """Name what a schedule may depend on: kernel, sizes, dtype, step and bucket.

    `candidate` is the default one; only what all candidates of the op share enters the key.
    """
    shape = ",".join(f"{name}={value}" for name, value in sorted(candidate.shape.items()))
    dtype = graph.type_of(op.outputs[0] if op.outputs else op.inputs[0]).dtype
    rows = where.dims["T"] if "size:T" in candidate.arguments.values() else where.dims["B"]
    return f"{candidate.name}/{shape}/{dtype}/{where.step}/{rows}"


def _is(candidate: Candidate, choice: Choice) -> bool:
    return candidate.template == choice.template and dict(candidate.schedule) == dict(
        choice.schedule
    )
