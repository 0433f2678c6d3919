"""The layers, read from the source: who may import whom, and who may read the environment.

Each rule is a function from a source tree to its violations, so that it can also be shown to fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle.kernels.inline import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
# What each layer may import of ours; `cli` is the top, `bench` stands beside it.
LAYERS = {
    "ir": {"ir"},
    "kernels": {"ir", "kernels"},
    "models": {"ir", "models"},
    "runtime": {"ir", "kernels", "models", "runtime"},
    "server": {"ir", "kernels", "models", "runtime", "server"},
    "bench": {"ir", "kernels", "models", "runtime", "server", "bench"},
    "cli": {"ir", "kernels", "models", "runtime", "server"},
}
# These layers load anywhere: nothing but the standard library.
STDLIB_ONLY = {"ir", "models"}
# The one place that loads modules of ours by name: the command line, a command's body when it runs.
LOADS_BY_NAME = {"cli.py"}
READS_ENVIRONMENT = {"ir/knobs.py"}

Rule = Callable[[Path], list[str]]


def sources(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Give path and syntax tree of every source file of the project."""
    for layer in LAYERS:
        paths = [root / "cli.py"] if layer == "cli" else sorted((root / layer).rglob("*.py"))
        for path in paths:
            if path.is_file():
                relative = path.relative_to(root).as_posix()
                yield relative, ast.parse(path.read_text(encoding="utf-8"), filename=relative)


def layer_of(relative: str) -> str:
    return relative.removesuffix(".py").split("/")[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Give line and dotted name of every import; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def is_ours(name: str) -> bool:
    return name == "treadle" or name.startswith("treadle.")


def upward_imports(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports `{name}`, which its layer may not"
        for path, tree in sources(root)
        for line, name in imports(tree)
        if is_ours(name)
        and name.count(".")
        and name.split(".")[1] not in LAYERS[layer_of(path)]
        and name != "treadle.__version__"
    ]


def relative_imports(root: Path) -> list[str]:
    return [
        f"{path}:{line} imports `{name}`; write it from `treadle.`"
        for path, tree in sources(root)
        for line, name in imports(tree)
        if name.startswith(".")
    ]


def foreign_imports_below(root: Path) -> list[str]:
    """The layers that load anywhere import the standard library and ours only."""
    return [
        f"{path}:{line} imports `{name}`; `{layer_of(path)}` is standard library only"
        for path, tree in sources(root)
        if layer_of(path) in STDLIB_ONLY
        for line, name in imports(tree)
        if not is_ours(name) and name.split(".")[0] not in sys.stdlib_module_names
    ]


def imports_in_templates(root: Path) -> list[str]:
    """Emitted kernels stand alone: what templates import of ours is put into them, function by
    function, with what those functions need of other parts.
    """
    return [
        f"{path}:{line} imports `{name}`; of ours templates and parts import parts alone"
        for path, tree in sources(root)
        if path.startswith("kernels/templates/")
        for line, name in imports(tree)
        if is_ours(name) and not name.startswith(f"{PACKAGE}.")
    ]


def hidden_imports(root: Path) -> list[str]:
    """An import of ours inside a function is a hidden cycle."""
    found = []
    for path, tree in sources(root):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found += [
                    f"{path}:{line} imports `{name}` inside `{function.name}`"
                    for line, name in imports(function)
                    if is_ours(name)
                ]
    return found


def loads_by_name(root: Path) -> list[str]:
    """`import_module` and `__import__` hide imports from all these rules."""
    found = []
    for path, tree in sources(root):
        for node in ast.walk(tree):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            if name in ("import_module", "__import__") and path not in LOADS_BY_NAME:
                found.append(f"{path}:{node.lineno} uses `{name}`")  # type: ignore[attr-defined]
    return found


def environment_readers(root: Path) -> list[str]:
    found = []
    for path, tree in sources(root):
        if path in READS_ENVIRONMENT:
            continue
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in (
                "environ",
                "environb",
                "getenv",
                "putenv",
            )
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (
                imported and {alias.name for alias in node.names} & {"environ", "getenv"}
            ):
                found.append(
                    f"{path}:{node.lineno} reads the environment; add a knob to ir/knobs.py"
                )
    return found


def import_cycles(root: Path) -> list[str]:
    trees = dict(sources(root))
    modules = {
        "treadle." + path.removesuffix(".py").replace("/", "."): tree
        for path, tree in trees.items()
    }
    edges = {
        module: {name for _, name in imports(tree) if name in modules and name != module}
        for module, tree in modules.items()
    }
    found: list[str] = []
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in finished:
            for other in sorted(edges[module]):
                visit(other, (*trail, module))
            finished.add(module)

    for module in sorted(modules):
        visit(module, ())
    return found


# Each rule with a file that breaks it, and the place that it must name.
RULES: list[tuple[Rule, dict[str, str], str]] = [
    (upward_imports, {"kernels/a.py": "from treadle.models import config"}, "kernels/a.py:1"),
    (upward_imports, {"ir/a.py": "import treadle.runtime.engine"}, "ir/a.py:1"),
    (upward_imports, {"runtime/a.py": "import treadle.cli"}, "runtime/a.py:1"),
    (upward_imports, {"server/a.py": "from treadle import bench"}, "server/a.py:1"),
    (relative_imports, {"server/a.py": "from . import app"}, "server/a.py:1"),
    (foreign_imports_below, {"ir/a.py": "import json\nimport torch"}, "ir/a.py:2"),
    (foreign_imports_below, {"models/a.py": "from transformers import x"}, "models/a.py:1"),
    (
        imports_in_templates,
        {"kernels/templates/a.py": "from treadle.ir import dims"},
        "kernels/templates/a.py:1",
    ),
    (
        imports_in_templates,
        {"kernels/templates/parts/a.py": "from treadle.kernels.templates.b import c"},
        "kernels/templates/parts/a.py:1",
    ),
    (hidden_imports, {"ir/a.py": "def f():\n  from treadle.ir import b"}, "ir/a.py:2"),
    (loads_by_name, {"runtime/a.py": "import importlib\nimportlib.import_module('x')"}, ":2"),
    (environment_readers, {"runtime/a.py": "import os\nx = os.environ['A']"}, "runtime/a.py:2"),
    (environment_readers, {"bench/a.py": "from os import getenv"}, "bench/a.py:1"),
    (
        import_cycles,
        {"ir/a.py": "from treadle.ir import b", "ir/b.py": "from treadle.ir.a import x"},
        "treadle.ir.a -> treadle.ir.b -> treadle.ir.a",
    ),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES))
def test_the_project_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "files", "place"), RULES)
def test_a_violation_is_found(
    rule: Rule, files: dict[str, str], place: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert place in "\n".join(rule(tmp_path))


def test_every_layer_has_sources() -> None:
    found = {layer_of(path) for path, _ in sources(ROOT)}
    assert found >= {"ir", "kernels", "models", "runtime", "server", "cli"}


@pytest.mark.parametrize("layer", ["ir", "kernels", "models", "runtime", "server"])
def test_a_source_folder_is_no_package_of_its_own(layer: str) -> None:
    # With an `__init__.py`, a root that leaks onto the path would hide the `kernels` library.
    assert not (ROOT / layer / "__init__.py").exists()
