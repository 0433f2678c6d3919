"""Open a model's files, whatever their format, as tensors under their Hugging Face names.

Knows formats, not models. The engine, the compiler and `verify` open their weights here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from treadle.ir.errors import CheckpointError
from treadle.runtime.gguf_source import GgufSource
from treadle.runtime.mxfp4 import Mxfp4Source, is_mxfp4
from treadle.runtime.safetensors_source import SafetensorsSource, TensorEntry

if TYPE_CHECKING:
    import torch

_SAMPLE_BYTES = 256


class TensorSource(Protocol):
    """Say what a format must offer."""

    config: dict[str, Any]
    generation_config: dict[str, Any]

    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def is_narrow(self, name: str) -> bool: ...
    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor: ...
    def entry(self, name: str) -> TensorEntry | None: ...
    def headers(self) -> Iterator[tuple[str, bytes, int]]: ...
    def spans(self) -> Iterator[tuple[Path, int, int]]: ...


@dataclass(frozen=True)
class Checkpoint:
    """Hold an opened model: its config, and its tensors by Hugging Face names, read on demand.

    `config` has the keys of a config.json. Where that names no dtype, `torch_dtype` is filled in
    from the weights; for a GGUF file the whole dict is made from the file's metadata. Where weights
    are widened when they are read, the config no longer says that they are quantised.
    """

    path: Path
    kind: Literal["safetensors", "gguf"]
    source: TensorSource

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.source.generation_config

    def names(self) -> frozenset[str]:
        """Give the names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Give a tensor's shape without reading it.

        Raises: CheckpointError: there is no such tensor.
        """
        return self.source.shape(self._known(name))

    def dtype(self, name: str) -> torch.dtype:
        """Give the dtype that `tensor` returns; float32 for quantised GGUF tensors, bf16 for MXFP4.

        Raises: CheckpointError: there is no such tensor.
        """
        return self.source.dtype(self._known(name))

    def is_narrow(self, name: str) -> bool:
        """Tell whether a tensor's numbers are such of 16 bits or fewer, before they are widened.

        Raises: CheckpointError: there is no such tensor.
        """
        return self.source.is_narrow(self._known(name))

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Read one tensor to a device (None: the host), in Hugging Face's layout; it is read-only.

        On the host, a tensor of a safetensors file is a view of the mapped file: its pages are read
        when used. Values in MXFP4 are widened on the device.
        Raises: CheckpointError: there is no such tensor, or it can't be read.
        """
        return self.source.tensor(self._known(name), device)

    def entry(self, name: str) -> TensorEntry | None:
        """Tell where a tensor's bytes lie as `tensor` gives them; None where they are computed.

        Raises: CheckpointError: there is no such tensor.
        """
        return self.source.entry(self._known(name))

    def fingerprint(self) -> str:
        """Compute a digest that changes when the weights or the config do; takes milliseconds.

        It covers the config, every file's header and size, and up to three samples of 256 bytes
        (start, middle, end) of every tensor; not names of folders, nor times. A change that touches
        none of the samples goes unseen: it is meant for mix-ups, not against forgery.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True, default=str).encode())
        for name, header, size_bytes in self.source.headers():
            digest.update(f"\n{name} {size_bytes} ".encode())
            digest.update(hashlib.sha256(header).digest())
        for file, spans in _by_file(self.source.spans()):
            with file.open("rb") as stream:
                for start, stop in spans:
                    for sample_start in _sample_starts(start, stop):
                        stream.seek(sample_start)
                        digest.update(stream.read(min(_SAMPLE_BYTES, stop - sample_start)))
        return digest.hexdigest()

    def _known(self, name: str) -> str:
        if name in self.source.names():
            return name
        nearest = difflib.get_close_matches(name, self.source.names(), n=3)
        hint = f"the nearest are {', '.join(nearest)}" if nearest else "none is similar"
        raise CheckpointError(
            f"Expected a tensor `{name}` in {self.path}; it has none: {hint}.",
            remedy="The file is incomplete, or the config describes another model.",
        )


def open_checkpoint(path: str | Path, *, if_missing: str = "") -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file, and check that it is complete; reads no weights.

    `if_missing` is the remedy where there is nothing at `path`, if the caller knows a better one.
    Raises: CheckpointError: something is missing, truncated, contradictory, unreadable or of an
    unknown format.
    """
    path = Path(path).expanduser()
    try:
        return _open(path, if_missing)
    except PermissionError as error:
        raise CheckpointError(
            f"{error.filename or path} can't be read: {error.strerror}.",
            remedy="Check its permissions.",
        ) from error


def _open(path: Path, if_missing: str) -> Checkpoint:
    if path.is_dir():
        stored = SafetensorsSource(path)
        source = Mxfp4Source(stored) if is_mxfp4(stored.config) else stored
        return Checkpoint(path, "safetensors", source)
    if not path.exists():
        remedy = "Check the spelling."
        if not path.is_absolute() and len(path.parts) == 2:  # as in `org/model`
            remedy += f" To use a model of the Hugging Face hub: `hf download {path}`."
        raise CheckpointError(
            f"A model must be a folder or a .gguf file; {path} does not exist.",
            remedy=if_missing or remedy,
        )
    if path.suffix.lower() == ".gguf":
        return Checkpoint(path, "gguf", GgufSource(path))
    remedy = "Give the folder that holds it." if path.suffix in (".safetensors", ".json") else ""
    raise CheckpointError(
        f"A model must be a folder or a .gguf file; {path} is another kind of file.", remedy=remedy
    )


def _by_file(
    spans: Iterator[tuple[Path, int, int]],
) -> Iterator[tuple[Path, list[tuple[int, int]]]]:
    files: dict[Path, list[tuple[int, int]]] = {}
    for file, start, stop in spans:
        files.setdefault(file, []).append((start, stop))
    yield from files.items()


def _sample_starts(start: int, stop: int) -> tuple[int, ...]:
    if stop - start <= 3 * _SAMPLE_BYTES:
        return tuple(range(start, stop, _SAMPLE_BYTES))
    return (start, (start + stop) // 2, stop - _SAMPLE_BYTES)
