"""`new-model`: a spec to start from, its registry line, and the tensors that it leaves out."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import edit_json, make_family
from treadle.ir.errors import ConfigError, SpecError
from treadle.models.registry import find_family
from treadle.runtime import new_model

ARCHITECTURE = "WombatForCausalLM"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a copy of models/ that `new-model` writes to."""
    folder = tmp_path / "models"
    shutil.copytree(new_model.MODELS, folder)
    monkeypatch.setattr(new_model, "MODELS", folder)
    return folder


def wombat(path: Path, model_type: str = "llama", **changes: object) -> Path:
    """Write a checkpoint of an architecture that has no spec."""
    make_family(path, model_type, **changes)
    keys = {"architectures": [ARCHITECTURE], "model_type": "wombat"}
    edit_json(path / "config.json", keys)
    return path


def test_the_spec_is_the_nearest_one_under_the_new_architecture(
    models: Path, tmp_path: Path
) -> None:
    new_model.run_new_model("wombat", "qwen3", str(wombat(tmp_path / "m") / "config.json"))
    text, source = ((models / f"{name}.py").read_text() for name in ("wombat", "qwen3"))
    assert f'ARCHITECTURES = ("{ARCHITECTURE}",)' in text
    assert (ast.get_docstring(ast.parse(text)) or "").startswith("The wombat family: so far as")
    assert text[text.index("def build") :] == source[source.index("def build") :]


def test_the_registry_gets_the_import_and_the_family(models: Path, tmp_path: Path) -> None:
    before = ast.parse((models / "registry.py").read_text())
    new_model.run_new_model("wombat", "llama", str(wombat(tmp_path / "m")))
    text = (models / "registry.py").read_text()
    assert 'Family("wombat", wombat.ARCHITECTURES, wombat.build),\n)' in text
    assert "    wombat,\n)" in text
    assert len(ast.parse(text).body) == len(before.body)


def test_tensors_that_only_one_side_has_are_listed_once_for_all_layers(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wombat(tmp_path / "m", "qwen3", tie_word_embeddings=True)
    new_model.run_new_model("wombat", "phi3", str(model))
    out = capsys.readouterr().out
    uncovered, missing = out.split("declared, but not in the checkpoint:")
    assert "  model.layers.N.self_attn.q_norm.weight  (2 layers)\n" in uncovered
    assert "  model.layers.N.mlp.gate_proj.weight  (2 layers)\n" in uncovered
    assert "  model.layers.N.mlp.gate_up_proj.weight  (2 layers)\n" in missing
    assert "input_layernorm" not in out and "lm_head" not in out


def test_a_config_without_weights_is_enough(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "alone" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"architectures": [ARCHITECTURE]}))
    new_model.run_new_model("wombat", "llama", str(config))
    assert "has no weights to compare with" in capsys.readouterr().out
    assert (models / "wombat.py").exists()


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("llama", "llama", "models/llama.py is there already"),
        ("Wombat", "llama", "lower-case"),
        ("class", "llama", "NAME becomes"),
        ("../wombat", "llama", "NAME becomes"),
        ("wombat", "wombats", "--like names a family"),
    ],
)
def test_a_name_that_can_not_be_used_is_refused_and_nothing_is_written(
    models: Path, tmp_path: Path, name: str, like: str, message: str
) -> None:
    model = wombat(tmp_path / "m")
    before = {path: path.read_text() for path in models.glob("*.py")}
    with pytest.raises(ConfigError, match=message):
        new_model.run_new_model(name, like, str(model))
    assert {path: path.read_text() for path in models.glob("*.py")} == before


def test_an_architecture_that_has_a_spec_is_refused(models: Path, tmp_path: Path) -> None:
    model = make_family(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"has a spec already: models/llama\.py"):
        new_model.run_new_model("wombat", "llama", str(model))


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_config_that_can_not_be_read_is_refused(
    models: Path, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        new_model.run_new_model("wombat", "llama", str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("Qwen3NextForCausalLM", "qwen3"), ("LlamaBidirectionalModel", "llama"), ("Olmo4", "olmo2")],
)
def test_an_unknown_architecture_names_the_nearest_spec_and_how_to_start(
    architecture: str, family: str
) -> None:
    with pytest.raises(SpecError, match=rf"models/{family}\.py") as caught:
        find_family(architecture)
    assert f"new-model NAME --like {family}" in caught.value.remedy
