"""Tensors of a checkpoint → a device, read ahead by several threads through page-locked buffers.

One thread that copies from mapped files waits in turn for the file and for the device. Here threads
read blocks of the files while earlier blocks travel. Called by `weights.py`; knows files and
devices, no models.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from treadle.ir.errors import CheckpointError
from treadle.runtime.checkpoint import Checkpoint

MAX_THREADS = 12
BLOCK_BYTES = 16 * 2**20
AHEAD_BYTES = 2**30  # of tensors without a place that are on their way and not asked for yet


class Uploader:
    """Bring tensors to `device` in the order in which they will be asked for.

    Use: with Uploader(checkpoint, device, names, ahead=True) as uploader: uploader.take(names[0])
    Without `ahead`, and where a format's values have to be computed, a tensor is read when it is
    asked for. `places` has, by number, those tensors whose memory is there already, as long as the
    stored ones and contiguous; memory for the others is allocated in turn, holding `allocating`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        names: Iterable[str],
        *,
        ahead: bool,
        places: Mapping[int, torch.Tensor] | None = None,
        allocating: AbstractContextManager[object] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._ahead = ahead
        self._places = places or {}
        self._allocating = allocating or nullcontext()
        self._waiting = deque(enumerate(names))
        self._coming: deque[_Coming] = deque()
        self._coming_bytes = 0
        self._files: dict[Path, int] = {}
        self._lanes = threading.local()
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="treadle-upload")

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def take(self, name: str) -> torch.Tensor:
        """Give the next tensor, on the device and in the dtype in which it is stored.

        Raises: CheckpointError: its file can't be read.
        """
        self._send_ahead()
        coming = self._coming.popleft()
        assert coming.name == name, f"`{name}` was asked for, `{coming.name}` is the next"
        if coming.tensor is None:
            return self._checkpoint.tensor(name, self._device)
        self._coming_bytes -= coming.own_bytes
        for block in coming.blocks:
            arrival = block.result()
            if arrival is not None:
                torch.cuda.current_stream(self._device).wait_event(arrival)
        return coming.tensor

    def _send_ahead(self) -> None:
        while self._waiting and (not self._coming or self._coming_bytes < AHEAD_BYTES):
            coming = self._send(*self._waiting.popleft())
            self._coming.append(coming)
            self._coming_bytes += coming.own_bytes

    def _send(self, number: int, name: str) -> _Coming:
        entry = self._checkpoint.entry(name) if self._ahead else None
        if entry is None or entry.start == entry.stop:
            return _Coming(name)
        tensor, own_bytes = self._places.get(number), 0
        if tensor is None:
            with self._allocating:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            own_bytes = tensor.nbytes
        target = tensor.view(-1).view(torch.uint8)  # [N * element size]
        # The memory may be that of a tensor whose last use is still to come on this stream.
        free = torch.cuda.current_stream(self._device).record_event() if tensor.is_cuda else None
        blocks = [
            self._pool.submit(self._copy_block, entry.file, entry.start + done, part, free)
            for done, part in zip(
                range(0, target.numel(), BLOCK_BYTES), target.split(BLOCK_BYTES), strict=True
            )
        ]
        return _Coming(name, tensor, own_bytes, tuple(blocks))

    def _copy_block(
        self, file: Path, start: int, target: torch.Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Read a block of a file and send it to `target`, u8[N]; give what tells its arrival."""
        if not hasattr(self._lanes, "lane"):
            self._lanes.lane = _Lane(target.is_cuda)
        return self._lanes.lane.copy(self._open(file), file, start, target, free)  # type: ignore[no-any-return]

    def _open(self, file: Path) -> int:
        if file not in self._files:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise _unreadable(file, error.strerror or str(error)) from error
            if self._files.setdefault(file, descriptor) != descriptor:
                os.close(descriptor)  # another thread was first
        return self._files[file]


@dataclass(frozen=True)
class _Coming:
    """A tensor on its way, with its blocks; without them one that is read when it is asked for."""

    name: str
    tensor: torch.Tensor | None = None
    own_bytes: int = 0  # allocated for it; 0 where it had a place
    blocks: tuple[Future[torch.cuda.Event | None], ...] = ()


class _Lane:
    """One thread's buffers, used in turn: one is filled while the other travels."""

    def __init__(self, pinned: bool) -> None:
        self._buffers = [
            torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._arrivals: list[torch.cuda.Event | None] = [None, None]
        self._stream = torch.cuda.Stream() if pinned else None
        self._turn = 0

    def copy(
        self,
        descriptor: int,
        file: Path,
        start: int,
        target: torch.Tensor,
        free: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Fill a buffer from the file and send it on. Raises: CheckpointError: see `_read`."""
        self._turn = 1 - self._turn
        last = self._arrivals[self._turn]
        if last is not None:
            last.synchronize()
        buffer = self._buffers[self._turn][: target.numel()]
        _read(descriptor, file, start, buffer.numpy().data)
        if self._stream is None or free is None:
            target.copy_(buffer)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            target.copy_(buffer, non_blocking=True)
            arrival = self._stream.record_event()
        self._arrivals[self._turn] = arrival
        return arrival


def _read(descriptor: int, file: Path, start: int, memory: memoryview) -> None:
    """Fill `memory` from a position of a file. Raises: CheckpointError: it can't be read so far."""
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(descriptor, [memory[done:]], start + done)
        except OSError as error:
            raise _unreadable(file, error.strerror or str(error)) from error
        if count == 0:
            raise _unreadable(file, "it became shorter while it was read")
        done += count


def _unreadable(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} can't be read: {reason}.",
        remedy="Check the disk, and that nothing writes to the file.",
    )
