"""What is said of one kind of op: parameters, type rule, cost, fusion role.

The ops stand in the other modules, by kind; `registry.py` lists them. The meaning of each is the
function of the same name in `kernels/reference/`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.ir.types import TensorType

Types = tuple[TensorType, ...]
Dims = Mapping[str, int]


@dataclass(frozen=True)
class OpDef:
    """Define one kind of op.

    `operands` name the inputs in order, `results` the outputs; an operand ending in `?` may be left
    out, those of one of the `groups` together: how many inputs there are says which. `mutates`
    names operands written in place: such an op never moves past
    another that touches the same operand. `role` is what fusion may do with it: an `anchor` gets a
    kernel, a `pointwise` op joins its producer's epilogue, a `row` op a prologue, a `view`
    vanishes. One that takes `any_rows` makes each row of its results of the same row of its values,
    and may have a row per token or per sequence.
    """

    kind: str
    params: type
    operands: tuple[str, ...]
    results: tuple[str, ...]
    role: str
    infer: Callable[..., Types]
    flops: Callable[[Any, Types, Types, Dims], int]
    bytes: Callable[[Any, Types, Types, Dims], int]
    doc: str
    mutates: tuple[str, ...] = ()
    any_rows: bool = False
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def required(self) -> int:
        """The number of operands that can't be left out."""
        return sum(not name.endswith("?") for name in self.operands)

    def present(self, count: int) -> tuple[str, ...]:
        """Name the operands that `count` inputs are; no names where no choice of them fits."""
        needed = self.operands[: self.required]
        for taken in itertools.product((True, False), repeat=len(self.groups)):
            chosen = itertools.compress(self.groups, taken)
            names = (*needed, *itertools.chain.from_iterable(chosen))
            if len(names) == count:
                return names
        return ()


def _moved_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return sum(type_.num_bytes(dims) for type_ in (*inputs, *outputs))


def elements(type_: TensorType, dims: Dims) -> int:
    """Count the elements of a tensor."""
    return math.prod(type_.bound_shape(dims))


def per_element(count: int) -> Callable[[Any, Types, Types, Dims], int]:
    """Give the cost of an op that takes `count` operations for each element of its results."""

    def flops(_params: Any, _inputs: Types, outputs: Types, dims: Dims) -> int:
        return count * sum(elements(type_, dims) for type_ in outputs)

    return flops


def define(
    kind: str,
    params: type,
    operands: str,
    results: str,
    role: str,
    *,
    flops: Callable[[Any, Types, Types, Dims], int] | None = None,
    bytes_: Callable[[Any, Types, Types, Dims], int] | None = None,
    mutates: str = "",
    any_rows: bool = False,
) -> Callable[[Callable[..., Types]], OpDef]:
    """Make the decorated type rule, with its docstring, the definition of the op `kind`.

    Of `operands`, those joined by `+` come together or not at all.
    """
    together = [part.split("+") for part in operands.replace("?", "").split()]
    is_optional = [part.endswith("?") for part in operands.split()]
    marks = zip(together, is_optional, strict=True)

    def complete(infer: Callable[..., Types]) -> OpDef:
        return OpDef(
            kind,
            params,
            tuple(name + "?" * optional for names, optional in marks for name in names),
            tuple(results.split()),
            role,
            infer,
            flops or per_element(0),
            bytes_ or _moved_bytes,
            (infer.__doc__ or "").strip(),
            tuple(mutates.split()),
            any_rows,
            tuple(map(tuple, itertools.compress(together, is_optional))),
        )

    return complete
