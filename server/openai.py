"""What OpenAI's two completion endpoints share: answers as choices, whole or in chunks, with usage.

Must not know what a choice looks like: `chat.py` and `completions.py` write it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

import treadle
from treadle.runtime.request import Delta, Engine, FinishReason, SamplingParams, collect
from treadle.server.answers import Answer, Usages, check_end, merge, submitted
from treadle.server.errors import error_event, log_fault
from treadle.server.schema import GenerateRequest
from treadle.server.sse import encode_json, open_stream
from treadle.server.state import ENGINE, METRICS


class Writer(Protocol):
    """Write the choices of one endpoint's answers."""

    @property
    def id(self) -> str: ...

    @property
    def endpoint(self) -> str: ...

    def head(self, *, is_chunk: bool) -> dict[str, Any]: ...

    def whole(self, index: int, answer: Delta) -> dict[str, Any]: ...

    def opening(self, index: int, first: Delta) -> list[dict[str, Any]]: ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]: ...

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]: ...


async def answer(
    request: web.Request,
    body: GenerateRequest,
    work: Sequence[tuple[Sequence[int], SamplingParams]],
    writer: Writer,
    start_s: float,
) -> web.StreamResponse:
    """Submit every prompt `n` times and send what comes back, whole or as a stream."""
    engine = request.app[ENGINE]
    endpoint = writer.endpoint
    with submitted(engine, work, body.n, writer.id, endpoint, request.app[METRICS]) as answers:
        for answer in answers:
            answer.start_s = start_s
        if body.stream:
            return await _stream(request, body, answers, writer)
        wholes = await asyncio.gather(*(collect(answer.deltas()) for answer in answers))
        for whole in wholes:
            check_end(whole.finish_reason)
        choices = [writer.whole(index, whole) for index, whole in enumerate(wholes)]
        usages = Usages(body.n)
        for index, whole in enumerate(wholes):
            usages.add(index, whole)
        return web.json_response(
            {**writer.head(is_chunk=False), "choices": choices, "usage": usages.to_json()}
        )


async def _stream(
    request: web.Request, body: GenerateRequest, answers: list[Answer], writer: Writer
) -> web.StreamResponse:
    """Send chunks as they come. A failure after the first byte is an error event without [DONE]."""
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    in_every_chunk = options is not None and options.continuous_usage_stats
    head = writer.head(is_chunk=True)
    usages = Usages(body.n)
    opened: set[int] = set()

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**head, "choices": choices}
        if in_every_chunk or usage is not None:
            chunk["usage"] = usage or usages.to_json()
        elif include_usage:
            chunk["usage"] = None
        return f"data: {encode_json(chunk)}\n\n".encode()

    async with open_stream(request) as response:
        try:
            async with aclosing(merge(answers)) as merged:
                async for index, delta in merged:
                    check_end(delta.finish_reason)
                    usages.add(index, delta)
                    events = []
                    if index not in opened:
                        opened.add(index)
                        events += [event([choice]) for choice in writer.opening(index, delta)]
                    if delta.text or delta.logprobs:
                        events.append(event([writer.piece(index, delta)]))
                    if delta.finish_reason is not None:
                        events.append(event([writer.end(index, delta.finish_reason)]))
                    if events:
                        await response.write(b"".join(events))
            ending = b"data: [DONE]\n\n"
            if include_usage:
                ending = event([], usages.to_json()) + ending
            await response.write(ending)
        except ConnectionError:
            raise  # the client has gone; the answers are given up on the way out
        except Exception as error:
            log_fault(error, f"a stream of {request.path}")
            await response.write(error_event(error))
    return response


def head(response_id: str, kind: str, created_unix_s: int, model: str) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": created_unix_s,
        "model": model,
        "system_fingerprint": f"treadle-{treadle.__version__}",
    }


def identity(engine: Engine, prefix: str) -> tuple[str, int, str]:
    return f"{prefix}{uuid.uuid4().hex}", int(time.time()), engine.model_name
