"""The graph: a flat list of typed ops in single-assignment form. Frozen; an edit makes a new graph.

Flat rather than nested: frozen nodes that hold their inputs hash exponentially along residual
connections. Knows nothing of op meanings (`ops/`) or of printing (`text.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from treadle.ir.errors import SpecError
from treadle.ir.types import TensorType


@dataclass(frozen=True)
class Value:
    """Name a tensor that a step produces or is given."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class RopeTable:
    """Declare the table of cosines and sines f32[C, rotary_dim]: cosines first, then sines.

    `inverse_frequencies` has rotary_dim / 2 entries; both halves are multiplied by `scale`. With
    `long_inverse_frequencies` those count instead, for all positions, where the model is served
    with a window of more than `short_window` tokens.
    """

    inverse_frequencies: tuple[float, ...]
    scale: float = 1.0
    short_window: int = 0
    long_inverse_frequencies: tuple[float, ...] = ()


@dataclass(frozen=True)
class Weight:
    """Declare a constant of the model and where it comes from.

    `parts` are checkpoint tensors concatenated along axis 0. `part_rows` are their rows. Where the
    checkpoint lacks the (single) part, `fallback` is used: a tied head. `interleave` g > 0 says
    that the first half of the rows (gate) and the second (up) alternate in groups of g rows, so
    that one tile of a matmul holds both. `sections` with `groups` G > 1 says that the rows
    come in G groups, each with its share of every section, and are sorted by section. `rope_pairs`
    (rows, head, rotary) says that of the first rows the first `rotary` of each head are pairs of
    neighbours, and are moved to where halves of a head make the pairs. `rope` marks a computed
    table, not a loaded tensor.

    `stack` X > 0 says that axis 0 counts experts: the parts are of each, their names have `{}`
    where the expert's number stands, and `fallback` is a tensor that holds all experts as one; so
    does a single part without `{}`. `transposed` says that the last two axes of the tensors are
    swapped.
    """

    name: str
    type: TensorType
    parts: tuple[str, ...] = ()
    part_rows: tuple[int, ...] = ()
    fallback: str = ""
    interleave: int = 0
    sections: tuple[int, ...] = ()
    groups: int = 1
    rope_pairs: tuple[int, ...] = ()
    rope: RopeTable | None = None
    stack: int = 0
    transposed: bool = False

    def names_of(self, expert: int) -> tuple[str, ...]:
        """Give the names of the parts of one expert, or of the weight where nothing is stacked."""
        if not self.stack:
            return self.parts
        return tuple(part.replace("{}", str(expert)) for part in self.parts)


@dataclass(frozen=True)
class Op:
    """Apply `kind` to `inputs`; names starting with `@` are weights, others are values.

    `where` is the author's file:line, `origin` the authored values this op realises. A fused op has
    kind `fused` and a `body` of plain ops, the anchor among them.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Any
    where: str = field(default="", compare=False)
    origin: tuple[str, ...] = field(default=(), compare=False)
    body: tuple[Op, ...] = ()

    @property
    def name(self) -> str:
        """The op's name: that of its first output, or of its kind where it has none."""
        return self.outputs[0] if self.outputs else f"{self.kind}.{self.inputs[-1]}"

    @property
    def plain(self) -> tuple[Op, ...]:
        """The plain ops it stands for: its body, or itself."""
        return self.body or (self,)


@dataclass(frozen=True)
class Graph:
    """Hold a whole step of a model.

    `values` types every output of an op, also of those inside bodies.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    values: tuple[Value, ...]

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of each value, and of each weight under its `@name`."""
        table = {value.name: value.type for value in (*self.inputs, *self.values)}
        table.update({f"@{weight.name}": weight.type for weight in self.weights})
        return table

    @cached_property
    def producers(self) -> dict[str, Op]:
        """The op that produces each value (the fused op, for values of a body that leave it)."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def uses(self) -> dict[str, tuple[Op, ...]]:
        """The ops that read each value or weight, in order; graph outputs are not counted."""
        table: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                table.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in table.items()}

    @cached_property
    def weight_table(self) -> dict[str, Weight]:
        """Each weight by its name, without the `@`."""
        return {weight.name: weight for weight in self.weights}

    def type_of(self, name: str) -> TensorType:
        """Give the type of a value or `@weight`. Raises: SpecError: there is no such name."""
        if name not in self.types:
            raise SpecError(f"`{name}` is neither a value nor a weight of graph `{self.name}`.")
        return self.types[name]

    def single_use(self, name: str) -> Op | None:
        """Give the only op that reads `name`, or None where several do or it leaves the graph."""
        readers = self.uses.get(name, ())
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def replace_ops(self, ops: Iterable[Op], weights: Iterable[Weight] | None = None) -> Graph:
        """Give the graph with other ops, keeping just the types that are still needed, in order."""
        ops = tuple(ops)
        table = {value.name: value for value in self.values}
        kept = dict.fromkeys(
            name for op in ops for inner in (op, *op.body) for name in inner.outputs
        )
        return replace(
            self,
            ops=ops,
            weights=self.weights if weights is None else tuple(weights),
            values=tuple(table[name] for name in kept),
        )


def walk(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the plain ops in order: those of a fused op's body instead of the fused op."""
    for op in ops:
        yield from op.plain


def fingerprint(text: str) -> str:
    """Give the 12-digit name of a text by its content (SHA-256)."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
