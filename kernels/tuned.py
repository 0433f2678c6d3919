"""The table of tuned schedules: which template and schedule won, by kernel, sizes, bucket and GPU.

Tables for known GPUs ship in `kernels/tuned_tables/`. Called by the tuner, which adds to them, and
by the planner, which looks up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from treadle.ir.errors import ConfigError
from treadle.ir.files import write_whole
from treadle.ir.graph import Graph, Op, fingerprint
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.near_sizes import nearest

SHIPPED = Path(__file__).parent / "tuned_tables"
# What to take for a GPU that is named by its architecture only, when compiling ahead of time.
TYPICAL_GPU = {"sm_90": "NVIDIA H200"}
WINDOW_SETTING = "MAX_SPLITS"  # of a schedule: what is offered depends on the window


@dataclass(frozen=True)
class Choice:
    """Name the template and schedule that won for one key."""

    template: str
    schedule: Mapping[str, int | bool]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.schedule.items())
        return f"{self.template} ({settings})"

    def is_of(self, candidate: Candidate) -> bool:
        """Say whether this candidate is the one that won."""
        return (candidate.template, candidate.schedule) == (self.template, self.schedule)

    def most_like(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Give the candidate that won, or else the first with another number of splits."""
        won = next((each for each in candidates if self.is_of(each)), None)
        if won is not None or WINDOW_SETTING not in self.schedule:
            return won
        splits = {WINDOW_SETTING: self.schedule[WINDOW_SETTING]}
        return next(
            (
                each
                for each in candidates
                if self.is_of(replace(each, schedule={**each.schedule, **splits}))
            ),
            None,
        )


@dataclass(frozen=True)
class TunedTable:
    """Hold the choices for one GPU, by key. Immutable: `with_choice` gives a new one."""

    gpu: str
    choices: Mapping[str, Choice] = field(default_factory=dict)

    def with_choice(
        self, key: str, template: str, schedule: Mapping[str, int | bool]
    ) -> TunedTable:
        """Give the table with one choice added or replaced."""
        return TunedTable(self.gpu, {**self.choices, key: Choice(template, dict(schedule))})

    def over(self, below: TunedTable) -> TunedTable:
        """Give this table with the choices of another where this one has none."""
        return TunedTable(self.gpu or below.gpu, {**below.choices, **self.choices})

    def fingerprint(self) -> str:
        """Name the content: equal choices give equal names."""
        return fingerprint(self.text())

    def choose(
        self,
        op: Op,
        graph: Graph,
        where: Situation,
        candidates: Iterator[Candidate],
        *,
        on_stale: Callable[[str], None],
    ) -> Candidate:
        """Choose the tuned candidate, or for a key never tuned what won for the nearest sizes.

        The splits of attention may be others than won: how many are offered depends on the window,
        which is not in the key. Where nothing near was tuned, the first candidate. So too where a
        choice is no candidate any more because the templates changed since it was tuned, which
        `on_stale` is told: it is right, only perhaps slower.
        """
        first = next(candidates)
        key = tuning_key(first, op, graph, where)
        choice = self.choices.get(key)
        if choice is not None and choice.is_of(first):
            return first
        offered = [first, *candidates]
        if choice is not None:
            found = choice.most_like(offered)
            if found is None:
                on_stale(f"{key}: the tuned {choice} is not offered any more, the default is used")
            return found or first
        like = (self.choices[near].most_like(offered) for near in nearest(key, self.choices))
        return next((candidate for candidate in like if candidate is not None), first)

    def text(self) -> str:
        """Give the table as JSON, in the order of its keys."""
        data = {
            "gpu": self.gpu,
            "choices": {
                key: {"template": choice.template, "schedule": dict(choice.schedule)}
                for key, choice in sorted(self.choices.items())
            },
        }
        return json.dumps(data, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the table; `read_table` gives it back equal. Raises: OSError."""
        write_whole(path, self.text())


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
    """Give the table that ships for a GPU, or else for a typical one of the architecture.

    A GPU that was never tuned has an empty one.
    """
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
