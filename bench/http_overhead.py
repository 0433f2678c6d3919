"""Measure the CPU time that the server takes per streamed token, without a model.

Exit 1 above the goal. Run: python bench/http_overhead.py
A stand-in for the engine gives every stream a token per step, which costs nothing to make; what is
left is HTTP, text, parsing and JSON, all on the event loop. The client reads in a process of its
own, and only the server's process is timed, all threads: its own time, and the system's on its
behalf, which is mostly the sending of a packet per token.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import aiohttp  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from treadle.runtime.engine import EngineStats, Generation  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402
from treadle.runtime.tokenizer import Tokenizer  # noqa: E402
from treadle.server.app import new_event_loop, serve  # noqa: E402
from treadle.server.state import ServerOptions  # noqa: E402

GOAL_US = 60.0  # of CPU per streamed token
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools <tool_call> <think> #}"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "chat with tools": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0},
    ),
}


def write_tokenizer(folder: str) -> Tokenizer:
    """Write a byte-level tokenizer of the 256 bytes and load it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    return Tokenizer.from_path(folder)


@dataclass
class StandIn:
    """Stand for an engine that gives every answer a token at once, step after step."""

    tokenizer: Tokenizer
    model_name: str = "none"
    max_model_len: int = 1_000_000
    phase: str = "ready"
    ready: bool = True
    failure: None = None
    is_sleeping: bool = False

    def __post_init__(self) -> None:
        self.vocab_size = self.tokenizer.vocab_size
        self._token = self.tokenizer.encode("a", add_special_tokens=False)[0]
        self._running: dict[str, Generation] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to step."""
        self._stepper = asyncio.create_task(self._step())

    async def close(self) -> None:
        """Stop stepping."""
        assert self._stepper is not None, "`start` comes first"
        self._stepper.cancel()

    async def drain(self, deadline_s: float) -> None:
        """Have nothing to wait for."""

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """Take parameters as they are."""
        return params

    def stats(self) -> EngineStats:
        """Tell how many answers run."""
        return EngineStats(running=len(self._running))

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Generation:
        """Begin an answer; its text ends it."""
        name = request_id or "request"
        generation = Generation(self, name, len(prompt_ids), params)  # type: ignore[arg-type]
        self._running[name] = generation
        return generation

    def _forget(self, name: str, reason: object, stop_reason: object) -> None:
        self._running.pop(name, None)

    async def _step(self) -> None:
        while True:
            # A moment between steps, in which every stream writes what it got.
            await asyncio.sleep(0.002 if self._running else 0.02)
            for generation in tuple(self._running.values()):
                generation._push(self._token, 0, None)


def read_streams(url: str, path: str, body: dict[str, Any], streams: int, rounds: int) -> None:
    """Read streams to their ends, `rounds` times; runs in a process of its own."""

    async def read_one(session: aiohttp.ClientSession) -> None:
        async with session.post(url + path, json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                pass

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            for _ in range(rounds):
                await asyncio.gather(*(read_one(session) for _ in range(streams)))

    asyncio.run(main())


async def measure(url: str, case: str, streams: int, tokens: int) -> tuple[float, float]:
    """Give the CPU time per token in µs, the server's own and the system's; a round warms up."""
    path, body = CASES[case]
    body = body | {"stream": True, "max_tokens": tokens}
    spawn = multiprocessing.get_context("spawn")
    for rounds in (1, 3):
        client = spawn.Process(target=read_streams, args=(url, path, body, streams, rounds))
        begin = resource.getrusage(resource.RUSAGE_SELF)
        client.start()
        await asyncio.to_thread(client.join)
        end = resource.getrusage(resource.RUSAGE_SELF)
        assert client.exitcode == 0, "the client failed; its words are above"
    count = 3 * streams * tokens / 1e6
    return (end.ru_utime - begin.ru_utime) / count, (end.ru_stime - begin.ru_stime) / count


async def main(streams: int, tokens: int) -> bool:
    """Measure every case and print it; say whether all are within the goal."""
    with tempfile.TemporaryDirectory() as folder:
        engine = StandIn(write_tokenizer(folder))
        stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
        server = asyncio.create_task(
            serve(
                engine,  # type: ignore[arg-type]
                stop=stop,
                port=0,
                drain_s=0,
                options=ServerOptions(),
                on_listening=listening.set_result,
            )
        )
        url = await listening
        found = {}
        for case in CASES:
            own_us, system_us = await measure(url, case, streams, tokens)
            found[case] = own_us + system_us
            print(
                f"{case:>16}  {found[case]:6.1f} µs of CPU per streamed token: "
                f"{own_us:.1f} its own, {system_us:.1f} the system's",
                flush=True,
            )
        stop.set()
        await server
    print(f"{streams} streams of {tokens} tokens, {type(asyncio.get_running_loop()).__module__}")
    return max(found.values()) <= GOAL_US


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        is_within = runner.run(main(options.streams, options.tokens))
    if not is_within:
        sys.exit(f"Expected at most {GOAL_US:g} µs of CPU per streamed token.")
