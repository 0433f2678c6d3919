"""OpenAI's /v1/chat/completions, whole or streamed.

Must not know how tokens are made: it reads a request, submits its prompt, and writes down what
comes back. `server/app.py` adds the route.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from treadle.runtime.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning
from treadle.runtime.request import TokenLogprobs
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.answers import Step
from treadle.server.conversation import AUTO
from treadle.server.openai import answer, head, identity
from treadle.server.reading import check_model, read_request
from treadle.server.schema import ChatRequest
from treadle.server.state import require_ready
from treadle.server.turns import Turn, prepare


def add_routes(app: web.Application) -> None:
    """Add the chat's route."""
    app.router.add_post("/v1/chat/completions", create_chat_completion)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    chat = await read_request(request, ChatRequest)
    check_model(engine, chat.model)
    turn = Turn(
        chat.messages,
        chat.sampling(),
        tools=chat.tools,
        tool_choice=chat.tool_choice or AUTO,
        parallel_tool_calls=chat.parallel_tool_calls,
        reasoning_effort=chat.reasoning_effort,
        add_generation_prompt=chat.add_generation_prompt,
        template_kwargs=chat.chat_template_kwargs or {},
        max_tokens_param=chat.max_tokens_param,
    )
    work = await prepare(request.app, turn)
    writer = _ChatWriter(*identity(engine, "chatcmpl-"), engine.tokenizer)
    return await answer(request, chat, [work], writer, start_s)


@dataclass(frozen=True)
class _ChatWriter:
    id: str
    created_unix_s: int
    model: str
    tokenizer: Tokenizer
    endpoint: str = "chat"

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return head(self.id, kind, self.created_unix_s, self.model)

    def whole(self, index: int, step: Step) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(step.parts),
            "logprobs": self._logprobs(step.delta.logprobs),
            "finish_reason": step.finish_reason,
            "stop_reason": step.delta.stop_reason,
        }

    def opening(self, index: int, first: Step) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def pieces(self, index: int, step: Step) -> list[dict[str, Any]]:
        deltas = [delta for part in step.parts if (delta := _delta(part))]
        logprobs = self._logprobs(step.delta.logprobs)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = logprobs
        return chunks

    def end(self, index: int, last: Step) -> dict[str, Any]:
        ending = {"finish_reason": last.finish_reason, "stop_reason": last.delta.stop_reason}
        return self._chunk(index, {}) | ending

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, told: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not told:
            return None
        content = [
            self._entry(one.token_id, one.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in told
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self.tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


def _delta(part: Part) -> dict[str, Any]:
    """Write a part as what a chunk adds to its message; nothing for what adds nothing."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.call, "id": part.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
    return {}


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """Write an answer's parts as the message that the chunks of its stream add up to."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[part.call]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message
