"""The binaries of an artifact: installed once into the user's cache, whole, and found there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.kernels.linear_cases import Case, emit_case
from treadle.ir.errors import ArtifactError
from treadle.kernels.cross_compile import Job, compile_many
from treadle.kernels.load import load_module
from treadle.runtime.artifact import Artifact, finish_manifest, open_artifact, writing
from treadle.runtime.binaries import BINARIES, install_binaries, read_source_keys
from treadle.runtime.triton_program import Kernels

from .test_artifact import BARE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """Write an artifact that carries the binary of one kernel, and give the kernel's job too."""
    path = tmp_path_factory.mktemp("made") / "artifact"
    text, _ = emit_case("gemv", Case("", dtype="bf16", N=64, K=128), ROWS=2)
    module = path.parent / "linear.py"
    module.write_text(text)
    job = Job(str(module), "sm_90", ("bf16[4, 128]", "bf16[64, 128]", "bf16[4, 64]", 4))
    with writing(path) as folder:
        (folder / "plan.json").write_text("{}")
        (outcome,) = compile_many([job], triton_cache=folder / BINARIES)
        assert not outcome.error, outcome.error
        kernels = [{"module": module.stem, **asdict(kernel)} for kernel in outcome.kernels]
        (folder / "report.json").write_text(json.dumps({"kernels": kernels}))
        finish_manifest(folder, BARE)
    return path, job


@pytest.fixture
def artifact(made: tuple[Path, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """Open it, with a user's cache that is empty."""
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    return open_artifact(made[0], later=BINARIES)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_runs_is_installed_and_no_text_of_a_stage(artifact: Artifact) -> None:
    suffixes = {path.suffix for path in install_binaries(artifact).rglob("*.*") if path.is_file()}
    assert {".cubin", ".json"} <= suffixes <= {".cubin", ".json", ".so"}
    assert {".ttir", ".ptx"} <= {path.suffix for path in artifact.path.rglob("*.*")}


def test_a_kernel_is_told_the_key_of_its_source_when_its_module_is_loaded(
    artifact: Artifact, made: tuple[Path, Job]
) -> None:
    keys = read_source_keys(artifact)
    assert list(keys) == ["linear"] and list(keys["linear"]) == ["gemv"]
    folder = made[0].parent
    Kernels(folder, keys).launch_of("linear")
    assert load_module(folder / "linear.py", "linear").gemv.hash == keys["linear"]["gemv"]


def test_triton_finds_what_was_installed(artifact: Artifact, made: tuple[Path, Job]) -> None:
    installed = install_binaries(artifact)
    before = files_of(installed)
    (outcome,) = compile_many([made[1]], triton_cache=installed)
    assert not outcome.error, outcome.error
    assert files_of(installed) == before, "nothing was compiled again"


def test_installed_binaries_are_named_where_they_are(artifact: Artifact) -> None:
    installed = install_binaries(artifact)
    groups = [json.loads(path.read_text()) for path in installed.rglob("__grp__*.json")]
    assert groups
    for group in groups:
        assert group["child_paths"]
        for name, path in group["child_paths"].items():
            assert Path(path).is_file(), name
            assert installed in Path(path).parents


def test_a_changed_binary_is_refused_before_it_is_installed(
    artifact: Artifact, tmp_path: Path
) -> None:
    (binary,) = artifact.path.rglob("*.cubin")
    kept = binary.read_bytes()
    binary.write_bytes(kept[:-1])
    try:
        with pytest.raises(ArtifactError, match=r"\.cubin` in .* was changed"):
            install_binaries(open_artifact(artifact.path, later=BINARIES))
        with pytest.raises(ArtifactError, match=r"\.cubin` in .* was changed"):
            open_artifact(artifact.path)
    finally:
        binary.write_bytes(kept)
    assert not (tmp_path / "cache" / BINARIES / BARE.key).exists()


def test_what_is_installed_is_not_looked_at_in_the_artifact_again(artifact: Artifact) -> None:
    installed = install_binaries(artifact)
    (binary,) = artifact.path.rglob("*.cubin")
    moved = binary.rename(binary.with_suffix(".away"))
    try:
        assert install_binaries(open_artifact(artifact.path, later=BINARIES)) == installed
    finally:
        moved.rename(binary)
