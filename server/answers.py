"""Running answers of one request: submitted together, followed, merged, given up at the end.

Must not know how a protocol writes them. Called by the protocols.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import QueueFullError, TreadleError
from treadle.runtime.request import Delta, Engine, FinishReason, Generation, SamplingParams
from treadle.server.state import Metrics

logger = logging.getLogger("treadle.server")


@dataclass
class Answer:
    """Follow one generation: when it began, and why it ended."""

    generation: Generation
    endpoint: str
    metrics: Metrics
    start_s: float = 0.0
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None

    async def deltas(self) -> AsyncIterator[Delta]:
        try:
            async for delta in self.generation:
                if self.completion_tokens == 0 and delta.usage.completion_tokens:
                    self.metrics.first_token_s.observe(time.monotonic() - self.start_s)
                self.completion_tokens = delta.usage.completion_tokens
                if delta.finish_reason is not None:
                    self._end(delta.finish_reason)
                yield delta
        except TreadleError:
            self._end(FinishReason.ERROR)
            raise

    def close(self) -> None:
        """Give up what nobody waits for any more."""
        if self.finish_reason is None:
            self._end(FinishReason.ABORT)
            logger.info(
                "aborted %s after %d tokens", self.generation.request_id, self.completion_tokens
            )
        self.generation.abort()

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.metrics.answers.labels(self.endpoint, reason.value).inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.metrics.answer_s.observe(time.monotonic() - self.start_s)


@contextmanager
def submitted(
    engine: Engine,
    work: Sequence[tuple[Sequence[int], SamplingParams]],
    n: int,
    response_id: str,
    endpoint: str,
    metrics: Metrics,
) -> Iterator[list[Answer]]:
    """Submit all generations; end every one of them when the request is over, however it ends."""
    answers: list[Answer] = []
    try:
        for prompt_ids, params in work:
            for choice in range(n):
                name = f"{response_id}-{len(answers)}"
                generation = engine.submit(prompt_ids, params.for_choice(choice), name)
                answers.append(Answer(generation, endpoint, metrics))
        yield answers
    finally:
        for answer in answers:
            answer.close()


def check_end(reason: FinishReason | None) -> None:
    """Raise for an answer that the server broke off; half an answer is never sent as whole."""
    if reason is FinishReason.ABORT:
        raise QueueFullError(
            "The server stopped before the answer was complete.",
            remedy="Send the request again.",
            retry_after_s=5,
            code="draining",
        )
    if reason is FinishReason.ERROR:
        raise TreadleError("The engine failed at this request.", remedy="Its log says why.")


async def merge(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Give the deltas of all answers as they come, each with its answer's index."""
    if len(answers) == 1:
        async for delta in answers[0].deltas():
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for delta in answers[index].deltas():
                arrived.put_nowait((index, delta))
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
        self._latest: dict[int, Delta] = {}

    def add(self, index: int, delta: Delta) -> None:
        self._latest[index] = delta

    def to_json(self) -> dict[str, Any]:
        usages = {index: delta.usage for index, delta in self._latest.items()}
        firsts: dict[int, int] = {}
        for index in sorted(usages):
            firsts.setdefault(index // self._n, index)
        prompt_tokens = sum(usages[index].prompt_tokens for index in firsts.values())
        cached_tokens = sum(usages[index].cached_tokens for index in firsts.values())
        completion_tokens = sum(usage.completion_tokens for usage in usages.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
