"""Running answers of one request: submitted together, followed, merged, given up at the end.

Must not know how a protocol writes them. Called by the protocols.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

from treadle.ir.errors import QueueFullError, RequestError, TreadleError
from treadle.runtime.answer_parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)
from treadle.runtime.request import (
    Delta,
    FinishReason,
    Generation,
    SamplingParams,
    Usage,
    join_deltas,
)
from treadle.server.metrics import Metrics
from treadle.server.state import ENGINE, METRICS, STATE

logger = logging.getLogger("treadle.server")


def _no_parser() -> AnswerParser | None:
    return None


@dataclass(frozen=True)
class Work:
    """Say what to submit, and how to tell the answer apart.

    `make_parser` gives a parser per answer, or None for one that is content and nothing else.
    `one_call`: the answer ends with its first tool call. `scores_only`: it is the prompt alone.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    make_parser: Callable[[], AnswerParser | None] = _no_parser
    one_call: bool = False
    scores_only: bool = False


class Step(NamedTuple):
    """Hold what one step adds to an answer: tokens and text, and the parts that these make.

    `finish_reason` is `tool_calls` for an answer that ended by itself and holds one.
    """

    delta: Delta
    parts: Sequence[Part]
    finish_reason: str | None
    reasoning_tokens: int

    @property
    def usage(self) -> Usage:
        """The tokens up to here."""
        return self.delta.usage


@dataclass
class Answer:
    """Follow one generation: what it says, when it began, and why it ended.

    `start_s` and `first_token_s` are on the monotonic clock.
    """

    generation: Generation
    endpoint: str
    metrics: Metrics
    parser: AnswerParser | None = None
    one_call: bool = False
    scores_only: bool = False
    start_s: float = 0.0
    first_token_s: float = 0.0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    has_calls: bool = False
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what the answer says, step by step.

        Raises: QueueFullError, TreadleError: the server broke it off; half is never given as whole.
        """
        try:
            async for delta in self.generation:
                if self.scores_only:
                    delta = _without_token(delta)
                if self.completion_tokens == 0 and delta.usage.completion_tokens:
                    self.first_token_s = time.monotonic()
                    self.metrics.first_token_s.observe(self.first_token_s - self.start_s)
                    self.metrics.cache_queries.inc(delta.usage.prompt_tokens)
                    self.metrics.cache_hits.inc(delta.usage.cached_tokens)
                self.completion_tokens = delta.usage.completion_tokens
                step = self._tell_apart(delta)
                reason = step.delta.finish_reason
                if reason is not None:
                    self._end(reason)
                    self._check_end(reason)
                yield step
                if reason is not None:
                    # The engine may not know that a call was the last thing wanted.
                    self.generation.abort()
                    return
        except TreadleError:
            self._end(FinishReason.ERROR)
            raise

    @property
    def has_more(self) -> bool:
        """Say whether the next step can be had without waiting."""
        return self.finish_reason is None and self.generation.has_more

    def close(self) -> None:
        """Give up what nobody waits for any more."""
        if self.finish_reason is None:
            self._end(FinishReason.ABORT)
            logger.info(
                "aborted %s after %d tokens", self.generation.request_id, self.completion_tokens
            )
        self.generation.abort()

    def cancel(self) -> bool:
        """End the answer from outside; its client is told. Say whether it still ran."""
        if self.finish_reason is not None:
            return False
        self.is_cancelled = True
        self.generation.abort()
        return True

    def _check_end(self, reason: FinishReason) -> None:
        """Raise for an answer that was broken off."""
        if reason is FinishReason.ABORT and self.is_cancelled:
            raise RequestError("The answer was ended by /abort_request.", code="aborted")
        if reason is FinishReason.ABORT:
            raise QueueFullError(
                "The server stopped before the answer was complete.",
                remedy="Send the request again.",
                retry_after_s=5,
                code="draining",
            )
        if reason is FinishReason.ERROR:
            raise TreadleError("The engine failed at this request.", remedy="Its log says why.")

    def _tell_apart(self, delta: Delta) -> Step:
        if self.parser is None:
            parts: list[Part] = [Content(delta.text)] if delta.text else []
            return Step(delta, parts, delta.finish_reason, 0)
        was_reasoning = self.parser.is_reasoning
        parts = self.parser.push(delta.text)
        if was_reasoning or self.parser.is_reasoning:
            self.reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            parts += self.parser.finish()
        self.has_calls = self.has_calls or any(isinstance(part, CallBegin) for part in parts)
        reason: str | None = delta.finish_reason
        ends = [index for index, part in enumerate(parts) if isinstance(part, CallEnd)]
        if self.one_call and ends:
            parts = parts[: ends[0] + 1]
            if delta.finish_reason is None:
                delta = delta._replace(finish_reason=FinishReason.STOP)
                reason = FinishReason.STOP
        if reason == FinishReason.STOP and self.has_calls:
            reason = "tool_calls"
        return Step(delta, parts, reason, self.reasoning_tokens)

    def _end(self, reason: FinishReason) -> None:
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.metrics.answers.labels(self.endpoint, reason.value).inc()
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        now_s, metrics = time.monotonic(), self.metrics
        metrics.answer_s.observe(now_s - self.start_s)
        metrics.prompt_tokens.observe(self.generation.prompt_tokens)
        metrics.answer_tokens.observe(self.completion_tokens)
        if self.completion_tokens > 1:
            metrics.token_s.observe((now_s - self.first_token_s) / (self.completion_tokens - 1))


def _without_token(delta: Delta) -> Delta:
    """Leave out the one token that the engine makes of every prompt."""
    usage = delta.usage._replace(completion_tokens=0)
    reason = delta.finish_reason and FinishReason.LENGTH
    if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        reason = delta.finish_reason
    return delta._replace(
        text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None, usage=usage
    )


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of a kind."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(part.call, last.text + part.text)
        else:
            joined.append(part)
    return joined


async def collect_answer(answer: Answer) -> Step:
    """Join an answer's steps into one, which has the form of a step."""
    steps = [step async for step in answer.steps()]
    delta = join_deltas([step.delta for step in steps])
    parts = join_parts(part for step in steps for part in step.parts)
    return Step(delta, parts, steps[-1].finish_reason, steps[-1].reasoning_tokens)


@contextmanager
def submitted(
    request: web.Request,
    work: Sequence[Work],
    n: int,
    response_id: str,
    endpoint: str,
    start_s: float,
) -> Iterator[list[Answer]]:
    """Submit all generations; end every one of them when the request is over, however it ends.

    Meanwhile they can be found by the answer's id, and by the client's own.
    """
    engine, metrics = request.app[ENGINE], request.app[METRICS]
    running = request.app[STATE].running
    names = {response_id, request.headers.get("X-Request-Id") or response_id}
    answers: list[Answer] = []
    for name in names:
        running.setdefault(name, [])
    try:
        for one in work:
            for choice in range(n):
                name = f"{response_id}-{len(answers)}"
                generation = engine.submit(one.prompt_ids, one.params.for_choice(choice), name)
                parser = one.make_parser()
                answer = Answer(
                    generation,
                    endpoint,
                    metrics,
                    parser,
                    one_call=one.one_call,
                    scores_only=one.scores_only,
                    start_s=start_s,
                )
                answers.append(answer)
                for name in names:
                    running[name].append(answer)
        yield answers
    finally:
        for answer in answers:
            answer.close()
            for name in names:
                running[name].remove(answer)
        for name in names:
            if not running[name]:
                del running[name]


async def merge(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Step], None]:
    """Give the steps of all answers as they come, each with its answer's index."""
    if len(answers) == 1:
        async for step in answers[0].steps():
            yield 0, step
        return
    arrived: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for step in answers[index].steps():
                arrived.put_nowait((index, step))
            arrived.put_nowait((index, None))
        except Exception as error:  # raised again by the reader below
            arrived.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(index)) for index in range(len(answers))]
    try:
        num_open = len(pumps)
        while num_open:
            index, item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()


class Usages:
    """Add up the usage of all choices: a prompt counts once, however many answers it gets."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._latest: dict[int, Step] = {}

    def add(self, index: int, step: Step) -> None:
        self._latest[index] = step

    def to_json(self) -> dict[str, Any]:
        usages = {index: step.usage for index, step in self._latest.items()}
        firsts: dict[int, int] = {}
        for index in sorted(usages):
            firsts.setdefault(index // self._n, index)
        prompt_tokens = sum(usages[index].prompt_tokens for index in firsts.values())
        cached_tokens = sum(usages[index].cached_tokens for index in firsts.values())
        completion_tokens = sum(usage.completion_tokens for usage in usages.values())
        reasoning_tokens = sum(step.reasoning_tokens for step in self._latest.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }
