"""Run a warp-specialised Gluon module on threads and numpy: its barriers and its order of stages.

Gluon has no interpreter. This one knows just what the templates of matmuls use: a group
of warps is one thread, a fetch happens some time after it is asked for, a product reads its stage
as late as its wait allows, so that a stage filled too early gives a wrong result and a missing
arrival a time-out.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from treadle.kernels.inline import inline_parts
from treadle.kernels.load import write_module

DEADLINE_S = 20.0


class Memory:
    """Shared memory: an array whose first axis can be indexed, or the view of one stage."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def index(self, number: int) -> Memory:
        return Memory(self.array[number])

    @property
    def dtype(self) -> None:
        return None

    def slice(self, start: int, length: int) -> Memory:
        return Memory(self.array[start : start + length])

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.array.transpose(order))

    def store(self, value: np.ndarray) -> None:
        self.array[...] = value

    def load(self, layout: Any) -> Result:
        return self.array.copy().view(Result)


class Barriers:
    """Barriers that count arrivals and bytes, and flip a phase when both are complete."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, number: int) -> Barrier:
        return self.all[number]


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.missing_bytes = self.phase = 0

    def settle(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()


class Mbarrier:
    """The functions of `mbarrier`."""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    @staticmethod
    def expect(bar: Barrier, size: int, pred: bool = True) -> None:
        if pred:
            with bar.changed:
                bar.missing_bytes += size
                bar.pending -= 1
                bar.settle()

    @staticmethod
    def arrive(bar: Barrier, count: int, pred: bool = True) -> None:
        if pred:
            with bar.changed:
                bar.pending -= count
                assert bar.pending >= 0, "more arrivals than the barrier counts"
                bar.settle()

    @staticmethod
    def wait(bar: Barrier, parity: int) -> None:
        with bar.changed:
            done = bar.changed.wait_for(lambda: bar.phase != parity, DEADLINE_S)
        assert done, "a wait that nobody ends"


ASKED = threading.local()  # products that a thread has asked for


class Accumulator:
    """Results with products that are still to be added, oldest first."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.open: list[tuple[Any, Memory, bool, int]] = []


def multiply(
    x: Any, w: Memory, acc: Any, use_acc: bool = True, is_async: bool = False
) -> Accumulator:
    acc = acc if isinstance(acc, Accumulator) else Accumulator(acc)
    ASKED.products = getattr(ASKED, "products", 0) + 1
    acc.open.append((x, w, use_acc, ASKED.products))
    return acc


def finish_products(pending: int, deps: tuple[Any, ...]) -> Any:
    """Finish the products of `deps` but for the thread's last `pending`; others stay open."""
    time.sleep(random.random() * 1e-4)
    finished: list[Any] = []
    for acc in deps:
        if not isinstance(acc, Accumulator):
            finished.append(acc)
            continue
        while acc.open and acc.open[0][3] <= ASKED.products - pending:
            x, w, use_acc, _ = acc.open.pop(0)
            left = np.asarray(x.array if isinstance(x, Memory) else x, np.float32)
            product = left @ w.array.astype(np.float32)
            acc.value = acc.value + product if use_acc else product
        finished.append(acc if acc.open else acc.value.view(Result))
    return finished[0] if len(finished) == 1 else tuple(finished)


def multiply_at_once(x: np.ndarray, w: np.ndarray, acc: np.ndarray) -> np.ndarray:
    return acc + x @ w


class Result(np.ndarray):
    """Values in registers."""

    type = types.SimpleNamespace(layout=types.SimpleNamespace(parent=None))

    def to(self, dtype: Any) -> Result:
        return self


class Number(int):
    """A whole number that all threads know."""

    def to(self, dtype: Any) -> Number:
        return self


def add_up(values: np.ndarray, axis: int) -> Any:
    return Number(values.sum(axis)) if values.ndim == 1 else values.sum(axis)


class Pointer:
    """A tensor as a kernel sees it: its elements, addressed by offsets."""

    def __init__(self, tensor: torch.Tensor, offsets: Any = 0) -> None:
        self.tensor, self.offsets = tensor, offsets
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.tensor, self.offsets + offsets)


def read(address: Pointer, mask: Any = True, other: float = 0) -> Any:
    offsets = np.where(mask, np.asarray(address.offsets), 0)
    found = address.tensor.view(-1)[torch.from_numpy(offsets)].numpy()
    found = np.where(mask, found, other)
    return found.view(Result) if found.ndim else found.item()


def write(address: Pointer, values: Any, mask: Any = True) -> None:
    values = np.asarray(values)
    inside = np.broadcast_to(np.asarray(mask), values.shape)
    offsets = np.broadcast_to(np.asarray(address.offsets), values.shape)[inside]
    written = torch.from_numpy(np.ascontiguousarray(values[inside]))
    address.tensor.view(-1)[torch.from_numpy(offsets)] = written.to(address.tensor.dtype)


class Descriptor:
    """Describe blocks of a matrix; what lies outside of it reads as zeros and is not written."""

    layout = dtype = None

    def __init__(self, tensor: torch.Tensor, block: list[int]) -> None:
        self.tensor, self.block = tensor, block

    @staticmethod
    def from_tensor(tensor: torch.Tensor, block: list[int], layout: Any) -> Descriptor:
        return Descriptor(tensor, block)

    def window(self, place: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        ends = [first + size for first, size in zip(place, self.block, strict=True)]
        found = self.tensor[tuple(map(slice, place, ends))]
        return found, tuple(slice(0, size) for size in found.shape)


def fetch(
    desc: Descriptor, place: list[int], bar: Barrier, stage: Memory, pred: bool = True
) -> None:
    if not pred:
        return

    def deliver() -> None:
        time.sleep(random.random() * 1e-4)
        found, inside = desc.window(place)
        stage.array[...] = 0
        stage.array[inside] = found.numpy()
        with bar.changed:
            bar.missing_bytes -= stage.array.size * 2
            bar.settle()

    threading.Thread(target=deliver, daemon=True).start()


def send(desc: Descriptor, place: list[int], tile: Memory) -> None:
    found, inside = desc.window(place)
    found[...] = torch.from_numpy(np.ascontiguousarray(tile.array[inside])).to(found.dtype)


class Machine:
    """All programs of a launch at once, each with a thread per group of warps."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.num_programs = (1, 1)
        self.memory = threading.Lock()

    def together(self, calls: list[Callable[[], None]]) -> None:
        """Make calls at the same time; raise the first error of any."""
        errors: list[BaseException] = []

        def run(call: Callable[[], None]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        if errors:
            raise errors[0]

    def specialise(self, parts: list[tuple[Callable, tuple]], *_: Any) -> None:
        program = self.local.program

        def call(function: Callable, arguments: tuple) -> None:
            self.local.program = program
            function(*arguments)

        self.together([partial(call, *part) for part in parts])

    def add_at(self, address: Pointer, amount: int) -> int:
        with self.memory:
            before = read(address)
            write(address, before + amount)
        return int(before)

    def jit(self, function: Callable | None = None, **_: Any) -> Any:
        if function is None:
            return self.jit
        return Kernel(self, function)

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Memory | Barriers:
        if dtype == "i64":
            return Barriers(shape[0])
        if dtype == "i32":
            return Memory(np.zeros(shape, np.int64))
        return Memory(np.full(shape, np.nan, np.float32))

    def modules(self) -> dict[str, types.ModuleType]:
        nothing: Callable = lambda *_, **__: None  # noqa: E731
        base = "triton.experimental.gluon"
        language = types.ModuleType(f"{base}.language")
        vars(language).update(
            constexpr=lambda value: value,
            float32="f32",
            int64="i64",
            int32="i32",
            zeros=lambda shape, dtype, layout: np.zeros(shape, np.float32).view(Result),
            full=lambda shape, value, dtype, layout: np.full(shape, value).view(Result),
            sum=add_up,
            max=lambda values, axis: values.max(axis),
            maximum=np.maximum,
            exp2=np.exp2,
            where=lambda condition, yes, no: np.where(condition, yes, no).view(Result),
            atomic_add=self.add_at,
            SwizzledSharedLayout=nothing,
            arange=lambda first, last, layout: np.arange(first, last).view(Result),
            convert_layout=lambda values, layout: values,
            load=read,
            store=write,
            static_range=range,
            minimum=np.fmin,  # a GPU gives the other one of a NaN
            num_warps=lambda: 4,
            inline_asm_elementwise=nothing,
            program_id=lambda axis: self.local.program[axis],
            num_programs=lambda axis: self.num_programs[axis],
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialise,
            NVMMADistributedLayout=nothing,
            NVMMASharedLayout=nothing,
            DotOperandLayout=nothing,
            BlockedLayout=nothing,
            SliceLayout=nothing,
            barrier=nothing,
        )
        tma = types.SimpleNamespace(async_load=fetch, async_store=send, store_wait=nothing)
        hopper = types.ModuleType("hopper")
        vars(hopper).update(
            fence_async_shared=nothing,
            mbarrier=Mbarrier,
            tma=tma,
            warpgroup_mma=multiply,
            warpgroup_mma_wait=finish_products,
            TensorDescriptor=Descriptor,
        )
        ampere = types.ModuleType("ampere")
        vars(ampere).update(mma_v2=multiply_at_once)
        gluon = types.ModuleType(base)
        vars(gluon).update(jit=self.jit, language=language)
        return {
            base: gluon,
            f"{base}.language": language,
            f"{base}.language.nvidia.ampere": ampere,
            f"{base}.language.nvidia.hopper": hopper,
            f"{base}.nvidia.hopper": hopper,
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take Gluon's place among the imported modules."""
        ours = self.modules()
        experimental = importlib.import_module("triton.experimental")
        gluon = ours["triton.experimental.gluon"]
        # Once the real one is imported, `from triton.experimental import gluon` finds that.
        with (
            mock.patch.dict(sys.modules, ours),
            mock.patch.object(experimental, "gluon", gluon, create=True),
        ):
            yield

    def load(self, path: Path) -> dict[str, Any]:
        """Run a template, as it is emitted, on this machine and give its names."""
        names: dict[str, Any] = {"__name__": "emulated"}
        text = inline_parts(path.stem, path.read_text())
        # Other kernels of the template are Triton's own, which reads their lines of the file.
        file = write_module(text, path.stem)
        with self.installed():
            exec(compile(text, str(file), "exec"), names)
        return names


class Kernel:
    """A function of the module: called by another one, or launched over a grid."""

    def __init__(self, machine: Machine, function: Callable) -> None:
        self.machine, self.function = machine, function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(
            *arguments: Any,
            num_warps: int,
            enable_fp_fusion: bool,
            launch_pdl: bool = False,
            **named: Any,
        ) -> None:
            values = [Pointer(v) if isinstance(v, torch.Tensor) else v for v in arguments]
            self.machine.num_programs = sizes = (*grid, 1)[:2]

            def run(program: tuple[int, ...]) -> None:
                self.machine.local.program = program
                self.function(*values, **named)

            programs = itertools.product(*map(range, sizes))
            self.machine.together([partial(run, program) for program in programs])

        return launch
