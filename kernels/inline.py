"""Put the functions that several templates share into a template's text.

A template imports them from `templates/parts/`, so that it is a legal Triton file; an emitted
module imports nothing of ours, so the functions take the import's place. Called by `emit.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from treadle.ir.errors import LoweringError

PACKAGE = "treadle.kernels.templates.parts"
PARTS_DIR = Path(__file__).parent / "templates" / "parts"


def inline_parts(stem: str, text: str) -> str:
    """Give a template's text with the parts that it imports before its first function.

    Those of a part come in their order there, with what they call of it.
    Raises: LoweringError: there is no such part or function.
    """
    tree, lines = ast.parse(text, filename=f"{stem}.py"), text.splitlines()
    imported = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
    ]
    if not imported:
        return text
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    place = _first_line(functions[0]) - 1
    pieces: list[str] = []
    for node in imported:
        part = str(node.module).removeprefix(f"{PACKAGE}.")
        for source in _functions(stem, part, frozenset(alias.name for alias in node.names)):
            pieces += [*source, "", ""]
    dropped = {
        number for node in imported for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    # The blank line between other libraries and ours goes with the first import of ours.
    dropped.add(min(dropped) - 1)
    kept = [line for number, line in enumerate(lines[:place], 1) if number not in dropped]
    return "\n".join([*kept, *pieces, *lines[place:]]) + "\n"


def _functions(stem: str, part: str, wanted: frozenset[str]) -> Iterator[list[str]]:
    """Yield the lines of each function asked for, and of each that one of them calls."""
    path = PARTS_DIR / f"{part}.py"
    if not path.is_file():
        raise LoweringError(f"Template `{stem}` imports the part `{part}`; there is none.")
    text, found = _read_part(path)
    if missing := sorted(wanted - set(found)):
        raise LoweringError(f"Template `{stem}`: part `{part}` has no {', '.join(missing)}.")
    needed, waiting = set(wanted), list(wanted)
    while waiting:
        names = {node.id for node in ast.walk(found[waiting.pop()]) if isinstance(node, ast.Name)}
        waiting += sorted((names & set(found)) - needed)
        needed |= names & set(found)
    for name, node in found.items():
        if name in needed:
            yield text[_first_line(node) - 1 : node.end_lineno]


@lru_cache(maxsize=32)
def _read_part(path: Path) -> tuple[list[str], dict[str, ast.FunctionDef]]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=path.name)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return text.splitlines(), functions


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
