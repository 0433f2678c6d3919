"""OpenAI's /v1/responses, whole or streamed; stored ones can be gone on from, read and deleted.

Must not know how tokens are made: it submits a turn, and writes the answer's parts as output items.
`server/app.py` adds the routes.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning
from treadle.runtime.request import show_value
from treadle.server.answers import Answer, Step, collect_answer, submitted
from treadle.server.errors import error_body, log_fault
from treadle.server.reading import check_model, read_request
from treadle.server.response_store import ResponseStore
from treadle.server.responses_request import ResponsesRequest
from treadle.server.sse import encode_json, open_stream
from treadle.server.state import require_ready
from treadle.server.turns import prepare

STORE: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)


def add_routes(app: web.Application) -> None:
    """Add the routes of responses, and the store that they share."""
    app[STORE] = ResponseStore()
    app.router.add_post("/v1/responses", create_response)
    app.router.add_get("/v1/responses/{id}", show_response)
    app.router.add_delete("/v1/responses/{id}", delete_response)


async def show_response(request: web.Request) -> web.Response:
    """Give a stored response again."""
    response_id = request.match_info["id"]
    stored = request.app[STORE].get(response_id)
    if stored is None:
        _refuse_id(response_id, "id")
    return web.json_response(stored.response)


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response."""
    response_id = request.match_info["id"]
    if not request.app[STORE].remove(response_id):
        _refuse_id(response_id, "id")
    return web.json_response({"id": response_id, "object": "response", "deleted": True})


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, which may go on from a stored response."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    body = await read_request(request, ResponsesRequest)
    check_model(engine, body.model)
    before: Sequence[dict[str, Any]] = ()
    if body.previous_response_id is not None:
        stored = request.app[STORE].get(body.previous_response_id)
        if stored is None:
            _refuse_id(body.previous_response_id, "previous_response_id")
        before = stored.messages
    work = await prepare(request.app, body.turn(before))
    writer = _ResponseWriter(body, engine.model_name)
    with submitted(request, [work], 1, writer.id, "responses", start_s) as (answer,):
        if body.stream:
            streamed = await _stream(request, answer, writer)
            if writer.is_over:
                _keep(request.app, body, before, writer)
            return streamed
        whole = await collect_answer(answer)
    for part in whole.parts:
        writer.write(part)
    writer.finish(whole)
    _keep(request.app, body, before, writer)
    return web.json_response(writer.response)


def _keep(
    app: web.Application,
    body: ResponsesRequest,
    before: Sequence[dict[str, Any]],
    writer: _ResponseWriter,
) -> None:
    if body.store:
        app[STORE].add(writer.response, [*before, *body.input, *writer.messages()])


def _refuse_id(response_id: str, param: str) -> NoReturn:
    raise RequestError(
        f"There is no stored response {show_value(response_id)}: it was never there, was not to be "
        "stored, or had to make room for later ones.",
        remedy="Send the whole conversation as `input`.",
        param=param,
        code="response_not_found",
    )


async def _stream(
    request: web.Request, answer: Answer, writer: _ResponseWriter
) -> web.StreamResponse:
    """Send events as the answer grows: items added, filled and done, one after the other."""
    async with open_stream(request) as stream:
        try:
            events = writer.begin()
            async for step in answer.steps():
                for part in step.parts:
                    events += writer.write(part)
                if step.finish_reason is not None:
                    events += writer.finish(step)
                data = b"".join(map(_event, events))
                await stream.send(data, more_follow=answer.has_more)
                events = []
        except ConnectionError:
            raise  # the client has gone; the answer is given up on the way out
        except Exception as error:
            log_fault(error, f"a stream of {request.path}")
            await stream.send(b"".join(map(_event, writer.fail(error))))
    return stream.response


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode()


class _ResponseWriter:
    """Turn parts into a response and, on the way, into the events that tell of it.

    At most one item is open; its index is its place in the output.
    """

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.is_over = False
        self.response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **body.echo(),
        }
        self._number = -1
        self._is_open = False

    @property
    def _output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return output

    def begin(self) -> list[dict[str, Any]]:
        """Give the events that a stream begins with."""
        return [
            self._event("response.created", response=self._snapshot()),
            self._event("response.in_progress", response=self._snapshot()),
        ]

    def write(self, part: Part) -> list[dict[str, Any]]:
        """Take the answer's next part."""
        if isinstance(part, Content):
            return self._write_text("message", part.text)
        if isinstance(part, Reasoning):
            return self._write_text("reasoning", part.text)
        if isinstance(part, CallBegin):
            call = {"call_id": part.id, "name": part.name, "arguments": ""}
            return self._open({"id": f"fc_{_token()}", "type": "function_call", **call})
        if isinstance(part, CallArguments):
            self._output[-1]["arguments"] += part.text
            return [self._item_event("response.function_call_arguments.delta", delta=part.text)]
        return self._close("completed")

    def finish(self, last: Step) -> list[dict[str, Any]]:
        """End the response as its answer ended."""
        is_cut = last.finish_reason == "length"
        events = [] if self._output else self._write_text("message", "")
        events += self._close("incomplete" if is_cut else "completed")
        if is_cut and self._output[-1]["status"] != "incomplete":
            self._output[-1]["status"] = "incomplete"
        usage = last.usage
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        self.is_over = True
        kind = f"response.{self.response['status']}"
        return [*events, self._event(kind, response=self._snapshot())]

    def fail(self, error: Exception) -> list[dict[str, Any]]:
        """Give the event that ends a stream which failed after it began."""
        told = error_body(error)["error"]
        self.response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": told["message"]},
        }
        return [self._event("response.failed", response=self._snapshot())]

    def messages(self) -> list[dict[str, Any]]:
        """Give the output as messages for the next turn."""
        found: list[dict[str, Any]] = []
        for item in self._output:
            if item["type"] == "message":
                found.append({"role": "assistant", "content": item["content"][0]["text"]})
            elif item["type"] == "reasoning":
                text = item["content"][0]["text"]
                found.append({"role": "assistant", "reasoning_content": text})
            else:
                function = {"name": item["name"], "arguments": _load(item["arguments"])}
                call = {"id": item["call_id"], "type": "function", "function": function}
                found.append({"role": "assistant", "tool_calls": [call]})
        return found

    def _write_text(self, kind: str, text: str) -> list[dict[str, Any]]:
        events = []
        if not self._is_open or self._output[-1]["type"] != kind:
            events = self._close("completed")
            if kind == "message":
                head: dict[str, Any] = {"id": f"msg_{_token()}", "type": kind, "role": "assistant"}
                part: dict[str, Any] = {"type": "output_text", "text": ""}
                part |= {"annotations": [], "logprobs": []}
            else:
                head = {"id": f"rs_{_token()}", "type": kind, "summary": []}
                part = {"type": "reasoning_text", "text": ""}
            events += self._open({**head, "content": []})
            self._output[-1]["content"].append(part)
            events.append(
                self._item_event("response.content_part.added", content_index=0, part=dict(part))
            )
        self._output[-1]["content"][0]["text"] += text
        if text:
            events.append(self._text_event("delta", delta=text))
        return events

    def _text_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        if self._output[-1]["type"] == "reasoning":
            return self._item_event(f"response.reasoning_text.{kind}", content_index=0, **fields)
        name = f"response.output_text.{kind}"
        return self._item_event(name, content_index=0, **fields, logprobs=[])

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close("completed")
        self._output.append({**item, "status": "in_progress"})
        self._is_open = True
        added = json.loads(json.dumps(self._output[-1]))
        index = len(self._output) - 1
        return [
            *events,
            self._event("response.output_item.added", output_index=index, item=added),
        ]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._item_event("response.function_call_arguments.done", **done)]
        else:
            part = dict(item["content"][0])
            events = [
                self._text_event("done", text=part["text"]),
                self._item_event("response.content_part.done", content_index=0, part=part),
            ]
        index = len(self._output) - 1
        done = json.loads(json.dumps(item))
        return [*events, self._event("response.output_item.done", output_index=index, item=done)]

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        index = len(self._output) - 1
        item_id = self._output[-1]["id"]
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = json.loads(json.dumps(self.response))
        return snapshot


def _token() -> str:
    return uuid.uuid4().hex


def _load(arguments: str) -> dict[str, Any]:
    """Give a call's arguments as templates want them; an object even where the model wrote none."""
    try:
        loaded = json.loads(arguments)
    except (ValueError, RecursionError):
        loaded = None
    return loaded if isinstance(loaded, dict) else {"INVALID_JSON": arguments}
