"""The body of the command `demo`: from nothing to a served model that has answered a question.

Fetches, compiles, serves, and asks through the `openai` client, as a user's program would. Called
by the command line only; the parameters are the options' names.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.ir.errors import MachineError, TreadleError
from treadle.runtime import compiler, demo_model
from treadle.runtime.commands import describe_speed, make_engine
from treadle.runtime.compile_key import CompileOptions, cached_artifact_path
from treadle.runtime.console import print_table, program_name
from treadle.runtime.engine import Engine
from treadle.runtime.loading import ServeOptions
from treadle.runtime.progress import Progress
from treadle.runtime.request import Usage
from treadle.server.app import serve

if TYPE_CHECKING:
    from openai import Stream
    from openai.types.chat import ChatCompletionChunk

POLL_S = 0.05
# The client is done when the server is asked to end: nothing is left to wait for.
DRAIN_S = 0.0


def run_demo(prompt: str, max_tokens: int, fetch_only: bool, target: str, progress: str) -> None:
    """Fetch a small model, compile it, serve it, ask it `prompt`, and say how to go on.

    What an earlier run has fetched and compiled is used again.
    Raises: MachineError: `openai` is not installed, or the model can't be fetched; or as `serve`.
    """
    if not fetch_only:
        _check_client()
    with Progress(progress) as shown:
        model = demo_model.fetch(shown)
        if fetch_only:
            print(model)
            return
        options = CompileOptions(target=target)
        out = cached_artifact_path(model, options)
        with shown.phases() as report:
            result = compiler.compile_model(model, out, options, report)
    manifest = result.artifact.manifest
    engine = make_engine(out, ServeOptions(), progress)
    with serving(engine) as url:
        print_table(
            [
                ("model", f"{demo_model.NAME}, {model}"),
                ("artifact", f"{out}{' (was current)' if result.was_current else ''}"),
                ("target", f"{manifest.target} {manifest.gpu}".strip()),
                ("served at", f"{url}/v1"),
                ("question", prompt),
            ]
        )
        print()
        ask(url, manifest.model_name, prompt, max_tokens)
    _say_how_to_go_on(out)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve at a free port of this machine, in a thread; give the address once the model is loaded.

    Raises: TreadleError: what ended the server.
    """
    stop = asyncio.Event()
    addresses: list[str] = []
    server = serve(engine, stop=stop, port=0, drain_s=DRAIN_S, on_listening=addresses.append)
    with asyncio.Runner() as runner, ThreadPoolExecutor(1, "treadle-server") as pool:
        loop = runner.get_loop()
        ended = pool.submit(runner.run, server)
        try:
            while not (engine.ready or ended.done()):
                time.sleep(POLL_S)
            if not ended.done():
                yield addresses[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            ended.result()


def ask(url: str, model: str, prompt: str, max_tokens: int) -> None:
    """Ask through the `openai` client; print the answer as it streams, and its speed."""
    import openai  # only here: `--fetch-only` works without it, and it takes a second to load

    # A proxy that the environment names has no way to a server on this machine.
    direct = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none needed", max_retries=0, http_client=direct
    ) as client:
        started_s = time.perf_counter()
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        _print_stream(stream, started_s)


def _print_stream(stream: Stream[ChatCompletionChunk], started_s: float) -> None:
    first_s, ended_by, usage = 0.0, "", None
    for chunk in stream:
        # The last chunk has the usage and no choice.
        for choice in chunk.choices:
            if choice.delta.content:
                first_s = first_s or time.perf_counter()
                print(choice.delta.content, end="", flush=True)
            ended_by = choice.finish_reason or ended_by
        usage = chunk.usage or usage
    print()
    if usage is None:
        raise TreadleError("The server ended its answer without telling its length.")
    counted = Usage(usage.prompt_tokens, usage.completion_tokens, 0)
    ended_s = time.perf_counter()
    print(describe_speed(counted, ended_by, started_s, first_s or ended_s, ended_s))


def _say_how_to_go_on(artifact: Path) -> None:
    program = program_name()
    print("\nGo on:")
    print_table(
        [
            ("  serve it for longer", f"{program} serve {artifact}"),
            ("  talk with it", f"{program} chat {artifact}"),
            ("  take your own model", f"{program} compile MODEL -o ARTIFACT"),
        ]
    )


def _check_client() -> None:
    if find_spec("openai") is None:
        raise MachineError(
            f"`openai`, the client that the demo asks its question with, is not installed for "
            f"{sys.executable}.",
            remedy="Install it: pip install openai; or with Treadle: pip install -e '.[demo]'. "
            "`treadle chat` and `treadle serve` work without it.",
        )
