"""OpenAI's /v1/chat/completions, whole or streamed.

Must not know how tokens are made: it reads a request, submits its prompt, and writes down what
comes back. `server/app.py` adds the route.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from treadle.runtime.request import Delta, FinishReason, fit_to_window
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.openai import answer, head, identity
from treadle.server.prompts import check_stop_ids, encode_chat
from treadle.server.reading import check_model, read_request
from treadle.server.schema import ChatRequest
from treadle.server.state import require_ready


def add_routes(app: web.Application) -> None:
    """Add the chat's route."""
    app.router.add_post("/v1/chat/completions", create_chat_completion)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    chat = await read_request(request, ChatRequest)
    check_model(engine, chat.model)
    prompt = await asyncio.to_thread(
        encode_chat,
        engine,
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        template_kwargs=chat.chat_template_kwargs,
    )
    params = fit_to_window(
        check_stop_ids(engine, chat.sampling()),
        len(prompt.token_ids),
        engine.max_model_len,
        prompt_param="messages",
        max_tokens_param=chat.max_tokens_param,
    )
    writer = _ChatWriter(*identity(engine, "chatcmpl-"), engine.tokenizer)
    return await answer(request, chat, [(prompt.token_ids, params)], writer, start_s)


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

    def whole(self, index: int, answer: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int, first: Delta) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._chunk(index, {"content": delta.text}) | {"logprobs": self._logprobs(delta)}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._chunk(index, {}, reason)

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: FinishReason | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        content = [
            self._entry(one.token_id, one.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in delta.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self.tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}
