"""check-env: each check passing and failing, the verdict, and what a bug report shows."""

from __future__ import annotations

import configparser
import json
from importlib import metadata
from pathlib import Path

import pytest

from treadle import cli
from treadle.ir import errors, knobs
from treadle.runtime import check_env
from treadle.runtime.check_env import FAIL, NOTE, PASS, Report, Step

ROOT = Path(__file__).resolve().parents[2]


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let the probe be this code instead."""
    probe = tmp_path / "probe.py"
    probe.write_text(code)
    monkeypatch.setattr(check_env, "_PROBE", probe)


def test_this_machine_passes(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The whole command, with real kernels in real child processes.
    assert cli.run(["check-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    names = [step["name"] for step in found["steps"]]
    assert names[:6] == ["Python", "libraries", "cache folder", "memory", "shared memory", "GPU"]
    assert names[-1] == "compile for another GPU"
    assert any(name.startswith("kernel ") for name in names)


def test_the_lower_bounds_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split()
    for name, least in check_env.MIN_VERSIONS.items():
        assert f"{name}>={least}" in required


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    step = check_env.check_libraries()
    assert (step.status, "triton is not installed" in step.detail) == (FAIL, True)


@pytest.mark.parametrize(
    ("version", "status"), [("2.9.1", FAIL), ("2.11.0+cpu", PASS), ("3", PASS)]
)
def test_a_library_that_is_too_old_fails(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    monkeypatch.setattr(check_env, "MIN_VERSIONS", {"torch": "2.11"})
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert check_env.check_libraries().status == status


def test_without_libraries_nothing_is_asked_of_them(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setattr(check_env, "MIN_VERSIONS", {"torch": "99"})
    monkeypatch.setattr(check_env, "_probe", lambda *question, **variables: pytest.fail("asked"))
    assert [step.name for step in check_env.check(need_gpu=False).failed] == ["libraries"]


def test_a_cache_folder_that_is_no_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    step = check_env.check_cache_folder(lambda: tmp_path / "file")
    assert (step.status, "TREADLE_CACHE_DIR" in step.remedy) == (FAIL, True)


def test_a_user_without_a_home_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TREADLE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    step = check_env.check_cache_folder(knobs.cache_dir)
    assert (step.status, "TREADLE_CACHE_DIR" in step.remedy) == (FAIL, True)


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_env, "MIN_FREE_DISK_BYTES", 2**60)
    assert check_env.check_cache_folder(lambda: tmp_path).status == FAIL


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("MemAvailable:   16000000 kB\n", PASS),
        ("MemAvailable:     100000 kB\n", FAIL),
        ("MemFree: 1 kB\n", NOTE),
    ],
)
def test_free_memory_is_read_from_the_system(tmp_path: Path, text: str, status: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(text)
    assert check_env.check_memory(meminfo).status == status


def test_a_small_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_env, "GOOD_SHARED_MEMORY_BYTES", 2**60)
    step = check_env.check_shared_memory(tmp_path)
    assert (step.status, "--shm-size" in step.remedy) == (NOTE, True)


NO_GPU = 'print(\'{"gpus": [], "cuda": null, "hip": null}\')'


@pytest.mark.parametrize(("need_gpu", "status"), [(False, NOTE), (True, FAIL)])
def test_no_gpu_fails_only_where_one_need_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, need_gpu: bool, status: str
) -> None:
    answering(monkeypatch, tmp_path, NO_GPU)
    assert check_env.check_gpu(need_gpu).status == status


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = {
        "name": "Loom 9",
        "architecture": "sm_90",
        "free_bytes": 2**34,
        "total_bytes": 2**35,
        "shared_bytes": 232448,
    }
    answer = {"gpus": [gpu], "cuda": "13.0", "hip": None}
    answering(monkeypatch, tmp_path, f"print({json.dumps(answer)!r})")
    step = check_env.check_gpu(False)
    assert step.status == PASS
    assert step.detail == (
        "Loom 9 (sm_90, 16.0 GiB of 32.0 GiB free, 227 KiB shared memory); CUDA 13.0"
    )


def test_a_kernel_that_fails_is_told_by_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, tmp_path, "raise RuntimeError('no ptxas')")
    step = check_env.check_kernel("cpu")
    assert (step.status, step.detail, step.exit_code) == (FAIL, "RuntimeError: no ptxas", 3)


def test_a_probe_that_crashes_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, tmp_path, "import os; os.abort()")
    step = check_env.check_kernel("cuda")
    assert (step.status, step.detail) == (FAIL, "the process ended with status -6")


def test_a_probe_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, tmp_path, "import time; time.sleep(1000)")
    monkeypatch.setattr(check_env, "PROBE_TIMEOUT_S", 0.5)
    assert check_env.check_cross_compile().status == FAIL


def test_a_wrong_result_is_a_fault_and_not_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, tmp_path, "print('{\"max_error\": 0.5}')")
    step = check_env.check_kernel("cpu")
    assert (step.status, step.exit_code) == (FAIL, 1)
    verdict = Report((step,)).verdict()
    assert isinstance(verdict, errors.KernelError)


def test_the_verdict_is_one_line_about_the_first_failure() -> None:
    report = Report(
        (
            Step("one", PASS, "fine"),
            Step("two", FAIL, "broken.", "Mend it."),
            Step("three", FAIL, "broken too"),
        )
    )
    verdict = report.verdict()
    assert isinstance(verdict, errors.MachineError)
    assert verdict.message == "2 of 3 checks failed. two: broken."
    assert verdict.remedy == "Mend it."


def test_a_failed_check_ends_with_three(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_env, "MIN_VERSIONS", {"torch": "99"})
    assert cli.run(["check-env"]) == 3
    captured = capsys.readouterr()
    assert "fail  libraries" in captured.out
    assert "is older than 99" in captured.err.splitlines()[-2]


def test_a_bug_report_hides_secrets_and_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setattr(check_env, "MIN_VERSIONS", {"torch": "99"})
    monkeypatch.setenv("TREADLE_API_KEYS", "sesame")
    monkeypatch.setenv("HOME", str(cache_dir.parent))
    text = check_env.check(need_gpu=False).markdown()
    assert "| `TREADLE_API_KEYS` | set | `(hidden)` |" in text
    assert "| `TREADLE_CACHE_DIR` | set | `~/cache` |" in text
    assert "sesame" not in text


def test_a_bar_in_a_detail_does_not_break_the_table() -> None:
    assert "| a \\| b |" in Report((Step("one", PASS, "a | b"),)).markdown()
