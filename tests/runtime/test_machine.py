"""A look at the machine with torch, and a glance without it, see the same."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from treadle.ir.errors import MachineError
from treadle.runtime import machine
from treadle.runtime.machine import Machine


class Driver:
    """Answer as the GPU's driver would for one H200, or fail in the function named."""

    def __init__(self, path: str = "", *, failing: str = "") -> None:
        self._failing = failing
        self.called: list[str] = []

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(function)
            if function == self._failing:
                return 100
            if function == "cuDeviceGetName":
                buffer, room, _ = arguments
                name = b"NVIDIA H200"
                assert len(name) < room
                buffer.value = name
            elif function == "cuDeviceGetAttribute":
                into, attribute, _ = arguments
                into._obj.value = {75: 9, 76: 0}[attribute]
            return 0

        return call


def test_a_glance_sees_what_a_look_sees() -> None:
    assert machine.glance() == machine.look()


def test_a_glance_names_the_gpu_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    found = machine.glance()
    assert (found.gpu, found.architecture) == ("NVIDIA H200", "sm_90")


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDeviceGetName"])
def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(failing=function))
    assert machine.glance().gpu == machine.glance().architecture == ""


def test_a_context_is_begun_for_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver)
    machine.begin_context().join()
    assert driver.called == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_nothing_comes_of_a_context_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    driver = Driver(failing=function)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    machine.begin_context().join()
    assert driver.called[-1] == function
    assert not failures


def test_a_library_that_is_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    this_process = ctypes.CDLL(None)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: this_process)
    assert machine.glance().gpu == ""


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._installed_version("no-such-package-of-ours") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\n", "+cu130"),
        ("__version__: str = '2.11.0+cu130'\n", "+cu130"),
        ("__version__ = read_it()\n", ""),
        ("git_version = '4f1e'\n", ""),
        ("this is no Python\n", ""),
        (None, ""),
    ],
)
def test_a_version_is_what_the_package_says_else_what_its_metadata_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    """And it is read without importing the package."""
    package = tmp_path / "made_up_for_machine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if text is not None:
        (package / "version.py").write_text(text)
    metadata = tmp_path / "made_up_for_machine-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: made_up_for_machine\nVersion: 2.11.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert machine._installed_version("made_up_for_machine") == f"2.11.0{expected}"
    assert "made_up_for_machine" not in sys.modules


@pytest.mark.parametrize(("gpu", "target"), [("NVIDIA H200", "cuda"), ("", "reference")])
def test_the_target_follows_from_the_machine(gpu: str, target: str) -> None:
    assert machine.choose_target("auto", Machine(gpu, "sm_90" if gpu else "")) == target
    assert machine.choose_target("reference", Machine(gpu, "")) == "reference"


def test_the_interpreter_must_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(MachineError, match="off in this process"):
        machine.choose_target("interpret", Machine("", ""))
