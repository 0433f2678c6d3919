"""Nothing is half there: every op has a meaning, a kernel and a docstring; every template its form.

A new op or template fails here until all its parts are in place; docs/ir.md lists them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from treadle.ir.ops.definition import OpDef
from treadle.ir.ops.registry import REGISTRY, lookup
from treadle.kernels import emit
from treadle.kernels.reference.by_kind import REFERENCES

ROOT = Path(__file__).resolve().parents[1]
KINDS = sorted(REGISTRY)
TEMPLATES = sorted(path.stem for path in (ROOT / "kernels/templates").glob("*.py"))
NOTES = ("Formula", "Shapes", "Numerics", "Cost", "Source")
# What the reference calls an operand of the registry, where that is not the operand's own name.
PARAMETERS = {
    "cache": ("k_cache", "v_cache"),
    "table": ("table", "cos_sin"),
    "gate_up": ("gate_up", "x"),
}


@cache
def reference_pages() -> ModuleType:
    """Load the generator of the documentation, which finds the kernels of every model family."""
    path = ROOT / "docs/build_reference.py"
    spec = importlib.util.spec_from_file_location("build_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operand_names(kind: str) -> list[tuple[str, ...]]:
    """Give, per parameter that the reference should have, the names that it may have."""
    found: list[tuple[str, ...]] = []
    for operand in lookup(kind).operands:
        name = operand.removesuffix("?")
        if name == "cache":
            found += [(part,) for part in PARAMETERS["cache"]]
        else:
            found.append(PARAMETERS.get(name, (name,)))
    return found


# --- ops ------------------------------------------------------------------------------------------


def test_every_op_that_a_module_defines_is_listed() -> None:
    modules = [path.stem for path in (ROOT / "ir/ops").glob("*.py")]
    loaded = [importlib.import_module(f"treadle.ir.ops.{name}") for name in modules]
    defined = [one for module in loaded for one in vars(module).values() if isinstance(one, OpDef)]
    assert len(modules) > 10 and {one.kind for one in defined} == set(REGISTRY)


def test_a_reference_stands_in_the_module_named_as_its_op_s() -> None:
    places = {kind: REGISTRY[kind].infer.__module__.split(".")[-1] for kind in KINDS}
    assert {k: f.__module__.split(".")[-1] for k, f in REFERENCES.items()} == places


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_has_a_reference_with_its_operands_in_order(kind: str) -> None:
    function = REFERENCES.get(kind)
    assert callable(function), f"kernels/reference/by_kind.py has no function for `{kind}`"
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    expected = operand_names(kind)
    assert len(parameters) == len(expected), [parameter.name for parameter in parameters]
    for parameter, names in zip(parameters, expected, strict=True):
        assert parameter.name in names
    for parameter, operand in zip(parameters[-1:], lookup(kind).operands[-1:], strict=True):
        assert (parameter.default is None) == operand.endswith("?")


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_s_parameters_reach_its_reference(kind: str) -> None:
    # Heads of a cache and groups of rows are in the tensors' shapes already.
    known = set(inspect.signature(REFERENCES[kind]).parameters)
    declared = set(inspect.signature(lookup(kind).params).parameters)
    assert declared <= known


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_is_lowered_alone_or_inside_a_fused_one(kind: str) -> None:
    kernels = reference_pages().kernels_of(kind)
    assert kernels, (
        f"no kernel of any model family computes `{kind}`: it needs a lowering in "
        "kernels/lower/, or an expression in kernels/epilogue.py and a rule in ir/fuse.py"
    )
    assert all(stems <= set(TEMPLATES) for stems in kernels.values())


# How each op becomes a kernel: `alone`, or fused behind (or before) one of the ops named.
HOW = {
    "activate": "linear",
    "add": "linear rms_norm combine",
    "adjust_logits": "alone",
    "advance": "alone",
    "attention": "alone",
    "combine": "add",
    "count_tokens": "alone",
    "embed": "alone",
    "expert_linear": "glu combine",
    "gather_rows": "alone",
    "glu": "linear expert_linear grouped_linear",
    "grouped_linear": "alone",
    "head_linear": "alone",
    "head_norm": "kv_write",
    "kv_write": "split",
    "latent_attention": "alone",
    "latent_write": "split",
    "layer_norm": "alone",
    "linear": "alone",
    "prompt_attention": "alone",
    "resolve_tokens": "alone",
    "rms_norm": "alone",
    "rope": "kv_write latent_write",
    "route": "linear",
    "row_gate": "linear",
    "sample": "alone",
    "scale": "linear",
    "section_norm": "alone",
    "soft_cap": "linear",
    "sort_by_expert": "alone",
    "split": "kv_write latent_write",
}


def test_how_each_op_is_lowered_is_named() -> None:
    assert set(HOW) == set(REGISTRY)


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_is_lowered_as_it_is_named(kind: str) -> None:
    bodies = [kinds for kinds, _ in reference_pages().kernels().values() if kind in kinds]
    if HOW[kind] == "alone":
        assert (kind,) in bodies
    else:
        assert (kind,) not in bodies
        assert all({*HOW[kind].split()} & {*kinds} for kinds in bodies)


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_has_a_docstring_in_house_form(kind: str) -> None:
    lines = inspect.cleandoc(lookup(kind).doc).splitlines()
    assert re.fullmatch(r"[A-Z].*\.", lines[0]), "the first line is one sentence"
    assert len(lines) > 2 and lines[1] == "", "the notes follow after an empty line"
    names = [found[1] for line in lines[2:] if (found := re.match(r"([A-Z][a-z]+): \S", line))]
    assert lines[2].startswith(("Formula: ", "Shapes: "))
    assert names == sorted(names, key=NOTES.index), "unknown notes, or not in their order"


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_s_reference_has_a_docstring_in_house_form(kind: str) -> None:
    lines = inspect.cleandoc(REFERENCES[kind].__doc__ or "").splitlines()
    assert lines and re.fullmatch(r"[A-Z].*\.", lines[0])


# --- templates ------------------------------------------------------------------------------------


def test_there_are_templates() -> None:
    assert list(emit.template_names()) == TEMPLATES and len(TEMPLATES) > 10


@pytest.mark.parametrize("stem", TEMPLATES)
def test_a_template_can_be_read(stem: str) -> None:
    template = emit.read_template(stem)
    names = [name for name, _ in template.schedule_facts]
    assert "num_warps" in names
    facts = [name for name, _ in (*template.shape_facts, *template.schedule_facts)]
    options = ("num_warps", "num_stages", "maxnreg")  # of a launch, in Triton's spelling
    assert all(name.isupper() or name in options for name in facts)


@pytest.mark.parametrize("stem", TEMPLATES)
def test_a_template_says_what_it_computes_on_what_and_what_bounds_it(stem: str) -> None:
    text = (ROOT / f"kernels/templates/{stem}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text)) or ""
    first = doc.partition("\n")[0]
    assert first.endswith(".") and first[0].isupper()
    for note in ("Shapes (", "Grid: ", "Bound by "):
        assert re.search(rf"^{re.escape(note)}", doc, re.MULTILINE), f"no `{note}`"


@pytest.mark.parametrize("stem", TEMPLATES)
def test_a_template_s_launch_takes_tensors_then_sizes(stem: str) -> None:
    text = (ROOT / f"kernels/templates/{stem}.py").read_text(encoding="utf-8")
    functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    launch = functions["launch"]
    kinds = [ast.unparse(a.annotation) if a.annotation else "" for a in launch.args.args]
    is_size = [kind == "int" for kind in kinds]
    assert set(kinds) <= {"torch.Tensor", "torch.Tensor | None", "int"}
    assert is_size == sorted(is_size) and any(is_size), "tensors come first, then sizes"
    assert ast.unparse(launch.returns or ast.Constant(...)) == "None"
    assert ast.get_docstring(launch)


@pytest.mark.parametrize("stem", TEMPLATES)
def test_a_template_with_its_parts_imports_triton_and_torch_alone(stem: str) -> None:
    text = "\n".join(emit.read_template(stem).lines)
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported <= {"torch", "triton"}


# Lowered without limits alone: the hooks are those of a kernel that it shares.
ALWAYS_PLAIN = {"attention_prefill_quantised_gluon"}


@pytest.mark.parametrize("stem", [stem for stem in TEMPLATES if emit.read_template(stem).hooks])
def test_a_template_with_hooks_has_golden_texts(stem: str) -> None:
    goldens = [path.stem for path in (ROOT / "tests/golden/triton").glob(f"{stem}*.py")]
    plain = [name for name in goldens if name == stem]
    fused = [name for name in goldens if name.startswith(f"{stem}__")]
    assert plain and bool(fused) == (stem not in ALWAYS_PLAIN), goldens
