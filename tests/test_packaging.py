"""The package: what a wheel holds, what installing gives, and that every version is pinned."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import treadle
from tests.checkpoints import make_llama

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ir", "kernels", "models", "runtime", "server", "bench")
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def read_setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements() -> list[str]:
    config = read_setup()
    extras = " ".join(config["options.extras_require"].values())
    return (config["options"]["install_requires"] + " " + extras).split()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "only exact versions"
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def source_files() -> set[str]:
    """Give every file of the project's folders as a path below `treadle/`, data files too."""
    files = {"treadle/__init__.py", "treadle/cli.py"}
    for folder in FOLDERS:
        files |= {
            f"treadle/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    return files


def copy_source(target: Path) -> Path:
    """Copy what a clone holds, links as links: a build writes into its source."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    shutil.copytree(ROOT / ".import", target / ".import", ignore=ignored, symlinks=True)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_source(folder / "a folder-with a.dash")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_every_requirement_is_pinned() -> None:
    names = {normal(re.split(r"[<>=!~\[]", requirement)[0]) for requirement in requirements()}
    assert names - set(pins()) == set()


def test_every_pin_is_allowed_by_its_requirement() -> None:
    found = pins()
    for requirement in requirements():
        name, operator, bound = re.split(r"(?:\[.*\])?(>=|==)", requirement)
        pinned = tuple(map(int, re.findall(r"\d+", found[normal(name)])))
        least = tuple(map(int, re.findall(r"\d+", bound)))
        assert pinned == least if operator == "==" else pinned >= least, requirement


def test_the_build_tool_is_pinned() -> None:
    assert "setuptools" in pins()


def test_every_link_of_the_import_folder_leads_to_the_root() -> None:
    links = {path.name: path for path in (ROOT / ".import/treadle").iterdir() if path.is_symlink()}
    assert set(links) == {*FOLDERS, "cli.py"}
    for name, link in links.items():
        assert (link.readlink().as_posix(), link.resolve()) == (f"../../{name}", ROOT / name)


def test_the_wheel_holds_every_file_of_the_source_but_the_benchmarks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("treadle/")}
    benchmarks = {name for name in source_files() if name.startswith("treadle/bench/")}
    assert held == source_files() - benchmarks


def test_the_wheel_adds_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        entry_points = archive.read(
            next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        ).decode()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"treadle"}
    assert "treadle = treadle.cli:main" in entry_points


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("LICENSE") for name in archive.namelist())


def test_what_the_wheel_installs_runs(wheel: Path, run_python: RunPython, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = run_python(
        "-m", "treadle.cli", "--version", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")
    )
    assert (done.returncode, done.stdout) == (0, f"treadle {treadle.__version__}\n"), done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the `bin` of a new environment with the wheel, and this one's libraries behind it."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "-q"]
    done = subprocess.run([*pip, "--no-deps", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return venv / "bin"


def run_installed(installed: Path, cwd: Path, *arguments: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed / "treadle"), *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_shows_its_help_elsewhere(installed: Path, tmp_path: Path) -> None:
    assert "treadle check-env" in run_installed(installed, tmp_path, "--help")


def test_an_installed_wheel_compiles_elsewhere(installed: Path, tmp_path: Path) -> None:
    make_llama(tmp_path / "model", num_layers=1)
    # Kernels are emitted from templates, which must have come along.
    sizes = ["--target", "interpret", "--max-rows", "2", "--max-step-tokens", "16"]
    out = run_installed(installed, tmp_path, "compile", "model", "-o", "artifact", *sizes)
    assert f"{installed}/treadle generate artifact" in out
    assert list((tmp_path / "artifact/kernels").glob("*.py"))


def test_an_installed_wheel_finds_the_tuned_tables(installed: Path, tmp_path: Path) -> None:
    code = (
        "from treadle.kernels import tuned; print(len(tuned.shipped_table('NVIDIA H200').choices))"
    )
    done = subprocess.run(
        [str(installed / "python"), "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.slow
def test_an_editable_installation_runs_and_hides_the_root(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "checkout")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(source)]
    libraries = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*libraries, "click", "rich"], check=True)
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = [str(tmp_path / "venv/bin/treadle"), "--version"]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == f"treadle {treadle.__version__}\n"
    # A new file of the checkout is there without another installation.
    (source / "ir/fresh.py").write_text("WEFT = 1\n")
    code = "import treadle.ir.fresh, importlib.util as u; print(u.find_spec('kernels'))"
    shown = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "None\n"


def test_ci_can_be_started() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="asks of the environment that `make test` makes"
)
def test_a_second_make_installs_nothing() -> None:
    environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    # -q: 0 when there is nothing to do, 1 when something would be done.
    asked = subprocess.run(["make", "-q", "env"], cwd=ROOT, env=environment)
    assert asked.returncode == 0, "the environment is older than its pins: run `make env`"
