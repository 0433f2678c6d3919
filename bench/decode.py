"""Time whole decode steps, input preparation and sampling included, under CUDA graphs.

Run: python bench/decode.py --models llama-3.1-8b,llama-3.2-1b --batches 1,8,32 --contexts 1024
`--parts` times the step again with one kind of kernel left out at a time, to see where time goes;
`--keep-up 5` replays it for five seconds, as a server does, until the card is at its power limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.kept_up import keep_up  # noqa: E402
from treadle.bench.random_models import CONFIGS, BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.ir.cost import read_bytes  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.trial import SelectedProgram, time_graph_ms  # noqa: E402
from treadle.runtime.triton_program import GraphedProgram  # noqa: E402

READ_BYTES_PER_S = 4.65e12  # measured on an H200: read-only stream
ROUNDS = 31


def floor_ms(engine: BenchEngine, batch: int, context: int) -> float:
    """Give the time to read once what the step can't do without: weights, keys and values."""
    dims = {"T": batch, "B": batch, "C": context}
    return 1e3 * read_bytes(engine.trial.graphs["decode"], dims) / READ_BYTES_PER_S


def case_of(name: str, batch: int, context: int, kv_dtype: str) -> str:
    """Name a case as results and goals do."""
    kv = "" if kv_dtype == "auto" else f" kv {kv_dtype}"
    return f"{name} batch {batch} context {context}{kv}"


def measure(name: str, batch: int, context: int, asked: argparse.Namespace) -> Iterator[Row]:
    """Time a step of `batch` sequences of `context` tokens each."""
    engine = build_engine(
        name,
        max_rows=batch,
        window=context + 512,
        max_step_tokens=max(batch, 16),
        kv_format=KV_DTYPES[asked.kv_dtype],
        only=("decode", batch),
        reuse_memory=not asked.parts,
    )
    engine.trial.fill(batch, context)
    graphed = engine.graphed(batch)
    value = statistics.median(time_graph_ms(graphed, engine.trial, context, ROUNDS))
    kept_up: dict[str, float] = {}
    if asked.keep_up:
        length = engine.trial.state.tensors["length"]

        def step() -> object:
            length.fill_(context)
            return graphed.run(batch, batch)

        found = keep_up(step, length.device, asked.keep_up)
        print(f"         {found}", flush=True)
        kept_up = found.conditions()
    logits = engine.programs["decode", batch].values["logits"]
    assert bool(torch.isfinite(logits).all()), "logits are not finite"
    case = case_of(name, batch, context, asked.kv_dtype)
    goal, peers = with_goal("decode", case)
    floor = floor_ms(engine, batch, context)
    stated = conditions(dtype="bf16", weights="random", page_size=64, graphs=True, **kept_up)
    yield Row("decode", case, value, "ms", "lower", goal, floor, peers, stated)
    if asked.parts:
        print_parts(engine, batch, context, value)


def main(arguments: list[str] | None = None) -> int:
    """Time the cases of the command line, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,llama-3.2-1b", help=", ".join(CONFIGS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--keep-up", type=float, default=0.0, help="seconds")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    cases = [
        (
            case_of(name, batch, context, asked.kv_dtype),
            partial(measure, name, batch, context, asked),
        )
        for name in asked.models.split(",")
        for batch in map(int, asked.batches.split(","))
        for context in map(int, asked.contexts.split(","))
    ]
    return play("decode", cases, asked, began_s).exit_code


def print_parts(engine: BenchEngine, batch: int, context: int, whole_ms: float) -> None:
    """Print what each kind of kernel adds to the step."""
    program = engine.programs["decode", batch]
    counts: dict[str, int] = {}
    for launch in program.plan.launches:
        kernel = launch.kernel.partition(".")[0]
        counts[kernel] = counts.get(kernel, 0) + 1
    for kernel, count in counts.items():
        kept = [
            index
            for index, launch in enumerate(program.plan.launches)
            if launch.kernel.partition(".")[0] != kernel
        ]
        graphed = GraphedProgram(SelectedProgram(program, kept), torch.cuda.graph_pool_handle())
        rest = statistics.median(time_graph_ms(graphed, engine.trial, context, ROUNDS))
        cost = 1e3 * (whole_ms - rest)
        print(f"    {kernel:28} ×{count:3}: {cost:8.1f} µs, {cost / count:7.2f} each", flush=True)


if __name__ == "__main__":
    sys.exit(main())
