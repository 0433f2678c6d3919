"""One way to compute an op, as lowering offers it, and what such ways depend on.

Knows templates by name and how a module is emitted; must not know ops. Made by the lowerings
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from treadle.kernels.emit import Fact, Header, Hooks, emit_module, read_template
from treadle.kernels.schedule.machine import INTERPRETER, Schedule


@dataclass(frozen=True)
class Scratch:
    """Ask for memory that outlives the kernel: `elements` of `dtype`, zero at the first launch."""

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Candidate:
    """One way to compute an op.

    `arguments` give each parameter of `launch`: `value:NAME` (a tensor by its graph name, weights
    with `@`), `keys:CACHE`, `values:CACHE`, `latents:CACHE`, `open_keys:CACHE`,
    `open_values:CACHE`, `scratch:NAME`, `none:`, `size:T` or `size:B`.
    """

    name: str
    template: str
    shape: Mapping[str, Fact]
    schedule: Schedule
    arguments: Mapping[str, str]
    scratch: tuple[Scratch, ...] = ()
    hooks: Hooks = field(default_factory=dict)
    operands: tuple[str, ...] = ()
    header: Header = field(default_factory=lambda: Header(""))

    def emit(self) -> str:
        """Write the kernel's module; equal candidates give equal text."""
        return _emit(
            self.template,
            self.name,
            tuple(self.shape.items()),
            tuple(self.schedule.items()),
            self.header,
            tuple((name, tuple(lines)) for name, lines in self.hooks.items()),
            self.operands,
        )


@lru_cache(maxsize=4096)  # the layers of a model ask for the same text again and again
def _emit(
    template: str,
    name: str,
    shape: tuple[tuple[str, Fact], ...],
    schedule: tuple[tuple[str, int | bool], ...],
    header: Header,
    hooks: tuple[tuple[str, tuple[str, ...]], ...],
    operands: tuple[str, ...],
) -> str:
    return emit_module(
        read_template(template),
        name=name,
        shape=dict(shape),
        schedule=dict(schedule),
        header=header,
        hooks=dict(hooks),
        operands=operands,
    )


@dataclass(frozen=True)
class Situation:
    """Say where a kernel will run: the largest dims of its bucket, the step, target and GPU."""

    dims: Mapping[str, int]
    step: str
    target: str
    architecture: str = ""

    @property
    def machine(self) -> str:
        """Name what schedules depend on: the architecture, or the interpreter."""
        return INTERPRETER if self.target == "interpret" else self.architecture
