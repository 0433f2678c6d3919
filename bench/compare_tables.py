"""Time a step by several tables of schedules in turn: once each, and kept up as in a server.

Run: python bench/compare_tables.py --work llama-3.1-8b:decode:256x1536 --tables mine.json
The shipped table is the first; the others lie over it. `tune --export` writes such a file, and one
with a few choices will do. A step is one of `--layers` layers. Kept up, a card may be at its power
limit, where what is faster once can be slower: what counts there is the energy of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.kept_up import KeptUp, keep_up  # noqa: E402
from treadle.bench.random_models import build_engine  # noqa: E402
from treadle.bench.timing import time_in_turn, timed_call  # noqa: E402
from treadle.kernels.tuned import TunedTable, read_table, shipped_table  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.triton_program import GraphedProgram  # noqa: E402
from treadle.runtime.tuner import Workload  # noqa: E402

ONCE_ROUNDS = 15
WARMING_S = 1.0  # until a cold card is as hot as it gets at once
SETTLING_S = 0.1  # after another step: the power limit looks back


def read_work(text: str) -> tuple[str, Workload]:
    """Read MODEL:STEP:SEQUENCESxTOKENS."""
    name, step, sizes = text.split(":")
    num_seqs, tokens = map(int, sizes.split("x"))
    return name, Workload(step, num_seqs, tokens)


def prepare(
    name: str, work: Workload, table: TunedTable, asked: argparse.Namespace
) -> Callable[[], object]:
    """Build a step by a table; give what plays it."""
    engine = build_engine(
        name,
        max_rows=work.num_seqs,
        window=work.context_tokens + asked.page_size,
        max_step_tokens=max(work.bucket, 16),
        target=asked.target,
        dtype=asked.dtype,
        kv_format=KV_DTYPES[asked.kv_dtype],
        page_size=asked.page_size,
        num_layers=asked.layers,
        table=table,
        only=(work.step, work.bucket),
    )
    fill = engine.trial.fill if work.step == "decode" else engine.trial.fill_prompts
    fill(work.num_seqs, work.context_tokens)
    program = engine.programs[work.step, work.bucket]
    sizes = (work.bucket, work.num_seqs)
    is_cuda = asked.target == "cuda"
    graphed = GraphedProgram(program, torch.cuda.graph_pool_handle(), sizes) if is_cuda else None
    length = engine.trial.state.tensors["length"]
    lengths = length.clone()

    def play() -> object:
        length.copy_(lengths)
        return (graphed or program).run(*sizes)

    return play


def main(arguments: list[str] | None = None) -> int:
    """Build the step by each table, then time all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="MODEL:STEP:SEQUENCESxTOKENS")
    parser.add_argument("--tables", required=True, help="files, with commas")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each turn that is kept up")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--page-size", type=int, default=64)
    asked = parser.parse_args(arguments)
    device = machine.device_of(asked.target)
    shipped = shipped_table(machine.look().gpu)
    tables = {"shipped": shipped} | {
        file: read_table(Path(file)).over(shipped) for file in asked.tables.split(",")
    }
    name, work = read_work(asked.work)
    steps = {title: prepare(name, work, table, asked) for title, table in tables.items()}
    timed = {title: timed_call(play, device) for title, play in steps.items()}
    once = time_in_turn(timed, ONCE_ROUNDS)
    turns: dict[str, list[KeptUp]] = {title: [] for title in steps}
    is_cuda = device.type == "cuda"
    keep_up(steps["shipped"], device, WARMING_S if is_cuda else 0.0)
    for number in range(asked.rounds):
        # Forth and back, so that nobody always comes after the same one.
        for title in list(steps)[:: 1 if number % 2 else -1]:
            keep_up(steps[title], device, SETTLING_S if is_cuda else 0.0)
            turns[title].append(keep_up(steps[title], device, asked.seconds))
    for title, found in turns.items():
        mean = KeptUp(*map(statistics.mean, zip(*map(astuple, found), strict=True)))
        low, high = min(each.ms for each in found), max(each.ms for each in found)
        print(
            f"{title}: {once[title].us / 1e3:.4g} ms once, {mean} ({low:.4g} to {high:.4g} ms)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
