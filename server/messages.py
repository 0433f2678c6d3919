"""Anthropic's /v1/messages and /v1/messages/count_tokens.

Must not know how tokens are made: it submits a turn, and writes the answer's parts as blocks of
text, thinking and tool use. `server/app.py` adds the routes.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from treadle.runtime.answer_parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)
from treadle.runtime.request import SamplingParams
from treadle.server.answers import Answer, Step, collect_answer, submitted
from treadle.server.errors import anthropic_error_body, log_fault
from treadle.server.messages_request import CountTokensRequest, MessagesRequest
from treadle.server.reading import check_model, read_request
from treadle.server.sse import encode_json, open_stream
from treadle.server.state import ENGINE, require_ready
from treadle.server.turns import prepare, render

# Thinking is not signed here; clients send the signature back with the block.
SIGNATURE = "unsigned"
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def add_routes(app: web.Application) -> None:
    """Add the routes of messages."""
    app.router.add_post("/v1/messages", create_message)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation as /v1/messages would send it to the model."""
    engine = require_ready(request.app)
    body = await read_request(request, CountTokensRequest)
    check_model(engine, body.model)
    prompt = await asyncio.to_thread(render, request.app, body.turn(SamplingParams()))
    return web.json_response({"input_tokens": len(prompt.token_ids)})


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    body = await read_request(request, MessagesRequest)
    check_model(engine, body.model)
    work = await prepare(request.app, body.turn(body.sampling()))
    message_id = f"msg_{uuid.uuid4().hex}"
    with submitted(request, [work], 1, message_id, "messages", start_s) as (answer,):
        if body.stream:
            return await _stream(request, answer, message_id)
        whole = await collect_answer(answer)
    message = _head(request, message_id, whole)
    message["content"] = _write_blocks(whole.parts)
    return web.json_response(message | _ending(whole) | {"usage": _usage(whole)})


async def _stream(request: web.Request, answer: Answer, message_id: str) -> web.StreamResponse:
    """Send events as the answer grows: blocks opened, filled and closed, one after the other."""
    async with open_stream(request) as stream:
        blocks = _BlockWriter()
        is_first = True
        try:
            async for step in answer.steps():
                events = []
                if is_first:
                    message = _head(request, message_id, step)
                    events.append({"type": "message_start", "message": message})
                    is_first = False
                for part in step.parts:
                    events += blocks.write(part)
                if step.finish_reason is not None:
                    events += blocks.close()
                    ending = {"type": "message_delta", "delta": _ending(step)}
                    events += [ending | {"usage": _usage(step)}, {"type": "message_stop"}]
                data = b"".join(_event(event) for event in events)
                await stream.send(data, more_follow=answer.has_more)
        except ConnectionError:
            raise  # the client has gone; the answer is given up on the way out
        except Exception as error:
            log_fault(error, f"a stream of {request.path}")
            await stream.send(_event(anthropic_error_body(error)))
    return stream.response


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode()


def _head(request: web.Request, message_id: str, step: Step) -> dict[str, Any]:
    """Give a message without content, as it is when it begins."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": request.app[ENGINE].model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(step),
    }


def _usage(step: Step) -> dict[str, int]:
    """Count tokens as Anthropic does: those from the cache are none of the `input_tokens`."""
    usage = step.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _ending(step: Step) -> dict[str, Any]:
    stopped_by = step.delta.stop_reason
    if step.finish_reason == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    reason = STOP_REASONS.get(step.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


class _BlockWriter:
    """Turn parts into events: at most one block is open, and its index is its place."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def write(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, Content):
            text = {"type": "text_delta", "text": part.text}
            return [*self._opened("text", {"text": ""}), self._delta(text)]
        if isinstance(part, Reasoning):
            thinking = {"type": "thinking_delta", "thinking": part.text}
            opened = self._opened("thinking", {"thinking": "", "signature": ""})
            return [*opened, self._delta(thinking)]
        if isinstance(part, CallBegin):
            return self._opened("tool_use", {"id": part.id, "name": part.name, "input": {}})
        if isinstance(part, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})]
        return self.close()

    def close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            events.insert(0, self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        self._open = None
        return events

    def _opened(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self.close()
        self._index += 1
        self._open = kind
        block = {"type": kind, **fields}
        return [
            *events,
            {"type": "content_block_start", "index": self._index, "content_block": block},
        ]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _write_blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Write an answer's parts as the blocks that its stream would add up to."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in parts:
        if isinstance(part, Content):
            blocks.append({"type": "text", "text": part.text})
        elif isinstance(part, Reasoning):
            blocks.append({"type": "thinking", "thinking": part.text, "signature": SIGNATURE})
        elif isinstance(part, CallBegin):
            arguments = ""
            blocks.append({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            arguments += part.text
        elif isinstance(part, CallEnd):
            blocks[-1]["input"] = _load_input(arguments)
    return blocks


def _load_input(arguments: str) -> dict[str, Any]:
    """Give a call's arguments as an object; what is none, as Anthropic's guide wraps it."""
    try:
        loaded = json.loads(arguments)
    except (ValueError, RecursionError):
        loaded = None
    return loaded if isinstance(loaded, dict) else {"INVALID_JSON": arguments}
