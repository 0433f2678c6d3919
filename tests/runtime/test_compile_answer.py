"""`compile` of what is current answers without the compiler, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treadle import cli
from treadle.runtime import compile_command
from treadle.runtime.artifact import FORMAT, MANIFEST

from ..checkpoints import make_llama


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Give the arguments of a compilation that is done."""
    model = make_llama(tmp_path / "model", num_layers=1)
    out = str(tmp_path / "artifact")
    words = ["compile", str(model), "-o", out, "--target", "reference", "--progress", "none"]
    assert cli.run(words) == 0
    return words


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of what is compiled from now on; nothing really is."""
    calls: list[str] = []

    def run_compile(**options: Any) -> None:
        calls.append(options["source"])

    monkeypatch.setattr(compile_command, "run_compile", run_compile)
    return calls


@pytest.mark.parametrize("as_json", [False, True])
def test_the_answer_is_the_compilers_own(
    words: list[str], capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    words = [*words, "--json"] if as_json else words
    options = {"source": words[1], "out": Path(words[3]), "as_json": as_json}
    options |= {"target": "reference", "progress": "none", "autotune": "cached", "dtype": None}
    options |= {"arch": "", "kv_dtype": "", "quant_policy": None, "dump": None, "pin": None}
    sizes = ("page_size", "max_rows", "max_step_tokens", "max_context_tokens")
    capsys.readouterr()
    compile_command.run_compile(**options, **dict.fromkeys(sizes, 0))
    expected = capsys.readouterr().out
    assert cli.run(words) == 0
    assert capsys.readouterr().out == expected
    assert "was" in expected


def test_what_is_current_is_not_compiled(words: list[str], compiled: list[str]) -> None:
    assert cli.run(words) == 0
    assert compiled == []


@pytest.mark.parametrize(
    "more",
    [
        ["--max-rows", "3"],
        ["--kv-dtype", "int8"],
        ["--dump", "passes"],
        ["--autotune", "quick"],
        ["--target", "cuda", "--arch", "sm_90"],
    ],
)
def test_other_options_are_left_to_the_compiler(
    words: list[str], compiled: list[str], more: list[str]
) -> None:
    assert cli.run([*words, *more]) == 0
    assert compiled == [words[1]]


@pytest.mark.parametrize("what", ["damaged", "moved", "other weights", "no model"])
def test_what_is_not_current_is_left_to_the_compiler(
    words: list[str], compiled: list[str], what: str
) -> None:
    model, out = Path(words[1]), Path(words[3])
    if what == "damaged":
        (out / "plan.json").write_text("{}")
    elif what == "moved":
        out.rename(out.with_name("elsewhere"))
    elif what == "other weights":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    else:
        model.rename(model.with_name("elsewhere"))
    assert cli.run(words) == 0
    assert compiled == [words[1]]


def test_a_manifest_of_another_version_is_left_to_the_compiler(
    words: list[str], compiled: list[str]
) -> None:
    file = Path(words[3]) / MANIFEST
    text = file.read_text()
    file.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}'))
    assert file.read_text() != text
    assert cli.run(words) == 0
    assert compiled == [words[1]]
