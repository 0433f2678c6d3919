"""Emission: which lines of a template change, which never do, and what is refused."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.ir import fuse
from treadle.ir.builder import GraphBuilder
from treadle.ir.errors import KernelError, LoweringError
from treadle.ir.graph import Op
from treadle.ir.ops.params import NoParams
from treadle.ir.ops.rope import RopeParams
from treadle.ir.pipeline import run_passes
from treadle.kernels.emit import (
    Header,
    emit_module,
    parse_template,
    read_template,
    template_names,
)
from treadle.kernels.epilogue import TILES, lower_linear
from treadle.kernels.inline import inline_parts
from treadle.kernels.load import load_module, write_module
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Situation

from ..golden import Golden
from .linear_cases import Case, emit_case

ROOT = Path(__file__).resolve().parents[2]

TINY = '''"""Copy."""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=4)
SCHEDULE = dict(BLOCK=4, num_warps=1)


@triton.jit
def CHANGE(value):
    """Change nothing."""
    return value


@triton.jit
def tiny(
    x_ptr,
    y_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy N numbers."""
    i = tl.arange(0, BLOCK)  # a comment that stays
    value = tl.load(x_ptr + i, mask=i < N)
    if BLOCK > 1:
        value = CHANGE(value)
    tl.store(y_ptr + i, value, mask=i < N)


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Copy."""
    tiny[(1,)](
        x,
        y,
        **SHAPE,
        **SCHEDULE,
    )
'''


def emit_tiny(text: str = TINY, **changes: object) -> str:
    arguments: dict = {
        "name": "tiny__twice",
        "shape": {"N": 3},
        "schedule": {"BLOCK": 4, "num_warps": 2},
        "header": Header("double three numbers.", ("y = x + x",), ("Floor: none.",)),
        "hooks": {"CHANGE": ("# doubled", "value = value + value")},
    }
    return emit_module(parse_template("tiny", text), **{**arguments, **changes})


# --- what changes -------------------------------------------------------------------------------


def test_only_the_replaceable_lines_differ() -> None:
    before, after = TINY.splitlines(), emit_tiny().splitlines()
    removed = [line for line in before if line not in after]
    added = [line for line in after if line not in before]
    assert removed == [
        '"""Copy."""',
        "SHAPE = dict(N=4)",
        "SCHEDULE = dict(BLOCK=4, num_warps=1)",
        "def CHANGE(value):",
        '    """Change nothing."""',
        "    return value",
        "def tiny(",
        "        value = CHANGE(value)",
        "    tiny[(1,)](",
    ]
    assert added == [
        '"""`tiny__twice`: double three numbers.',
        "Covers:",
        "  y = x + x",
        "Floor: none.",
        "Schedule: BLOCK=4, num_warps=2",
        '"""',
        "SHAPE = dict(N=3)",
        "SCHEDULE = dict(BLOCK=4, num_warps=2)",
        "def tiny__twice(",
        "        # doubled",
        "        value = value + value",
        "    tiny__twice[(1,)](",
    ]


def test_extra_operands_go_before_y_everywhere() -> None:
    text = emit_tiny(operands=("bias", "residual"))
    assert "    x_ptr,\n    bias_ptr,\n    residual_ptr,\n    y_ptr,\n" in text
    assert "    bias: torch.Tensor,\n    residual: torch.Tensor,\n    y: torch.Tensor,\n" in text
    assert "        x,\n        bias,\n        residual,\n        y,\n" in text


def test_extra_operands_pass_through_the_parts_of_a_kernel() -> None:
    text, _ = emit_case("matmul_gluon", Case("bias", dtype="bf16"))
    assert text.count("bias_ptr,\n                    y_desc,") == 2
    assert "def consume(\n    bias_ptr,\n    y_desc," in text
    assert "        bias,\n        describe(y[:num_tokens]" in text


def test_long_facts_take_a_line_each() -> None:
    facts = {f"LONG_NAME_{i}": i for i in range(12)}
    text = TINY.replace("N=4", ", ".join(f"{key}=0" for key in facts))
    assert "SHAPE = dict(\n    LONG_NAME_0=0,\n    LONG_NAME_1=1,\n" in emit_tiny(text, shape=facts)


def test_facts_keep_the_templates_order_and_kinds() -> None:
    text = TINY.replace("N=4", 'N=4, EPS=1e-5, FLAG=False, MODE="a"')
    emitted = emit_tiny(text, shape={"MODE": "b", "FLAG": True, "EPS": 1e-6, "N": 3})
    assert 'SHAPE = dict(N=3, EPS=1e-06, FLAG=True, MODE="b")' in emitted


def test_several_kernels_are_renamed_by_their_stem() -> None:
    text = TINY + "    tiny_combine[(1,)](y)\n    other[(1,)](y)\n"
    emitted = emit_tiny(text)
    assert "tiny__twice[(1,)](" in emitted
    assert "tiny__twice_combine[(1,)](y)" in emitted
    assert "other[(1,)](y)" in emitted


def test_same_arguments_give_same_bytes() -> None:
    assert emit_case("gemv", Case("norm glu")) == emit_case("gemv", Case("norm glu"))


@pytest.mark.parametrize("name", template_names())
def test_template_emits_with_its_own_facts(name: str) -> None:
    template = read_template(name)
    if name in TILES:
        text, _ = emit_case(name, Case("bias add", dtype="bf16"))
    else:
        text = emit_module(
            template,
            name=f"{name}__case",
            shape=dict(template.shape_facts),
            schedule=dict(template.schedule_facts),
            header=Header("the same."),
            hooks=dict.fromkeys(template.hooks, ()),
        )
    imported = [
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert imported and not any("treadle" in str(module) for module in imported)
    assert not any(hook in text for hook in template.hooks)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *((template, "") for template in sorted(TILES)),
        *(
            (template, "bias glu add")
            for template, tile in sorted(TILES.items())
            if not tile.is_gluon
        ),
        *((template, "glu") for template, tile in sorted(TILES.items()) if tile.is_gluon),
        *((template, "bias add") for template, tile in sorted(TILES.items()) if tile.is_gluon),
    ],
)
def test_emitted_linear_is_golden(
    template: str, form: str, golden: Callable[[str], Golden]
) -> None:
    text, _ = emit_case(template, Case(form, dtype="bf16", N=6144, K=4096))
    assert text == golden(f"triton/{'__'.join([template, *form.split()])}.py")


ATTENTION = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "scale": 0.0625}


ATTENTION_TEMPLATES = (
    "attention_decode",
    "attention_prefill",
    "attention_prefill_tma",
    "rope_attention_decode",
    "attention_decode_quantised",
    "attention_prefill_quantised",
)
LIMITS = ("", "window__cap", "window__sinks")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *itertools.product(ATTENTION_TEMPLATES, LIMITS),
        ("attention_prefill_gluon", ""),
        ("attention_prefill_quantised_gluon", ""),
    ],
)
def test_emitted_attention_is_golden(
    template: str, form: str, golden: Callable[[str], Golden]
) -> None:
    step = "decode" if "decode" in template else "mixed"
    kv_format = "int8" if "quantised" in template else ""
    b = GraphBuilder("attending", step=step, dtype="bf16", page_size=64, kv_format=kv_format)
    x = b.embed(b.weight("embed", "embed", 32, 6144))
    q, k, v = b.split(x, 4096, 1024, 1024, name="q k v")
    limits = {"window": 4096 if "window" in form else 0, "soft_cap": 50.0 if "cap" in form else 0.0}
    sinks = b.weight("sinks", "sinks", 32) if "sinks" in form else None
    if template == "rope_attention_decode":
        table = b.rope_table("rope", (1.0,) * 64)
        q, k = (b.rope(part, table, head_dim=128) for part in (q, k))
    y = b.attention(q, k, v, sinks, cache="kv.0", **ATTENTION, **limits)
    head = b.weight("h", "h", 32, 4096)
    graph = b.finish(b.linear(b.last_rows(y), head, out_dtype="f32"))
    if template == "rope_attention_decode":
        for rule in (fuse.fuse_rope_kv_write, fuse.fuse_rope_attention):
            graph, _ = rule(graph)
    op = next(op for op in graph.ops if op.plain[-1].kind == "attention")
    where = Situation({"T": 8192, "B": 8, "C": 8192}, step, "cuda", "sm_90")
    candidate = next(each for each in lower(op, graph, where) if each.template == template)
    assert candidate.emit() == golden(f"triton/{'__'.join([template, *form.split()])}.py")


@pytest.mark.parametrize("form", ["", "add"])
def test_emitted_norm_is_golden(form: str, golden: Callable[[str], Golden]) -> None:
    b = GraphBuilder("normed", step="mixed", dtype="bf16", page_size=16)
    x = b.embed(b.weight("embed", "embed", 32, 4096))
    y = b.rms_norm(x, b.weight("norm", "norm", 4096), eps=1e-5, name="y")
    y = b.add(x, y, name="after") if form else y
    head = b.weight("h", "h", 32, 4096)
    graph = b.finish(b.linear(b.last_rows(y), head, out_dtype="f32"))
    graph, _ = run_passes(graph, few_tokens=False)
    op = next(op for op in graph.ops if "rms_norm" in [inner.kind for inner in op.plain])
    where = Situation({"T": 8, "B": 8}, "mixed", "cuda", "sm_90")
    text = next(lower(op, graph, where)).emit()
    assert text == golden(f"triton/{'__'.join(['norm', *form.split()])}.py")


def test_emitted_norm_prologue_is_golden(golden: Callable[[str], Golden]) -> None:
    text, _ = emit_case("gemv", Case("norm glu", dtype="bf16", N=6144, K=4096))
    assert text == golden("triton/gemv__norm__glu.py")


def test_emitted_text_is_formatted(tmp_path: Path) -> None:
    forms = ["", "bias", "add", "glu", "bias glu", "bias add", "f32"]
    for template in sorted(TILES):
        extra = ["norm", "norm offset bias glu add"] if TILES[template].has_prologue else []
        for number, form in enumerate([*forms, *extra]):
            text, _ = emit_case(template, Case(form, N=28672, K=14336, dtype="bf16"))
            (tmp_path / f"{template}_{number}.py").write_text(text)
    for command in (["format", "--check"], ["check", "--select", "E,F,W,I,B", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


# --- what is refused ----------------------------------------------------------------------------


def test_missing_and_unknown_entries_are_named() -> None:
    with pytest.raises(LoweringError, match="missing are N, unknown M"):
        emit_tiny(shape={"M": 1})
    with pytest.raises(LoweringError, match="schedule entries BLOCK, num_warps; missing are num"):
        emit_tiny(schedule={"BLOCK": 1})


def test_hook_without_lines_is_named() -> None:
    with pytest.raises(LoweringError, match="missing are CHANGE"):
        emit_tiny(hooks={})


def test_hook_without_a_default_is_named() -> None:
    with pytest.raises(LoweringError, match="no default for MISSING"):
        emit_tiny(TINY.replace("value = CHANGE(value)", "value = MISSING(value)"))


def test_template_without_launch_is_refused() -> None:
    with pytest.raises(LoweringError, match="no function `launch`"):
        emit_tiny(TINY[: TINY.index("def launch")])


def test_template_without_facts_is_refused() -> None:
    with pytest.raises(LoweringError, match="no statement `SHAPE"):
        emit_tiny(TINY.replace("SHAPE = dict(N=4)", "SHAPE = {}"))


def test_unknown_template_lists_the_known() -> None:
    with pytest.raises(LoweringError, match=r"no template `nonesuch`.*gemv"):
        read_template("nonesuch")


def test_name_that_is_no_identifier_is_refused() -> None:
    with pytest.raises(LoweringError, match="identifier"):
        emit_tiny(name="layers.0.qkv")


def test_header_that_would_end_the_docstring_is_refused() -> None:
    with pytest.raises(LoweringError, match="three quotes"):
        emit_tiny(header=Header('end it """ here.'))


def test_op_without_expression_is_named() -> None:
    case = Case("glu")
    rope = Op("rope", ("layers.0.gated", "p", "t"), ("layers.0.r",), RopeParams(8))
    with pytest.raises(LoweringError, match=r"can't fuse `rope`.*add, combine, glu"):
        lower_linear("gemv", replace(case.op, body=(*case.op.body, rope)), case.types)


def test_norm_needs_a_prologue() -> None:
    with pytest.raises(
        LoweringError, match=r"can't fuse `rms_norm`.*no prologue.*kernel of its own"
    ):
        lower_linear("matmul", Case("norm").op, Case("norm").types)


def test_glu_needs_interleaved_rows() -> None:
    case = Case("glu", interleave=0)
    with pytest.raises(LoweringError, match=r"different tiles.*alternate"):
        lower_linear("gemv", case.op, case.types)


def test_op_that_skips_the_chain_is_refused() -> None:
    case = Case("add")
    stray = Op("add", ("hidden", "hidden"), ("layers.0.after",), NoParams())
    with pytest.raises(LoweringError, match="does not read"):
        lower_linear("gemv", replace(case.op, body=(case.op.body[0], stray)), case.types)


def test_residual_of_another_shape_is_refused() -> None:
    case = Case("add")
    types = {**case.types, "hidden": case.types["x"]}
    with pytest.raises(LoweringError, match="`hidden` has the shape"):
        lower_linear("gemv", case.op, types)


def test_glu_sets_what_tiles_must_be_multiples_of() -> None:
    assert lower_linear("gemv", Case("glu").op, Case("glu").types).feature_multiple == 16
    assert lower_linear("gemv", Case("add").op, Case("add").types).feature_multiple == 1


def test_gluon_refuses_what_it_cannot_do() -> None:
    for case, reason in (
        (Case("glu add", dtype="bf16"), "lie otherwise"),
        (Case(dtype="f32"), "16-bit numbers, not f32"),
        (Case(N=100, dtype="bf16"), "rows of y have 200 bytes, not a multiple of 16.*by pointer"),
    ):
        with pytest.raises(LoweringError, match=reason):
            lower_linear("matmul_gluon", case.op, case.types)


def test_copy_engine_refuses_ragged_rows() -> None:
    case = Case(K=100, dtype="bf16")
    with pytest.raises(LoweringError, match="rows of x have 200 bytes"):
        lower_linear("matmul_skinny_tma", case.op, case.types)


def test_operands_have_the_launch_order() -> None:
    case = Case("norm bias add")
    fused = lower_linear("gemv", case.op, case.types)
    assert fused.operands == ("bias", "norm_weight", "residual")
    assert fused.inputs == (
        *("x", "@layers.0.weight"),
        *("@layers.0.bias", "@layers.0.norm", "hidden"),
    )


def test_value_named_like_a_temporary_gets_another_name() -> None:
    case = Case("glu add")
    linear, glu, add = case.op.body
    glu, add = replace(glu, outputs=("up",)), replace(add, inputs=("hidden", "up"))
    types = {**case.types, "up": case.types["layers.0.gated"]}
    fused = lower_linear("gemv", replace(case.op, body=(linear, glu, add)), types)
    assert any(line.startswith("up_ = tl.reshape") for line in fused.hooks["EPILOGUE"])


# --- loading ------------------------------------------------------------------------------------


def test_module_is_written_once_and_loaded_once(tmp_path: Path) -> None:
    path = write_module("ANSWER = 42\n", "answer", tmp_path)
    assert path == write_module("ANSWER = 42\n", "answer", tmp_path)
    assert load_module(path, "answer") is load_module(path, "answer")
    assert load_module(path, "answer").ANSWER == 42
    assert write_module("ANSWER = 43\n", "answer", tmp_path) != path
    assert [child.suffix for child in tmp_path.iterdir() if child.is_file()] == [".py", ".py"]


def test_text_is_loaded_from_the_cache(cache_dir: Path) -> None:
    module = load_module("ANSWER = 44\n", "answer")
    assert module.ANSWER == 44
    assert Path(str(module.__file__)).is_relative_to(cache_dir)


def test_broken_module_names_the_kernel(tmp_path: Path) -> None:
    path = write_module("ANSWER = \n", "broken", tmp_path)
    with pytest.raises(KernelError, match=r"`broken`.*can't be imported"):
        load_module(path, "broken")
    with pytest.raises(KernelError, match="no such file"):
        load_module(tmp_path / "absent.py", "absent")


# --- parts --------------------------------------------------------------------------------------

QUANTISED_PREFILL = "parts.quantised_prefill import attention_prefill_quantised"
WITH_PARTS = """import triton

from treadle.kernels.templates.parts.prefetch import prefetch_tiles

SHAPE = dict(N=1)


@triton.jit
def kernel():
    prefetch_tiles()
"""


def test_a_part_is_put_before_the_first_function_with_what_it_calls() -> None:
    text = inline_parts("some", WITH_PARTS)
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert names == ["prefetch", "prefetch_tiles", "kernel"]
    imports = "import triton\nimport triton.language as tl\n\n"
    assert text.startswith(f"{imports}SHAPE = dict(N=1)\n\n\n@triton.jit\ndef prefetch(")
    assert "treadle" not in text


def test_a_part_brings_the_constants_and_imports_that_it_needs_once() -> None:
    wanted = WITH_PARTS.replace("prefetch import prefetch_tiles", "attention_warps import plan")
    wanted = wanted.replace(
        "import triton\n", "import triton\nfrom triton.experimental import gluon\n"
    )
    text = inline_parts("some", wanted)
    assert text.count("from triton.experimental import gluon\n") == 1
    assert "    mbarrier,\n" in text
    assert "FIELDS = gl.constexpr(8)" in text
    assert "# The step's metadata" not in text  # the comment above another function
    assert "warpgroup_mma(" not in text  # of what `plan` does not call


def test_a_part_brings_what_it_imports_of_another_part() -> None:
    wanted = WITH_PARTS.replace(
        "prefetch import prefetch_tiles", "quantised_prefill import attend_own"
    )
    text = inline_parts("some", wanted)
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert names == ["SCORES", "attend_own", "kernel"]


def test_a_comment_above_a_function_goes_with_it() -> None:
    wanted = WITH_PARTS.replace("parts.prefetch import prefetch_tiles", QUANTISED_PREFILL)
    text = inline_parts("some", wanted.replace("@triton.jit\ndef", "# Ours.\n@triton.jit\ndef"))
    assert "# Ours.\n@triton.jit\ndef kernel" in text
    assert "another compiled kernel.\n@triton.jit(\n    do_not_specialize" in text


def test_a_text_without_parts_stays_as_it_is() -> None:
    text = WITH_PARTS.replace("from treadle", "from elsewhere")
    assert inline_parts("some", text) == text


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("parts.prefetch", "parts.nonesuch", "`some` imports the part `nonesuch`; there is none"),
        ("import prefetch_tiles", "import nonesuch", "part `prefetch` has no nonesuch"),
    ],
)
def test_a_part_that_is_not_there_is_named(old: str, new: str, complaint: str) -> None:
    with pytest.raises(LoweringError, match=complaint):
        inline_parts("some", WITH_PARTS.replace(old, new))
