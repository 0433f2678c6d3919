"""The command line as a thing of its own: declarations, exit codes, what is printed where."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import treadle
from treadle import cli
from treadle.ir import errors
from treadle.runtime import commands, compile_command, show_command

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted(cli.group.commands)


def raising(error: BaseException) -> Callable[..., None]:
    def body(**options: object) -> None:
        raise error

    return body


def body_of(name: str) -> Callable[..., None]:
    path: str = cli.group.commands[name].callback.body  # type: ignore[union-attr]
    module, _, function = path.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(f"treadle.{module}"), function)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_body_takes_what_the_command_offers(name: str) -> None:
    command = cli.group.commands[name]
    offered = {parameter.name for parameter in command.params}
    if command.callback.runs_model:  # type: ignore[union-attr]
        offered.add("compile_model")
    assert set(inspect.signature(body_of(name)).parameters) == offered


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_examples_and_every_option_says_what_it_is(name: str) -> None:
    command = cli.group.commands[name]
    assert f"treadle {name}" in (command.help or "").partition("Examples:")[2]
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_sentence_is_short_enough_for_the_list(name: str) -> None:
    assert "..." not in cli.group.commands[name].get_short_help_str(limit=65)


def test_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"treadle {treadle.__version__}\n"


def test_help_ends_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["compile", "-h"]) == 0
    assert "Examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["weave"],
        ["compile"],
        ["compile", "model"],
        ["compile", "model", "-o", "a", "--target", "tpu"],
        ["show", "model", "--colour"],
        ["serve", "model", "--kv-memory", "much"],
    ],
)
def test_a_wrong_option_ends_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, "Error: " in captured.err) == ("", True)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.SpecError("a spec."), 1),
        (errors.ArtifactError("an artifact."), 1),
        (errors.ConfigError("an option."), 2),
        (errors.MachineError("a machine."), 3),
    ],
)
def test_an_error_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, error: errors.TreadleError, exit_code: int
) -> None:
    monkeypatch.setattr(show_command, "run_show", raising(error))
    assert cli.run(["show", "model"]) == exit_code


def test_an_error_is_a_paragraph_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = errors.MachineError("There is no GPU.", remedy="Buy one.")
    monkeypatch.setattr(show_command, "run_show", raising(error))
    cli.run(["show", "model"])
    captured = capsys.readouterr()
    assert captured.err == "Error: There is no GPU.\nWhat to do: Buy one.\n"
    assert captured.out == ""


def test_debug_shows_where_an_error_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_command, "run_show", raising(errors.SpecError("a spec.")))
    monkeypatch.setenv("TREADLE_DEBUG", "1")
    assert cli.run(["show", "model"]) == 1
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.endswith("Error: a spec.\n")


def test_a_bad_variable_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TREADLE_DEBUG", "loud")
    assert cli.run(["show", "model"]) == 2
    assert "`TREADLE_DEBUG` is 'loud'" in capsys.readouterr().err


def test_a_fault_of_ours_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_command, "run_show", raising(ZeroDivisionError("by zero")))
    assert cli.run(["show", "model"]) == 1
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert "ZeroDivisionError: by zero" in captured.splitlines()[-2]
    assert "check-env --markdown" in captured.splitlines()[-1]


def test_ctrl_c_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_command, "run_show", raising(KeyboardInterrupt()))
    assert cli.run(["show", "model"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_under_json_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = errors.ConfigError("An option is wrong.", remedy="Change it.")
    monkeypatch.setattr(compile_command, "run_compile", raising(error))
    assert cli.run(["compile", "model", "-o", "a", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == {
        "kind": "ConfigError",
        "message": "An option is wrong.",
        "remedy": "Change it.",
        "exit_code": 2,
    }
    assert captured.err.startswith("Error: An option is wrong.")


def test_a_missing_library_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importlib, "import_module", load)
    assert cli.run(["show", "model"]) == 3
    assert "`torch` is not installed" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == (b"", 141)
    child.stderr.close()


@pytest.mark.parametrize("how", ["option", "variable", "artifact"])
def test_the_interpreter_is_chosen_before_the_body_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    seen: list[str | None] = []

    def load(name: str) -> object:
        seen.append(os.environ.get("TRITON_INTERPRET"))
        return commands

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(commands, "run_chat", lambda **options: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    arguments = ["chat", str(tmp_path)]
    if how == "option":
        arguments += ["--target", "interpret"]
    elif how == "variable":
        monkeypatch.setenv("TREADLE_TARGET", "interpret")
    else:
        monkeypatch.setattr(cli, "is_artifact", lambda path: path == tmp_path)
        monkeypatch.setattr(
            cli, "read_manifest", lambda path: type("M", (), {"target": "interpret"})
        )
    assert cli.run(arguments) == 0
    assert seen == ["1"]


@pytest.mark.parametrize(
    ("name", "target", "begun"),
    [("chat", "cuda", True), ("chat", "reference", False), ("show", "cuda", False)],
)
def test_a_gpu_s_context_is_begun_before_the_body_of_what_will_run_there_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, target: str, begun: bool
) -> None:
    seen: list[str] = []
    bodies = show_command if name == "show" else commands

    def load(module: str) -> object:
        seen.append("body")
        return bodies

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(bodies, f"run_{name}", lambda **options: None)
    monkeypatch.setattr(cli, "begin_context", lambda: seen.append("context"))
    monkeypatch.setattr(cli, "is_artifact", lambda path: path == tmp_path)
    monkeypatch.setattr(cli, "read_manifest", lambda path: type("M", (), {"target": target}))
    assert cli.run([name, str(tmp_path)]) == 0
    assert seen == (["context", "body"] if begun else ["body"])


@pytest.mark.parametrize(
    ("text", "count_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("1KiB", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2gb", 2 * 10**9),
        ("3MB", 3_000_000),
    ],
)
def test_a_size_has_a_unit_or_none(text: str, count_bytes: int) -> None:
    assert cli.Size().convert(text, None, None) == count_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1GiB", "1GiBs", "nan", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="4GiB"):
        cli.Size().convert(text, None, None)


def test_an_artifact_is_served_without_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, treadle.server.commands; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "treadle.runtime.loading" in loaded
    assert not loaded & {
        "treadle.runtime.compiler",
        "treadle.runtime.planner",
        "treadle.models.registry",
        "treadle.kernels.lower.by_kind",
        "treadle.ir.fuse",
    }
