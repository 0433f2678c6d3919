"""Plans: what is written reads back equal, every bucket has its program, and all fits together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ir.toy import CONFIG
from treadle.ir.graph import Op
from treadle.kernels.schedule.attention import JOINED_ROWS
from treadle.kernels.schedule.linears import GEMV_ROWS
from treadle.models.config import from_hf
from treadle.runtime import planner
from treadle.runtime.compiler import Compilation, build
from treadle.runtime.config import EngineConfig, decode_buckets, mixed_buckets
from treadle.runtime.plan import PLAN, Plan, bucket_dims, read_plan
from treadle.runtime.planner import decode_form, first_candidate, plan_one, plan_programs


def compilation(target: str, kv_format: str = "") -> Compilation:
    engine = EngineConfig(
        target,
        "f32",
        page_size=16,
        max_rows=8,
        max_step_tokens=64,
        max_context_tokens=128,
        kv_format=kv_format,
    )
    return build(from_hf({**CONFIG, "head_dim": 32} if kv_format else CONFIG), engine)


def plan_for(target: str, kv_format: str = "") -> tuple[Compilation, Plan]:
    made = compilation(target, kv_format)
    return made, plan_programs(made.fused, made.engine)


@pytest.mark.parametrize("target", ["interpret", "reference"])
def test_a_plan_reads_back_as_it_was_written(tmp_path: Path, target: str) -> None:
    _, plan = plan_for(target)
    plan.write(tmp_path)
    read = read_plan(json.loads((tmp_path / PLAN).read_text()))
    assert (read.programs, read.scratch) == (plan.programs, plan.scratch)
    assert read.resample == plan.resample is not None
    files = {path.stem: path.read_text() for path in (tmp_path / "kernels").glob("*.py")}
    assert files == plan.modules


def test_every_bucket_has_its_program_in_the_form_meant_for_it() -> None:
    made, plan = plan_for("interpret")
    decode = [("decode", n, decode_form(n)) for n in decode_buckets(made.engine.max_rows)]
    mixed = [("mixed", n, "mixed") for n in mixed_buckets(made.engine.max_step_tokens)]
    assert [(p.step, p.bucket, p.form) for p in plan.programs] == [*decode, *mixed]


def test_norms_are_folded_and_attention_joined_only_as_far_as_it_pays() -> None:
    assert decode_form(1) == "decode.few.joined"
    assert decode_form(max(GEMV_ROWS, JOINED_ROWS) + 1) == "decode"


def test_a_program_launches_the_ops_of_its_graph_in_order() -> None:
    made, plan = plan_for("interpret")
    for program in plan.all_programs:
        ops = [op.name for op in made.fused[program.form].ops]
        assert [launch.op for launch in program.launches] == ops
        assert {launch.kernel for launch in program.launches} <= set(plan.modules)


@pytest.mark.parametrize("kv_format", ["", "int8"])
def test_lowering_a_layer_s_op_once_gives_the_plan_of_lowering_each(
    monkeypatch: pytest.MonkeyPatch, kv_format: str
) -> None:
    _, plan = plan_for("interpret", kv_format)
    numbers, real = itertools.count(), planner._without_layer

    def each_alone(op: Op, *rest: Any) -> tuple[object, tuple[str, ...]]:
        signature, names = real(op, *rest)
        return (next(numbers), signature), names

    monkeypatch.setattr(planner, "_without_layer", each_alone)
    assert plan_for("interpret", kv_format)[1] == plan
    assert next(numbers) == sum(len(program.launches) for program in plan.all_programs)


def test_every_value_lies_inside_the_arena_of_its_program() -> None:
    made, plan = plan_for("interpret")
    for program in plan.programs:
        graph = made.fused[program.form]
        dims = bucket_dims(made.engine, program.step, program.bucket)
        produced = {name for op in graph.ops for name in op.outputs}
        assert set(program.offsets) == produced
        for name, offset in program.offsets.items():
            assert 0 <= offset <= program.arena_bytes - graph.types[name].num_bytes(dims)


def test_the_program_that_draws_again_has_no_values_of_its_own() -> None:
    made, plan = plan_for("interpret")
    assert plan.resample is not None and plan.all_programs[-1] is plan.resample
    assert (plan.resample.offsets, plan.resample.arena_bytes) == ({}, 0)
    # It draws by the very kernel that the steps draw by.
    samplers = {p.launches[-1].kernel for p in plan.programs}
    assert samplers == {plan.resample.launches[1].kernel}
    assert [op.kind for op in made.fused["resample"].ops] == [
        "adjust_logits",
        "sample",
        "count_tokens",
    ]


def test_scratch_is_as_large_as_the_most_demanding_program_asks() -> None:
    made, plan = plan_for("interpret")
    largest: dict[str, int] = {}
    for program in plan.programs:
        form = program.form
        alone = plan_one(
            made.engine, program.step, program.bucket, form, made.fused[form], "", first_candidate
        )
        assert alone.programs == (program,)
        for name, (_, elements) in alone.scratch.items():
            largest[name] = max(largest.get(name, 0), elements)
    assert {name: elements for name, (_, elements) in plan.scratch.items()} == largest


def test_planning_twice_gives_the_same_kernels() -> None:
    assert plan_for("interpret")[1] == plan_for("interpret")[1]


def test_the_reference_needs_one_program_a_step_and_no_kernels() -> None:
    made, plan = plan_for("reference")
    assert [(p.step, p.bucket) for p in plan.programs] == [
        ("decode", made.engine.max_rows),
        ("mixed", made.engine.max_step_tokens),
    ]
    assert plan.modules == plan.scratch == {}


def test_a_mixed_step_has_no_more_sequences_than_tokens_or_rows() -> None:
    engine = compilation("interpret").engine
    assert bucket_dims(engine, "mixed", 4)["B"] == 4
    assert bucket_dims(engine, "mixed", 64)["B"] == engine.max_rows
    assert bucket_dims(engine, "decode", 4)["T"] == bucket_dims(engine, "decode", 4)["B"] == 4
