"""Put the functions that several templates share into a template's text.

A template imports them from `templates/parts/`, so that it is a legal Triton file; an emitted
module imports nothing of ours, so the functions take the import's place. Called by `emit.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

from treadle.ir.errors import LoweringError

PACKAGE = "treadle.kernels.templates.parts"
PARTS_DIR = Path(__file__).parent / "templates" / "parts"


def inline_parts(stem: str, text: str) -> str:
    """Give a template's text with the parts that it imports before its first function.

    Those of a part come in their order there, with the functions and constants of it, and of parts
    that it imports itself, that they need; its imports of other libraries join the template's.
    Raises: LoweringError: there is no such part or function.
    """
    tree, lines = ast.parse(text, filename=f"{stem}.py"), text.splitlines()
    imported = _imports_of_parts(tree)
    if not imported:
        return text
    found = _Pieces(stem)
    for node in imported:
        found.take(_part_of(node), {alias.name for alias in node.names})
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    place = _first_line(functions[0], lines) - 1
    dropped = {
        number for node in imported for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    # The blank line between other libraries and ours goes with the first import of ours.
    dropped.add(min(dropped) - 1)
    present = {ast.unparse(node) for node in tree.body}
    imports = {code: source for code, source in found.imports.items() if code not in present}
    kept: list[str] = []
    for number, line in enumerate(lines[:place], 1):
        # Imports of names follow those of modules.
        if number == min(dropped) or line.startswith("from "):
            kept += chain.from_iterable(_pop(imports, "import "))
        if number == min(dropped):
            kept += chain.from_iterable(_pop(imports, "from "))
        if number not in dropped:
            kept.append(line)
    constants = [*found.constants, "", ""] if found.constants else []
    return "\n".join([*kept, *constants, *found.functions, *lines[place:]]) + "\n"


class _Pieces:
    """What a template takes of its parts: lines of imports, of constants and of functions."""

    def __init__(self, stem: str) -> None:
        self.imports: dict[str, list[str]] = {}
        self.constants: list[str] = []
        self.functions: list[str] = []
        self._stem = stem
        self._taken: set[tuple[str, str]] = set()

    def take(self, part: str, wanted: set[str]) -> None:
        """Add what is wanted of a part, after what that needs of others."""
        path = PARTS_DIR / f"{part}.py"
        if not path.is_file():
            raise LoweringError(
                f"Template `{self._stem}` imports the part `{part}`; there is none."
            )
        text, tree, definitions = _read_part(path)
        if missing := sorted(wanted - set(definitions)):
            raise LoweringError(
                f"Template `{self._stem}`: part `{part}` has no {', '.join(missing)}."
            )
        needed, waiting, used = set(wanted), list(wanted), set[str]()
        while waiting:
            definition = definitions[waiting.pop()]
            names = {inner.id for inner in ast.walk(definition) if isinstance(inner, ast.Name)}
            used |= names
            waiting += sorted((names & set(definitions)) - needed)
            needed |= names & set(definitions)
        for node in _imports_of_parts(tree):
            if of_other := {alias.name for alias in node.names} & used:
                self.take(_part_of(node), of_other)
        for line in tree.body:
            if isinstance(line, ast.Import | ast.ImportFrom):
                names = {(alias.asname or alias.name).split(".")[0] for alias in line.names}
                if names & used and line not in _imports_of_parts(tree):
                    self.imports[ast.unparse(line)] = text[line.lineno - 1 : line.end_lineno]
        for name, definition in definitions.items():
            if name in needed and (part, name) not in self._taken:
                self._taken.add((part, name))
                source = text[_first_line(definition, text) - 1 : definition.end_lineno]
                if isinstance(definition, ast.FunctionDef):
                    self.functions += [*source, "", ""]
                else:
                    self.constants += source


def _imports_of_parts(tree: ast.Module) -> list[ast.ImportFrom]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
    ]


def _part_of(node: ast.ImportFrom) -> str:
    return str(node.module).removeprefix(f"{PACKAGE}.")


@lru_cache(maxsize=32)
def _read_part(path: Path) -> tuple[list[str], ast.Module, dict[str, ast.FunctionDef | ast.Assign]]:
    """Give a part's lines, its tree, and its functions and constants by name."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=path.name)
    found: dict[str, ast.FunctionDef | ast.Assign] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return text.splitlines(), tree, found


def _first_line(node: ast.FunctionDef | ast.Assign, lines: Sequence[str]) -> int:
    """Give the first line of a definition, with its decorators and the comment above it."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return first


def _pop(imports: dict[str, list[str]], word: str) -> list[list[str]]:
    """Take out the imports that begin with a word."""
    return [imports.pop(code) for code in sorted(imports) if code.startswith(word)]
