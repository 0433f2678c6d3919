"""Measure offline throughput through the real engine: scheduler, pages, sampling, text.

Run: python bench/throughput.py --model llama-3.1-8b --shapes 1024x1024,128x2048,2048x128
Each case keeps `concurrency` requests running until all are done. Prompts are random tokens, so the
prefix cache finds nothing; no token ends an answer early.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.runtime.commands import make_engine  # noqa: E402
from treadle.runtime.compiler import CompileOptions, compile_model  # noqa: E402
from treadle.runtime.engine import Engine  # noqa: E402
from treadle.runtime.loading import ServeOptions  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """What one request took: seconds to the first delta and to the last, and its tokens."""

    first_s: float
    whole_s: float
    tokens: int


async def play(
    engine: Engine, prompt_tokens: int, output_tokens: int, concurrency: int, requests: int
) -> tuple[float, list[Outcome]]:
    """Run all requests, so many at a time; give the seconds of the whole and each one's."""
    chance = random.Random(prompt_tokens * 7919 + output_tokens)
    gate = asyncio.Semaphore(concurrency)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    vocab_size = engine.vocab_size

    async def one() -> Outcome:
        prompt = [chance.randrange(vocab_size) for _ in range(prompt_tokens)]
        async with gate:
            began, first, tokens = time.perf_counter(), 0.0, 0
            async for delta in engine.submit(prompt, params):
                first = first or time.perf_counter() - began
                tokens = delta.usage.completion_tokens
            return Outcome(first, time.perf_counter() - began, tokens)

    began = time.perf_counter()
    outcomes = await asyncio.gather(*(one() for _ in range(requests)))
    return time.perf_counter() - began, outcomes


def to_row(case: str, seconds: float, outcomes: list[Outcome], stated: dict[str, object]) -> Row:
    """Give the row of a case: output tokens a second, with the times a user sees."""
    goal, peers = with_goal("throughput", case)
    total = sum(outcome.tokens for outcome in outcomes)
    each = [(o.whole_s - o.first_s) / (o.tokens - 1) for o in outcomes if o.tokens > 1]
    more: dict[str, object] = {
        "requests": len(outcomes),
        "seconds": seconds,
        "first_token_s_median": statistics.median(outcome.first_s for outcome in outcomes),
        "per_token_s_median": statistics.median(each) if each else None,
    }
    value = total / seconds
    unit = "output tokens/s"
    return Row("throughput", case, value, unit, "higher", goal, None, peers, stated | more)


def main(arguments: list[str] | None = None) -> None:
    """Compile a random checkpoint, start the engine once, play the cases, write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--shapes", default="1024x1024,128x2048,2048x128", help="prompt x output")
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--requests", type=int, default=0, help="default: twice the concurrency")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret", "reference"])
    parser.add_argument("--max-step-tokens", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    parser.add_argument("--out", type=Path, help="a folder for throughput.json")
    asked = parser.parse_args(arguments)
    shapes = [tuple(map(int, text.split("x"))) for text in asked.shapes.split(",")]
    concurrencies = [int(text) for text in asked.concurrency.split(",")]
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        model = write_checkpoint(asked.model, folder, asked.layers)
        options = CompileOptions(
            target=asked.target,
            max_rows=max(concurrencies),
            max_step_tokens=asked.max_step_tokens,
            max_context_tokens=max(map(sum, shapes)),
        )
        artifact = compile_model(model, folder / f"{model.name}.artifact", options).artifact
        engine = make_engine(artifact.path, ServeOptions(), "none")
        stated = conditions(
            weights="random", target=asked.target, dtype=artifact.manifest.engine.dtype
        )
        rows = asyncio.run(_play_all(engine, asked, shapes, concurrencies, stated))
    print(write_rows("throughput", rows, asked.out))


async def _play_all(
    engine: Engine,
    asked: argparse.Namespace,
    shapes: list[tuple[int, ...]],
    concurrencies: list[int],
    stated: dict[str, object],
) -> list[Row]:
    await engine.start()
    rows = []
    try:
        await play(engine, shapes[0][0], 2, 1, 1)  # what is made at first use is made now
        for prompt_tokens, output_tokens in shapes:
            for concurrency in concurrencies:
                requests = asked.requests or 2 * concurrency
                seconds, outcomes = await play(
                    engine, prompt_tokens, output_tokens, concurrency, requests
                )
                case = f"{asked.model} {prompt_tokens}/{output_tokens} concurrency {concurrency}"
                rows.append(to_row(case, seconds, outcomes, stated))
                print(f"{case}: {rows[-1].value:.1f} output tokens/s", flush=True)
    finally:
        await engine.close()
    return rows


if __name__ == "__main__":
    main()
