"""The body of `new-model`: start a spec from the nearest one, and list what it does not cover yet.

Called by the command line only.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterable
from pathlib import Path

from treadle.ir.builder import STEP_KINDS
from treadle.ir.errors import CheckpointError, ConfigError, SpecError
from treadle.ir.graph import Graph
from treadle.models import registry
from treadle.models.config import architecture_of
from treadle.models.registry import FAMILIES, Family
from treadle.runtime.checkpoint import open_checkpoint

MODELS = Path(registry.__file__).parent


def run_new_model(name: str, like: str, config: str) -> None:
    """Write `models/NAME.py` and its registry line, and compare it with the checkpoint's tensors.

    Raises: ConfigError: the name or the family can't be used, or the config can't be read.
    SpecError: the config changes the maths in a way that no spec has yet; MachineError is not
    raised: a folder that can't be written is a ConfigError with its path.
    """
    family = _family_called(like)
    file = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
    values = _read(file)
    architecture = architecture_of(values)
    _check_name(name, architecture)
    spec = MODELS / f"{name}.py"
    try:
        spec.write_text(_started(family, name, architecture), encoding="utf-8")
        registry_file = MODELS / "registry.py"
        registry_file.write_text(_registered(registry_file.read_text("utf-8"), name), "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename} can't be written: {error.strerror}.",
            remedy="Work in a checkout of Treadle that is yours to change.",
        ) from error
    print(f"wrote       models/{name}.py, as models/{family.name}.py")
    print(f"registered  {architecture} in models/registry.py")
    for line in _compare(family, {**values, "architectures": [architecture]}, file.parent):
        print(line)
    print(f"next        edit models/{name}.py, then: python cli.py verify {file.parent}")


def _family_called(name: str) -> Family:
    for family in FAMILIES:
        if name == family.name:
            return family
    raise ConfigError(
        f"--like names a family that has a spec, not `{name}`.",
        remedy=f"Those are {', '.join(family.name for family in FAMILIES)}.",
    )


def _read(file: Path) -> dict[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config should be a config.json, or the folder with it; {file} is none: {error}."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} should hold a JSON object; it holds {type(values).__name__}.")
    return values


def _check_name(name: str, architecture: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"NAME becomes models/NAME.py: lower-case letters, digits and `_`; found `{name}`."
        )
    if (MODELS / f"{name}.py").exists():
        raise ConfigError(f"models/{name}.py is there already.", remedy="Choose another name.")
    for family in FAMILIES:
        if architecture in family.architectures:
            raise ConfigError(
                f"`{architecture}` has a spec already: models/{family.name}.py.",
                remedy="Edit that one, or let the config name another architecture.",
            )


def _started(family: Family, name: str, architecture: str) -> str:
    """Give the text of the nearest spec under its new name."""
    text = (MODELS / f"{family.name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    for node in reversed(tree.body):
        is_docstring = node is tree.body[0]
        targets = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
        if "ARCHITECTURES" in targets:
            lines[node.lineno - 1 : node.end_lineno] = [f'ARCHITECTURES = ("{architecture}",)']
        elif is_docstring:
            doc = f'"""The {name} family: so far as {family.name}. Say here what sets it apart."""'
            lines[node.lineno - 1 : node.end_lineno] = [doc]
    return "\n".join(lines) + "\n"


def _registered(text: str, name: str) -> str:
    """Give the registry's text with the family in it: its import and its line."""
    tree = ast.parse(text)
    imported = next(
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "treadle.models"
    )
    families = next(
        node
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAMILIES"
    )
    lines = text.splitlines(keepends=True)
    lines.insert((families.end_lineno or 0) - 1, f'    Family("{name}", {name}.ARCHITECTURES, '
                 f"{name}.build),\n")  # fmt: skip
    names = sorted({*(alias.name for alias in imported.names), name})
    lines[imported.lineno - 1 : imported.end_lineno] = [
        "from treadle.models import (\n",
        *(f"    {each},\n" for each in names),
        ")\n",
    ]
    return "".join(lines)


def _compare(family: Family, values: dict[str, object], folder: Path) -> Iterable[str]:
    """Say which tensors of the checkpoint the spec does not declare, and the other way round."""
    try:
        present = open_checkpoint(folder).names()
    except CheckpointError:
        yield f"checkpoint  {folder} has no weights to compare with"
        return
    try:
        graphs = [_build(family, values, step) for step in STEP_KINDS]
    except SpecError as error:
        yield f"checkpoint  not compared: {error.message}"
        return
    weights = [weight for graph in graphs for weight in graph.weights]
    declared = {part for weight in weights for part in weight.parts}
    optional = {w.parts[0] for w in weights if w.fallback} | {w.fallback for w in weights}
    uncovered, missing = present - declared - optional, declared - present - optional
    yield f"checkpoint  {folder}: {len(present)} tensors, {len(present - uncovered)} covered"
    yield from _listed("not covered yet", uncovered)
    yield from _listed("declared, but not in the checkpoint", missing)


def _build(family: Family, values: dict[str, object], step: str) -> Graph:
    config = registry.from_hf(values)
    builder = registry.GraphBuilder(family.name, step=step, dtype="f32", page_size=16)
    return family.build(config, builder)


def _listed(title: str, names: Iterable[str]) -> Iterable[str]:
    """List names, those that differ in a layer's number once."""
    counts: dict[str, int] = {}
    for name in sorted(names):
        pattern = re.sub(r"\.\d+\.", ".N.", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    if counts:
        yield f"{title}:"
        for pattern, count in counts.items():
            yield f"  {pattern}" + (f"  ({count} layers)" if count > 1 else "")
