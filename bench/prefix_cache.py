"""Time the first token of requests that share a long prefix: of the first and of the next.

Run: python bench/prefix_cache.py --model llama-3.1-8b --prefix 2048 --tail 32
Each round has a prefix of its own, asked twice with two tails. The figure is the second request's
time to its first token as a share of the first's; both go alone through the real engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.bench.workloads import draw_prompt  # noqa: E402
from treadle.runtime.commands import make_engine  # noqa: E402
from treadle.runtime.compile_key import CompileOptions  # noqa: E402
from treadle.runtime.compiler import compile_model  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.engine import Engine  # noqa: E402
from treadle.runtime.loading import ServeOptions  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402


async def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Give the seconds to a prompt's first token, and how many of its tokens were cached."""
    began = time.perf_counter()
    async for delta in engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0)):
        return time.perf_counter() - began, delta.usage.cached_tokens
    raise AssertionError("an answer without a token")


def main(arguments: list[str] | None = None) -> int:
    """Compile a random checkpoint, play the rounds, write the row, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--prefix", type=int, default=2048, help="tokens that are shared")
    parser.add_argument("--tail", type=int, default=32, help="tokens of a request's own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    case = f"{asked.model} prefix {asked.prefix} tail {asked.tail}"
    case += "" if asked.kv_dtype == "auto" else f" kv {asked.kv_dtype}"
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        model = write_checkpoint(asked.model, asked.folder or Path(temporary), asked.layers)
        options = CompileOptions(
            target=asked.target,
            max_rows=4,
            max_context_tokens=asked.prefix + asked.tail + 16,
            kv_formats=(KV_DTYPES[asked.kv_dtype],),
        )
        artifact = compile_model(model, Path(temporary) / "artifact", options).artifact
        engine = make_engine(artifact.path, ServeOptions(num_pages=1024), "log")
        with asyncio.Runner() as runner:
            runner.run(engine.start())

            def measure() -> Iterator[Row]:
                first_s, second_s, cached = [], [], []
                # The first round is for what is made at first use.
                for number in range(asked.rounds + 1):
                    prefix = draw_prompt(asked.prefix, engine.vocab_size, number)
                    tails = (draw_prompt(asked.tail, engine.vocab_size, -i) for i in (1, 2))
                    times = [runner.run(first_token(engine, prefix + tail)) for tail in tails]
                    if number:
                        first_s.append(times[0][0])
                        second_s.append(times[1][0])
                        cached.append(times[1][1])
                first, second = statistics.median(first_s), statistics.median(second_s)
                goal, peers = with_goal("prefix_cache", case)
                stated = conditions(
                    weights="random",
                    target=asked.target,
                    first_ms=1e3 * first,
                    second_ms=1e3 * second,
                    cached_tokens=min(cached),
                )
                share = 100 * second / first
                yield Row("prefix_cache", case, share, "%", "lower", goal, None, peers, stated)

            try:
                return play("prefix_cache", {case: measure}.items(), asked, began_s).exit_code
            finally:
                runner.run(engine.close())


if __name__ == "__main__":
    sys.exit(main())
