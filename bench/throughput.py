"""Measure offline throughput through the real engine: scheduler, pages, sampling, text.

Run: python bench/throughput.py --model llama-3.1-8b --shapes 1024x1024,128x2048,2048x128,mix
Each case keeps `concurrency` requests running until all are done. Prompts are random tokens, other
ones in each case, so the prefix cache finds nothing; no token ends an answer early. `mix` are
lengths as in conversations, see `workloads.py`. `--peers` first plays requests of the same lengths
through transformers, in a process of its own (`baselines.py`), `--peers continuous` by its
continuous batching alone; `--kv-memory` and `--kv-dtypes` repeat all cases with a KV cache of each
size and of each dtype.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench import workloads  # noqa: E402
from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.runtime.commands import make_engine  # noqa: E402
from treadle.runtime.compile_key import CompileOptions  # noqa: E402
from treadle.runtime.compiler import compile_model  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.engine import Engine  # noqa: E402
from treadle.runtime.loading import ServeOptions  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """What one request took: seconds to the first delta and to the last, and its tokens."""

    first_s: float
    whole_s: float
    tokens: int


async def submit_all(
    engine: Engine, case: str, shape: str, concurrency: int, requests: int
) -> tuple[float, list[Outcome]]:
    """Run all requests, so many at a time; give the seconds of the whole and each one's."""
    gate = asyncio.Semaphore(concurrency)
    lengths = workloads.draw_lengths(shape, requests)
    prompts = [
        workloads.draw_prompt(length.prompt, engine.vocab_size, number, case)
        for number, length in enumerate(lengths)
    ]

    async def one(prompt: list[int], output_tokens: int) -> Outcome:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        async with gate:
            began, first, tokens = time.perf_counter(), 0.0, 0
            async for delta in engine.submit(prompt, params):
                first = first or time.perf_counter() - began
                tokens = delta.usage.completion_tokens
            return Outcome(first, time.perf_counter() - began, tokens)

    began = time.perf_counter()
    outcomes = await asyncio.gather(
        *(one(prompt, length.output) for prompt, length in zip(prompts, lengths, strict=True))
    )
    return time.perf_counter() - began, outcomes


def to_row(
    case: str,
    seconds: float,
    outcomes: list[Outcome],
    peers: dict[str, float],
    stated: dict[str, object],
) -> Row:
    """Give the row of a case: output tokens a second, with the times a user sees."""
    goal, known_peers = with_goal("throughput", case)
    total = sum(outcome.tokens for outcome in outcomes)
    each = [(o.whole_s - o.first_s) / (o.tokens - 1) for o in outcomes if o.tokens > 1]
    more: dict[str, object] = {
        "requests": len(outcomes),
        "seconds": seconds,
        "first_token_s_median": statistics.median(outcome.first_s for outcome in outcomes),
        "per_token_s_median": statistics.median(each) if each else None,
    }
    value, unit = total / seconds, "output tokens/s"
    all_peers = known_peers | peers
    return Row("throughput", case, value, unit, "higher", goal, None, all_peers, stated | more)


def main(arguments: list[str] | None = None) -> int:
    """Compile a random checkpoint, play the cases, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument(
        "--shapes", default="1024x1024,mix,128x2048,2048x128", help="prompt x output, or mix"
    )
    parser.add_argument("--concurrency", default="256,64,16,1")
    parser.add_argument("--requests", type=int, default=0, help="default: twice the concurrency")
    parser.add_argument(
        "--kv-memory", default="", help="sizes of the KV cache in GiB, with commas; default: all"
    )
    parser.add_argument("--kv-dtypes", default="auto", help=f"some of {', '.join(KV_DTYPES)}")
    parser.add_argument(
        "--peers",
        nargs="?",
        const="static,continuous",
        default="",
        help="play them with transformers as well, in one of these two ways or in both",
    )
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret", "reference"])
    parser.add_argument("--max-step-tokens", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    shapes = asked.shapes.split(",")
    concurrencies = [int(text) for text in asked.concurrency.split(",")]
    pools = [float(text) for text in filter(None, asked.kv_memory.split(","))] or [0.0]
    kv_dtypes = asked.kv_dtypes.split(",")
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        model = write_checkpoint(asked.model, folder, asked.layers)
        peers: dict[str, dict[str, float]] = {}
        if asked.peers:
            peers = play_peers(model, asked, Path(temporary) / "peers.json")
        options = CompileOptions(
            target=asked.target,
            max_rows=max(concurrencies),
            max_step_tokens=asked.max_step_tokens,
            max_context_tokens=max(
                length.prompt + length.output for length in map(workloads.longest, shapes)
            ),
            kv_formats=tuple(KV_DTYPES[kv_dtype] for kv_dtype in kv_dtypes),
        )
        print("compiling", flush=True)
        artifact = compile_model(model, folder / f"{model.name}.artifact", options).artifact
        stated = conditions(
            weights="random", target=asked.target, dtype=artifact.manifest.engine.dtype
        )
        exit_code = 0
        for gib, kv_dtype in itertools.product(pools, kv_dtypes):
            serve = ServeOptions(kv_bytes=int(gib * 2**30), kv_dtype=kv_dtype)
            engine = make_engine(artifact.path, serve, "log")
            with asyncio.Runner() as runner:
                runner.run(engine.start())
                print(engine.model.summary["start-up"], flush=True)
                try:
                    # What is made at first use is made now.
                    runner.run(submit_all(engine, "first use", "8x2", 1, 1))
                    of_all = asked, stated, peers
                    cases = [
                        (case, partial(measure, runner, engine, case, shape, count, *of_all))
                        for shape in shapes
                        for count in concurrencies
                        for case in [case_name(asked, shape, count, kv_dtype)]
                    ]
                    exit_code |= play("throughput", cases, asked, began_s).exit_code
                finally:
                    runner.run(engine.close())
    return exit_code


def case_name(asked: argparse.Namespace, shape: str, concurrency: int, kv_dtype: str) -> str:
    """Name a case by model, lengths, concurrency and the KV cache's dtype."""
    kv = "" if kv_dtype == "auto" else f" kv {kv_dtype}"
    return f"{asked.model} {workloads.title(shape)} concurrency {concurrency}{kv}"


def measure(
    runner: asyncio.Runner,
    engine: Engine,
    case: str,
    shape: str,
    concurrency: int,
    asked: argparse.Namespace,
    stated: dict[str, object],
    peers: dict[str, dict[str, float]],
) -> Iterator[Row]:
    """Play one case through the engine."""
    requests = asked.requests or 2 * concurrency
    before = engine.stats().preemptions_total
    seconds, outcomes = runner.run(submit_all(engine, case, shape, concurrency, requests))
    pool = engine.model.summary["KV cache"]
    more = {"kv_cache": pool, "preemptions": engine.stats().preemptions_total - before}
    known = peers.get(f"{workloads.title(shape)} concurrency {concurrency}", {})
    if asked.kv_memory:
        case += f" KV {pool.partition(' =')[0]}"
    yield to_row(case, seconds, outcomes, known, stated | more)


def play_peers(model: Path, asked: argparse.Namespace, result: Path) -> dict[str, dict[str, float]]:
    """Play the same cases with transformers, as far as it can; give tokens/s by case and peer."""
    command = [sys.executable, str(ROOT / "bench" / "baselines.py"), "--model-path", str(model)]
    command += ["--shapes", asked.shapes, "--concurrency", asked.concurrency]
    command += ["--requests", str(asked.requests), "--peers", asked.peers, "--json", str(result)]
    command += ["--budget", str(asked.budget / 2)]
    done = subprocess.run(command)
    if done.returncode:
        print(f"the peers ended with {done.returncode}; going on without what they lack")
    return json.loads(result.read_text()) if result.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
