"""The body of `tune`: which programs to tune for a model, how long, and where the winners go.

Called by the command line, and by `compile` where it is asked to tune first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from treadle.ir.errors import ConfigError, MachineError
from treadle.models.registry import read_config
from treadle.runtime import compiler, machine, tables
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.compile_key import CompileOptions, engine_config
from treadle.runtime.config import (
    EngineConfig,
    decode_buckets,
    mixed_buckets,
    read_kv_dtypes,
)
from treadle.runtime.console import print_json, print_table, program_name
from treadle.runtime.progress import Progress
from treadle.runtime.roofs import gpu_state, measure_roofs
from treadle.runtime.timings import TimingLog
from treadle.runtime.tuner import Effort, Tuned, Workload, tune_program

LAYERS = 4  # of the model: more than the L2 cache holds, and a step is still short
DEFAULT_BATCHES = "1,8,32,128"
DEFAULT_PROMPTS = "1x1024"
BUDGET_S = {"quick": 300.0, "full": 3600.0}

Report = Callable[[str], None]


@dataclass(frozen=True)
class TuneRun:
    """Tell what tuning a model did: each program with its seconds, and where all of it is."""

    gpu: str
    table: Path
    log: Path
    programs: list[tuple[Workload, Tuned, float]]
    left_out: list[Workload]

    @property
    def finished(self) -> bool:
        """Say whether nothing was cut off by the budget."""
        return not self.left_out and all(done.finished for _, done, _ in self.programs)


def parse_workloads(batches: str, prompts: str, context_tokens: int) -> list[Workload]:
    """Read `1,8,32` and `1x1024,8x1024`. Raises: ConfigError: neither is such a list."""
    found = []
    try:
        for text in filter(None, batches.split(",")):
            found.append(Workload("decode", int(text), context_tokens))
        for text in filter(None, prompts.split(",")):
            count, _, tokens = text.partition("x")
            found.append(Workload("mixed", int(count), int(tokens)))
    except ValueError:
        raise ConfigError(
            f"`{text}` is no workload.",
            remedy="Write --batches 1,8,32 and --prompts 1x1024,8x1024 (prompts x tokens each).",
        ) from None
    if not found or any(min(w.num_seqs, w.context_tokens) < 1 for w in found):
        raise ConfigError("There is nothing to tune for: sizes are at least 1.")
    return found


def check_buckets(workloads: Sequence[Workload], engine: EngineConfig) -> None:
    """Refuse sizes that no program has, because their winners would never be looked up.

    Raises: ConfigError: names the sizes that there are.
    """
    buckets = {
        "decode": decode_buckets(engine.max_rows),
        "mixed": mixed_buckets(engine.max_step_tokens),
    }
    for work in workloads:
        if work.bucket not in buckets[work.step]:
            known = ", ".join(map(str, buckets[work.step]))
            unit = "sequences" if work.step == "decode" else "tokens"
            raise ConfigError(
                f"No program has a bucket of {work.bucket} {unit} ({work}).",
                remedy=f"{work.step.capitalize()} steps have buckets of {known} {unit}.",
            )
        if work.context_tokens >= engine.max_context_tokens:
            raise ConfigError(
                f"{work.context_tokens} tokens fill the window of {engine.max_context_tokens}.",
                remedy="Take fewer, or a larger --max-context-tokens.",
            )


def need_gpu() -> None:
    """Refuse to tune without a GPU. Raises: MachineError."""
    if not machine.look().gpu:
        raise MachineError(
            "Tuning times kernels on the GPU that will serve, and torch sees none here.",
            remedy="Tune on that machine, then `tune --export FILE` there and `tune --import FILE` "
            "(or `compile --pin FILE`) here.",
        )


def tune_model(
    source: str,
    options: CompileOptions,
    workloads: Sequence[Workload],
    effort: Effort,
    report: Report = lambda phase: None,
) -> TuneRun:
    """Tune a model's programs for this GPU, one after the other, within the effort's deadline.

    Raises: MachineError: there is no GPU. ConfigError, CheckpointError, SpecError.
    """
    need_gpu()
    found = machine.look()
    report(f"reading {source}")
    config = read_config(open_checkpoint(source).config)
    engine = engine_config(config, replace(options, target="cuda"), found)
    check_buckets(workloads, engine)
    small = replace(config, num_layers=min(config.num_layers, LAYERS))
    graphs = compiler.build(small, engine).fused
    log = TimingLog(tables.log_path(found.gpu))
    report("measuring the roofs")
    log.append(
        "session",
        model=Path(source).resolve().name,
        gpu=found.gpu,
        architecture=found.architecture,
        torch=found.torch,
        triton=found.triton,
        autotune=effort.autotune,
        workloads=[str(work) for work in workloads],
        layers=small.num_layers,
        model_layers=config.num_layers,
        began=datetime.now().isoformat(timespec="seconds"),
        state=gpu_state(),
        roofs=measure_roofs(torch.device("cuda")).to_json(),
    )
    table = tables.table_for(found.gpu, found.architecture, "cached")
    mine = tables.user_table(found.gpu)
    run = TuneRun(found.gpu, tables.table_path(found.gpu), log.path or Path(), [], [])
    for work in workloads:
        if time.monotonic() >= effort.deadline_s:
            run.left_out.append(work)
            continue
        began_s = time.monotonic()
        done = tune_program(
            graphs, engine, work, table, found.architecture, report, log=log, effort=effort
        )
        torch.cuda.empty_cache()
        keys = {tuning.key for tuning in done.tunings}
        for key in keys & set(done.table.choices):
            choice = done.table.choices[key]
            mine = mine.with_choice(key, choice.template, choice.schedule)
        tables.save_user_table(mine)
        table = mine.over(table)
        run.programs.append((work, done, time.monotonic() - began_s))
    log.append("session end", state=gpu_state())
    return run


def run_tune(
    source: str,
    batches: str,
    prompts: str,
    context: int,
    autotune: str,
    budget: float,
    again: bool,
    dtype: str | None,
    kv_dtype: str,
    page_size: int,
    max_context_tokens: int,
    export_to: Path | None,
    import_from: Path | None,
    gpu: str,
    progress: str,
    as_json: bool,
) -> None:
    """Tune a model's programs, or move tables in and out."""
    if export_to or import_from:
        _move_tables(source, export_to, import_from, gpu, as_json)
        return
    if not source:
        raise ConfigError("Expected a MODEL to tune.", remedy="Or --export FILE, --import FILE.")
    workloads = parse_workloads(batches, prompts, context)
    need_gpu()
    options = CompileOptions(
        target="cuda",
        dtype=dtype or "",
        page_size=page_size,
        max_context_tokens=max_context_tokens,
        kv_formats=read_kv_dtypes(kv_dtype)[:1],
    )
    deadline_s = time.monotonic() + (budget or BUDGET_S[autotune])
    with Progress(progress) as shown, shown.phases() as report:
        run = tune_model(source, options, workloads, Effort(autotune, deadline_s, again), report)
    _print_run(run, as_json)


def tune_for_compile(source: str, options: CompileOptions, report: Report) -> TuneRun:
    """Tune the usual workloads within the usual time. Raises: see `tune_model`."""
    workloads = parse_workloads(DEFAULT_BATCHES, DEFAULT_PROMPTS, 1024)
    need_gpu()
    deadline_s = time.monotonic() + BUDGET_S[options.autotune]
    return tune_model(source, options, workloads, Effort(options.autotune, deadline_s), report)


def _move_tables(
    source: str, export_to: Path | None, import_from: Path | None, gpu: str, as_json: bool
) -> None:
    if source or (export_to and import_from):
        raise ConfigError(
            "--export and --import take a FILE and nothing else: no MODEL, and not both."
        )
    if import_from:
        table = tables.import_table(import_from)
        result = {"imported": str(import_from), "into": str(tables.table_path(table.gpu))}
    elif export_to:
        gpu = gpu or machine.look().gpu
        if not gpu:
            raise MachineError(
                "There is no GPU here whose table could be exported.",
                remedy="Name one: --gpu 'NVIDIA H200'.",
            )
        table = tables.export_table(export_to, gpu)
        result = {"exported": str(export_to)}
    details: dict[str, Any] = result | {"gpu": table.gpu, "choices": len(table.choices)}
    if as_json:
        print_json(details)
    else:
        print_table([(name, str(value)) for name, value in details.items()])


def _print_run(run: TuneRun, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "gpu": run.gpu,
                "table": str(run.table),
                "log": str(run.log),
                "finished": run.finished,
                "left_out": [str(work) for work in run.left_out],
                "programs": [
                    {
                        "work": str(work),
                        "seconds": seconds,
                        "finished": done.finished,
                        "timed": done.timed,
                        "known": done.known,
                        "kernels": [asdict(tuning) for tuning in done.tunings],
                    }
                    for work, done, seconds in run.programs
                ],
            }
        )
        return
    rows = [("program", "timed", "known", "seconds", "")]
    for work, done, seconds in run.programs:
        end = "" if done.finished else "cut off by the budget"
        rows.append((str(work), str(done.timed), str(done.known), f"{seconds:.0f}", end))
    rows += [(str(work), "0", "0", "0", "left out: no time left") for work in run.left_out]
    print_table(rows)
    print_table(
        [
            ("table", str(run.table)),
            ("timings", str(run.log)),
            ("next", f"{program_name()} report {run.log}"),
        ]
    )
    if not run.finished:
        print("Run the same command again to go on where the time ended.")
