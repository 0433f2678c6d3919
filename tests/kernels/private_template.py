"""Loads a private copy of a kernel template with the facts and the schedule that a test needs.

Knows the form of a template, not what it computes. Tests of templates import it.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

from treadle.kernels.interpreter import repair_interpreter

Fact = int | float | bool | str


def load_template(
    name: str, *, shape: dict[str, Fact] | None = None, schedule: dict[str, Fact] | None = None
) -> ModuleType:
    """Import `kernels/templates/NAME.py` anew, with some entries of SHAPE and SCHEDULE changed."""
    spec = importlib.util.find_spec(f"treadle.kernels.templates.{name}")
    assert spec is not None and spec.loader is not None, f"template `{name}` not found"
    repair_interpreter()
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    for facts, changes in ((template.SHAPE, shape), (template.SCHEDULE, schedule)):
        unknown = set(changes or {}) - set(facts)
        assert not unknown, f"template `{name}` has no entry {sorted(unknown)}"
        facts.update(changes or {})
    return template
