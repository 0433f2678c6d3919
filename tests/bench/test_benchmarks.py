"""Each benchmark on a tiny model without a GPU: it runs, and its rows are complete."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_llama
from treadle.bench import (
    baselines,
    compare_tables,
    decode,
    host_time,
    kernels,
    kv_attention,
    prefill,
    prefix_cache,
    quality,
    serve,
    startup,
    throughput,
    workloads,
)
from treadle.bench.checkpoints import write_checkpoint
from treadle.bench.kept_up import KeptUp, keep_up, read_lines
from treadle.bench.random_models import CONFIGS
from treadle.bench.rows import Row
from treadle.bench.timing import Spread, time_in_turn, timed_round
from treadle.kernels.tuned import TunedTable
from treadle.models.config import from_hf
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.roofs import Roofs
from treadle.runtime.tuner import Workload

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    "admission",
    "baselines",
    "compare_tables",
    "decode",
    "goals",
    "host_time",
    "kernels",
    "kv_attention",
    "prefill",
    "prefix_cache",
    "quality",
    "serve",
    "startup",
    "throughput",
    "tune",
]
INTERPRET = ["--target", "interpret", "--dtype", "f32", "--page-size", "16", "--rounds", "1"]
SMALL = ["--layers", "1", "--out"]


def read(folder: Path, bench: str) -> dict[str, dict[str, Any]]:
    """Read a benchmark's rows by case and check that each has all fields and a figure."""
    rows = read_any(folder, bench)
    assert all(row["value"] > 0 for row in rows.values())
    return rows


def read_any(folder: Path, bench: str) -> dict[str, dict[str, Any]]:
    """Read rows of which some may be 0, as gaps of a device that never waits."""
    rows = json.loads((folder / f"{bench}.json").read_text())
    for row in rows:
        assert set(row) == set(Row.__dataclass_fields__)
        assert row["bench"] == bench
        assert row["better"] in ("lower", "higher")
        assert {"torch", "triton", "date", "commit"} <= set(row["conditions"])
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_says_how_it_is_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "bench" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "Run: " in capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_model_has_no_key_that_nobody_reads(name: str) -> None:
    assert from_hf(CONFIGS[name]).unknown_keys == ()


def test_decode_steps_that_the_time_is_too_short_for_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--models", "tiny", "--batches", "1,8", "--budget", "0", "--out", str(tmp_path)]
    assert decode.main(asked) == 0
    told = capsys.readouterr().out
    assert "left out: tiny batch 1 context 1024, tiny batch 8 context 1024" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.interpreted
def test_kernels_are_timed_beside_their_peers(tmp_path: Path) -> None:
    sizes = ["--batches", "2", "--prompts", "1x16", "--context", "8"]
    kernels.main(["--model", "tiny", *sizes, *INTERPRET, "--layers", "2", "--out", str(tmp_path)])
    rows = read(tmp_path, "kernels")
    qkv = rows["tiny decode 2x8 linear 2 rows qkv"]
    assert qkv["peers"]["cuBLAS"] > 0 and qkv["floor"] > 0
    assert qkv["conditions"]["gb_per_s"] > 0
    attention = rows["tiny mixed 1x16 attention_prefill 16 rows"]
    assert attention["peers"]["flash SDPA"] > 0
    assert "cuDNN SDPA" in attention["conditions"]["missing_peers"]
    assert "tiny projections, 2-64 rows, least" in rows
    assert "tiny prefill attention 1x16" in rows


def test_a_kernel_and_its_peers_are_timed_in_turn() -> None:
    """A clock that falls from round to round is the same for both."""
    played: list[str] = []

    def falling(name: str, us: float) -> Callable[[], float]:
        def time_once() -> float:
            played.append(name)
            return us * (1 + len(played) // 2)

        return time_once

    spreads = time_in_turn({"ours": falling("ours", 10.0), "peer": falling("peer", 10.0)}, 11)
    assert played == ["ours", "peer"] * 11
    assert spreads["peer"].us == pytest.approx(spreads["ours"].us, rel=0.2)
    assert spreads["ours"].low < spreads["ours"].us < spreads["ours"].high


def test_what_is_not_timed_runs_ahead_of_each_round() -> None:
    played: list[str] = []
    timed = timed_round(
        lambda: played.append("call"), torch.device("cpu"), lambda: played.append("before")
    )
    assert played == ["before", "call"]
    assert time_in_turn({"ours": timed}, 2)["ours"].us >= 0
    assert played == ["before", "call"] * 3


def test_what_is_kept_up_is_called_until_the_time_is_over() -> None:
    called: list[float] = []

    def call() -> None:
        called.append(time.perf_counter())
        time.sleep(0.001)

    found = keep_up(call, torch.device("cpu"), 0.1)
    assert called[-1] - called[0] >= 0.08
    assert found.ms == pytest.approx(1e2 / (len(called) - 1), rel=0.5)
    assert (found.watts, found.joules) == (0.0, 0.0)
    assert "kept up" in str(found) and "W" not in str(found)


def test_clock_and_power_are_read_from_whole_lines() -> None:
    told = "1980, 373.4\n1620, 692.7\n[N/A], 690.0\n1605, 69"
    assert read_lines(told) == [(1980.0, 373.4), (1620.0, 692.7)]
    found = KeptUp(10.0, 1620.0, 500.0)
    assert "1620 MHz and 500 W, 5.00 J" in str(found)
    assert found.conditions() == {
        "kept_up_ms": 10.0,
        "kept_up_mhz": 1620.0,
        "kept_up_watts": 500.0,
    }


@pytest.mark.interpreted
def test_tables_are_compared_once_and_kept_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(TunedTable("").text())
    work = ["--work", "tiny:decode:2x8", "--tables", str(tmp_path / "mine.json")]
    assert compare_tables.main([*work, *INTERPRET, "--seconds", "0", "--layers", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in told] == ["shipped", str(tmp_path / "mine.json")]
    assert all("ms once" in line and "ms kept up" in line for line in told)


def test_what_goals_are_set_for_is_summed_up() -> None:
    def linear(rows: int, ours: float, weight: str = "@layers.0.mlp.down") -> kernels.Measured:
        work = Workload("decode", rows, 1024)
        spread = Spread(ours, ours, ours)
        return kernels.Measured(
            "llama-3.1-8b",
            work,
            "linear",
            4,
            rows,
            spread,
            1,
            1,
            {kernels.CUBLAS: 12.0},
            weights=(weight,),
        )

    found = [linear(2, 12.0), linear(64, 3.0), linear(8, 1.0, "@lm_head"), linear(256, 24.0)]
    rows = kernels.summaries("llama-3.1-8b", found, Roofs(1.0, 1.0, 1.0), {})
    values = {row.case: (row.value, row.goal) for row in rows}
    assert values == {
        "llama-3.1-8b projections, 2-64 rows, least": (1.0, 1.0),
        "llama-3.1-8b projections, 2-64 rows, geometric mean": (pytest.approx(2.0), 1.05),
        "llama-3.1-8b projections, 256 rows, geometric mean": (pytest.approx(0.5), 0.97),
    }


@pytest.mark.interpreted
def test_a_step_of_prompts_is_timed(tmp_path: Path) -> None:
    asked = ["--models", "tiny", "--prompts", "1x16,1x16+3x20", "--keep-up", "0.001"]
    prefill.main([*asked, *INTERPRET, *SMALL, str(tmp_path)])
    rows = read(tmp_path, "prefill")
    row, beside = rows["tiny 1x16"], rows["tiny 1x16+3x20"]
    assert beside["floor"] > row["floor"], "rows that decode compute too"
    assert row["conditions"]["tokens_per_s"] > 0 and row["floor"] > 0
    assert row["conditions"]["kept_up_ms"] > 0


def test_throughput_goes_through_the_engine(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--shapes", "8x4,4x2"]
    assert throughput.main([*asked, "--concurrency", "1,2", *SMALL, str(tmp_path)]) == 0
    rows = read(tmp_path, "throughput")
    assert len(rows) == 4
    assert rows["tiny 8/4 concurrency 2"]["conditions"]["requests"] == 4


@pytest.mark.usefixtures("admits_at_once")
def test_throughput_with_less_cache_preempts(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--shapes", "8x30", "--concurrency", "3"]
    # A page of 16 tokens of one layer of f32 is 4 KiB: three pages, of which a request needs three.
    throughput.main([*asked, "--kv-memory", str(12 / 2**20), *SMALL, str(tmp_path)])
    (row,) = read(tmp_path, "throughput").values()
    assert "3 pages" in row["conditions"]["kv_cache"] and row["conditions"]["preemptions"] > 0


def test_throughput_of_each_dtype_of_the_cache(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--shapes", "8x4", "--concurrency", "1"]
    assert throughput.main([*asked, "--kv-dtypes", "auto,int8", *SMALL, str(tmp_path)]) == 0
    cases = {"tiny 8/4 concurrency 1", "tiny 8/4 concurrency 1 kv int8"}
    assert set(read(tmp_path, "throughput")) == cases


def test_a_shared_prefix_is_found_in_the_cache(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--prefix", "64", "--tail", "8"]
    assert prefix_cache.main([*asked, "--rounds", "2", *SMALL, str(tmp_path)]) == 0
    row = read(tmp_path, "prefix_cache")["tiny prefix 64 tail 8"]
    assert row["conditions"]["cached_tokens"] == 64
    assert row["value"] == pytest.approx(
        100 * row["conditions"]["second_ms"] / row["conditions"]["first_ms"]
    )


def test_the_mix_is_drawn_again_the_same_and_as_long_as_it_says() -> None:
    drawn = workloads.draw_lengths(workloads.MIX, 1000)
    assert drawn == workloads.draw_lengths(workloads.MIX, 1000)
    assert sum(length.prompt for length in drawn) / 1000 == pytest.approx(225, rel=0.1)
    assert sum(length.output for length in drawn) / 1000 == pytest.approx(195, rel=0.1)
    most = workloads.longest(workloads.MIX)
    assert max(length.prompt for length in drawn) <= most.prompt
    assert max(length.output for length in drawn) <= most.output


def test_no_two_prompts_begin_alike_nor_do_those_of_two_cases() -> None:
    drawn = [
        workloads.draw_prompt(length, 320, number, case)
        for length in (40, 41)
        for number in range(2)
        for case in ("concurrency 8", "concurrency 64")
    ]
    assert len({tuple(tokens[:8]) for tokens in drawn}) == len(drawn)
    assert drawn[0] == workloads.draw_prompt(40, 320, 0, "concurrency 8")


def test_what_clients_saw_is_told_in_percentiles() -> None:
    answers = [
        serve.Answer(first_s=0.1 * n, last_s=0.1 * n + 0.04, gaps_s=[0.01, 0.03], tokens=3)
        for n in range(1, 11)
    ]
    rows = {row.case: row for row in serve.to_rows("case", 2.0, answers, {})}
    assert rows["case"].value == 15
    assert rows["case TTFT p50"].value == pytest.approx(500)
    assert rows["case TTFT p99"].value == pytest.approx(1000)
    assert rows["case TPOT p90"].value == pytest.approx(20)
    assert rows["case ITL p50"].value == pytest.approx(10)
    assert rows["case ITL p90"].value == pytest.approx(30)


def test_a_request_that_failed_leaves_no_figure() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: gone"):
        list(serve.to_rows("case", 1.0, [serve.Answer(tokens=2), serve.Answer(failure="gone")], {}))


@pytest.mark.slow
def test_a_server_is_measured_over_http(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--shapes", "8x6", "--requests", "3"]
    asked += ["--rates", "20", "--concurrency", "2", "--max-rows", "4"]
    assert serve.main([*asked, *SMALL, str(tmp_path)]) == 0
    rows = read(tmp_path, "serve")
    assert rows["tiny 8/6 rate 20/s"]["conditions"]["output_tokens"] == 18
    assert rows["tiny 8/6 concurrency 2 ITL p99"]["better"] == "lower"


def test_the_host_s_time_is_told_by_phase(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "fake", "--batches", "2", "--steps", "20"]
    assert host_time.main([*asked, "--step-ms", "1", *SMALL, str(tmp_path)]) == 0
    row = read_any(tmp_path, "host_time")["tiny batch 2 host time (fake device)"]
    phases = row["conditions"]["phases_us"]
    assert row["value"] == pytest.approx(sum(phases.values()) - phases["wait"] - phases["idle"])
    assert phases["wait"] > 0 and phases["schedule"] > 0


@pytest.mark.slow
def test_transformers_plays_the_same_requests(tmp_path: Path) -> None:
    model = write_checkpoint("tiny", tmp_path, 1)
    asked = ["--model-path", str(model), "--shapes", "8x4,mix", "--requests", "2"]
    asked += ["--concurrency", "2", "--json", str(tmp_path / "peers.json")]
    assert baselines.main(asked) == 0
    found = json.loads((tmp_path / "peers.json").read_text())
    assert len(found["8/4 concurrency 2"]) == 2
    assert all(value > 0 for value in found["8/4 concurrency 2"].values())
    continuous = list(found["8/4 concurrency 2"])[1]
    assert list(found["mix concurrency 2"]) == [continuous]
    assert baselines.main([*asked, "--peers", "continuous"]) == 0
    again = json.loads((tmp_path / "peers.json").read_text())
    assert all(list(values) == [continuous] for values in again.values())


def test_a_peer_that_nobody_knows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        baselines.main(["--model-path", "m", "--json", "j", "--peers", "continuous,batched"])
    assert "--peers has batched, and knows static, continuous" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_is_timed_from_nothing_to_ready(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--rounds", "1"]
    startup.main([*asked, *SMALL, str(tmp_path)])
    assert set(read(tmp_path, "startup")) == {
        "tiny first compile",
        "tiny compile again",
        "tiny ready, first",
        "tiny ready, warm",
    }


def test_a_checkpoint_is_written_once_and_opens(tmp_path: Path) -> None:
    path = write_checkpoint("tiny", tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert write_checkpoint("tiny", tmp_path, 1) == path
    assert before == {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert "lm_head.weight" in open_checkpoint(path).names()


@pytest.mark.interpreted
def test_attention_over_caches_of_every_dtype_is_timed_side_by_side(tmp_path: Path) -> None:
    sizes = ["--batches", "2", "--contexts", "64", "--candidates", "2", "--layers", "1"]
    arguments = ["--model", "tiny", "--target", "interpret", "--rounds", "1", *sizes]
    kv_attention.main([*arguments, "--out", str(tmp_path)])
    found = read(tmp_path, "kv_attention")
    assert list(found) == [f"tiny 2x64 {name}" for name in ("auto", "int8", "int4", "fp8")]
    assert all(row["conditions"]["schedule"] for row in found.values())


def test_forms_of_the_cache_can_be_named_on_the_command_line() -> None:
    assert not [name for name in quality.FORMS if "," in name or name != name.strip()]


def test_accuracy_is_measured_of_attention_and_of_a_model_s_text(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=1)
    forms = "bf16,int8,int4 by token with keys rotated"
    # Windows of more than a page: an open page is stored as it is.
    sizes = ["--windows", "2", "--tokens", "100", "--forms", forms]
    quality.main(["--model", str(model), *sizes, "--out", str(tmp_path)])
    found = read_any(tmp_path, "quality")
    assert found["int8, KL divergence"]["value"] > 0
    assert found["int8, gaussian, keys only"]["value"] < 1
