"""Copies of pages between a device's caches and host memory, beside the steps.

Several pages travel at once: for each cache one gather or scatter on the device, between its pages
and a buffer that has all parts of a page side by side; then a copy a page to or from the host.
Called by the executor; decides nothing (`host_pages.py` does).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from treadle.ir.errors import MachineError
from treadle.runtime.host_pages import HostPages, PageCopies
from treadle.runtime.state import DeviceState

STAGING_BYTES = 64 * 2**20  # on the device; at least a page
# Of copies of fewer pages, launches take the time: they say little about a long prefix.
MIN_TIMED_PAGES = 8
_WORD = torch.int64


class PageCopier:
    """Hold the host's pages, u8[H, page bytes], and copy between them and a state's caches.

    On a GPU the memory is page-locked, and copies run on a stream of their own. They wait for no
    step: nothing in flight uses their pages (`StepPlan.page_copies`); the step that is launched
    next waits for them. On the CPU they are made at once. What larger copies took is told to
    `host`, beginning with one that is made here; the pages' content stays as it is.

    Raises: MachineError: the memory can't be had or locked.
    """

    def __init__(self, state: DeviceState, host: HostPages) -> None:
        self._host = host
        planes = [plane for planes in state.caches.values() for plane in planes]
        pages = [plane.view(plane.size(0), -1).view(torch.uint8) for plane in planes]
        sizes = [each.size(1) for each in pages]
        assert sum(sizes) == host.page_bytes, "host pages hold all parts of a page"
        # Whole words where all parts are: a gather of bytes is slower.
        self._word = torch.uint8 if any(size % _WORD.itemsize for size in sizes) else _WORD
        self._planes = [each.view(self._word) for each in pages]  # [P, words of a page]
        device = planes[0].device
        memory = _allocate(host.num_pages, host.page_bytes)
        if device.type == "cuda":
            # Not torch's own page-locked memory: it rounds sizes up to powers of two.
            unlock = weakref.finalize(self, _lock(memory))
            unlock.atexit = False
        self._memory = memory.view(self._word)  # [H, words of a page]
        width = self._memory.size(1)
        most = min(state.dims["P"], host.num_pages)
        self._batch = max(1, min(STAGING_BYTES // host.page_bytes, most))
        self._staging = torch.empty((self._batch, width), dtype=self._word, device=device)
        self._parts = self._staging.split([plane.size(1) for plane in self._planes], dim=1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Copies on their way, to be timed: begin, end, bytes.
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._measure()

    def run(self, copies: PageCopies) -> None:
        """Begin the copies; what is launched on the current stream from here on waits for them."""
        num_pages = len(copies.pages_out) + len(copies.pages_in)
        num_bytes = num_pages * self._host.page_bytes
        is_timed = num_pages >= min(MIN_TIMED_PAGES, self._batch)
        if self._stream is None:
            began_s = time.perf_counter()
            self._copy(copies)
            if is_timed:
                self._host.copies.add(num_bytes, time.perf_counter() - began_s)
            return
        self._note_times()
        steps = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self._copy(copies)
            ended.record()
        steps.wait_event(ended)
        if is_timed:
            self._timed.append((began, ended, num_bytes))

    def _note_times(self) -> None:
        while self._timed and self._timed[0][1].query():
            began, ended, num_bytes = self._timed.popleft()
            self._host.copies.add(num_bytes, began.elapsed_time(ended) / 1e3)

    def _copy(self, copies: PageCopies) -> None:
        for batch in _split(copies.pages_out, self._batch):
            pages = self._send_indices([page for page, _ in batch])
            for plane, part in zip(self._planes, self._parts, strict=True):
                torch.index_select(plane, 0, pages, out=part[: len(batch)])
            for staged, (_, host_page) in zip(self._staging, batch, strict=False):
                self._memory[host_page].copy_(staged, non_blocking=True)
        for batch in _split(copies.pages_in, self._batch):
            for staged, (_, host_page) in zip(self._staging, batch, strict=False):
                staged.copy_(self._memory[host_page], non_blocking=True)
            pages = self._send_indices([page for page, _ in batch])
            for plane, part in zip(self._planes, self._parts, strict=True):
                plane.index_copy_(0, pages, part[: len(batch)])

    def _send_indices(self, pages: list[int]) -> torch.Tensor:
        """Give page numbers on the device, i64[N], without waiting for it."""
        indices = torch.tensor(pages, pin_memory=self._stream is not None)
        return indices.to(self._staging.device, non_blocking=True)

    def _measure(self) -> None:
        """Time a copy, out and back, of pages that nobody uses yet."""
        pages = tuple((page, page) for page in range(self._batch))
        seconds = 0.0
        for _ in range(2):  # the first one loads kernels
            began_s = time.perf_counter()
            if self._stream is None:
                self._copy(PageCopies(pages, pages))
            else:
                # The caches may still be being filled with zeros.
                self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
                with torch.cuda.stream(self._stream):
                    self._copy(PageCopies(pages, pages))
                self._stream.synchronize()
            seconds = time.perf_counter() - began_s
        self._host.copies.add(2 * self._batch * self._host.page_bytes, seconds)


def _split(pairs: Sequence[tuple[int, int]], most: int) -> list[Sequence[tuple[int, int]]]:
    return [pairs[start : start + most] for start in range(0, len(pairs), most)]


def _allocate(num_pages: int, page_bytes: int) -> torch.Tensor:
    """Give host memory, u8[H, page bytes]."""
    try:
        return torch.empty((num_pages, page_bytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise _refused(num_pages * page_bytes, "allocated") from error


def _lock(memory: torch.Tensor) -> Callable[[], object]:
    """Lock memory to its pages, for copies that need no help of the host; give what unlocks it."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        raise _refused(memory.nbytes, "page-locked")
    return partial(runtime.cudaHostUnregister, address)


def _refused(num_bytes: int, verb: str) -> MachineError:
    return MachineError(
        f"{num_bytes / 2**30:.1f} GiB of host memory for the KV cache can't be {verb}.",
        remedy="Lower --kv-host-memory, or leave it out.",
    )
