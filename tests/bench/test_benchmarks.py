"""Each benchmark on a tiny model without a GPU: it runs, and its rows are complete."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.bench import kernels, prefill, startup, throughput
from treadle.bench.checkpoints import write_checkpoint
from treadle.bench.rows import Row
from treadle.bench.timing import Spread
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.roofs import Roofs
from treadle.runtime.tuner import Workload

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["decode", "goals", "kernels", "prefill", "startup", "throughput", "tune"]
INTERPRET = ["--target", "interpret", "--dtype", "f32", "--page-size", "16", "--rounds", "1"]
SMALL = ["--layers", "1", "--out"]


def read(folder: Path, bench: str) -> dict[str, dict[str, Any]]:
    """Read a benchmark's rows by case and check that each has all fields."""
    rows = json.loads((folder / f"{bench}.json").read_text())
    for row in rows:
        assert set(row) == set(Row.__dataclass_fields__)
        assert row["bench"] == bench and row["value"] > 0
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


@pytest.mark.interpreted
def test_kernels_are_timed_beside_their_peers(tmp_path: Path) -> None:
    sizes = ["--batches", "2", "--prompts", "1x16", "--context", "8"]
    kernels.main(["--model", "tiny", *sizes, *INTERPRET, *SMALL, str(tmp_path)])
    rows = read(tmp_path, "kernels")
    qkv = rows["tiny decode 2x8 linear 2 rows qkv"]
    assert qkv["peers"]["cuBLAS"] > 0 and qkv["floor"] > 0
    assert qkv["conditions"]["gb_per_s"] > 0
    assert "torch SDPA" in rows["tiny mixed 1x16 attention_prefill 16 rows"]["peers"]
    assert "tiny projections, 2-64 rows, least" in rows
    assert "tiny prefill attention 1x16" in rows


def test_what_goals_are_set_for_is_summed_up() -> None:
    def linear(rows: int, ours: float, weight: str = "@layers.0.mlp.down") -> kernels.Measured:
        work = Workload("decode", rows, 1024)
        spread = Spread(ours, ours, ours)
        return kernels.Measured(
            "llama-3.1-8b", work, "linear", 4, rows, spread, 1, 1, kernels.CUBLAS, 12.0, (weight,)
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
    prefill.main(["--models", "tiny", "--prompts", "1x16", *INTERPRET, *SMALL, str(tmp_path)])
    row = read(tmp_path, "prefill")["tiny 1x16"]
    assert row["conditions"]["tokens_per_s"] > 0 and row["floor"] > 0


def test_throughput_goes_through_the_engine(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--shapes", "8x4,4x2"]
    throughput.main([*asked, "--concurrency", "1,2", *SMALL, str(tmp_path)])
    rows = read(tmp_path, "throughput")
    assert len(rows) == 4
    assert rows["tiny 8/4 concurrency 2"]["conditions"]["requests"] == 4


@pytest.mark.slow
def test_a_start_is_timed_from_nothing_to_ready(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--target", "reference", "--rounds", "1"]
    startup.main([*asked, *SMALL, str(tmp_path)])
    assert set(read(tmp_path, "startup")) == {
        "tiny first compile",
        "tiny ready, first",
        "tiny ready, warm",
    }


def test_a_checkpoint_is_written_once_and_opens(tmp_path: Path) -> None:
    path = write_checkpoint("tiny", tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert write_checkpoint("tiny", tmp_path, 1) == path
    assert before == {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert "lm_head.weight" in open_checkpoint(path).names()
