"""Turn a template and the facts of one fused op into the text of a kernel module.

A template is a legal Triton file; emission replaces its facts, its schedule, its hook lines and
what it imports of `parts/` (`inline.py`), and leaves every other line as it is. Must not know
graphs or ops: they arrive as lines of text. Called by `lower/`; `epilogue.py` writes the hook
lines.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from treadle.ir.errors import LoweringError
from treadle.kernels.inline import inline_parts

TEMPLATE_DIR = Path(__file__).parent / "templates"
LINE_LENGTH = 100

Fact = int | float | bool | str
Hooks = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Header:
    """Say what a module's docstring tells its reader.

    `summary` is one sentence; `covers` the ops it realises, one a line; `facts` formulas, shapes,
    bytes, FLOPs and the floor, one a line.
    """

    summary: str
    covers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """Name the lines `first` to `last` of a template, counted from 1."""

    first: int
    last: int


@dataclass(frozen=True)
class Template:
    """Hold a template's text and where its replaceable parts lie.

    `hooks` are the names that are called, each with a default definition in the file. `kernels` are
    the kernels that `launch` starts, in order; `main_kernel` is the one that takes extra operands.
    """

    stem: str
    lines: tuple[str, ...]
    docstring: Span
    shape: Span
    schedule: Span
    shape_facts: tuple[tuple[str, Fact], ...]
    schedule_facts: tuple[tuple[str, Fact], ...]
    hook_definitions: tuple[Span, ...]
    hook_calls: tuple[tuple[str, Span], ...]
    kernels: tuple[str, ...]
    operand_lines: tuple[tuple[int, str], ...]

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that need lines."""
        return frozenset(name for name, _ in self.hook_calls)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        """All names that occur in the file: hook lines may use them, and must not reuse them."""
        nodes = list(ast.walk(ast.parse("\n".join(self.lines))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return frozenset(names | {node.arg for node in nodes if isinstance(node, ast.arg)})


def template_names() -> tuple[str, ...]:
    """Give the names of the templates that are shipped."""
    return tuple(sorted(path.stem for path in TEMPLATE_DIR.glob("*.py")))


def read_template(name: str) -> Template:
    """Read a template of `kernels/templates/` and find its replaceable parts.

    Raises: LoweringError: there is none of that name, or it breaks the form of a template.
    """
    path = TEMPLATE_DIR / f"{name}.py"
    if not path.is_file():
        raise LoweringError(
            f"There is no template `{name}`; the templates are {', '.join(template_names())}."
        )
    return parse_template(name, inline_parts(name, path.read_text(encoding="utf-8")))


@lru_cache(maxsize=64)
def parse_template(stem: str, text: str) -> Template:
    """Find the replaceable parts of a template's text.

    Raises: LoweringError: it lacks a docstring, `SHAPE`, `SCHEDULE`, `launch` or a hook's default.
    """
    tree = ast.parse(text, filename=f"{stem}.py")
    if not tree.body or ast.get_docstring(tree) is None:
        raise LoweringError(f"Template `{stem}` starts with no docstring.")
    facts = {name: _literal_dict(stem, tree, name) for name in ("SHAPE", "SCHEDULE")}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "launch" not in functions:
        raise LoweringError(f"Template `{stem}` has no function `launch`.")
    definitions = {name: node for name, node in functions.items() if _is_hook(name)}
    calls = tuple(
        call for name, node in functions.items() if not _is_hook(name) for call in _hook_calls(node)
    )
    missing = sorted({name for name, _ in calls} - set(definitions))
    if missing:
        raise LoweringError(f"Template `{stem}` has no default for {', '.join(missing)}.")
    launches = list(_launches(functions["launch"]))
    kernels = tuple(dict.fromkeys(call.func.value.id for call in launches))  # type: ignore[attr-defined]
    return Template(
        stem,
        tuple(text.splitlines()),
        _span(tree.body[0]),
        facts["SHAPE"][0],
        facts["SCHEDULE"][0],
        facts["SHAPE"][1],
        facts["SCHEDULE"][1],
        tuple(_definition_span(node) for node in definitions.values()),
        calls,
        kernels,
        tuple(_operand_lines(text.splitlines(), functions, launches)),
    )


def emit_module(
    template: Template,
    *,
    name: str,
    shape: Mapping[str, Fact],
    schedule: Mapping[str, Fact],
    header: Header,
    hooks: Hooks | None = None,
    operands: Sequence[str] = (),
) -> str:
    """Write the module of one kernel; the same arguments give the same bytes.

    `name` becomes the kernel's name. `shape` and `schedule` must have just the template's entries.
    `hooks` gives the lines of every hook of the template, unindented. `operands` name extra tensors
    (`bias`, ...): they go before the result, `y` or `out`, in the parameters of the kernel and of
    its parts that have hooks, in `launch` and in the calls.
    Raises: LoweringError: an entry, a hook or the place for an operand is missing or unknown.
    """
    where = f"template `{template.stem}`"
    hooks = hooks or {}
    if not name.isidentifier():
        raise LoweringError(f"A kernel's name is an identifier; found `{name}` for {where}.")
    _check_names(where, "shape entries", dict(template.shape_facts), shape)
    _check_names(where, "schedule entries", dict(template.schedule_facts), schedule)
    _check_names(where, "hooks", template.hooks, hooks)
    if operands and len(template.operand_lines) < 3:
        raise LoweringError(f"The {where} has no place for {', '.join(operands)}.")

    ordered_shape = {key: shape[key] for key, _ in template.shape_facts}
    ordered_schedule = {key: schedule[key] for key, _ in template.schedule_facts}
    edits: dict[int, tuple[int, list[str]]] = {}  # first line -> (last line, lines instead)

    def replace(span: Span, lines: list[str]) -> None:
        edits[span.first] = (span.last, lines)

    replace(template.docstring, _docstring(name, header, ordered_schedule))
    replace(template.shape, _dict_lines("SHAPE", ordered_shape))
    replace(template.schedule, _dict_lines("SCHEDULE", ordered_schedule))
    for span in template.hook_definitions:
        replace(span, [])
    for hook, span in template.hook_calls:
        indent = _indent_of(template.lines[span.first - 1])
        replace(span, [f"{indent}{line}" if line else "" for line in hooks[hook]])
    for line, pattern in template.operand_lines:
        extra = [pattern.format(operand) for operand in operands]
        replace(Span(line, line), [*extra, template.lines[line - 1]])

    written, line = [], 1
    while line <= len(template.lines):
        last, lines = edits.get(line, (line, [template.lines[line - 1]]))
        written += lines
        line = last + 1
    text = "\n".join(written) + "\n"
    for old, new in _renamings(template, name).items():
        text = re.sub(rf"\b{old}\b(?=[\[(])", new, text)
    return text


# --- reading ------------------------------------------------------------------------------------


def _is_hook(name: str) -> bool:
    return name.isupper()


def _span(node: ast.stmt) -> Span:
    return Span(node.lineno, node.end_lineno or node.lineno)


def _definition_span(node: ast.FunctionDef) -> Span:
    """The lines of a definition, its decorators and the two blank lines after it."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Span(first, (node.end_lineno or node.lineno) + 2)


def _literal_dict(
    stem: str, tree: ast.Module, name: str
) -> tuple[Span, tuple[tuple[str, Fact], ...]]:
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and [getattr(target, "id", "") for target in node.targets] == [name]
            and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") == "dict"
            and not node.value.args
        ):
            entries = {
                keyword.arg or "**": ast.literal_eval(keyword.value)
                for keyword in node.value.keywords
            }
            return _span(node), tuple(entries.items())
    raise LoweringError(f"Template `{stem}` has no statement `{name} = dict(...)`.")


def _hook_calls(function: ast.FunctionDef) -> Iterator[tuple[str, Span]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.Expr) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "id", "")
            if name.isupper():
                yield name, _span(node)


def _launches(launch: ast.FunctionDef) -> Iterator[ast.Call]:
    """Yield the kernel calls `kernel[grid](...)` of `launch`, in order."""
    for node in ast.walk(launch):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        ):
            yield node


def _operand_lines(
    lines: Sequence[str], functions: Mapping[str, ast.FunctionDef], launches: Sequence[ast.Call]
) -> Iterator[tuple[int, str]]:
    """Yield the lines that extra operands go before, with the pattern of the inserted line.

    They are `y_ptr,` (or `y_desc,`, `out_ptr,`) where the kernel and its parts that have hooks take
    or pass it, `y: ...,` in `launch` and the argument made of y in its call, each on a line of its
    own.
    """
    plain = functions.keys() - _hooked(functions)
    skipped = {"launch"} | plain
    in_plain_calls = {
        argument.lineno
        for function in functions.values()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in plain
        for argument in call.args
    }
    for name, function in functions.items():
        for number in range(function.lineno, (function.end_lineno or function.lineno) + 1):
            line = lines[number - 1]
            is_result = line.strip() in ("y_ptr,", "y_desc,", "out_ptr,")
            if is_result and name not in skipped and number not in in_plain_calls:
                yield number, f"{_indent_of(line)}{{}}_ptr,"
    for argument in functions["launch"].args.args:
        if argument.arg in ("y", "out"):
            yield argument.lineno, "    {}: torch.Tensor,"
    for node in launches[0].args if len(launches) == 1 else []:
        if {"y", "out"} & {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
            yield node.lineno, "        {},"


def _hooked(functions: Mapping[str, ast.FunctionDef]) -> set[str]:
    """Name the functions that call a hook, or that name another which does."""
    hooked = {name for name, node in functions.items() if any(_hook_calls(node))}
    size = 0
    while size < len(hooked):
        size = len(hooked)
        for name, node in functions.items():
            if {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} & hooked:
                hooked.add(name)
    return hooked


# --- writing ------------------------------------------------------------------------------------


def _check_names(where: str, what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    expected, found = set(expected), set(found)
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise LoweringError(
            f"The {where} has the {what} {', '.join(sorted(expected)) or '(none)'};"
            f" missing are {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}."
        )


def _renamings(template: Template, name: str) -> dict[str, str]:
    """Map kernels to new names: one called like the template, or the only one, becomes `name`."""
    if len(template.kernels) == 1:
        return {template.kernels[0]: name}
    pattern = re.compile(rf"{template.stem}(?=_|$)")
    return {kernel: pattern.sub(name, kernel, count=1) for kernel in template.kernels}


def _value(value: Fact) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _dict_lines(name: str, facts: Mapping[str, Fact]) -> list[str]:
    line = f"{name} = dict({', '.join(f'{key}={_value(value)}' for key, value in facts.items())})"
    if len(line) <= LINE_LENGTH:
        return [line]
    return [f"{name} = dict(", *(f"    {key}={_value(facts[key])}," for key in facts), ")"]


def _docstring(name: str, header: Header, schedule: Mapping[str, Fact]) -> list[str]:
    settings = ", ".join(f"{key}={_value(value)}" for key, value in schedule.items())
    blocks = [
        _wrap(f"`{name}`: {header.summary}", "", ""),
        *([["Covers:", *_indented(header.covers)]] if header.covers else []),
        [line for fact in header.facts for line in _wrap(fact, "", "  ")],
        _wrap(f"Schedule: {settings}", "", "  "),
    ]
    lines = [line for block in blocks if block for line in (*block, "")]
    text = "\n".join(lines)
    if '"""' in text or "\\" in text:
        raise LoweringError(f"The header of `{name}` holds a backslash or three quotes: {text!r}.")
    return [f'"""{lines[0]}', *lines[1:-1], '"""']


def _indented(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in _wrap(line, "  ", "    ")]


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        LINE_LENGTH - 3,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
