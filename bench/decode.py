"""Time whole decode steps, input preparation and sampling included, under CUDA graphs.

Run: python bench/decode.py --models llama-3.1-8b,llama-3.2-1b --batches 1,8,32 --contexts 1024
`--parts` times the step again with one kind of kernel left out at a time, to see where time goes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.random_models import BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
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


def main() -> None:
    """Time the cases of the command line and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,llama-3.2-1b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write decode.json (default: results/)")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.models.split(","):
        for batch in map(int, arguments.batches.split(",")):
            for context in map(int, arguments.contexts.split(",")):
                engine = build_engine(
                    name,
                    max_rows=batch,
                    window=context + 512,
                    max_step_tokens=max(batch, 16),
                    kv_format=KV_DTYPES[arguments.kv_dtype],
                )
                engine.trial.fill(batch, context)
                times = time_graph_ms(engine.graphed(batch), engine.trial, context, ROUNDS)
                value = statistics.median(times)
                logits = engine.programs["decode", batch].values["logits"]
                assert bool(torch.isfinite(logits).all()), "logits are not finite"
                case = f"{name} batch {batch} context {context}"
                if arguments.kv_dtype != "auto":
                    case += f" kv {arguments.kv_dtype}"
                goal, peers = with_goal("decode", case)
                floor = floor_ms(engine, batch, context)
                stated = conditions(dtype="bf16", weights="random", page_size=64, graphs=True)
                rows.append(Row("decode", case, value, "ms", "lower", goal, floor, peers, stated))
                write_rows("decode", rows[-1:], arguments.out)  # kept, whatever comes next
                print(f"{case}: {value:.3f} ms, goal {goal}, floor {floor:.2f}", flush=True)
                if arguments.parts:
                    print_parts(engine, batch, context, value)
                del engine
                torch.cuda.empty_cache()
    print(write_rows("decode", rows, arguments.out))


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
    main()
