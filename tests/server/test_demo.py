"""The demo from start to end on a tiny model, and how it ends where something is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.checkpoints import EOS, find_demo_model, make_script
from treadle import cli
from treadle.ir.errors import MachineError
from treadle.runtime import demo_model
from treadle.runtime.loading import LoadedArtifact
from treadle.server import demo

QUESTION = "[[S1]]"
DEMO = ["demo", "--prompt", QUESTION, "--target", "reference", "--progress", "log"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scripts = {QUESTION: ["one", " river", EOS]}
    return make_script(tmp_path_factory.mktemp("demo") / "model", scripts).path


@pytest.fixture
def fetched(model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tiny model stand in for the one that would be fetched."""
    monkeypatch.setattr(demo_model, "fetch", lambda progress: model)


@pytest.mark.usefixtures("fetched")
def test_the_demo_streams_an_answer_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    assert cli.run(DEMO) == 0
    out = capsys.readouterr().out
    (artifact,) = (cache_dir / "artifacts").iterdir()
    assert re.search(r"^served at  http://127\.0\.0\.1:\d+/v1$", out, re.MULTILINE)
    answer, speed = out.partition("\n\n")[2].splitlines()[:2]
    assert answer == "one river"
    assert re.fullmatch(r"\[\d+ \+ 3 tokens, first after .+ tokens/s, ended by stop\]", speed)
    assert f"treadle serve {artifact}\n" in out
    assert f"treadle chat {artifact}\n" in out
    assert "treadle compile MODEL" in out


@pytest.mark.usefixtures("fetched")
def test_a_second_demo_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(DEMO) == 0
    assert "building the graph" in capsys.readouterr().err
    assert cli.run(DEMO) == 0
    second = capsys.readouterr()
    assert "building the graph" not in second.err
    assert "(was current)" in second.out
    assert "\none river\n" in second.out


def test_the_demo_needs_the_client_and_says_so_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.run(DEMO) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: `openai`")
    assert "pip install openai" in captured.err
    assert "Traceback" not in captured.err
    assert not cache_dir.exists()


@pytest.mark.usefixtures("fetched")
def test_fetching_needs_no_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.run(["demo", "--fetch-only"]) == 0
    assert capsys.readouterr().out == f"{model}\n"


@pytest.mark.usefixtures("fetched")
def test_a_model_that_does_not_load_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> LoadedArtifact:
        raise MachineError("There is too little memory.", remedy="Buy some.")

    monkeypatch.setattr("treadle.runtime.loading.load_artifact", fail)
    assert cli.run(DEMO) == 3
    captured = capsys.readouterr()
    assert captured.err.endswith("Error: There is too little memory.\nWhat to do: Buy some.\n")
    assert "served at" not in captured.out


@pytest.mark.usefixtures("fetched")
def test_a_proxy_of_the_environment_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Port 9 of this machine: whatever is sent there is refused.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert cli.run(DEMO) == 0
    assert "\none river\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    monkeypatch.delenv("TREADLE_CACHE_DIR")
    model = find_demo_model()
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(cache_dir))
    monkeypatch.setattr(demo_model, "fetch", lambda progress: model)
    question = "What is the capital of France?"
    assert cli.run(["demo", "--prompt", question, "--target", "reference"]) == 0
    answer = capsys.readouterr().out.partition("\n\n")[2].splitlines()[0]
    assert answer == "The capital of France is Paris."
