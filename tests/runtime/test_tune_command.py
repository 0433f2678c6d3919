"""Tuning from the command line: workloads, tables that come and go, and machines without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import make_random
from treadle import cli
from treadle.ir.errors import ConfigError
from treadle.kernels.tuned import TunedTable, read_table, shipped_table
from treadle.runtime import machine, tables, tune_command
from treadle.runtime.compile_key import CompileOptions, cached_artifact_path
from treadle.runtime.config import EngineConfig
from treadle.runtime.roofs import measure_roofs
from treadle.runtime.tuner import Workload

GPU = "NVIDIA H200"
ENGINE = EngineConfig("cuda", "bf16", 64, 256, 8192, 4096)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "look", lambda: machine.Machine("", ""))
    return tmp_path / "cache"


def test_workloads_are_read_as_they_are_written() -> None:
    found = tune_command.parse_workloads("1,8", "2x512", 1024)
    assert found == [
        Workload("decode", 1, 1024),
        Workload("decode", 8, 1024),
        Workload("mixed", 2, 512),
    ]


@pytest.mark.parametrize(("batches", "prompts"), [("one", ""), ("", "3"), ("", ""), ("0", "")])
def test_other_workloads_are_refused(batches: str, prompts: str) -> None:
    with pytest.raises(ConfigError):
        tune_command.parse_workloads(batches, prompts, 1024)


def test_a_size_that_no_program_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket of 3 sequences") as caught:
        tune_command.check_buckets([Workload("decode", 3, 64)], ENGINE)
    assert "1, 2, 4, 8" in caught.value.remedy
    with pytest.raises(ConfigError, match="window"):
        tune_command.check_buckets([Workload("decode", 4, 4096)], ENGINE)
    tune_command.check_buckets([Workload("decode", 4, 64), Workload("mixed", 2, 512)], ENGINE)


@pytest.mark.parametrize(
    "arguments",
    [["tune", "model"], ["compile", "model", "-o", "out", "--autotune", "quick"]],
)
def test_without_a_gpu_tuning_ends_with_three(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*arguments, "--progress", "none"]) == 3
    captured = capsys.readouterr()
    assert "on the GPU that will serve" in captured.err
    assert "tune --import FILE" in captured.err


def test_the_user_s_table_comes_before_the_shipped_and_a_pin_before_both(tmp_path: Path) -> None:
    shipped = shipped_table(GPU)
    key = next(iter(shipped.choices))
    assert tables.table_for(GPU, "sm_90", "cached").choices == shipped.choices
    tables.save_user_table(TunedTable(GPU).with_choice(key, "mine", {}))
    mixed = tables.table_for(GPU, "sm_90", "cached")
    assert mixed.choices[key].template == "mine"
    assert len(mixed.choices) == len(shipped.choices)
    pin = tmp_path / "pin.json"
    TunedTable(GPU).with_choice(key, "pinned", {}).write(pin)
    assert tables.table_for(GPU, "sm_90", "cached", pin).choices[key].template == "pinned"
    assert list(tables.table_for(GPU, "sm_90", "off", pin).choices) == [key]
    assert tables.table_for(GPU, "sm_90", "off").choices == {}


def test_without_the_gpu_the_architecture_s_typical_one_counts() -> None:
    assert tables.table_for("", "sm_90", "cached").choices == shipped_table(GPU).choices


def test_a_table_goes_out_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.save_user_table(TunedTable(GPU).with_choice("a/b", "mine", {"num_warps": 2}))
    file = tmp_path / "out.json"
    assert cli.run(["tune", "--export", str(file), "--gpu", GPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == len(read_table(file).choices)
    tables.table_path(GPU).unlink()
    assert cli.run(["tune", "--import", str(file)]) == 0
    assert tables.user_table(GPU) == read_table(file)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tune"], 2),
        (["tune", "--export", "x", "--import", "y"], 2),
        (["tune", "model", "--export", "x"], 2),
        (["tune", "--import", "absent.json"], 2),
        (["tune", "--export", "x"], 3),
    ],
)
def test_what_can_t_be_moved_is_refused(arguments: list[str], code: int) -> None:
    assert cli.run(arguments) == code


def test_roofs_are_rates() -> None:
    roofs = measure_roofs(machine.device_of("reference"), small=True)
    assert min(roofs.to_json().values()) > 0
    assert roofs.bytes_per_s >= roofs.read_bytes_per_s


def test_an_artifact_s_key_covers_the_schedules_in_use(tmp_path: Path) -> None:
    model = make_random(tmp_path / "model", num_layers=1)
    options = CompileOptions(target="cuda", architecture="sm_90")
    default = cached_artifact_path(model, options)
    assert cached_artifact_path(model, options) == default
    assert cached_artifact_path(model, replace(options, autotune="off")) != default
    pin = tmp_path / "pin.json"
    TunedTable(GPU).with_choice("a/b", "mine", {}).write(pin)
    assert cached_artifact_path(model, replace(options, pin=pin)) != default
    tables.import_table(pin)
    assert cached_artifact_path(model, options) == cached_artifact_path(
        model, replace(options, pin=pin)
    )
    # Nothing is tuned for plain torch.
    plain = CompileOptions(target="reference")
    assert cached_artifact_path(model, plain) == cached_artifact_path(
        model, replace(plain, autotune="off")
    )
