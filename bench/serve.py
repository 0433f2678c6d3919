"""Measure serving over HTTP: our server as a child process, streamed answers, many clients.

Run: python bench/serve.py --model llama-3.1-8b --shapes mix --rates 4,16 --concurrency 64,256
A case either sends requests at a rate, at random moments (a Poisson process), or keeps so many
running. TTFT is the time to the first token, TPOT the mean time of the later ones of a request, ITL
each gap between two; all as the client sees them. Prompts are texts of random words that are one
token each, so that the server tokenises them and no prefix is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import aiohttp  # noqa: E402

from treadle.bench import workloads  # noqa: E402
from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.child_server import Server, run_command, running_server  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402

PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """What a client saw of one request; times in seconds from when it was sent."""

    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    failure: str = ""

    @property
    def per_token_s(self) -> float | None:
        """The mean time of the tokens after the first."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


async def ask(
    session: aiohttp.ClientSession, model: str, prompt: str, output_tokens: int
) -> Answer:
    """Send one request and read its stream to the end."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    began_s = time.perf_counter()
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                answer.failure = f"status {response.status}: {await response.text()}"
                return answer
            await _read(response, answer, began_s)
    except aiohttp.ClientError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer, began_s: float) -> None:
    """Note when each event comes. Only the usage is parsed: clients are many."""
    usage = b""
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        if b'"usage":{' in line or b'"usage": {' in line:
            usage = line
        if b'"choices":[]' in line or b'"choices": []' in line:
            continue
        now_s = time.perf_counter() - began_s
        if not answer.first_s:
            answer.first_s = now_s
        else:
            answer.gaps_s.append(now_s - answer.last_s)
        answer.last_s = now_s
    told = json.loads(usage.removeprefix(b"data: ") or b"{}")
    answer.tokens = (told.get("usage") or {}).get("completion_tokens", 0)
    if not answer.tokens:
        answer.failure = "the stream ended without a usage"


async def send_all(
    server: Server,
    model: str,
    vocab_size: int,
    case: str,
    shape: str,
    requests: int,
    rate: float = 0.0,
    concurrency: int = 0,
) -> tuple[float, list[Answer]]:
    """Send requests at a rate per second, or so many at a time; give the seconds and answers."""
    lengths = workloads.draw_lengths(shape, requests)
    drawn = (
        workloads.draw_prompt(length.prompt, vocab_size, number, case)
        for number, length in enumerate(lengths)
    )
    prompts = [" ".join(f"t{token}" for token in tokens) for tokens in drawn]
    chance = random.Random(workloads.SEED)
    gate = asyncio.Semaphore(concurrency or requests)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        server.address, timeout=timeout, connector=connector, read_bufsize=2**18
    ) as session:

        async def one(prompt: str, output_tokens: int) -> Answer:
            async with gate:
                return await ask(session, model, prompt, output_tokens)

        began_s = time.perf_counter()
        tasks = []
        for prompt, length in zip(prompts, lengths, strict=True):
            tasks.append(asyncio.create_task(one(prompt, length.output)))
            if rate:
                await asyncio.sleep(chance.expovariate(rate))
        answers = await asyncio.gather(*tasks)
        return time.perf_counter() - began_s, answers


def percentile(values: Iterable[float], percent: int) -> float:
    """Give the value that so many percent of the values do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * percent // 100) - 1))]


def to_rows(
    case: str, seconds: float, answers: list[Answer], stated: dict[str, object]
) -> Iterator[Row]:
    """Give the rows of a case: output tokens a second, then the percentiles of its times.

    Raises: RuntimeError: a request failed; figures without it would flatter.
    """
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(answers)} requests failed: {failures[0]}")
    tokens = sum(answer.tokens for answer in answers)
    times = {
        "TTFT": [answer.first_s for answer in answers],
        "TPOT": [value for answer in answers if (value := answer.per_token_s) is not None],
        "ITL": [gap for answer in answers for gap in answer.gaps_s],
    }
    more: dict[str, object] = {
        "requests": len(answers),
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "output_tokens": tokens,
    }
    goal, peers = with_goal("serve", case)
    unit = "output tokens/s"
    yield Row("serve", case, tokens / seconds, unit, "higher", goal, None, peers, stated | more)
    for name, values in times.items():
        for percent in PERCENTILES if values else ():
            what = f"{case} {name} p{percent}"
            goal, peers = with_goal("serve", what)
            value = 1e3 * percentile(values, percent)
            yield Row("serve", what, value, "ms", "lower", goal, None, peers, stated | more)


def main(arguments: list[str] | None = None) -> int:
    """Compile a random checkpoint, serve it, play the cases, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--shapes", default="mix", help="prompt x output, or mix, with commas")
    parser.add_argument("--rates", default="4,16,32", help="requests a second; empty for none")
    parser.add_argument("--concurrency", default="64,256", help="requests at once; may be empty")
    parser.add_argument(
        "--requests", type=int, default=0, help="default: 30 seconds of a rate, twice a number"
    )
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--options", default="", help="more options of serve, in quotes")
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    shapes = asked.shapes.split(",")
    window = max(length.prompt + length.output for length in map(workloads.longest, shapes))
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder, cache = asked.folder or Path(temporary), Path(temporary) / "cache"
        model = write_checkpoint(asked.model, folder, asked.layers)
        artifact = Path(temporary) / "artifact"
        sizes = {"--target": asked.target, "--max-rows": asked.max_rows}
        sizes["--max-context-tokens"] = window
        words = [str(word) for pair in sizes.items() for word in pair]
        print("compiling", flush=True)
        run_command(
            ["compile", str(model), "-o", str(artifact), "--progress", "none", *words], cache
        )
        loads: list[dict[str, Any]] = []
        for rate in filter(None, asked.rates.split(",")):
            requests = asked.requests or round(30 * float(rate))
            loads.append({"rate": float(rate), "requests": requests})
        for number in map(int, filter(None, asked.concurrency.split(","))):
            loads.append({"concurrency": number, "requests": asked.requests or 2 * number})
        with running_server(artifact, cache, asked.options.split()) as server:
            print(f"ready after {server.ready_s:.1f} s", flush=True)
            stated = conditions(
                weights="random", target=asked.target, options=asked.options, over="HTTP, streamed"
            )
            cases = [
                (case, partial(measure, server, model.name, shape, load, case, asked.model, stated))
                for shape in shapes
                for load in loads
                for case in [f"{asked.model} {workloads.title(shape)} {_title(load)}"]
            ]
            return play("serve", cases, asked, began_s).exit_code


def _title(load: dict[str, Any]) -> str:
    if "rate" in load:
        return f"rate {load['rate']:g}/s"
    return f"concurrency {load['concurrency']}"


def measure(
    server: Server,
    name: str,
    shape: str,
    load: dict[str, Any],
    case: str,
    model: str,
    stated: dict[str, object],
) -> Iterator[Row]:
    """Play one case, after a request that warms the way."""
    vocab_size = int(str(CONFIGS[model]["vocab_size"]))
    asyncio.run(send_all(server, name, vocab_size, "first use", "8x2", 1))
    seconds, answers = asyncio.run(send_all(server, name, vocab_size, case, shape, **load))
    yield from to_rows(case, seconds, answers, stated)


if __name__ == "__main__":
    sys.exit(main())
