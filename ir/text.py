"""The graph as text that a person can read and diff, and the way back: parse(print(g)) == g.

Called by `show`, the dumps, the artifact and the golden tests.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from treadle.ir.errors import SpecError
from treadle.ir.graph import Graph, Op, RopeTable, Value, Weight
from treadle.ir.ops.params import FusedParams, describe
from treadle.ir.ops.registry import make_params
from treadle.ir.types import TensorType, parse_type

INDENT = "  "


def print_graph(graph: Graph) -> str:
    """Write the graph, one declaration or op a line, fused ops with their bodies."""
    lines = [f"graph {graph.name} {{"]
    lines += [f"{INDENT}input {value.name}: {value.type}" for value in graph.inputs]
    lines += [INDENT + print_weight(weight) for weight in graph.weights]
    for op in graph.ops:
        lines += print_op(op, graph, INDENT)
    lines += [f"{INDENT}return {', '.join(graph.outputs)}", "}"]
    return "\n".join(lines) + "\n"


def print_weight(weight: Weight) -> str:
    """Write a weight's declaration with its source."""
    head = f"weight @{weight.name}: {weight.type} = "
    if weight.rope:
        frequencies = ", ".join(map(repr, weight.rope.inverse_frequencies))
        extra = ""
        if weight.rope.long_inverse_frequencies:
            others = ", ".join(map(repr, weight.rope.long_inverse_frequencies))
            extra = (
                f", short_window={weight.rope.short_window}, long_inverse_frequencies=({others},)"
            )
        return f"{head}rope_table([{frequencies}], scale={weight.rope.scale!r}{extra})"
    parts = [f"{part!r}: {rows}" for part, rows in zip(weight.parts, weight.part_rows, strict=True)]
    extra = f", fallback={weight.fallback!r}" if weight.fallback else ""
    extra += f", interleave={weight.interleave}" if weight.interleave else ""
    extra += f", sections={weight.sections}, groups={weight.groups}" if weight.groups > 1 else ""
    extra += f", rope_pairs={weight.rope_pairs}" if weight.rope_pairs else ""
    extra += f", stack={weight.stack}" if weight.stack else ""
    extra += ", transposed=True" if weight.transposed else ""
    return f"{head}load({{{', '.join(parts)}}}{extra})"


def print_op(op: Op, graph: Graph, indent: str = "") -> list[str]:
    """Write one op; a fused op is written with its body, one line each."""
    results = ", ".join(f"{name}: {graph.types[name]}" for name in op.outputs)
    head = f"{results} = " if results else ""
    if op.body:
        lines = [f"{indent}{head}fused {op.params.kernel}({', '.join(op.inputs)}) {{"]
        for inner in op.body:
            lines += print_op(inner, graph, indent + INDENT)
        return [*lines, indent + "}"]
    params = describe(op.params)
    arguments = ", ".join(op.inputs) + (f"; {params}" if params else "")
    return [f"{indent}{head}{op.kind}({arguments})"]


# --- parsing ------------------------------------------------------------------------------------

_INPUT = re.compile(r"^input (\S+): (.+)$")
_WEIGHT = re.compile(r"^weight @(\S+): (.+?) = (load|rope_table)\((.*)\)$")
_FUSED = re.compile(r"^(?:(.*) = )?fused (\w+)\((.*)\) \{$")
_OP = re.compile(r"^(?:(.*) = )?(\w+)\(([^;]*)(?:; (.*))?\)$")
_RESULT = re.compile(r"([\w.\[\]-]+): ((?:kv\.)?\w+\[[^\]]*\])")


@dataclass
class _Parts:
    inputs: list[Value] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    values: dict[Value, None] = field(default_factory=dict)  # in order, each once
    outputs: tuple[str, ...] = ()


def parse_graph(text: str) -> Graph:
    """Read a graph as `print_graph` writes it.

    Raises: SpecError: a line can't be read; quotes it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].startswith("graph ") or lines[-1] != "}":
        raise SpecError("A graph's text starts with `graph NAME {` and ends with `}`.")
    parts = _Parts()
    fused: tuple[tuple[str, ...], str, tuple[str, ...], list[Op]] | None = None
    for line in lines[1:-1]:
        if found := _INPUT.match(line):
            parts.inputs.append(Value(found[1], parse_type(found[2])))
        elif found := _WEIGHT.match(line):
            parts.weights.append(_parse_weight(found[1], parse_type(found[2]), found[3], found[4]))
        elif line.startswith("return "):
            parts.outputs = _names(line.removeprefix("return "))
        elif found := _FUSED.match(line):
            fused = (_results(found[1], parts), found[2], _names(found[3]), [])
        elif line == "}" and fused:
            outputs, kernel, inputs, body = fused
            params = FusedParams(kernel)
            parts.ops.append(Op("fused", inputs, outputs, params, body=tuple(body)))
            fused = None
        elif found := _OP.match(line):
            op = _parse_op(found, parts)
            (fused[3] if fused else parts.ops).append(op)
        else:
            raise SpecError(f"This line of a graph can't be read: `{line}`.")
    name = lines[0].removeprefix("graph ").removesuffix(" {")
    values = tuple(parts.values)
    return Graph(
        name, tuple(parts.inputs), tuple(parts.weights), tuple(parts.ops), parts.outputs, values
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _results(text: str | None, parts: _Parts) -> tuple[str, ...]:
    found = [Value(name, parse_type(type_)) for name, type_ in _RESULT.findall(text or "")]
    parts.values.update(dict.fromkeys(found))
    return tuple(value.name for value in found)


def _parse_op(found: re.Match[str], parts: _Parts) -> Op:
    params = _parse_params(found[2], found[4] or "")
    return Op(found[2], _names(found[3]), _results(found[1], parts), params)


@lru_cache(maxsize=1024)  # layers repeat their ops
def _parse_params(kind: str, text: str) -> Any:
    return make_params(kind, _parse_arguments(text)[1])


def _parse_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read what stands between the parentheses of a call: literals, then `name=literal`."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call), "the text was put into a call"
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {word.arg or "**": ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"Arguments are literals, as in `name=value`; found `{text}`.") from error
    return positional, named


def _parse_weight(name: str, type_: TensorType, source: str, arguments: str) -> Weight:
    positional, options = _parse_arguments(arguments)
    if len(positional) != 1:
        raise SpecError(f"The source of weight `{name}` can't be read: `{source}({arguments})`.")
    (first,) = positional
    if source == "rope_table":
        return Weight(name, type_, rope=RopeTable(tuple(first), **options))
    return Weight(name, type_, tuple(first), tuple(first.values()), **options)
