"""Decide the programs of an engine: which graph serves which bucket, by which kernels and buffers.

Called by the compiler; what it writes, `loading.py` reads. Knows kernels only through `kernels/lower.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treadle.ir.graph import Graph
from treadle.runtime.config import EngineConfig, decode_buckets, mixed_buckets

PLAN = "plan.json"
FEW_TOKENS = 4  # decode steps of up to so many sequences use the form with norms folded in


@dataclass(frozen=True)
class ProgramPlan:
    """Plan one program: the step it plays, its bucket (sequences or tokens) and the graph's form."""

    step: str
    bucket: int
    form: str
    launches: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Plan all programs of an engine. `modules` are the kernels' texts by file name."""

    programs: tuple[ProgramPlan, ...]
    modules: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write plan and kernels into an artifact's folder."""
        programs = [asdict(program) for program in self.programs]
        (folder / PLAN).write_text(json.dumps({"programs": programs}, indent=1) + "\n")
        if self.modules:
            (folder / "kernels").mkdir()
        for name, text in self.modules.items():
            (folder / "kernels" / name).write_text(text)


def plan_programs(
    graphs: Mapping[str, Graph],
    engine: EngineConfig,
    architecture: str,
    report: Callable[[str], None],
) -> Plan:
    """Plan a program per bucket; lower and emit kernels unless the target is `reference`."""
    if engine.target == "reference":
        return Plan(
            (
                ProgramPlan("decode", engine.max_rows, "decode"),
                ProgramPlan("mixed", engine.max_step_tokens, "mixed"),
            )
        )
    raise NotImplementedError((graphs, architecture, report, decode_buckets, mixed_buckets))
