"""Measure the host's part of decode steps, and how long the device waits between two of them.

Run: python bench/host_time.py --model llama-3.1-8b --batches 1,8,64,256
On a GPU the real engine serves a random checkpoint, and events before and after each step's graph
tell the gaps between steps. `--target fake` stands in for the device with a clock: a step takes
`--step-ms` and computes nothing, so that the host alone can be looked at on any machine.
`--profile` prints the worker's most expensive functions.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.bench.workloads import draw_prompt  # noqa: E402
from treadle.runtime import host_times  # noqa: E402
from treadle.runtime.compile_key import CompileOptions  # noqa: E402
from treadle.runtime.compiler import compile_model  # noqa: E402
from treadle.runtime.engine import Engine, LoadedModel  # noqa: E402
from treadle.runtime.executor import Executor, Program, StepResult  # noqa: E402
from treadle.runtime.loading import ServeOptions, load_model  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402
from treadle.runtime.scheduler import Scheduler  # noqa: E402
from treadle.runtime.steps import StepPlan  # noqa: E402

PROMPT_TOKENS = 16
WARM_TOKENS = 8  # of each answer, before anything is counted


class WatchedProgram:
    """Run a program between two events, to learn when the device was busy with it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Run the step and note its events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        values = self._program.run(num_tokens, num_seqs)
        end.record()
        self.marks.append((begin, end))
        return values

    def gaps_us(self) -> list[float]:
        """Give the time between the end of each step and the beginning of the next."""
        return [
            1e3 * end.elapsed_time(begin)
            for (_, end), (begin, _) in zip(self.marks, self.marks[1:], strict=False)
        ]


class FakeDevice:
    """Take a fixed time for each step, one after the other, by the clock."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.free_at_s = 0.0
        self.gaps_us: list[float] = []

    def launch(self) -> FakeEvent:
        """Queue a step; give what tells its end."""
        now_s = time.perf_counter()
        self.gaps_us.append(1e6 * max(0.0, now_s - self.free_at_s))
        self.free_at_s = max(now_s, self.free_at_s) + self.step_s
        return FakeEvent(self.free_at_s)


@dataclasses.dataclass(frozen=True)
class FakeEvent:
    """Stand in for a CUDA event that comes at a known time."""

    at_s: float

    def synchronize(self) -> None:
        """Wait for it, as CUDA does: without Python's lock."""
        time.sleep(max(0.0, self.at_s - time.perf_counter()))


class FakeProgram:
    """Give the same tokens whatever is asked."""

    def __init__(self, max_rows: int) -> None:
        self._values = {"tokens": torch.full((max_rows,), 7, dtype=torch.int32)}

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Do nothing."""
        return self._values


class FakeExecutor(Executor):
    """Do all that the executor does, with a fake device behind it."""

    def __init__(self, real: Executor, max_rows: int, step_s: float) -> None:
        program = FakeProgram(max_rows)
        programs = {
            "decode": dict.fromkeys(real.decode, program),
            "mixed": dict.fromkeys(real.mixed, program),
        }
        super().__init__(real.state, programs, programs)
        self.device = FakeDevice(step_s)

    def launch(self, plan: StepPlan) -> StepResult:
        """Plan the device's time for the step, after the host's work."""
        return dataclasses.replace(super().launch(plan), _done=self.device.launch())


def with_fake_device(model: LoadedModel, step_s: float) -> LoadedModel:
    """Give the model a device that computes nothing, and two steps in flight as on a GPU."""
    old = model.scheduler
    scheduler = Scheduler(
        old.pool,
        max_rows=old.max_rows,
        max_step_tokens=old.max_step_tokens,
        max_model_len=old.max_model_len,
        max_in_flight=2,
    )
    executor = FakeExecutor(model.executor, old.max_rows, step_s)
    return dataclasses.replace(model, executor=executor, scheduler=scheduler)


def with_watched_programs(model: LoadedModel) -> LoadedModel:
    """Give the model programs whose steps leave events."""
    old = model.executor
    decode = {bucket: WatchedProgram(program) for bucket, program in old.decode.items()}
    return dataclasses.replace(
        model, executor=Executor(old.state, {"decode": decode, "mixed": old.mixed}, old.resamples)
    )


@dataclasses.dataclass(frozen=True)
class Taken:
    """What some steps took: seconds of the host by phase, of the wall, and their number."""

    seconds: dict[str, float]
    wall_s: float
    cpu_s: float  # of the worker's thread: less than its phases by what it waited for others
    steps: int

    def us(self, phase: str) -> float:
        """Give a phase's µs a step."""
        return 1e6 * self.seconds[phase] / self.steps

    @property
    def cpu_us(self) -> float:
        """The µs of processor time a step of the worker's thread."""
        return 1e6 * self.cpu_s / self.steps

    @property
    def host_us(self) -> float:
        """The µs a step of the phases in which the host works."""
        return sum(self.us(phase) for phase in self.seconds if phase not in host_times.WAITING)


async def decode_steps(engine: Engine, batch: int, steps: int) -> Taken:
    """Let `batch` requests decode together, read as a server reads them; measure the middle."""
    tokens = WARM_TOKENS + steps + WARM_TOKENS
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    counts = [0] * batch
    everyone_decodes, someone_ends = asyncio.Event(), asyncio.Event()

    async def read(number: int) -> None:
        prompt = draw_prompt(PROMPT_TOKENS, engine.vocab_size, number)
        async for delta in engine.submit(prompt, params):
            counts[number] = delta.usage.completion_tokens
            if counts[number] == WARM_TOKENS and min(counts) >= WARM_TOKENS:
                everyone_decodes.set()
            if counts[number] == tokens - WARM_TOKENS:
                someone_ends.set()

    (worker,) = [thread for thread in threading.enumerate() if thread.name == "treadle-engine"]
    assert worker.ident is not None, "it runs"
    clock = time.pthread_getcpuclockid(worker.ident)

    def look() -> tuple[dict[str, float], float, float, int]:
        seconds = dict(engine.model.executor.times.seconds)
        steps = engine.model.scheduler.steps_total
        return seconds, time.perf_counter(), time.clock_gettime(clock), steps

    readers = [asyncio.create_task(read(number)) for number in range(batch)]
    await everyone_decodes.wait()
    before_seconds, before_s, before_cpu_s, before_steps = look()
    await someone_ends.wait()
    seconds, now_s, cpu_s, steps_now = look()
    await asyncio.gather(*readers)
    difference = {phase: seconds[phase] - before_seconds[phase] for phase in seconds}
    return Taken(difference, now_s - before_s, cpu_s - before_cpu_s, steps_now - before_steps)


def run_engine(
    load: Callable[[Callable[[str], None]], LoadedModel], batch: int, steps: int, profile: bool
) -> tuple[Taken, LoadedModel]:
    """Start an engine, let it decode, close it."""

    async def run() -> tuple[Taken, LoadedModel]:
        engine = Engine("bench", load)
        await engine.start()
        try:
            return await decode_steps(engine, batch, steps), engine.model
        finally:
            await engine.close()

    if not profile:
        return asyncio.run(run())
    profiler = cProfile.Profile()
    serve = Engine._serve
    Engine._serve = lambda self: profiler.runcall(serve, self)  # type: ignore[method-assign]
    try:
        found = asyncio.run(run())
    finally:
        Engine._serve = serve  # type: ignore[method-assign]
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return found


def measure(
    artifact: Path, batch: int, asked: argparse.Namespace, stated: dict[str, object]
) -> Iterator[Row]:
    """Measure one batch: the host's phases, then the device's waits."""
    options = ServeOptions(num_pages=asked.max_rows * 8)
    is_fake = asked.target == "fake"

    def load(report: Callable[[str], None]) -> LoadedModel:
        model = load_model(artifact, options, report)
        return with_fake_device(model, asked.step_ms / 1e3) if is_fake else model

    taken, model = run_engine(load, batch, asked.steps, asked.profile)
    for phase in taken.seconds:
        print(f"           {taken.us(phase):9.1f} µs  {phase}", flush=True)
    print(f"           {taken.cpu_us:9.1f} µs of processor time", flush=True)
    if is_fake:
        gaps = model.executor.device.gaps_us[1:]  # type: ignore[attr-defined]
    else:

        def load_watched(report: Callable[[str], None]) -> LoadedModel:
            return with_watched_programs(load_model(artifact, options, report))

        _, model = run_engine(load_watched, batch, asked.steps, False)
        programs = model.executor.decode.values()
        watched = [p for p in programs if isinstance(p, WatchedProgram) and p.marks]
        gaps = max((program.gaps_us() for program in watched), key=len)
    # The first steps and the last are not of the whole batch.
    gaps = gaps[WARM_TOKENS:-WARM_TOKENS] or gaps
    more: dict[str, object] = {
        "phases_us": {phase: taken.us(phase) for phase in taken.seconds},
        "cpu_us": taken.cpu_us,
        "step_us": 1e6 * taken.wall_s / taken.steps,
        "steps": taken.steps,
        "gaps_us": {"p10": _quantile(gaps, 0.1), "p90": _quantile(gaps, 0.9)},
    }
    for what, value in (("host time", taken.host_us), ("idle GPU", statistics.median(gaps))):
        case = f"{asked.model} batch {batch} {what}" + (" (fake device)" if is_fake else "")
        goal, peers = with_goal("host_time", case)
        row = Row("host_time", case, value, "µs a step", "lower", goal, None, peers)
        yield dataclasses.replace(row, conditions=stated | more)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(arguments: list[str] | None = None) -> int:
    """Measure the batches of the command line, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--batches", default="256,64,8,1")
    parser.add_argument("--steps", type=int, default=200, help="to measure")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "fake"])
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the fake device")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    batches = [int(text) for text in asked.batches.split(",")]
    asked.max_rows = max(batches)
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        model = write_checkpoint(asked.model, folder, asked.layers)
        options = CompileOptions(
            target="reference" if asked.target == "fake" else asked.target,
            max_rows=asked.max_rows,
            max_step_tokens=max(asked.max_rows * PROMPT_TOKENS, 512),
            max_context_tokens=PROMPT_TOKENS + 2 * WARM_TOKENS + asked.steps + 64,
            page_size=64,  # a GPU's, on every target: how often a row needs a page is host time
        )
        print("compiling", flush=True)
        artifact = compile_model(model, Path(temporary) / "artifact", options).artifact.path
        stated = conditions(weights="random", target=asked.target, prompt_tokens=PROMPT_TOKENS)
        if asked.target == "fake":
            stated["step_ms"] = asked.step_ms
        cases = [
            (f"{asked.model} batch {batch}", partial(measure, artifact, batch, asked, stated))
            for batch in batches
        ]
        return play("host_time", cases, asked, began_s).exit_code


if __name__ == "__main__":
    sys.exit(main())
