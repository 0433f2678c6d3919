"""Tensors and config of a Hugging Face folder: config.json beside one or more safetensors files.

Reads files and knows no model: which names are needed is the loader's business. All is checked when
the folder is opened, from headers and file sizes alone. Called by `checkpoint.open_checkpoint`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from treadle.ir.errors import CheckpointError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DOWNLOAD_AGAIN = "Download the file again, or copy it again: the copy at hand is incomplete."


class StoredDtype(NamedTuple):
    """Name a dtype as torch does, and give its size: headers are read before torch is loaded."""

    name: str
    item_bytes: int


DTYPES: dict[str, StoredDtype] = {
    "F64": StoredDtype("float64", 8),
    "F32": StoredDtype("float32", 4),
    "F16": StoredDtype("float16", 2),
    "BF16": StoredDtype("bfloat16", 2),
    "F8_E4M3": StoredDtype("float8_e4m3fn", 1),
    "F8_E5M2": StoredDtype("float8_e5m2", 1),
    "I64": StoredDtype("int64", 8),
    "I32": StoredDtype("int32", 4),
    "I16": StoredDtype("int16", 2),
    "I8": StoredDtype("int8", 1),
    "U8": StoredDtype("uint8", 1),
    "BOOL": StoredDtype("bool", 1),
}


@dataclass(frozen=True)
class TensorEntry:
    """Say where one tensor lies: `start` and `stop` are byte offsets from the start of the file."""

    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        import torch

        return getattr(torch, self.dtype_name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Shard:
    """Hold a file's header, as bytes and as the tensors it describes, and the file's size."""

    file: Path
    header: bytes
    size_bytes: int
    tensors: dict[str, TensorEntry]


class SafetensorsSource:
    """Give the tensors of a folder by their own names, read from the mapped files on demand.

    Safe to read from several threads.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = _read_config(folder)
        generation_file = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = (
            _read_json_object(generation_file) if generation_file.exists() else {}
        )
        self._shards = tuple(_read_shard(file) for file in _find_shards(folder))
        self._entries = _join(self._shards)
        if folder.joinpath(INDEX).exists():
            _check_index(folder / INDEX, self._entries)
        if self.config.get("torch_dtype") is None and self.config.get("dtype") is None:
            _set_dtype(self.config, self._entries.values())
        self._open_files: dict[Path, safe_open] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def is_narrow(self, name: str) -> bool:
        return self.dtype(name).itemsize <= 2

    def dtype_name(self, name: str) -> str:
        return self._entries[name].dtype_name

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        file = self._entries[name].file
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open_files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"`{name}` in {file} can't be read: {error}.", remedy=_DOWNLOAD_AGAIN
            ) from error
        return tensor if device is None else tensor.to(device)

    def entry(self, name: str) -> TensorEntry:
        return self._entries[name]

    def headers(self) -> Iterator[tuple[str, bytes, int]]:
        """Give name, header and size in bytes of every file, in order of their names."""
        for shard in self._shards:
            yield shard.file.name, shard.header, shard.size_bytes

    def spans(self) -> Iterator[tuple[Path, int, int]]:
        """Give file, start and stop of every tensor's bytes, in order of their names."""
        for name in sorted(self._entries):
            entry = self._entries[name]
            yield entry.file, entry.start, entry.stop


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        remedy = "Give the folder that `hf download` or `save_pretrained` wrote."
        if ggufs := sorted(folder.glob("*.gguf")):
            remedy = f"To load the GGUF file, give its own path: {ggufs[0]}."
        elif (folder / "adapter_config.json").exists():
            remedy = "This is an adapter (LoRA); give the folder of the base model."
        raise CheckpointError(
            f"A checkpoint folder must hold config.json; {folder} holds {found}.", remedy=remedy
        )
    return _read_json_object(file)


def _read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object, refusing a key that stands twice with different values."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{file} can't be read: {error.strerror or error}.",
            remedy="Check its permissions, and that a link does not point into the void.",
        ) from error
    if raw.startswith(_LFS_POINTER):
        raise _lfs_pointer(file)
    try:
        value = json.loads(raw, object_pairs_hook=_object_without_conflicts)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or a key in conflict
        raise CheckpointError(
            f"{file} must be JSON; it is not: {error}.", remedy="Correct it, or download it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} must hold a JSON object; found a {type(value).__name__}.",
            remedy="Download it again.",
        )
    return value


def _object_without_conflicts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise ValueError(f"`{key}` stands twice, as {result[key]!r} and as {value!r}")
        result[key] = value
    return result


def _find_shards(folder: Path) -> list[Path]:
    """Decide which files make up the checkpoint; each exists."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        if whole.exists() and names != [WEIGHTS]:
            raise CheckpointError(
                f"A checkpoint must be in one file or in shards; {folder} holds both {WEIGHTS} and "
                f"{INDEX}, which lists {names[0]}.",
                remedy="Move the one that is out of date away.",
            )
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{index} lists {len(names)} shards; missing: {', '.join(missing[:6])}.",
                remedy="The download is incomplete: run it again, it fetches what is missing.",
            )
        return [folder / name for name in names]
    if whole.exists():
        return [whole]
    return _find_shards_without_index(folder)


def _find_shards_without_index(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    shards = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    if len(files) == 1 and not shards and files[0].name != "adapter_model.safetensors":
        return files
    if shards and len({(match["stem"], match["parts"]) for match in shards}) == 1:
        present = {int(match["part"]) for match in shards}
        missing = sorted(set(range(1, int(shards[0]["parts"]) + 1)) - present)
        if not missing:
            return [folder / match.string for match in shards]
        stem, parts = shards[0]["stem"], shards[0]["parts"]
        names = [f"{stem}-{part:05d}-of-{parts}.safetensors" for part in missing[:6]]
        raise CheckpointError(
            f"{folder} holds {len(present)} of {int(parts)} shards; missing: {', '.join(names)}.",
            remedy="The download is incomplete: run it again, it fetches what is missing.",
        )
    remedy = f"Download {WEIGHTS}, or every shard and {INDEX}."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        remedy = (
            "Convert the PyTorch files, which can run code when loaded: "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`."
        )
    found = ", ".join(file.name for file in files[:6]) or "no *.safetensors file"
    raise CheckpointError(
        f"Expected {WEIGHTS} or {INDEX} in {folder}; found {found}.", remedy=remedy
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} must hold an object `weight_map` of tensor names and file names; "
            f"found {str(weight_map)[:60]}.",
            remedy="Download it again.",
        )
    for name, file in weight_map.items():
        # A name with a folder in it could point anywhere on this machine.
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise CheckpointError(
                f"{index} must give plain file names; for `{name}` it gives {file!r}.",
                remedy="Correct it, or download it again.",
            )
    return weight_map


def _check_index(index: Path, entries: dict[str, TensorEntry]) -> None:
    for name, file in _weight_map(index).items():
        entry = entries.get(name)
        if entry is None or entry.file.name != file:
            place = "no shard holds it" if entry is None else f"{entry.file.name} holds it"
            raise CheckpointError(
                f"{index} says that `{name}` is in {file}, but {place}.",
                remedy="Index and shards belong to different versions: download all of them again.",
            )


def _read_shard(file: Path) -> Shard:
    """Read a file's header and check it against the size of the file."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            fits = 0 < header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES)
            header = stream.read(header_bytes) if fits else b""
    except OSError as error:
        raise CheckpointError(
            f"{file} can't be read: {error.strerror or error}.", remedy="Check its permissions."
        ) from error
    if head == _LFS_POINTER[:8]:
        raise _lfs_pointer(file)
    if not fits:
        raise CheckpointError(
            f"{file} is not a whole safetensors file: its header should be {header_bytes} bytes, "
            f"the file has {size_bytes} bytes.",
            remedy=_DOWNLOAD_AGAIN,
        )
    tensors = _parse_header(file, header)
    end_bytes = max((entry.stop for entry in tensors.values()), default=8 + header_bytes)
    if end_bytes != size_bytes:
        problem = "truncated" if size_bytes < end_bytes else "longer than it should be"
        raise CheckpointError(
            f"{file} is {problem}: its header describes {end_bytes} bytes, the file has "
            f"{size_bytes} bytes.",
            remedy=_DOWNLOAD_AGAIN,
        )
    return Shard(file, header, size_bytes, tensors)


def _parse_header(file: Path, header: bytes) -> dict[str, TensorEntry]:
    try:
        fields = json.loads(header, object_pairs_hook=_object_without_conflicts)
        fields.pop("__metadata__", None)
        return {name: _parse_entry(file, 8 + len(header), field) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} has an unreadable header: {type(error).__name__}: {error}.",
            remedy=_DOWNLOAD_AGAIN,
        ) from error


def _parse_entry(file: Path, data_start: int, field: dict[str, Any]) -> TensorEntry:
    dtype = DTYPES.get(field["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {field['dtype']!r} is not one of {', '.join(DTYPES)}")
    shape = tuple(int(size) for size in field["shape"])
    start, stop = (int(offset) for offset in field["data_offsets"])
    expected_bytes = dtype.item_bytes
    for size in shape:
        expected_bytes *= size
    if start < 0 or stop - start != expected_bytes:
        raise ValueError(
            f"{field['dtype']}{list(shape)} takes {expected_bytes} bytes, not {stop - start}"
        )
    return TensorEntry(file, dtype.name, shape, data_start + start, data_start + stop)


def _join(shards: Iterable[Shard]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if name in entries:
                raise CheckpointError(
                    f"Every tensor must be in one shard; `{name}` is in {entries[name].file} and "
                    f"in {shard.file.name}.",
                    remedy="Move the shard that is out of date away, or download all again.",
                )
            entries[name] = entry
    return entries


def _set_dtype(config: dict[str, Any], entries: Iterable[TensorEntry]) -> None:
    """Take the dtype of the weights where the config names none, as transformers does."""
    floating = [entry.dtype_name for entry in entries if "float" in entry.dtype_name]
    if floating:
        config["torch_dtype"] = floating[0]


def _lfs_pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a git-lfs pointer of a few bytes, not the file itself.",
        remedy="Fetch the files with `git lfs pull`, or download the model again.",
    )
