"""Tuned tables: what is written is read, what is chosen is used, and what is stale is told."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ir.toy import toy_graph
from treadle.bench.random_models import CONFIGS
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Op
from treadle.ir.kv_cache import KV_FORMATS
from treadle.ir.pipeline import run_passes
from treadle.kernels.emit import read_template
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.near_sizes import nearest
from treadle.kernels.tuned import (
    SHIPPED,
    TYPICAL_GPU,
    Choice,
    TunedTable,
    read_table,
    shipped_table,
    tuning_key,
)
from treadle.models.config import from_hf
from treadle.models.registry import build_graph
from treadle.runtime.planner import decode_form

WHERE = Situation(
    {"T": 32, "B": 32, "R": 32, "M": 64, "P": 512, "C": 1024}, "decode", "cuda", "sm_90"
)
TABLES = sorted(SHIPPED.glob("*.json"))


def toy_linears() -> tuple[Graph, list[Op]]:
    """Give a fused graph and those of its ops that have several candidates and equal keys."""
    graph, _ = run_passes(toy_graph("decode"), few_tokens=False)
    return graph, [op for op in graph.ops if op.name.endswith("after_mlp")]


def choose(table: TunedTable, op: Op, graph: Graph) -> tuple[Candidate, list[str]]:
    """Give the choice for an op, and what was told to be stale."""
    stale: list[str] = []
    candidates = lower(op, graph, WHERE)
    return table.choose(op, graph, WHERE, candidates, on_stale=stale.append), stale


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    table = TunedTable("GPU of tests").with_choice("a/N=1/bf16/decode/1", "gemv", {"BLOCK_N": 16})
    table = table.with_choice("b//i32/mixed/64", "matmul", {"USE_PDL": True, "num_warps": 4})
    table.write(tmp_path / "new folder" / "table.json")
    assert read_table(tmp_path / "new folder" / "table.json") == table


def test_a_table_is_the_same_text_in_whatever_order_it_was_tuned(tmp_path: Path) -> None:
    keys = ["b", "a", "c"]
    for name, order in (("one", keys), ("two", keys[::-1])):
        table = TunedTable("GPU of tests")
        for key in order:
            table = table.with_choice(key, "gemv", {"BLOCK_N": 16})
        table.write(tmp_path / name)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()


def test_a_later_choice_replaces_an_earlier_one() -> None:
    table = TunedTable("GPU of tests").with_choice("key", "gemv", {"BLOCK_N": 16})
    table = table.with_choice("key", "matmul", {"BLOCK_N": 64})
    assert table.choices == {"key": Choice("matmul", {"BLOCK_N": 64})}


@pytest.mark.parametrize(
    "text", ["", "{}", '{"gpu": "x", "choices": {"key": {"template": "gemv"}}}', "[]"]
)
def test_a_damaged_table_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}.*tune again"):
        read_table(path)


def test_the_tuned_candidate_is_chosen_for_every_layer(rng_seed: int) -> None:
    graph, layers = toy_linears()
    candidates = list(lower(layers[0], graph, WHERE))
    wanted = random.Random(rng_seed).choice(candidates[1:])
    key = tuning_key(candidates[0], layers[0], graph, WHERE)
    table = TunedTable("GPU of tests").with_choice(key, wanted.template, wanted.schedule)
    for layer in layers:
        chosen, stale = choose(table, layer, graph)
        assert (chosen.template, chosen.schedule) == (wanted.template, wanted.schedule)
        assert chosen.arguments["y"] == f"value:{layer.outputs[0]}"
        assert stale == []


def test_the_default_is_chosen_where_nothing_was_tuned() -> None:
    graph, (layer, *_) = toy_linears()
    chosen, stale = choose(TunedTable("GPU of tests"), layer, graph)
    assert chosen == next(lower(layer, graph, WHERE))
    assert stale == []


def test_a_choice_that_is_no_candidate_any_more_is_told_and_the_default_used() -> None:
    graph, (layer, *_) = toy_linears()
    default = next(lower(layer, graph, WHERE))
    key = tuning_key(default, layer, graph, WHERE)
    table = TunedTable("GPU of tests").with_choice(key, "matmul_skinny", {"BLOCK_N": 7})
    chosen, stale = choose(table, layer, graph)
    assert chosen == default
    (note,) = stale
    assert note.startswith(key) and "matmul_skinny (BLOCK_N=7)" in note and "default" in note


def test_a_key_tells_buckets_steps_sizes_and_dtypes_apart() -> None:
    graph, (layer, *_) = toy_linears()
    default = next(lower(layer, graph, WHERE))
    other_bucket = replace(WHERE, dims={**WHERE.dims, "T": 16, "B": 16})
    wider, _ = run_passes(toy_graph("decode", intermediate_size=256), few_tokens=False)
    keys = [
        tuning_key(default, layer, graph, WHERE),
        tuning_key(default, layer, graph, other_bucket),
        tuning_key(default, layer, graph, replace(WHERE, step="mixed")),
        tuning_key(next(lower(layer, wider, WHERE)), layer, wider, WHERE),
    ]
    assert len(set(keys)) == len(keys)


def test_a_choice_with_another_setting_than_any_candidate_is_stale(rng_seed: int) -> None:
    graph, (layer, *_) = toy_linears()
    candidates = list(lower(layer, graph, WHERE))
    wanted = random.Random(rng_seed).choice(candidates[1:])
    schedule = dict(wanted.schedule) | {"num_stages": 99}
    key = tuning_key(candidates[0], layer, graph, WHERE)
    table = TunedTable("GPU of tests").with_choice(key, wanted.template, schedule)
    chosen, stale = choose(table, layer, graph)
    assert chosen == candidates[0]
    assert [note.partition(":")[0] for note in stale] == [key]


def test_a_longer_window_keeps_what_was_tuned_for_attention() -> None:
    table = shipped_table("NVIDIA H200")
    model = from_hf({**CONFIGS["llama-3.1-8b"], "num_hidden_layers": 1})
    authored = build_graph(model, step="decode", dtype="bf16", page_size=64)
    graph, _ = run_passes(authored, few_tokens=False)
    op = next(op for op in graph.ops if any(inner.kind == "attention" for inner in op.plain))
    found, stale = [], []
    for window in (1536, 4096, 131072):
        dims = {"T": 8, "B": 8, "R": 256, "M": window // 64, "P": 8192, "C": window}
        where = Situation(dims, "decode", "cuda", "sm_90")
        chosen = table.choose(op, graph, where, lower(op, graph, where), on_stale=stale.append)
        found.append({**chosen.schedule, "MAX_SPLITS": 0})
    assert found[0] == found[1] == found[2]
    assert stale == []


def test_where_nothing_was_tuned_the_nearest_rows_decide(rng_seed: int) -> None:
    graph, (layer, *_) = toy_linears()
    candidates = list(lower(layer, graph, WHERE))
    near, far = random.Random(rng_seed).sample(candidates[1:], 2)
    table = TunedTable("GPU of tests")
    for rows, wanted in ((16, near), (8, far)):
        where = replace(WHERE, dims={**WHERE.dims, "T": rows, "B": rows})
        key = tuning_key(candidates[0], layer, graph, where)
        table = table.with_choice(key, wanted.template, wanted.schedule)
    chosen, stale = choose(table, layer, graph)
    assert (chosen.template, chosen.schedule) == (near.template, near.schedule)
    assert stale == []


def test_what_won_nearby_but_is_not_offered_here_gives_way_to_the_next(rng_seed: int) -> None:
    graph, (layer, *_) = toy_linears()
    candidates = list(lower(layer, graph, WHERE))
    wanted = random.Random(rng_seed).choice(candidates[1:])
    mixed = replace(WHERE, step="mixed", dims={**WHERE.dims, "T": 64, "B": 32})
    table = TunedTable("GPU of tests")
    table = table.with_choice(
        tuning_key(candidates[0], layer, graph, mixed), "matmul", {"BLOCK_N": 7}
    )
    mixed = replace(mixed, dims={**WHERE.dims, "T": 128, "B": 32})
    key = tuning_key(candidates[0], layer, graph, mixed)
    chosen, _ = choose(table.with_choice(key, wanted.template, wanted.schedule), layer, graph)
    assert (chosen.template, chosen.schedule) == (wanted.template, wanted.schedule)


@pytest.mark.parametrize(
    ("key", "other", "is_near"),
    [
        ("linear/K=4096,N=6144/bf16/decode/8", "linear/K=2560,N=4096/bf16/decode/8", True),
        ("linear/K=4096,N=6144/bf16/decode/8", "linear/K=1024,N=6144/bf16/decode/8", False),
        ("linear/K=4096,N=6144/bf16/decode/8", "linear/K=4096,N=6144/f32/decode/8", False),
        ("linear/K=4096,N=6144/bf16/decode/8", "linear/K=4096,N=6144/bf16/mixed/32", True),
        ("linear/K=4096,N=6144/bf16/decode/8", "linear/K=4096,N=6144/bf16/decode/64", False),
        ("norm/EPS=1e-05,HIDDEN=64/bf16/decode/8", "norm/EPS=1e-06,HIDDEN=96/bf16/decode/8", True),
        ("norm/HIDDEN=64,GATHER=True/bf16/decode/8", "norm/HIDDEN=64/bf16/decode/8", False),
        ("a/HEAD_DIM=64/bf16/decode/8", "a/HEAD_DIM=128/bf16/decode/8", False),
        (
            "a/NUM_HEADS=32,NUM_KV_HEADS=8/bf16/decode/8",
            "a/NUM_HEADS=16,NUM_KV_HEADS=4/bf16/decode/8",
            True,
        ),
        (
            "a/NUM_HEADS=32,NUM_KV_HEADS=8/bf16/decode/8",
            "a/NUM_HEADS=32,NUM_KV_HEADS=4/bf16/decode/8",
            False,
        ),
        ("a/b", "a/c", False),
    ],
)
def test_near_are_widths_and_rows_within_a_few_times_and_nothing_else(
    key: str, other: str, is_near: bool
) -> None:
    assert list(nearest(key, [key, other])) == ([other] if is_near else [])


def test_a_gpu_that_was_never_tuned_has_an_empty_table() -> None:
    assert shipped_table("Some Other GPU", "sm_89") == TunedTable("Some Other GPU")


def test_an_architecture_alone_is_tuned_as_its_typical_gpu() -> None:
    for architecture, gpu in TYPICAL_GPU.items():
        assert shipped_table("", architecture) == shipped_table(gpu) != TunedTable(gpu)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_shipped_table_lies_under_the_name_of_its_gpu(path: Path) -> None:
    table = read_table(path)
    assert path.name == table.gpu.replace(" ", "_") + ".json"
    assert shipped_table(table.gpu) == table
    assert list(json.loads(path.read_text())["choices"]) == sorted(table.choices)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_shipped_choice_sets_just_what_its_template_leaves_open(path: Path) -> None:
    for key, choice in read_table(path).choices.items():
        entries = {name for name, _ in read_template(choice.template).schedule_facts}
        assert set(choice.schedule) == entries, key


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_choice_is_used_by_a_model_of_the_benchmarks(path: Path) -> None:
    table = read_table(path)
    buckets = {tuple(key.split("/")[-2:]) for key in table.choices}
    stale: list[str] = []
    found: set[str] = set()
    # Two layers: the first may have no experts.
    models = [(config, "") for config in CONFIGS.values()]
    models += [(CONFIGS["llama-3.1-8b"], kv_format) for kv_format in KV_FORMATS]
    for config, kv_format in models:
        model = from_hf({**config, "num_hidden_layers": 2})
        for step, rows in sorted(buckets):
            dims = {"T": int(rows), "B": int(rows), "R": 256, "M": 32, "P": 8192, "C": 2048}
            where = Situation(dims, step, "cuda", "sm_90")
            form = decode_form(int(rows)) if step == "decode" else step
            authored = build_graph(
                model, step=step, dtype="bf16", page_size=64, kv_format=kv_format
            )
            graph, _ = run_passes(
                authored,
                few_tokens=form.startswith("decode.few"),
                joined=form.endswith(".joined"),
            )
            for op in graph.ops:
                key = tuning_key(next(lower(op, graph, where)), op, graph, where)
                if key in table.choices and key not in found:
                    found.add(key)
                    candidates = lower(op, graph, where)
                    table.choose(op, graph, where, candidates, on_stale=stale.append)
    assert stale == []
    assert found == set(table.choices)
