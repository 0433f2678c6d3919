"""What every test shares: the import path, Triton's interpreter, goldens, seeds, child processes.

Must not import torch or triton at the top: it decides how they start.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the root on the path, where `kernels` would hide the library of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import pytest  # noqa: E402

from .golden import Golden  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("treadle")
    group.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    group.addoption("--rng-seed", type=int, help="repeat a run with the seed that it printed")
    group.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cpu: kernels run in Triton's interpreter (default); cuda: compiled, on the GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and os.environ.get("CI"):
        raise pytest.UsageError(
            "Goldens are rewritten by a person who reads the diff, not under CI."
        )
    # Tests see the defaults, not what the user has set; a wheel at hand only saves its download.
    for name in [name for name in os.environ if name.startswith("TREADLE_")]:
        if name != "TREADLE_DEMO_WHEEL":
            del os.environ[name]
    # Triton and torch read these when first imported, which test files do. pytest imports the
    # `conftest.py` beside a test that is named on its command line before it comes here.
    early = [name for name in ("torch", "triton") if name in sys.modules]
    assert not early, f"a conftest.py imports {' and '.join(early)} at its top"
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    # More threads than cores make torch several times slower on small tensors.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    # Tokenizers warn and switch off their threads after a fork; tests fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A test never asks the model hub for anything, not even whether a file is current.
    os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A process either compiles kernels or interprets them.
    if item.get_closest_marker("interpreted") and item.config.getoption("--device") == "cuda":
        pytest.skip("needs Triton's interpreter: run without --device cuda")


@pytest.fixture
def admits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit requests whatever those that run will need, so that some must be preempted."""
    find_wait = "treadle.runtime.admission.Admission.find_wait"
    monkeypatch.setattr(find_wait, lambda *what, **more: 0)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Give the device that kernels run on: `cpu` (Triton's interpreter) unless `--device cuda`."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], Golden]:
    """Give `golden(name)`, text that equals the golden file, or rewrites it with `--update-golden`.

    Use: assert emit(...) == golden("triton/rms_norm__plain.py")
    """
    updating = bool(request.config.getoption("--update-golden"))
    return lambda name: Golden.open(name, updating=updating)


@pytest.fixture
def rng_seed(request: pytest.FixtureRequest) -> int:
    """Give a fresh seed and print it; a failing test shows it, `--rng-seed` repeats it."""
    given = request.config.getoption("--rng-seed")
    seed = secrets.randbits(31) if given is None else int(given)
    print(f"rng_seed: repeat with --rng-seed {seed}")
    return seed


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Give `run_python(*arguments, **variables)`: a fresh Python that can import `treadle`.

    A variable given as None is unset in the child. Triton's interpreter is off unless asked for.
    """
    return _run_python


def _run_python(
    *arguments: str, cwd: Path | None = None, timeout_s: float = 120, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT / ".import")}
    environment.pop("TRITON_INTERPRET", None)
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Point Treadle's cache to an empty folder for one test, and give that folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(folder))
    yield folder
