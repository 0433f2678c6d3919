"""Bad input as a user meets it: each fault is told with a remedy and leaves no trace.

Everything goes through the command line. A failed command leaves the folders as they were, byte for
byte: no temporary folders, no half artifact, and an older artifact still in its place.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import EOS, edit_json, make_llama, make_script
from treadle import cli
from treadle.runtime import commands, compiler, machine
from treadle.runtime.artifact import FORMAT, MANIFEST
from treadle.runtime.engine import Engine
from treadle.runtime.loading import ServeOptions, load_model
from treadle.runtime.tokenizer import Tokenizer
from treadle.server import commands as server_commands

ROOT = Path(__file__).resolve().parents[1]
QUIET = ["--progress", "none"]
SIZES = ["--page-size", "16", "--max-rows", "4", "--max-step-tokens", "64", *QUIET]
QUESTION = "[[S1]]"

Refused = Callable[..., str]


def compile_command(model: Path, out: Path, *more: str, target: str = "reference") -> list[str]:
    return ["compile", str(model), "-o", str(out), "--target", target, *SIZES, *more]


def generate_command(artifact: Path) -> list[str]:
    return ["generate", str(artifact), QUESTION, "--max-tokens", "4", *QUIET]


def snapshot(folder: Path) -> dict[str, str]:
    """Give every path below the folder, hidden ones too, with the hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(
            path.read_bytes() if path.is_file() else b"a folder"
        ).hexdigest()
        for path in folder.rglob("*")
    }


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Give `refused(arguments, exit_code, *words)`: run, check the refusal, and give stderr."""

    def run(arguments: list[str], exit_code: int, *words: str) -> str:
        before = snapshot(tmp_path)
        capsys.readouterr()
        found = cli.run(arguments)
        err = capsys.readouterr().err
        assert found == exit_code, err
        check_paragraph(err)
        for word in words:
            assert word in err
        assert snapshot(tmp_path) == before
        return err

    return run


def check_paragraph(err: str) -> None:
    """Check that this is an error in one line and its remedy in another, and nothing else."""
    error, remedy = err.splitlines()
    assert error.startswith("Error: ") and error.endswith("."), err
    assert remedy.startswith("What to do: "), err


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("plain") / "model", num_layers=2)


@pytest.fixture(scope="session")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a model that answers a question, and artifacts of it by target."""
    folder = tmp_path_factory.mktemp("answering")
    model = make_script(folder / "model", {QUESTION: ["one", " river", EOS]}).path
    with pytest.MonkeyPatch.context() as patch:  # `interpret` sets it for the rest of the process
        patch.setenv("TRITON_INTERPRET", "1")
        for target in ("reference", "interpret"):
            assert cli.run(compile_command(model, folder / target, target=target)) == 0
    return folder


@pytest.fixture
def model(plain_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain_model, tmp_path / "model")


@pytest.fixture
def artifact(answering: Path, tmp_path: Path) -> Path:
    """Give an artifact for plain torch, to be spoilt."""
    return shutil.copytree(answering / "reference", tmp_path / "artifact")


def answers(artifact: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    assert cli.run(generate_command(artifact)) == 0
    return capsys.readouterr().out == "one river\n"


# --- checkpoints --------------------------------------------------------------------------------


def change_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = model / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_missing_shard_is_named(tmp_path: Path, refused: Refused) -> None:
    model = make_llama(tmp_path / "model", shards=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    refused(compile_command(model, tmp_path / "out"), 1, "model-00002-of-00003.safetensors")


def test_a_truncated_shard_is_named(tmp_path: Path, refused: Refused) -> None:
    model = make_llama(tmp_path / "model", shards=3)
    shard = model / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    refused(compile_command(model, tmp_path / "out"), 1, f"{shard} is truncated", "ownload")


def test_a_shard_that_was_cut_after_compiling_is_named(tmp_path: Path, refused: Refused) -> None:
    model = make_llama(tmp_path / "model", shards=2)
    assert cli.run(compile_command(model, tmp_path / "artifact")) == 0
    shard = model / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    refused(generate_command(tmp_path / "artifact"), 1, f"{shard} is truncated")


def test_an_unknown_architecture_is_named_before_its_keys(model: Path, refused: Refused) -> None:
    other = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64}
    edit_json(model / "config.json", other, drop=["hidden_size", "num_hidden_layers"])
    for arguments in (compile_command(model, model.parent / "out"), ["show", str(model)]):
        refused(arguments, 1, "`GPT2LMHeadModel`", "nearest are", "new-model", "docs/")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 1}, "`model.layers.1."),
        ({"num_hidden_layers": 3}, "`model.layers.2."),
        ({"hidden_size": 128}, "`model.embed_tokens.weight` should be [320, 128]"),
        ({"intermediate_size": 64}, "`model.layers.0.mlp.gate_proj.weight` should be [64, 64]"),
        ({"num_key_value_heads": 1}, "`model.layers.0.self_attn.k_proj.weight` should be [16, 64]"),
        ({"vocab_size": 400}, "`model.embed_tokens.weight` should be [400, 64]"),
        ({"attention_bias": True}, "`model.layers.0.self_attn.q_proj.bias`"),
    ],
)
def test_a_config_that_contradicts_the_weights_names_a_tensor(
    model: Path, refused: Refused, changes: dict[str, object], word: str
) -> None:
    edit_json(model / "config.json", changes)
    refused(compile_command(model, model.parent / "out"), 1, word)


def test_an_untied_config_without_a_head_names_the_head(tmp_path: Path, refused: Refused) -> None:
    model = make_llama(tmp_path / "model", tie=True)
    edit_json(model / "config.json", {"tie_word_embeddings": False})
    refused(compile_command(model, tmp_path / "out"), 1, "`lm_head.weight`")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_of_quantised_weights_are_refused(
    model: Path, refused: Refused, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(model, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    word = str(dtype).removeprefix("torch.")
    refused(compile_command(model, model.parent / "out"), 1, f"`{name}`", word, "GGUF")


LOOM = {"type": "loom"}  # a kind that no tokenizer is of


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: os.truncate(model / "tokenizer.json", 3000),
        lambda model: edit_json(model / "tokenizer.json", {"model": LOOM}),
        lambda model: edit_json(model / "tokenizer.json", {"decoder": LOOM}),
        lambda model: os.truncate(model / "tokenizer_config.json", 50),
    ],
    ids=["truncated", "of an unknown model", "of an unknown decoder", "config"],
)
def test_a_tokenizer_that_can_not_be_loaded_stops_the_compiler(
    damage: Callable[[Path], object], model: Path, tmp_path: Path, refused: Refused
) -> None:
    damage(model)
    refused(compile_command(model, tmp_path / "artifact"), 1, f"from {model}: ", "tokenizer.json")


def test_a_model_without_a_tokenizer_compiles_and_says_what_it_lacks_when_asked_for_text(
    model: Path, tmp_path: Path, refused: Refused
) -> None:
    (model / "tokenizer.json").unlink()
    assert cli.run(compile_command(model, tmp_path / "artifact")) == 0
    refused(generate_command(tmp_path / "artifact"), 1, f"from {model}: ", "tokenizer.json")


def test_a_weight_that_is_not_a_number_is_named(
    model: Path, refused: Refused, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change_tensors(model, lambda tensors: tensors[name][3].fill_(float("nan")))
    assert cli.run(compile_command(model, tmp_path / "artifact")) == 0
    refused(generate_command(tmp_path / "artifact"), 1, f"`{name}`", "NaN")


# --- a head that should be tied and differs -----------------------------------------------------


@pytest.fixture
def with_two_heads(tmp_path: Path) -> Path:
    """Give an artifact of a model that is tied by its config and yet holds a head of its own."""
    model = make_llama(tmp_path / "model", tie=False, seed=3)
    edit_json(model / "config.json", {"tie_word_embeddings": True})
    assert cli.run(compile_command(model, tmp_path / "artifact")) == 0
    return tmp_path / "artifact"


def test_a_head_that_differs_from_the_tied_one_is_used_and_named(
    with_two_heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untied = make_llama(tmp_path / "untied", tie=False, seed=3)
    assert cli.run(compile_command(untied, tmp_path / "expected")) == 0
    capsys.readouterr()
    assert cli.run(generate_command(tmp_path / "expected")) == 0
    expected = capsys.readouterr()
    assert cli.run(generate_command(with_two_heads)) == 0
    found = capsys.readouterr()
    assert found.out == expected.out
    (warning,) = [line for line in found.err.splitlines() if line.startswith("Warning: ")]
    assert "`lm_head.weight` is tied to `model.embed_tokens.weight`" in warning
    assert "Warning" not in expected.err


def test_the_start_up_report_of_serve_names_the_head(
    with_two_heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_server(engine: Engine, *addresses: object, **options: object) -> None:
        async def start() -> None:
            await engine.start()
            await engine.close()

        options["on_listening"]("http://127.0.0.1:1")  # type: ignore[operator]
        asyncio.run(start())

    monkeypatch.setattr(server_commands, "run_server", run_server)
    assert cli.run(["serve", str(with_two_heads), *QUIET]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "`lm_head.weight`" in row


def test_a_head_that_equals_the_tied_one_is_held_once(tmp_path: Path) -> None:
    tied = make_llama(tmp_path / "tied", tie=True)
    both = make_llama(tmp_path / "both", tie=True)
    name = "model.embed_tokens.weight"
    change_tensors(both, lambda tensors: tensors.update({"lm_head.weight": tensors[name].clone()}))
    summaries = []
    for model in (tied, both):
        out = tmp_path / f"{model.name}-artifact"
        assert cli.run(compile_command(model, out)) == 0
        summaries.append(load_model(out, ServeOptions()).summary)
    assert "warning" not in summaries[1]
    assert summaries[1]["weights"] == summaries[0]["weights"]


# --- artifacts ----------------------------------------------------------------------------------


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, architecture: str, triton: str = "") -> None:
    """Let the machine have a GPU, as far as artifacts are checked against it."""
    found = machine.look()
    gpu = machine.Machine("NVIDIA H200", architecture, triton=triton or found.triton)
    monkeypatch.setattr(machine, "look", lambda: gpu)
    monkeypatch.setattr(machine, "device_of", lambda target: torch.device("cpu"))


def test_an_artifact_for_a_gpu_is_refused_where_there_is_none(
    artifact: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    edit_json(artifact / MANIFEST, {"target": "cuda", "architecture": "sm_80"})
    refused(generate_command(artifact), 3, "needs a GPU", "--target reference")


def test_an_artifact_for_another_gpu_is_refused(
    artifact: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, "sm_90")
    edit_json(artifact / MANIFEST, {"target": "cuda", "architecture": "sm_80"})
    refused(generate_command(artifact), 1, "sm_80", "NVIDIA H200 (sm_90)", "Compile it again")


def test_an_artifact_of_another_triton_is_refused(
    artifact: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, "sm_90", triton="9.9.9")
    edit_json(artifact / MANIFEST, {"target": "cuda", "architecture": "sm_90", "triton": "1.2.3"})
    refused(generate_command(artifact), 1, "Triton 1.2.3", "9.9.9", "Compile it again")


def test_an_artifact_of_other_weights_is_refused(
    model: Path, tmp_path: Path, refused: Refused
) -> None:
    artifact = tmp_path / "artifact"
    assert cli.run(compile_command(model, artifact)) == 0
    shutil.rmtree(model)
    make_llama(model, num_layers=2, seed=1)
    err = refused(generate_command(artifact), 1, "other weights", str(model))
    assert f"compile {model} -o {artifact}" in err


def test_an_artifact_whose_model_has_gone_says_how_to_name_its_new_place(
    model: Path, tmp_path: Path, refused: Refused
) -> None:
    artifact = tmp_path / "artifact"
    assert cli.run(compile_command(model, artifact)) == 0
    model.rename(tmp_path / "moved")
    refused(generate_command(artifact), 1, f"{model} does not exist", "--model-path")
    assert load_model(artifact, ServeOptions(model_path=str(tmp_path / "moved"))).name == "model"


def spoil(artifact: Path, name: str) -> str:
    """Change a file of an artifact; `kernels/*.py` means its first kernel. Give its name."""
    file = sorted(artifact.glob(name))[0]
    file.write_text(file.read_text() + "\n# mine\n")
    return str(file.relative_to(artifact))


@pytest.mark.parametrize("name", ["graph/decode.ir", "plan.json", "kernels/*.py"])
def test_a_changed_file_of_an_artifact_is_named_and_compiling_again_heals_it(
    name: str,
    answering: Path,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = "interpret" if name.startswith("kernels") else "reference"
    artifact = shutil.copytree(answering / target, tmp_path / "artifact")
    whole = snapshot(artifact)
    refused(generate_command(artifact), 1, f"`{spoil(artifact, name)}`", "changed", "again")
    assert cli.run(compile_command(answering / "model", artifact, target=target)) == 0
    assert snapshot(artifact) == whole


def test_a_missing_file_of_an_artifact_is_named_and_compiling_again_heals_it(
    answering: Path, artifact: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / "graph/mixed.ir").unlink()
    refused(generate_command(artifact), 1, "lacks `graph/mixed.ir`")
    assert cli.run(compile_command(answering / "model", artifact)) == 0
    assert answers(artifact, capsys)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"format": 1', "can't be read"),
        ("[]", "can't be read"),
        ("\x00\xff", "can't be read"),
        ('{"format": 0}', "artifact format 0"),
        (f'{{"format": {FORMAT}, "engine": {{"target": "reference", "sails": 3}}}}', "sails"),
    ],
)
def test_a_manifest_of_another_form_is_told_and_compiling_again_heals_it(
    text: str,
    word: str,
    answering: Path,
    artifact: Path,
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (artifact / MANIFEST).write_bytes(text.encode("latin-1"))
    refused(generate_command(artifact), 1, word, "Compile the model again")
    assert cli.run(compile_command(answering / "model", artifact)) == 0
    assert answers(artifact, capsys)


def test_compiling_says_why_a_damaged_artifact_is_replaced(
    answering: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(artifact, "graph/decode.ir")
    arguments = compile_command(answering / "model", artifact, "--progress", "log")
    assert cli.run(arguments) == 0
    assert f"replacing {artifact}: `graph/decode.ir`" in capsys.readouterr().err


# --- places that can't be written ---------------------------------------------------------------


@pytest.fixture(params=["nothing there", "an older artifact there"])
def out(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Path:
    """Give where to compile `model` to: a new place, or one with an artifact of other options."""
    folder = tmp_path / "out"
    if request.param != "nothing there":
        assert cli.run(compile_command(model, folder, "--max-context-tokens", "32")) == 0
    return folder


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["decode.authored.ir", "plan.json", "manifest.json"])
def test_a_disk_that_fills_up_leaves_what_was_there(
    name: str, model: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def write_half(self: Path, text: str, **options: str) -> int:
        if name not in self.name:  # temporary names hold the file's own
            return write(self, text, **options)
        write(self, text[: len(text) // 2], **options)
        raise full_disk()

    monkeypatch.setattr(Path, "write_text", write_half)
    refused(compile_command(model, out), 3, f"{out}: No space left on device", "-o")


def test_a_disk_that_fills_up_with_the_tokenizer_leaves_what_was_there(
    model: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Tokenizer.save

    def save_on_full_disk(self: Tokenizer, folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to("/dev/full")
        save(self, folder)

    monkeypatch.setattr(Tokenizer, "save", save_on_full_disk)
    refused(compile_command(model, out), 3, f"{out}: No space left on device")


def test_a_disk_too_full_for_a_folder_leaves_what_was_there(
    model: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_no_folder(**options: object) -> None:
        raise full_disk()

    monkeypatch.setattr("tempfile.mkdtemp", make_no_folder)
    refused(compile_command(model, out), 3, f"{out}: No space left on device")


def test_an_artifact_that_can_not_get_its_name_leaves_what_was_there(
    model: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def rename_old_only(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith(".old"):
            raise full_disk()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_old_only)
    refused(compile_command(model, out), 3, "No space left on device")


def test_ctrl_c_while_compiling_leaves_what_was_there(
    model: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(folder: Path, manifest: object) -> None:
        raise KeyboardInterrupt

    before = snapshot(tmp_path)
    monkeypatch.setattr("treadle.runtime.artifact.finish_manifest", stop)
    assert cli.run(compile_command(model, out)) == 130
    assert capsys.readouterr().err.endswith("Stopped.\n")
    assert snapshot(tmp_path) == before


def test_binaries_that_can_not_be_written_are_no_fault_of_a_kernel(
    model: Path, out: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder below a file: the processes that compile can't make it.
    monkeypatch.setattr(compiler, "BINARIES", "plan.json/binaries")
    arguments = compile_command(model, out, "--arch", "sm_90", target="cuda")
    refused(arguments, 3, "can't be compiled: Not a directory", "TMPDIR")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Give a file where a folder should be: nothing can be made below it, not by root either."""
    (tmp_path / "file").write_text("content")
    return tmp_path / "file"


def test_an_output_below_a_file_is_named(model: Path, file: Path, refused: Refused) -> None:
    refused(compile_command(model, file / "out"), 3, f"{file}/out: {file} is a file", "-o")
    refused(compile_command(model, file / "deep/out"), 3, f"{file}/deep/out: Not a directory")


def test_a_relative_output_below_a_file_is_named(
    model: Path, file: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    refused(compile_command(model, Path("file/out")), 3, "Can't write file/out: file is a file")


def test_a_dump_below_a_file_is_named(
    model: Path, file: Path, tmp_path: Path, refused: Refused
) -> None:
    arguments = compile_command(model, tmp_path / "out", "--dump", str(file / "dump"))
    refused(arguments, 3, f"{file}/dump: Not a directory")


def test_a_cache_below_a_file_is_named(
    model: Path, file: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(file / "cache"))
    refused(generate_command(model), 3, f"{file}/cache", "Not a directory", "TREADLE_CACHE_DIR")


def pretend_artifact_of_gpu(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an artifact and the machine have the same GPU, until something asks of it."""
    pretend_gpu(monkeypatch, "sm_90")
    engine = json.loads((artifact / MANIFEST).read_text())["engine"] | {"target": "cuda"}
    changes = {"target": "cuda", "architecture": "sm_90", "engine": engine}
    edit_json(artifact / MANIFEST, changes)


def test_a_cache_that_can_not_take_an_artifacts_binaries_is_named(
    artifact: Path, file: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_artifact_of_gpu(artifact, monkeypatch)
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(file))
    refused(generate_command(artifact), 3, f"{file}/binaries/", "TREADLE_CACHE_DIR")


def test_a_cache_that_fills_up_holds_no_half_of_an_artifacts_binaries(
    artifact: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise full_disk()

    pretend_artifact_of_gpu(artifact, monkeypatch)
    (artifact / "binaries").mkdir()
    (artifact / "binaries/kernel.cubin").write_bytes(b"whole")
    (tmp_path / "cache/binaries").mkdir(parents=True)
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    copytree = functools.partial(shutil.copytree, copy_function=copy)
    monkeypatch.setattr(shutil, "copytree", copytree)
    refused(generate_command(artifact), 3, "No space left on device", "TREADLE_CACHE_DIR")


def test_an_output_that_is_something_else_is_left_alone(
    model: Path, file: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"cat")
    for place in (file, tmp_path / "photos"):
        refused(compile_command(model, place), 1, f"{place} exists and is not an artifact", "-o")


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Be a user who may not look into the tests' folder; root may do everything."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize("command", ["show", "generate", "serve", "compile"])
def test_a_folder_that_may_not_be_looked_into_is_named(
    command: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path_factory.getbasetemp() / "model"
    more = {"generate": ["x"], "compile": ["-o", "/nowhere/out"]}.get(command, [])
    assert cli.run([command, str(place), *more]) == 3
    err = capsys.readouterr().err
    check_paragraph(err)
    assert f"{place}: Permission denied" in err


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_a_model_that_may_not_be_read_is_named(
    name: str, plain_model: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # everybody may look into the folder above
        Path(folder).chmod(0o755)
        model = shutil.copytree(plain_model, Path(folder) / "model")
        assert cli.run(compile_command(model, Path(folder) / "artifact")) == 0
        (model / name).chmod(0)
        request.getfixturevalue("as_nobody")
        capsys.readouterr()
        try:
            assert cli.run(generate_command(Path(folder) / "artifact")) == 1
        finally:
            os.seteuid(0)
        err = capsys.readouterr().err
    check_paragraph(err)
    assert f"{model / name}" in err
    assert "Permission denied" in err


# What a disk of its own is, for one process: it ends with it.
ON_A_DISK = """
mount -t tmpfs -o size=16k tmpfs "$1" && mount -o "remount,$2" "$1" || exit 99
cd "$1" && shift 2 && "$@"
code=$?
ls -A >&2
exit $code
"""


@pytest.mark.parametrize(
    ("options", "word"),
    [("size=16k", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_real_disk_that_is_full_or_read_only_is_told(
    options: str, word: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    shell = ["unshare", "--mount", *user, "sh", "-c", ON_A_DISK, "sh", str(tmp_path / "disk")]
    arguments = compile_command(model, Path("out"))
    done = subprocess.run(
        [*shell, options, sys.executable, str(ROOT / "cli.py"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "cli.py" not in done.stderr and done.returncode in (1, 99) and "mount" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 3, done.stderr
    # Two lines and nothing else: `ls` found nothing to add.
    check_paragraph(done.stderr)
    assert word in done.stderr


# --- serve --------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_before_the_model_loads(
    artifact: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        pytest.fail("the model was loaded for nothing")

    monkeypatch.setattr(commands, "load_model", load)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ["serve", str(artifact), "--port", str(port), *QUIET]
        refused(arguments, 3, f"127.0.0.1:{port}", "ddress already in use", "--port")


def test_a_server_whose_model_does_not_load_ends_with_the_reason(
    artifact: Path, refused: Refused
) -> None:
    name = spoil(artifact, "graph/decode.ir")
    refused(["serve", str(artifact), "--port", "0", *QUIET], 1, f"`{name}`")


def test_an_artifact_is_json_for_a_machine_to_read(artifact: Path) -> None:
    # What the tests above edit is what is there.
    manifest = json.loads((artifact / MANIFEST).read_text())
    assert {"target", "architecture", "triton", "model_path", "engine"} <= set(manifest)
