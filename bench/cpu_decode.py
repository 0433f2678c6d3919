"""Time greedy decoding on this CPU beside transformers' `generate`; exit 1 below the goal.

Run: python bench/cpu_decode.py --out bench/results/cpu
The model is the demo's unless `--model` names a GGUF file or a Hugging Face folder. Both decode the
same prompts in float32, take turns round by round, and are timed from the moment when every
sequence has its first token. Each figure is a median over the rounds; the goal is a multiple of the
best setting of transformers in float32, all of which take part in each round. How this engine holds
its weights is up to `--weight-dtype`; transformers in bfloat16, which rounds everything else too,
is measured beside the others and is no part of the goal. Transformers runs in a
process of its own: where a process has more OpenMP threads than cores they no longer wait
actively, which makes whoever computes in it up to half as slow again.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402
import transformers  # noqa: E402

from treadle.bench.rows import Row, conditions, write_rows  # noqa: E402
from treadle.runtime import demo_model  # noqa: E402
from treadle.runtime.compile_key import CompileOptions  # noqa: E402
from treadle.runtime.compiler import compile_model  # noqa: E402
from treadle.runtime.engine import Engine  # noqa: E402
from treadle.runtime.loading import ServeOptions, load_model  # noqa: E402
from treadle.runtime.progress import Progress  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402

GOAL = 1.5  # times as many tokens a second as transformers
STREAM_BYTES = 2**29
# Each setting that decides the speed of `generate` on a CPU: dtype, attention, kind of cache.
FLOAT32_SETTINGS = tuple(
    ("float32", kind, cache) for kind in ("sdpa", "eager") for cache in ("dynamic", "static")
)
SETTINGS = (*FLOAT32_SETTINGS, ("bfloat16", "sdpa", "dynamic"))
Setting = tuple[str, str, str]
SUBJECTS = (
    "a lighthouse keeper who collects storms",
    "why bread rises",
    "the first train that crossed the desert",
    "how a loom turns thread into cloth",
    "a map of a city under the sea",
    "what bees know about geometry",
    "the shortest winter on record",
    "an orchestra of old machines",
    "how rivers choose their way",
    "a chess game between two clouds",
    "the price of salt in ancient times",
    "how to repair a broken clock",
    "a letter that arrived late",
    "the colours of autumn leaves",
    "a bridge made of paper",
    "what the moon does to the tides",
)


@dataclass(frozen=True)
class Timing:
    """Hold one run: decoded tokens per second, seconds in all, and the new tokens."""

    tokens_per_s: float
    whole_s: float
    tokens: list[list[int]]


class StepClock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Note when each step of `generate` ends; stop nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Say of no sequence that it has ended."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Peer:
    """Run transformers in another process; calls wait for it."""

    def __init__(self, model: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, initializer=_load_peer, initargs=(model,))

    def generate(self, setting: Setting, prompts: list[list[int]], count: int) -> Timing:
        """Generate `count` tokens per prompt with one setting of transformers."""
        return self._process.submit(_generate, setting, prompts, count).result()

    def weight_bytes(self) -> int:
        """Give the bytes of the weights in float32, shared ones counted once."""
        return self._process.submit(_weight_bytes).result()

    def read_bytes_per_s(self) -> float:
        """Measure how fast all cores together read memory."""
        return self._process.submit(_read_bytes_per_s).result()

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()


_loaded: dict[str, Any] = {}  # the peer's process holds its models here, by dtype


def _load_peer(model: Path) -> None:
    """Load the model in transformers, in each dtype, for this process; it never stops by itself."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.is_file():
        where = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    for dtype in sorted({dtype for dtype, _, _ in SETTINGS}):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, dtype)
        )
        loaded.generation_config.eos_token_id = None
        _loaded[dtype] = loaded.eval()


def _generate(setting: Setting, prompts: list[list[int]], count: int) -> Timing:
    dtype, attention, cache = setting
    peer = _loaded[dtype]
    peer.set_attn_implementation(attention)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    clock = StepClock()
    ids = torch.tensor(prompts)  # [B, T]
    started = time.perf_counter()
    with torch.inference_mode():
        output = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            stopping_criteria=[clock],
            **options,
        )  # [B, T + count]
    whole_s = time.perf_counter() - started
    decoded = len(prompts) * (count - 1)
    tokens_per_s = decoded / (clock.times[-1] - clock.times[0])
    return Timing(tokens_per_s, whole_s, output[:, ids.shape[1] :].tolist())


def _weight_bytes() -> int:
    return sum(weight.nbytes for weight in _loaded["float32"].parameters())


def _read_bytes_per_s() -> float:
    stream = torch.ones(STREAM_BYTES // 4)  # [N]
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        stream.sum()
        seconds.append(time.perf_counter() - started)
    return STREAM_BYTES / min(seconds)


async def time_engine(engine: Engine, prompts: list[list[int]], count: int) -> Timing:
    """Generate `count` tokens per prompt through the engine, all requests at once."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    arrivals: list[tuple[float, int]] = []  # when, how many tokens
    first: list[float] = []

    async def consume(prompt: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        async for delta in engine.submit(prompt, params):
            now = time.perf_counter()
            if not tokens:
                first.append(now)
            tokens += delta.token_ids
            arrivals.append((now, len(delta.token_ids)))
        return tokens

    started = time.perf_counter()
    answers = await asyncio.gather(*(consume(prompt) for prompt in prompts))
    whole_s = time.perf_counter() - started
    begin, end = max(first), max(when for when, _ in arrivals)
    decoded = sum(number for when, number in arrivals if when > begin)
    return Timing(decoded / (end - begin), whole_s, list(answers))


async def measure(arguments: argparse.Namespace, artifact: Path, model: Path) -> list[Row]:
    """Measure a row per batch size."""
    peer = Peer(model)
    weight_bytes = peer.weight_bytes()
    options = ServeOptions(prefix_cache=False, weight_dtype=arguments.weight_dtype)
    engine = Engine("bench", lambda report: load_model(artifact, options, report))
    await engine.start()
    held = engine.model.summary["weights"]
    if held.endswith(" matrices in float16"):  # all of them
        weight_bytes //= 2
    texts = [f"Write at least three pages of a story about {subject}." for subject in SUBJECTS]
    encoded = [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    length = min(len(prompt) for prompt in encoded)
    # The end of a prompt stays, cut where transformers would need padding: in front.
    prompts = [prompt[-length:] for prompt in encoded]
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        chosen = prompts[:batch]
        await time_engine(engine, chosen, 2)
        for setting in SETTINGS:
            peer.generate(setting, chosen, 2)
        ours: list[Timing] = []
        theirs: dict[Setting, list[Timing]] = {setting: [] for setting in SETTINGS}
        load_before = os.getloadavg()[0]
        for _ in range(arguments.rounds):
            ours.append(await time_engine(engine, chosen, arguments.tokens))
            for setting in SETTINGS:
                theirs[setting].append(peer.generate(setting, chosen, arguments.tokens))
        rows.append(
            make_row(
                arguments,
                batch,
                ours,
                theirs,
                floor=batch * peer.read_bytes_per_s() / weight_bytes,
                prompt_tokens=length,
                weights=held,
                load=[round(load_before, 1), round(os.getloadavg()[0], 1)],
            )
        )
        print(describe(rows[-1]), flush=True)
    await engine.close()
    peer.close()
    return rows


def make_row(
    arguments: argparse.Namespace,
    batch: int,
    ours: list[Timing],
    theirs: dict[Setting, list[Timing]],
    *,
    floor: float,
    **stated: object,
) -> Row:
    """Put the rounds of one batch size into a row. `floor` is the most that memory would allow."""
    value = median_speed(ours)
    speeds = {setting: median_speed(timings) for setting, timings in theirs.items()}
    best = max(FLOAT32_SETTINGS, key=lambda setting: speeds[setting])
    in_bfloat16 = max(speed for (dtype, *_), speed in speeds.items() if dtype == "bfloat16")
    rivals = theirs[best]
    same = sum(a == b for a, b in zip(ours[0].tokens, rivals[0].tokens, strict=True))
    whole_s, whole_s_of_peer = (
        statistics.median(timing.whole_s for timing in timings) for timings in (ours, rivals)
    )
    return Row(
        "cpu_decode",
        f"{arguments.name} batch {batch}",
        round(value, 2),
        "tokens/s",
        "higher",
        goal=round(GOAL * speeds[best], 2),
        floor=round(floor, 1),
        peers={_name(setting): round(speed, 2) for setting, speed in speeds.items()},
        conditions=conditions(
            dtype="f32",
            threads=torch.get_num_threads(),
            transformers=transformers.__version__,
            new_tokens=arguments.tokens,
            rounds=arguments.rounds,
            best_peer=_name(best),
            ratio=round(value / speeds[best], 2),
            ratio_to_bfloat16=round(value / in_bfloat16, 2),
            ratio_with_prompt=round(whole_s_of_peer / whole_s, 2),
            all_rounds=[round(timing.tokens_per_s, 1) for timing in ours],
            all_rounds_of_best_peer=[round(timing.tokens_per_s, 1) for timing in rivals],
            same_answers=f"{same} of {batch}",
            **stated,
        ),
    )


def median_speed(timings: Sequence[Timing]) -> float:
    """Give the median of some runs' tokens per second."""
    return statistics.median(timing.tokens_per_s for timing in timings)


def _name(setting: Setting) -> str:
    return "transformers generate, {}, {} attention, {} cache".format(*setting)


def describe(row: Row) -> str:
    """Say a row in one line."""
    stated = row.conditions
    best = str(stated["best_peer"])
    return (
        f"{row.case}: {row.value:.1f} tokens/s; "
        f"{best} {row.peers[best]:.1f}: {stated['ratio']}x, "
        f"with prompt {stated['ratio_with_prompt']}x, bfloat16 {stated['ratio_to_bfloat16']}x; "
        f"memory allows {row.floor:.0f}; same answers: {stated['same_answers']}; "
        f"load {stated['load']}"
    )


def main() -> int:
    """Measure, write the rows, and say by the exit code whether each meets the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the demo's model")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of this engine only, if not float32")
    parser.add_argument("--weight-dtype", default="auto", help="of this engine, as of `serve`")
    parser.add_argument("--out", type=Path, help="where to write cpu_decode.json")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = arguments.model or demo_model.fetch(Progress("none"))
    arguments.name = demo_model.NAME if arguments.model is None else model.stem
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(target="reference", dtype=arguments.dtype)
        artifact = compile_model(model, Path(folder) / "artifact", options).artifact.path
        rows = asyncio.run(measure(arguments, artifact, model))
    print(write_rows("cpu_decode", rows, arguments.out))
    missed = [row for row in rows if row.goal is not None and row.value < row.goal]
    for row in missed:
        print(f"{row.case}: less than {GOAL} times transformers.", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
