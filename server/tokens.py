"""/tokenize, /detokenize and /tokenizer_info: the model's tokenizer, for clients without it.

Evaluation tools such as lm-eval ask for them. Must not know how answers are made. `server/app.py`
adds these routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.reading import check_model, read_request
from treadle.server.schema import DetokenizeRequest, TokenizeRequest
from treadle.server.state import require_ready


def add_routes(app: web.Application) -> None:
    """Add the tokenizer's routes."""
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/tokenizer_info", show_tokenizer)


async def tokenize(request: web.Request) -> web.Response:
    """Give the token ids of a text or a conversation, and how many there are."""
    engine = require_ready(request.app)
    body = await read_request(request, TokenizeRequest)
    check_model(engine, body.model)
    ids = await asyncio.to_thread(_encode, engine.tokenizer, body)
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": engine.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [engine.tokenizer.spelling(token_id) for token_id in ids]
    return web.json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Give the text of token ids, special tokens written out, as `prompt`."""
    engine = require_ready(request.app)
    body = await read_request(request, DetokenizeRequest)
    check_model(engine, body.model)
    for index, token_id in enumerate(body.tokens):
        if token_id >= engine.vocab_size:
            raise RequestError(
                f"Expected token ids from 0 to {engine.vocab_size - 1}, the model's vocabulary; "
                f"found {token_id} at index {index}.",
                param=f"tokens.{index}",
                code="invalid_token_id",
            )
    text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, keeps_special=True)
    return web.json_response({"prompt": text})


async def show_tokenizer(request: web.Request) -> web.Response:
    """Describe the tokenizer: its class, its special tokens, its chat template."""
    engine = require_ready(request.app)
    return web.json_response(engine.tokenizer.describe())


def _encode(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None, "the request's check wants one of them"
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return tokenizer.encode_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        **(body.chat_template_kwargs or {}),
    )
