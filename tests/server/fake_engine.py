"""An engine without a model: it says what a test tells it to, as fast or as slowly as it is told.

Its answers take the real path from tokens to text. For what a real engine can't be made to do at
will: load for long, be full, hang, break.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from treadle.ir.errors import QueueFullError, TreadleError
from treadle.runtime.host_pages import HostStats
from treadle.runtime.request import (
    Delta,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    Usage,
    fit_to_window,
)
from treadle.runtime.text import TextStream
from treadle.runtime.tokenizer import Tokenizer

PAGE_SIZE = 16
NextToken = Callable[[Sequence[int], int], int]


@dataclass(frozen=True)
class FakeStats:
    """Give the counters an engine has."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    steps_total: int
    last_step_age_s: float
    step_in_flight_s: float
    jit_compiles_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    host: HostStats


def say(text: str | bytes, *, then: int) -> NextToken:
    """Answer every prompt with the bytes of `text`, then with the token `then` for ever."""
    data = text.encode() if isinstance(text, str) else text
    return lambda generated, seed: data[len(generated)] if len(generated) < len(data) else then


def letters(generated: Sequence[int], seed: int) -> int:
    """Answer with letters that depend on the seed and the position alone."""
    return random.Random(f"{seed}/{len(generated)}").randrange(ord("a"), ord("z") + 1)


class FakeGeneration:
    """Stand for one running answer."""

    def __init__(
        self, engine: FakeEngine, request_id: str, prompt_tokens: int, params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.params = params
        self.generated: list[int] = []
        self.stream = TextStream(engine.tokenizer, params)
        self.deltas: asyncio.Queue[Delta | TreadleError] = asyncio.Queue()
        self._engine = engine
        self._hidden = np.ones(engine.hidden_size, np.float32) if params.tells_hidden else None

    def advance(self, token_id: int) -> None:
        self.generated.append(token_id)
        step = self.stream.push([token_id])
        self._put(step.text, step.token_ids, step.finish_reason, step.stop_reason)

    @property
    def has_more(self) -> bool:
        return not self.deltas.empty()

    def abort(self) -> None:
        self._engine.aborts += self.request_id in self._engine.live
        step = self.stream.finish(FinishReason.ABORT)
        if step.finish_reason is not None:
            self._put(step.text, (), step.finish_reason, None)
        self._engine.live.pop(self.request_id, None)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = await self.deltas.get()
            if isinstance(delta, TreadleError):
                raise delta
            yield delta
            if delta.finish_reason is not None:
                return

    def _put(
        self,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        usage = Usage(self.prompt_tokens, self.stream.completion_tokens, 0)
        scored: tuple[TokenLogprobs, ...] = ()
        if self.params.prompt_logprobs is not None and len(self.generated) == 1:
            scored = (TokenLogprobs(0, -1.0, (), None, self._hidden),) * (self.prompt_tokens - 1)
        told = tuple(
            TokenLogprobs(token_id, -1.0, (), None, self._hidden) for token_id in token_ids
        )
        if self.params.logprobs is None:
            told = ()
        delta = Delta(text, token_ids, reason, stop_reason, usage, told, scored)
        self.deltas.put_nowait(delta)


@dataclass
class FakeEngine:
    """Serve what `next_token` says. Units: `step_s` per token of each answer, `load_s` to start.

    `faults`: the answer with this many tokens breaks, by number of tokens.
    """

    folder: Path
    next_token: NextToken = letters
    model_name: str = "tiny"
    max_model_len: int = 128
    vocab_size: int = 0
    hidden_size: int = 64
    pooling: str = ""
    step_s: float = 0.0
    load_s: float = 0.0
    load_error: TreadleError | None = None
    max_running: int = 8
    max_waiting: int = 8
    fault_at: int | None = None
    close_s: float = 0.0
    phase: str = "starting"
    ready: bool = False
    failure: TreadleError | None = None
    is_stuck: bool = False
    aborts: int = 0
    host: HostStats = field(default_factory=HostStats)
    live: dict[str, FakeGeneration] = field(default_factory=dict)
    seen: deque[tuple[tuple[int, ...], SamplingParams]] = field(
        default_factory=lambda: deque(maxlen=256)
    )

    def __post_init__(self) -> None:
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._draining = False
        self._stepper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.phase = "loading weights"
        await asyncio.sleep(self.load_s)
        if self.load_error is not None:
            self.phase = "failed"
            raise self.load_error
        self.tokenizer = await asyncio.to_thread(Tokenizer.from_path, self.folder)
        self.vocab_size = self.vocab_size or self.tokenizer.vocab_size
        self._stepper = asyncio.create_task(self._run())
        self.ready, self.phase = True, "ready"

    async def close(self) -> None:
        await asyncio.sleep(self.close_s)
        if self._stepper is not None:
            self._stepper.cancel()
        self.ready, self.phase = False, "closed"

    @property
    def is_sleeping(self) -> bool:
        return self.phase == "sleeping"

    async def sleep(self) -> None:
        self.ready, self.phase = False, "sleeping"

    async def wake(self) -> None:
        self.ready, self.phase = True, "ready"

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> FakeGeneration:
        if self._draining:
            raise QueueFullError("The fake engine drains.", code="draining")
        if len(self.live) >= self.max_running + self.max_waiting:
            raise QueueFullError(f"{len(self.live)} requests run or wait.", retry_after_s=1.5)
        params = fit_to_window(params.validate(), len(prompt_ids), self.max_model_len)
        name = request_id or f"request-{len(self.seen)}"
        assert name not in self.live, "the server gives every answer a name of its own"
        generation = FakeGeneration(self, name, len(prompt_ids), params)
        self.live[name] = generation
        self.seen.append((tuple(prompt_ids), params))
        self._prompt_tokens += len(prompt_ids)
        return generation

    def stats(self) -> FakeStats:
        running = min(len(self.live), self.max_running)
        pages = sum(
            -(-(g.prompt_tokens + len(g.generated)) // PAGE_SIZE) for g in self.live.values()
        )
        return FakeStats(
            running=running,
            waiting=len(self.live) - running,
            pages_total=64,
            pages_free=64 - pages,
            steps_total=self._steps,
            last_step_age_s=1e6 if self.is_stuck else 0.0,
            step_in_flight_s=0.0,
            jit_compiles_total=0,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            preemptions_total=0,
            host=self.host,
        )

    async def drain(self, deadline_s: float) -> None:
        self._draining, self.ready, self.phase = True, False, "draining"
        end_s = asyncio.get_running_loop().time() + deadline_s
        while self.live and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.005)
        for generation in tuple(self.live.values()):
            generation.abort()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.is_stuck:
                continue
            self._steps += 1
            for generation in tuple(self.live.values())[: self.max_running]:
                self._advance(generation)

    def _advance(self, generation: FakeGeneration) -> None:
        if len(generation.generated) == self.fault_at:
            del self.live[generation.request_id]
            generation.deltas.put_nowait(TreadleError("A fault of the fake engine."))
            return
        seed = generation.params.seed or 0
        generation.advance(self.next_token(generation.generated, seed))
        self._generation_tokens += 1
        if generation.stream.finish_reason is not None:
            self.live.pop(generation.request_id, None)
