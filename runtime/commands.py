"""The bodies of the commands that run a model without a server, and the engine of all that do.

Results go to stdout, progress and remarks to stderr. Called by the command line only, after it has
chosen the interpreter; the parameters are the options' names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from treadle.ir.errors import ConfigError
from treadle.runtime import artifact as artifacts
from treadle.runtime.chat import Chat
from treadle.runtime.engine import Engine, LoadedModel
from treadle.runtime.loading import ServeOptions, load_model
from treadle.runtime.progress import Progress
from treadle.runtime.request import Delta, SamplingParams, Usage, collect, fit_to_window
from treadle.runtime.tokenizer import Tokenizer

Report = Callable[[str], None]


def run_generate(
    source: str,
    prompts: Sequence[str],
    raw: bool,
    weight_dtype: str,
    target: str,
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: Sequence[str],
    progress: str,
    as_json: bool,
    compile_model: Callable[..., Path],
) -> None:
    """Answer prompts; one prompt's answer is streamed, several are printed in their order."""
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop),
        continues_text=raw,
    ).validate()
    with running_engine(source, weight_dtype, target, progress, compile_model) as (runner, engine):
        requests = [_encode(engine.tokenizer, text, raw) for text in texts]
        if len(texts) == 1 and not as_json:
            runner.run(_stream(engine, requests[0], params))
            return
        answers = runner.run(_collect_all(engine, requests, params))
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True), start=1):
        if as_json:
            record = {"prompt": text, "text": answer.text, "finish_reason": answer.finish_reason}
            print(json.dumps(record | {"usage": answer.usage._asdict()}, ensure_ascii=False))
        else:
            print(f"--- {number} of {len(texts)}: {text}\n{answer.text}\n")


def run_chat(
    source: str,
    system: str,
    weight_dtype: str,
    target: str,
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: Sequence[str],
    progress: str,
    compile_model: Callable[..., Path],
) -> None:
    """Talk with the model until the input ends."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop),
    ).validate()
    with running_engine(source, weight_dtype, target, progress, compile_model) as (runner, engine):
        Chat(engine, runner, params, system).converse()


@contextmanager
def running_engine(
    source: str,
    weight_dtype: str,
    target: str,
    progress: str,
    compile_model: Callable[..., Path],
) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """Start an engine for an artifact or a model source, and give it with its event loop's runner.

    The engine is closed at the end. Raises: see `artifact_of` and `load_model`.
    """
    path = artifact_of(source, target, progress, compile_model)
    engine = make_engine(path, ServeOptions(weight_dtype=weight_dtype), progress)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield runner, engine
        finally:
            runner.run(engine.close())


def make_engine(
    path: Path,
    options: ServeOptions,
    progress: str,
    on_ready: Callable[[LoadedModel], None] | None = None,
    time_before: Callable[[], Mapping[str, float]] = dict,
) -> Engine:
    """Give an engine that will load the artifact when started, and show its progress.

    `on_ready` tells about the model; without it only what is odd about the weights is told.
    `time_before` is asked at each load for the phases, in seconds, that led to it.
    """

    def load(set_phase: Report) -> LoadedModel:
        before_s = time_before()
        with Progress(progress) as shown, shown.phases() as report:

            def tell(phase: str) -> None:
                set_phase(phase)
                report(phase)

            return load_model(path, options, tell, before_s)

    return Engine(artifacts.read_manifest(path).model_name, load, on_ready or _tell_warning)


def _tell_warning(model: LoadedModel) -> None:
    if warning := model.summary.get("warning"):
        print(f"Warning: {warning}.", file=sys.stderr)


def artifact_of(
    source: str, target: str, progress: str, compile_model: Callable[..., Path], kv_dtype: str = ""
) -> Path:
    """Give the artifact's path; a model source is first compiled into the cache.

    `compile_model` does that: `compile_into_cache`, which is loaded only where it is needed.
    Raises: ConfigError: an artifact of another target than the one asked for.
    """
    path = Path(source)
    if artifacts.is_artifact(path):
        made_for = artifacts.read_manifest(path).target
        if target not in ("auto", made_for):
            raise ConfigError(
                f"--target {target} was asked for, and the artifact {path} is for `{made_for}`.",
                remedy=f"Leave --target out, or compile the model with --target {target}.",
            )
        return path
    return compile_model(source=source, target=target, kv_dtype=kv_dtype, progress=progress)


def _encode(tokenizer: Tokenizer, text: str, raw: bool) -> list[int]:
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


async def _stream(engine: Engine, prompt_ids: list[int], params: SamplingParams) -> None:
    params = fit_to_window(params, len(prompt_ids), engine.max_model_len)
    generation = engine.submit(prompt_ids, params)
    started_s = time.perf_counter()
    first_s = started_s
    last: Delta | None = None
    async for delta in generation:
        if last is None:
            first_s = time.perf_counter()
        print(delta.text, end="", flush=True)
        last = delta
    print()
    if last is not None:
        ended_s = time.perf_counter()
        text = describe_speed(last.usage, str(last.finish_reason), started_s, first_s, ended_s)
        print(text, file=sys.stderr)


async def _collect_all(
    engine: Engine, requests: Sequence[list[int]], params: SamplingParams
) -> list[Delta]:
    generations = [
        engine.submit(ids, fit_to_window(params.for_choice(number), len(ids), engine.max_model_len))
        for number, ids in enumerate(requests)
    ]
    return list(await asyncio.gather(*(collect(generation) for generation in generations)))


def describe_speed(
    usage: Usage, ended_by: str, started_s: float, first_s: float, ended_s: float
) -> str:
    """Say how long an answer took, for a person."""
    after_first_s = ended_s - first_s
    text = f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after "
    text += f"{first_s - started_s:.2f} s"
    if usage.completion_tokens > 1 and after_first_s > 0:
        text += f", then {(usage.completion_tokens - 1) / after_first_s:.1f} tokens/s"
    return text + f", ended by {ended_by}]"
