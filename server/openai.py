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
from treadle.runtime.answer_parts import Content, Reasoning
from treadle.runtime.request import Engine
from treadle.server.answers import Answer, Step, Usages, Work, collect_answer, merge, submitted
from treadle.server.errors import error_event, log_fault
from treadle.server.schema import GenerateRequest
from treadle.server.sse import TextEvents, encode_json, open_stream


class Writer(Protocol):
    """Write the choices of one endpoint's answers."""

    @property
    def id(self) -> str: ...

    @property
    def endpoint(self) -> str: ...

    def head(self, *, is_chunk: bool) -> dict[str, Any]: ...

    def whole(self, index: int, step: Step) -> dict[str, Any]: ...

    def opening(self, index: int, first: Step) -> list[dict[str, Any]]: ...

    def pieces(self, index: int, step: Step) -> list[dict[str, Any]]: ...

    def end(self, index: int, last: Step) -> dict[str, Any]: ...


async def answer(
    request: web.Request,
    body: GenerateRequest,
    work: Sequence[Work],
    writer: Writer,
    start_s: float,
) -> web.StreamResponse:
    """Submit every prompt as often as is asked and send what comes back, whole or as a stream."""
    made = body.num_candidates
    with submitted(request, work, made, writer.id, writer.endpoint, start_s) as answers:
        if body.stream:
            return await _stream(request, body, answers, writer)
        wholes = await asyncio.gather(*(collect_answer(one) for one in answers))
        usages = Usages(made)
        for index, whole in enumerate(wholes):
            usages.add(index, whole)
        given = [
            whole
            for begin in range(0, len(wholes), made)
            for whole in _likeliest(wholes[begin : begin + made], body.n)
        ]
        choices = [writer.whole(index, whole) for index, whole in enumerate(given)]
        return web.json_response(
            {**writer.head(is_chunk=False), "choices": choices, "usage": usages.to_json()}
        )


def _likeliest(wholes: Sequence[Step], count: int) -> Sequence[Step]:
    """Give the answers with the highest log probability per token, best first; all as they are."""
    if count == len(wholes):
        return wholes

    def mean(whole: Step) -> float:
        told = whole.delta.logprobs
        return sum(one.logprob for one in told) / max(len(told), 1)

    return sorted(wholes, key=mean, reverse=True)[:count]


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

    texts = TextEvents()

    def write(index: int, step: Step) -> bytes:
        """Give the events of a step, most of which bring a piece of one text and nothing else."""
        part = step.parts[0] if len(step.parts) == 1 else None
        if (
            isinstance(part, Content | Reasoning)
            and step.finish_reason is None
            and index in opened
            and not step.delta.logprobs
            and not in_every_chunk
        ):
            kind = type(part)

            def make(text: str) -> bytes:
                marked = step._replace(delta=step.delta._replace(text=text), parts=[kind(text)])
                return event(writer.pieces(index, marked))

            return texts.write((index, kind), part.text, make)
        choices = [] if index in opened else writer.opening(index, step)
        opened.add(index)
        choices += writer.pieces(index, step)
        if step.finish_reason is not None:
            choices.append(writer.end(index, step))
        return b"".join(event([choice]) for choice in choices)

    async with open_stream(request) as stream:
        try:
            async with aclosing(merge(answers)) as merged:
                async for index, step in merged:
                    usages.add(index, step)
                    await stream.send(write(index, step), more_follow=answers[index].has_more)
            ending = b"data: [DONE]\n\n"
            if include_usage:
                ending = event([], usages.to_json()) + ending
            await stream.send(ending)
        except ConnectionError:
            raise  # the client has gone; the answers are given up on the way out
        except Exception as error:
            log_fault(error, f"a stream of {request.path}")
            await stream.send(error_event(error))
    return stream.response


def head(response_id: str, kind: str, created_unix_s: int, model: str) -> dict[str, Any]:
    """Give the fields that every answer and every chunk begins with."""
    return {
        "id": response_id,
        "object": kind,
        "created": created_unix_s,
        "model": model,
        "system_fingerprint": f"treadle-{treadle.__version__}",
    }


def identity(engine: Engine, prefix: str) -> tuple[str, int, str]:
    """Give a new answer's id, time of making (Unix, s) and model."""
    return f"{prefix}{uuid.uuid4().hex}", int(time.time()), engine.model_name
