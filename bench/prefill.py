"""Time whole mixed steps of prompts: input preparation, all layers, head and sampling.

Run: python bench/prefill.py --models llama-3.1-8b --prompts 1x512,1x1024,1x2048,8x1024,1x8192
`1x1024+80x1536` is a prompt of 1,024 tokens beside 80 rows that decode after 1,536.
On a GPU the step is captured in a graph for timing, so that the host's launches are left out;
`launched_ms` among the conditions is the step as it is served, with them; `--keep-up 5` plays that
for five seconds, as a busy server does, until the card is at its power limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.kept_up import keep_up  # noqa: E402
from treadle.bench.random_models import BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.bench.timing import time_us  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.kernels.schedule.machine import power_of_two  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.plan import bucket_dims  # noqa: E402
from treadle.runtime.roofs import best_seconds  # noqa: E402

MATMUL_FLOPS_PER_S = 786e12  # measured on an H200: bf16 matmul


@dataclass(frozen=True)
class Step:
    """Say how many prompts of how many tokens, and how many rows that decode after how many."""

    num_prompts: int
    prompt_tokens: int
    num_decode: int = 0
    context_tokens: int = 0

    @property
    def num_seqs(self) -> int:
        """The sequences of the step."""
        return self.num_prompts + self.num_decode

    @property
    def num_tokens(self) -> int:
        """The tokens of the step."""
        return self.num_prompts * self.prompt_tokens + self.num_decode

    @property
    def bucket(self) -> int:
        """A bucket that holds it: a power of two, as tuned ones are."""
        return max(power_of_two(self.num_tokens), 16)


def read_step(text: str) -> Step:
    """Read `8x1024` or `1x1024+80x1536`."""
    return Step(*(int(number) for part in text.split("+") for number in part.split("x")))


def floor_ms(engine: BenchEngine, step: Step) -> float:
    """Give the time of the step's arithmetic alone; of a causal score half is computed."""
    trial = engine.trial
    dims = bucket_dims(trial.engine, "mixed", step.bucket)
    seen = step.num_prompts * step.prompt_tokens * step.prompt_tokens // 2
    seen += step.num_decode * (step.context_tokens + 1)
    dims = {**dims, "T": step.num_tokens, "C": seen // step.num_tokens, "B": step.num_seqs}
    graph = trial.graphs["mixed"]
    return 1e3 * sum(op_cost(op, graph, dims).flops for op in graph.ops) / MATMUL_FLOPS_PER_S


def case_of(name: str, text: str, kv_dtype: str) -> str:
    """Name a case as results and goals do."""
    return f"{name} {text}" + ("" if kv_dtype == "auto" else f" kv {kv_dtype}")


def measure(name: str, text: str, asked: argparse.Namespace) -> Iterator[Row]:
    """Time a step of whole prompts, and of rows that decode, as `text` has it."""
    sizes = read_step(text)
    device = machine.device_of(asked.target)
    total, bucket = sizes.num_tokens, sizes.bucket
    engine = build_engine(
        name,
        max_rows=sizes.num_seqs,
        window=max(sizes.prompt_tokens, sizes.context_tokens + 1) + asked.page_size,
        max_step_tokens=bucket,
        target=asked.target,
        dtype=asked.dtype,
        kv_format=KV_DTYPES[asked.kv_dtype],
        page_size=asked.page_size,
        num_layers=asked.layers,
        only=("mixed", bucket),
    )
    engine.trial.fill_prompts(
        sizes.num_prompts, sizes.prompt_tokens, sizes.num_decode, sizes.context_tokens
    )
    program = engine.programs["mixed", bucket]
    length = engine.trial.state.tensors["length"]
    lengths = length.clone()

    def step() -> object:
        return program.run(total, sizes.num_seqs)

    launched_ms = 1e3 * best_seconds(step, device, rounds=min(asked.rounds, 5))
    spread = time_us(step, device, asked.rounds, before=lambda: length.copy_(lengths))
    assert bool(torch.isfinite(program.values["logits"]).all()), "logits are not finite"
    case = case_of(name, text, asked.kv_dtype)
    goal, peers = with_goal("prefill", case)
    kept_up: dict[str, float] = {}
    if asked.keep_up:

        def served() -> object:
            length.copy_(lengths)
            return step()

        found = keep_up(served, device, asked.keep_up)
        print(f"         {found}", flush=True)
        kept_up = found.conditions()
    stated = conditions(
        dtype=asked.dtype,
        weights="random",
        page_size=asked.page_size,
        launched_ms=launched_ms,
        p10=spread.low / 1e3,
        p90=spread.high / 1e3,
        tokens_per_s=total / spread.us * 1e6,
        **kept_up,
    )
    floor = floor_ms(engine, sizes)
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
    parser.add_argument("--keep-up", type=float, default=0.0, help="seconds")
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
