"""The artifact: the directory that `compile` writes and `serve` reads, and the checks between.

manifest.json   what this is: versions, target, model source, engine settings, hash of every file
graph/*.ir      the graphs, authored and fused, as text; the runtime parses the fused ones
plan.json       which kernels each program launches, with which arguments and buffers
kernels/*.py    the emitted Triton modules
kv-*/           graphs and plan for each other dtype of the KV cache that it was compiled with
tokenizer/      the tokenizer and chat template, as a Hugging Face folder
binaries/       their compiled form (Triton's own cache layout)
report.json     what each kernel uses of the GPU, and its source's digest; target cuda only

Called by the compiler and the engine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from treadle.ir.errors import ArtifactError, ConfigError, MachineError
from treadle.ir.files import write_whole
from treadle.runtime.config import KV_DTYPES, EngineConfig

FORMAT = 4
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Manifest:
    """Say what an artifact is. `key` names all its content depends on; `files` their SHA-256.

    `kv_formats` are those it may be served with; `engine` has the first of them.
    """

    key: str
    treadle: str
    torch: str
    triton: str
    target: str
    architecture: str
    gpu: str
    model_path: str
    model_kind: str
    model_name: str
    model_architecture: str
    model_fingerprint: str
    engine: EngineConfig
    kv_formats: tuple[str, ...] = ("",)
    files: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk, its manifest read and its files' hashes checked."""

    path: Path
    manifest: Manifest

    def engine(self, kv_dtype: str = "") -> EngineConfig:
        """Give the settings with this dtype of the KV cache; empty for the first it was made for.

        Raises: ArtifactError: it was compiled without it.
        """
        made, kv_formats = self.manifest.engine, self.manifest.kv_formats
        kv_format = KV_DTYPES[kv_dtype] if kv_dtype else made.kv_format
        if kv_format not in kv_formats:
            known = ",".join(kv_format or "auto" for kv_format in kv_formats)
            raise ArtifactError(
                f"{self.path} was compiled for a KV cache of {known}, not {kv_dtype}.",
                remedy=f"Compile it with --kv-dtype {known},{kv_dtype}: it then serves either.",
            )
        return replace(made, kv_format=kv_format)

    def part(self, engine: EngineConfig, name: str) -> str:
        """Name a file of the graphs and plans that an engine with these settings runs."""
        return (
            name
            if engine.kv_format == self.manifest.engine.kv_format
            else (f"{variant_folder(engine)}/{name}")
        )

    def text(self, name: str) -> str:
        """Read one of its text files."""
        return (self.path / name).read_text()

    def json(self, name: str) -> Any:
        """Read one of its JSON files."""
        return json.loads(self.text(name))


def variant_folder(engine: EngineConfig) -> str:
    """Name the folder of the graphs and plan for a dtype of the KV cache that is not the first."""
    return f"kv-{engine.kv_dtype}"


def hash_file(path: Path) -> str:
    """Give the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_artifact(path: Path) -> bool:
    """Say whether `path` is a directory with a manifest. Raises: MachineError: it can't be told."""
    try:
        return (path / MANIFEST).is_file()
    except OSError as error:
        raise MachineError(
            f"Can't look into {path}: {error.strerror or error}.", remedy="Check its permissions."
        ) from None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest. Raises: ArtifactError: it is absent, unreadable or of another format."""
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(
            f"{path} is not an artifact: it has no {MANIFEST}.",
            remedy="Make one with `python cli.py compile MODEL -o DIR`.",
        )
    try:
        data = json.loads(file.read_text())
        found = data.get("format")
        if found != FORMAT:
            raise ArtifactError(
                f"{path} has artifact format {found}, this version reads {FORMAT}.",
                remedy="Compile the model again.",
            )
        data["engine"] = EngineConfig.from_json(data["engine"])
        data["kv_formats"] = tuple(data["kv_formats"])
        return Manifest(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise ArtifactError(
            f"{file} can't be read: {error}.", remedy="Compile the model again."
        ) from error


def open_artifact(path: Path, *, later: str = "") -> Artifact:
    """Open an artifact and check every file against the manifest.

    Those in the folder `later` are left to who reads them, who calls `check_files`.
    Raises: ArtifactError: see `read_manifest` and `check_files`.
    """
    artifact = Artifact(path, read_manifest(path))
    check_files(
        artifact, [name for name in artifact.manifest.files if Path(name).parts[0] != later]
    )
    return artifact


def check_files(artifact: Artifact, names: Iterable[str]) -> None:
    """Check files against the manifest. Raises: ArtifactError: one is missing or was changed."""
    path = artifact.path
    for name in names:
        file = path / name
        if not file.is_file():
            raise ArtifactError(
                f"{path} lacks `{name}`, which its manifest lists.",
                remedy="The copy is incomplete: copy it again, or compile the model again.",
            )
        if hash_file(file) != artifact.manifest.files[name]:
            raise ArtifactError(
                f"`{name}` in {path} was changed after the artifact was written.",
                remedy="Compile the model again: that replaces it.",
            )


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill; on success it becomes `path`, on any error it vanishes.

    An artifact that is at `path` stays until then.
    Raises: ArtifactError: `path` exists and is not an artifact. MachineError: the folder can't be
    written, or the disk is full.
    """
    if not is_artifact(path) and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArtifactError(
            f"{path} exists and is not an artifact.", remedy="Choose another -o, or remove it."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield folder
        folder.chmod(0o755)
        _put_in_place(folder, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; what was there gets its name back should that fail."""
    if not path.exists():
        folder.rename(path)
        return
    old = folder.with_name(folder.name + ".old")
    path.rename(old)
    try:
        folder.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_error(path: Path, error: OSError) -> MachineError:
    """Say why `path` could not be written; where the disk is full, how much space is left."""
    reason = error.strerror or str(error)
    if isinstance(error, shutil.Error):
        _, _, reason = error.args[0][0]  # source, target and reason of the first of many files
    if isinstance(error, FileExistsError):
        reason = f"{error.filename} is a file"
    advice = "Choose another folder (-o or --dump; for caches TREADLE_CACHE_DIR)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
        free_bytes = shutil.disk_usage(there).free
        reason += f"; {free_bytes / 2**20:.1f} MiB are free in {there}"
        advice += ", or free some space"
    return MachineError(f"Can't write {path}: {reason}.", remedy=f"{advice}.")


def finish_manifest(folder: Path, manifest: Manifest) -> None:
    """Hash every file below `folder` and write the manifest, the last file of all."""
    files = {
        str(file.relative_to(folder)): hash_file(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    data = asdict(manifest) | {"files": files, "engine": manifest.engine.to_json()}
    write_whole(folder / MANIFEST, json.dumps(data, indent=1) + "\n")
