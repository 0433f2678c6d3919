"""Time decode attention over KV caches of every dtype, side by side, at many sizes.

Run: python bench/kv_attention.py --batches 1,8,32,128,256 --contexts 1024,8192,32768 --candidates 6
A figure is the launches of attention alone in a CUDA graph, layer after layer, each on pages of its
own; the best of so many schedules, the tuned one first, then the likeliest. Sizes that `--max-gib`
can't hold are said and left out. `--target interpret --rounds 1` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.random_models import CONFIGS, build_engine, build_graphs  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.bench.timing import time_us  # noqa: E402
from treadle.ir.graph import Graph, Op  # noqa: E402
from treadle.kernels.lower.candidates import Candidate, Situation  # noqa: E402
from treadle.kernels.tuned import TunedTable, shipped_table  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES, EngineConfig  # noqa: E402
from treadle.runtime.state import page_bytes  # noqa: E402
from treadle.runtime.trial import SelectedProgram  # noqa: E402

PAGE_TOKENS = 64
READ_BYTES_PER_S = 4.65e12  # measured on an H200: read-only stream


class Nth:
    """Choose the n-th candidate of attention, and the first of every other op.

    The tuned one comes first, as it is served, then the others in their order.
    """

    def __init__(self, number: int, table: TunedTable) -> None:
        self.number = number
        self.schedule = ""
        self._table = table

    def __call__(
        self, op: Op, graph: Graph, where: Situation, candidates: Iterator[Candidate]
    ) -> Candidate:
        """Choose; the schedule of attention is noted, empty where there is no n-th."""
        found = list(candidates)
        if not any(inner.kind == "attention" for inner in op.plain):
            return found[0]
        tuned = self._table.choose(op, graph, where, iter(found), on_stale=print)
        found.sort(key=lambda each: each != tuned)
        chosen = found[min(self.number, len(found) - 1)]
        self.schedule = str(chosen.schedule) if self.number < len(found) else ""
        return chosen


def time_attention(
    asked: argparse.Namespace, kv_dtype: str, batch: int, context: int, layers: int
) -> tuple[float, str]:
    """Give the µs of one layer's attention with the best of the candidates, and its schedule."""
    best, best_schedule = float("inf"), ""
    table = shipped_table(machine.look().gpu)
    for number in range(asked.candidates):
        choose = Nth(number, table)
        engine = build_engine(
            asked.model,
            max_rows=batch,
            window=context + PAGE_TOKENS,
            max_step_tokens=max(batch, 16),
            target=asked.target,
            dtype="bf16" if asked.target == "cuda" else "f32",
            kv_format=KV_DTYPES[kv_dtype],
            num_layers=layers,
            only=("decode", batch),
            choose=choose,
            reuse_memory=False,
        )
        if not choose.schedule:
            break
        engine.trial.fill(batch, context)
        program = engine.programs["decode", batch]
        graph = engine.trial.graphs[program.plan.form]
        kinds = {op.name: {inner.kind for inner in op.plain} for op in graph.ops}
        indices = [i for i, e in enumerate(program.plan.launches) if "attention" in kinds[e.op]]
        program.run(batch, batch)
        selected = SelectedProgram(program, indices)
        length = engine.trial.state.tensors["length"]

        def run(selected: SelectedProgram = selected) -> None:
            selected.run(batch, batch)

        def restore(length: torch.Tensor = length) -> None:
            length.fill_(context)

        found = time_us(run, length.device, asked.rounds, before=restore).us / len(indices)
        if found < best:
            best, best_schedule = found, choose.schedule
        del engine, program, selected
        if asked.target == "cuda":
            torch.cuda.empty_cache()
    return best, best_schedule


def main(arguments: list[str] | None = None) -> None:
    """Time the sizes of the command line and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--kv-dtypes", default=",".join(KV_DTYPES))
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--candidates", type=int, default=3, help="schedules to try, of each")
    parser.add_argument("--layers", type=int, default=4, help="fewer where memory is short")
    parser.add_argument("--max-gib", type=float, default=90.0, help="for pages")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--out", type=Path, help="a folder for kv_attention.json")
    asked = parser.parse_args(arguments)
    machine.device_of(asked.target)
    rows: list[Row] = []
    for batch in map(int, asked.batches.split(",")):
        for context in map(int, asked.contexts.split(",")):
            plain_us = 0.0
            for kv_dtype in asked.kv_dtypes.split(","):
                engine = EngineConfig(
                    asked.target, "bf16", PAGE_TOKENS, kv_format=KV_DTYPES[kv_dtype]
                )
                graph = build_graphs(asked.model, engine, 1).fused["decode"]
                layer_bytes = batch * (context // PAGE_TOKENS + 2) * page_bytes(graph)
                layers = min(asked.layers, int(asked.max_gib * 2**30 // layer_bytes))
                case = f"{asked.model} {batch}x{context} {kv_dtype}"
                if layers < 1:
                    print(f"{case}: left out, a layer's pages are {layer_bytes / 2**30:.0f} GiB")
                    continue
                us, schedule = time_attention(asked, kv_dtype, batch, context, layers)
                plain_us = plain_us or (us if kv_dtype == "auto" else 0.0)
                floor = 1e6 * batch * context * page_bytes(graph) / PAGE_TOKENS / READ_BYTES_PER_S
                goal, peers = with_goal("kv_attention", case)
                stated = conditions(layers=layers, schedule=schedule, over_plain=plain_us / us)
                rows.append(
                    Row("kv_attention", case, us, "µs", "lower", goal, floor, peers, stated)
                )
                print(f"{case}: {us:.2f} µs, {plain_us / us:.2f}× plain, {schedule}", flush=True)
                written = write_rows("kv_attention", rows, asked.out)  # kept whatever comes after
    if rows:
        print(written)


if __name__ == "__main__":
    main()
