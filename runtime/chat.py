"""A conversation on the terminal: one turn after the other, with a few commands of its own.

Must not know how models are compiled or loaded. Called by the command `chat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

from treadle.ir.errors import RequestError
from treadle.runtime.engine import Engine
from treadle.runtime.request import Delta, SamplingParams, fit_to_window

# It gives `input` editing and history; not every Python is built with it.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401

HELP = """\
/raw            show the prompt as the model gets it
/system TEXT    set the system message and begin anew
/reset          begin anew
/help           show this
/exit           leave; so does Ctrl-D
Ctrl-C stops an answer, not the program."""


class Chat:
    """Hold one conversation. Between turns the event loop of `runner` stands still.

    `read` asks for a line and raises EOFError at the end of the input.
    """

    def __init__(
        self,
        engine: Engine,
        runner: asyncio.Runner,
        params: SamplingParams,
        system: str = "",
        read: Callable[[str], str] = input,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._params = params
        self._system = system
        self._read = read
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message where there is one."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def converse(self) -> None:
        """Take turns until the input ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print("Type a message, or /help. Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                line = self._read("> " if is_terminal else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves.)", file=sys.stderr)
                continue
            if line == "/exit":
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            else:
                self._turn(line)
        except RequestError as error:
            # A mistake in one turn doesn't end the conversation.
            print(f"{error.message} {error.remedy}".strip(), file=sys.stderr)

    def _command(self, name: str, text: str) -> None:
        if name == "/raw":
            print(self._engine.tokenizer.render_chat(self._messages))
        elif name == "/reset":
            self.reset()
        elif name == "/system":
            self._system = text.strip()
            self.reset()
        else:
            print(HELP, file=sys.stderr)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._runner.run(self._answer())
        except RequestError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer})

    async def _answer(self) -> str:
        prompt_ids = self._engine.tokenizer.encode_chat(self._messages)
        window = self._engine.max_model_len
        params = fit_to_window(self._params, len(prompt_ids), window)
        generation = self._engine.submit(prompt_ids, params)
        started_s = time.perf_counter()
        pieces: list[str] = []
        last: Delta | None = None
        try:
            async for delta in generation:
                print(delta.text, end="", flush=True)
                pieces.append(delta.text)
                last = delta
        except asyncio.CancelledError:
            # Ctrl-C while an answer runs means this answer.
            generation.abort()
            print(" [stopped]", end="")
        print()
        if last is not None:
            usage, took_s = last.usage, time.perf_counter() - started_s
            used = usage.prompt_tokens + usage.completion_tokens
            print(
                f"[{usage.completion_tokens} tokens, {usage.completion_tokens / took_s:.1f} "
                f"tokens/s, {used} of {window} tokens of context used]",
                file=sys.stderr,
            )
        return "".join(pieces)
