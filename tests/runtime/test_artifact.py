"""Artifacts: the manifest and its hashes, writing whole or not at all, compiling only changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import make_llama
from treadle.ir.errors import ArtifactError
from treadle.kernels.tuned import Choice, TunedTable
from treadle.runtime import compiler
from treadle.runtime.artifact import (
    FORMAT,
    MANIFEST,
    Manifest,
    finish_manifest,
    is_artifact,
    open_artifact,
    read_manifest,
    writing,
)
from treadle.runtime.compile_key import CompileOptions
from treadle.runtime.compiler import compile_model
from treadle.runtime.config import EngineConfig

BARE = Manifest(
    key="0123",
    treadle="1",
    torch="2",
    triton="3",
    target="reference",
    architecture="",
    gpu="",
    model_path="/models/tiny",
    model_kind="safetensors",
    model_name="tiny",
    model_architecture="LlamaForCausalLM",
    model_fingerprint="4567",
    engine=EngineConfig("reference", "f32", page_size=16),
)


def make_artifact(path: Path, text: str = "first") -> Path:
    """Write an artifact of two files."""
    with writing(path) as folder:
        (folder / "graph").mkdir()
        (folder / "graph" / "decode.ir").write_text(text)
        (folder / "plan.json").write_text('{"programs": []}')
        finish_manifest(folder, BARE)
    return path


def edit_manifest(path: Path, **changes: object) -> None:
    data = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**data, **changes}))


def test_a_manifest_reads_back_as_it_was_written_with_a_hash_per_file(tmp_path: Path) -> None:
    manifest = read_manifest(make_artifact(tmp_path / "artifact"))
    assert set(manifest.files) == {"graph/decode.ir", "plan.json"}
    assert replace(manifest, files={}) == BARE


def test_an_artifact_gives_its_texts_and_its_json(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "artifact"))
    assert artifact.text("graph/decode.ir") == "first"
    assert artifact.json("plan.json") == {"programs": []}


def test_equal_content_gives_equal_hashes(tmp_path: Path) -> None:
    one = read_manifest(make_artifact(tmp_path / "one"))
    assert one == read_manifest(make_artifact(tmp_path / "two"))
    assert one != read_manifest(make_artifact(tmp_path / "three", "other"))


def test_a_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "artifact")
    (path / "graph" / "decode.ir").write_text("firsT")
    with pytest.raises(ArtifactError, match=r"`graph/decode\.ir`.*changed.*Compile"):
        open_artifact(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "artifact")
    (path / "plan.json").unlink()
    with pytest.raises(ArtifactError, match=r"lacks `plan\.json`.*incomplete"):
        open_artifact(path)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    assert not is_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="not an artifact"):
        open_artifact(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}.*reads {FORMAT}"),
        ({"engine": {"target": "reference"}}, "engine settings don't fit.*page_size"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_a_manifest_of_another_version_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = make_artifact(tmp_path / "artifact")
    edit_manifest(path, **changes)
    with pytest.raises(ArtifactError, match=reason):
        read_manifest(path)


def test_an_artifact_appears_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "artifact"
    with writing(path) as folder:
        (folder / "plan.json").write_text("{}")
        finish_manifest(folder, BARE)
        assert not path.exists()
    assert is_artifact(path)
    assert list(path.parent.iterdir()) == [path]


def test_an_artifact_stays_until_its_successor_is_whole(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "artifact")
    with writing(path) as folder:
        (folder / "plan.json").write_text("{}")
        finish_manifest(folder, BARE)
        assert open_artifact(path).text("graph/decode.ir") == "first"
    assert set(open_artifact(path).manifest.files) == {"plan.json"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = make_artifact(tmp_path / "artifact")
    with pytest.raises(error), writing(path) as folder:
        (folder / "plan.json").write_text("{}")
        raise error
    assert open_artifact(path).text("graph/decode.ir") == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_folder_may_become_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    assert is_artifact(make_artifact(tmp_path / "artifact"))


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="exists and is not an artifact"):
        make_artifact(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_compiling_twice_does_nothing_the_second_time_and_says_so(tmp_path: Path) -> None:
    model, out = make_llama(tmp_path / "model", num_layers=1), tmp_path / "artifact"
    options = CompileOptions(target="reference", max_rows=2)
    phases: list[str] = []
    first = compile_model(model, out, options, phases.append)
    assert not first.was_current and "building the graph" in phases
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    phases.clear()
    second = compile_model(model, out, options, phases.append)
    assert second.was_current and "building the graph" not in phases
    assert second.artifact == first.artifact
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == written


class StaleChoices(dict[str, Choice]):
    """Hold, for any key, a schedule that nothing offers."""

    def get(self, key: str, default: object = None) -> Choice:
        return Choice("gemv", {"BLOCK_N": 7})


@pytest.mark.interpreted
def test_compiling_tells_once_of_each_tuned_schedule_that_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TunedTable("GPU of tests", StaleChoices())
    monkeypatch.setattr(compiler, "table_for", lambda *_: table)
    phases: list[str] = []
    options = CompileOptions(target="interpret", max_rows=1, max_step_tokens=16)
    model = make_llama(tmp_path / "model", num_layers=2)
    compiler.compile_model(model, tmp_path / "artifact", options, phases.append)
    notes = [phase for phase in phases if "gemv (BLOCK_N=7) is not offered any more" in phase]
    kernels = {note.partition("/")[0] for note in notes}
    assert {"embed", "linear__add", "attention_prefill"} <= kernels
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("change", ["option", "weights", "config"])
def test_a_change_of_what_is_compiled_compiles_anew(tmp_path: Path, change: str) -> None:
    model, out = make_llama(tmp_path / "model", num_layers=1), tmp_path / "artifact"
    options = CompileOptions(target="reference", max_rows=2)
    first = compile_model(model, out, options)
    if change == "option":
        options = replace(options, max_rows=4)
    elif change == "weights":
        make_llama(model, num_layers=1, seed=1)
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    second = compile_model(model, out, options)
    assert not second.was_current
    assert second.artifact.manifest.key != first.artifact.manifest.key
