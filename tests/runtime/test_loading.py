"""What loading brings up beside the weights, what fails there, and what it watches for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.checkpoints import make_llama
from tests.runtime.serving import compile_tiny
from treadle.ir.errors import CheckpointError, KernelError
from treadle.runtime import triton_program
from treadle.runtime.loading import (
    Allocating,
    LoadedArtifact,
    ServeOptions,
    count_compiles,
    limit_mixed_steps,
    load_artifact,
    load_model,
)
from treadle.runtime.pending_weights import PendingWeights
from treadle.runtime.plan import ProgramPlan
from treadle.runtime.triton_program import GraphedProgram

OPTIONS = ServeOptions(num_pages=4)


@pytest.fixture
def model(tmp_path: Path, rng_seed: int) -> Path:
    return make_llama(tmp_path / "model", seed=rng_seed % 1000, num_layers=1)


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Path:
    """An artifact whose weights come beside the rest, as on a GPU."""
    return compile_tiny(
        model, tmp_path / "artifact", target="interpret", max_rows=2, max_step_tokens=16
    )


def hold_back(monkeypatch: pytest.MonkeyPatch, until: threading.Event) -> None:
    """Let no value come before the event."""
    fill = PendingWeights.fill

    def fill_later(
        self: PendingWeights, allocating: Allocating, is_unwanted: Callable[[], bool]
    ) -> None:
        assert until.wait(timeout=60)
        fill(self, allocating, is_unwanted)

    monkeypatch.setattr(PendingWeights, "fill", fill_later)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("treadle-")]


def test_programs_are_built_before_the_weights_are_there(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    hold_back(monkeypatch, begun)
    seen: list[LoadedArtifact] = []

    def on_built(loaded: LoadedArtifact, allocating: Allocating) -> None:
        seen.append(loaded)
        assert loaded.programs and not loaded.weights["embed"].any()
        begun.set()

    phases: list[str] = []
    loaded = load_artifact(artifact, OPTIONS, phases.append, on_built=on_built)
    assert loaded.weights["embed"].any() and loaded.weights_s > 0
    assert loaded.weights["embed"] is seen[0].weights["embed"]
    assert phases == [
        "checking the artifact",
        "allocating weights",
        "allocating the KV cache",
        "loading kernels",
        "waiting for the weights",
    ]
    assert not threads()


def test_the_summary_says_what_the_weights_took_beside_the_phases(artifact: Path) -> None:
    summary = load_model(artifact, OPTIONS).summary
    assert "s beside the phases from `loading kernels` on" in summary["weights"]
    assert "waiting for the weights" in summary["start-up"]


def test_the_reference_loads_its_weights_as_a_phase(tmp_path: Path, model: Path) -> None:
    """Their values are packed, and on the host they may stay in the mapped file."""
    summary = load_model(compile_tiny(model, tmp_path / "reference"), OPTIONS).summary
    assert "beside" not in summary["weights"]
    assert "loading weights" in summary["start-up"] and "waiting for the we" not in str(summary)


def test_an_unreadable_file_is_told_though_the_rest_went_well(
    artifact: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    hold_back(monkeypatch, begun)

    def truncate(loaded: LoadedArtifact, allocating: Allocating) -> None:
        file = model / "model.safetensors"
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
        begun.set()

    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        load_artifact(artifact, OPTIONS, on_built=truncate)
    assert not threads()


def test_a_failure_beside_the_weights_stops_them_and_is_told(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def wait_until_unwanted(
        self: PendingWeights, allocating: Allocating, is_unwanted: Callable[[], bool]
    ) -> None:
        while not is_unwanted():
            threading.Event().wait(0.01)
        told.append(True)

    def fail(loaded: LoadedArtifact, allocating: Allocating) -> None:
        raise KernelError("Launching sample failed.")

    monkeypatch.setattr(PendingWeights, "fill", wait_until_unwanted)
    with pytest.raises(KernelError, match="Launching sample failed"):
        load_artifact(artifact, OPTIONS, on_built=fail)
    assert told and not threads()


def test_a_module_is_looked_at_once_for_all_launches(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    load_module = triton_program.load_module

    def note(path: Path, name: str) -> object:
        looked.append(path)
        return load_module(path, name)

    monkeypatch.setattr(triton_program, "load_module", note)
    loaded = load_artifact(artifact, OPTIONS)
    launches = [launch.kernel for each in loaded.plan.programs for launch in each.launches]
    assert len(launches) > len(looked) == len(set(looked))


class FakeStream:
    """A stream of a machine without a GPU."""

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeGraph:
    """A CUDA graph of such a machine; notes when a capture begins and ends."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._events.append(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self._events.append("end")


class FakeProgram:
    """A program that notes its runs and whether others may allocate; fails in the last one."""

    def __init__(self, events: list[str], allocating: threading.Lock, runs: int) -> None:
        self._events, self._allocating, self._runs = events, allocating, runs
        self.plan = ProgramPlan("decode", 4, "decode")
        self.values: dict[str, torch.Tensor] = {}

    def run(self, num_tokens: int, num_seqs: int) -> None:
        self._events.append("alone" if self._allocating.locked() else "beside others")
        self._runs -= 1
        if not self._runs:
            raise KernelError("Launching sample failed.")


@pytest.mark.parametrize("runs", [3, 2, 1])
def test_others_allocate_while_a_program_runs_but_not_while_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """A capture ends, and lets them go on, where it fails."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(events))
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    allocating = threading.Lock()
    program = FakeProgram(events, allocating, runs)
    with nullcontext() if runs == 3 else pytest.raises(KernelError):
        GraphedProgram(program, (0, 0), allocating=allocating)
    captured = ["begin thread_local", "alone", "end"]
    assert events == ["beside others", *(captured if runs > 1 else [])]
    assert not allocating.locked()


def test_a_kernel_compiled_while_serving_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    count = count_compiles()
    tell = triton.knobs.compilation.listener
    assert tell is not None
    tell(src=None, metadata={"name": "gemv"}, metadata_group={}, times=None, cache_hit=True)
    assert count() == 0 and not caplog.records
    tell(src=None, metadata={"name": "gemv"}, metadata_group={}, times=None, cache_hit=False)
    assert count() == 1
    assert "compiled while serving: kernel gemv" in caplog.text


@pytest.mark.parametrize(("target", "known"), [("cuda", True), ("reference", False)])
def test_a_gpu_says_how_much_context_may_be_decoded_beside_prompts(
    monkeypatch: pytest.MonkeyPatch, target: str, known: bool
) -> None:
    # 8B on an H200: a third of 15 GiB, in keys and values of 128 KiB a token, 8 heads of them.
    loaded = SimpleNamespace(
        engine=SimpleNamespace(target=target, page_size=64),
        weight_bytes=15 * 2**30,
        state=SimpleNamespace(
            page_bytes=64 * 128 * 2**10,
            packed=torch.zeros(1),
            caches={"kv": (torch.zeros(3, 8, 64, 128),)},
        ),
    )
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = limit_mixed_steps(loaded)  # type: ignore[arg-type]
    wanted = {"max_mixed_context_tokens": 40960, "rows_at_once": 16}
    assert found == (wanted if known else {})
