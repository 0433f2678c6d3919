"""Time whole mixed steps of prompts: input preparation, all layers, head and sampling.

Run: python bench/prefill.py --models llama-3.1-8b --prompts 1x512,1x1024,1x2048,8x1024,1x8192
On a GPU the step is captured in a graph for timing, so that the host's launches are left out;
`launched_ms` among the conditions is the step as it is served, with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.random_models import BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.bench.timing import time_us  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.planner import bucket_dims  # noqa: E402
from treadle.runtime.roofs import best_seconds  # noqa: E402

MATMUL_FLOPS_PER_S = 786e12  # measured on an H200: bf16 matmul


def floor_ms(engine: BenchEngine, num_seqs: int, tokens: int) -> float:
    """Give the time of the step's arithmetic alone; of a causal score half is computed."""
    trial = engine.trial
    dims = bucket_dims(trial.engine, "mixed", num_seqs * tokens)
    dims = {**dims, "C": tokens // 2, "B": num_seqs}
    graph = trial.graphs["mixed"]
    return 1e3 * sum(op_cost(op, graph, dims).flops for op in graph.ops) / MATMUL_FLOPS_PER_S


def case_of(name: str, text: str, kv_dtype: str) -> str:
    """Name a case as results and goals do."""
    return f"{name} {text}" + ("" if kv_dtype == "auto" else f" kv {kv_dtype}")


def measure(name: str, text: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Time a step of whole prompts, of which `text` says how many of how many tokens: `8x1024`."""
    num_seqs, tokens = map(int, text.split("x"))
    device = machine.device_of(asked.target)
    total = num_seqs * tokens
    bucket = max(total, 16)
    engine = build_engine(
        name,
        max_rows=num_seqs,
        window=tokens + asked.page_size,
        max_step_tokens=bucket,
        target=asked.target,
        dtype=asked.dtype,
        kv_format=KV_DTYPES[asked.kv_dtype],
        page_size=asked.page_size,
        num_layers=asked.layers,
        only=("mixed", bucket),
    )
    engine.trial.fill_prompts(num_seqs, tokens)
    program = engine.programs["mixed", bucket]
    length = engine.trial.state.tensors["length"]

    def step() -> object:
        return program.run(total, num_seqs)

    launched_ms = 1e3 * best_seconds(step, device, rounds=min(asked.rounds, 5))
    spread = time_us(step, device, asked.rounds, before=lambda: length.fill_(tokens))
    assert bool(torch.isfinite(program.values["logits"]).all()), "logits are not finite"
    case = case_of(name, text, asked.kv_dtype)
    goal, peers = with_goal("prefill", case)
    stated = conditions(
        dtype=asked.dtype,
        weights="random",
        page_size=asked.page_size,
        launched_ms=launched_ms,
        p10=spread.low / 1e3,
        p90=spread.high / 1e3,
        tokens_per_s=total / spread.us * 1e6,
    )
    floor = floor_ms(engine, num_seqs, tokens)
    yield Row("prefill", case, spread.us / 1e3, "ms", "lower", goal, floor, peers, stated)


def main(arguments: list[str] | None = None) -> int:
    """Time the cases of the command line, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--prompts", default="1x1024,8x1024,1x512,1x2048,1x8192")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--page-size", type=int, default=64)
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    cases = [
        (case_of(name, text, asked.kv_dtype), partial(measure, name, text, asked))
        for name in asked.models.split(",")
        for text in asked.prompts.split(",")
    ]
    return play("prefill", cases, asked, began_s).exit_code


if __name__ == "__main__":
    sys.exit(main())
