"""What programs an engine has: launches and buffers. The compiler writes it, loading reads it.

Called by all that run a plan. Knows no kernels: `planner.py` decides which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treadle.runtime.config import EngineConfig
from treadle.runtime.state import state_dims

PLAN = "plan.json"
# The step, and the form of its graph, that draws again from adjusted logits.
RESAMPLE = "resample"


@dataclass(frozen=True)
class LaunchPlan:
    """Plan one launch: the op it computes, the kernel's module and what its `launch` takes.

    `arguments` are written as in `kernels.lower.candidates.Candidate`.
    """

    op: str
    kernel: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class ProgramPlan:
    """Plan one program: the step it plays, its bucket (sequences or tokens) and the graph's form.

    `offsets` place the step's values in an arena of `arena_bytes`, shared by all programs.
    """

    step: str
    bucket: int
    form: str
    launches: tuple[LaunchPlan, ...] = ()
    offsets: Mapping[str, int] = field(default_factory=dict)
    arena_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """Plan all programs.

    `resample` follows any of the steps when rows ask for adjusted logits; its values are those of
    the step it follows. `modules` are the kernels' texts by name, `scratch` the (dtype, elements)
    of what they ask for.
    """

    programs: tuple[ProgramPlan, ...]
    resample: ProgramPlan | None = None
    scratch: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_programs(self) -> tuple[ProgramPlan, ...]:
        """The steps' programs, and the one that may follow them."""
        return (*self.programs, *([self.resample] if self.resample else []))

    def write(self, folder: Path, kernels: Path | None = None) -> None:
        """Write plan and kernels into an artifact's folder, or the kernels into their own."""
        kernels = kernels or folder / "kernels"
        data = {
            "scratch": {name: list(size) for name, size in self.scratch.items()},
            "programs": [asdict(program) for program in self.programs],
            "resample": asdict(self.resample) if self.resample else None,
        }
        (folder / PLAN).write_text(json.dumps(data, indent=1) + "\n")
        if self.modules:
            kernels.mkdir(exist_ok=True)
        for name, text in self.modules.items():
            (kernels / f"{name}.py").write_text(text)


def read_plan(data: Mapping[str, Any]) -> Plan:
    """Read what `Plan.write` wrote, without the modules."""
    programs = tuple(map(_read_program, data["programs"]))
    resample = _read_program(data["resample"]) if data["resample"] else None
    scratch = {name: (dtype, elements) for name, (dtype, elements) in data["scratch"].items()}
    return Plan(programs, resample, scratch)


def _read_program(program: Mapping[str, Any]) -> ProgramPlan:
    launches = tuple(LaunchPlan(**launch) for launch in program["launches"])
    return ProgramPlan(**{**program, "launches": launches})


def bucket_dims(engine: EngineConfig, step: str, bucket: int) -> dict[str, int]:
    """Give the largest dims of a step of this bucket."""
    dims = state_dims(engine, num_pages=max(engine.num_pages, 1))
    if step == "decode":
        return {**dims, "T": bucket, "B": bucket}
    return {**dims, "T": bucket, "B": min(engine.max_rows, bucket)}
