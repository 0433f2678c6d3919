"""OpenAI's /v1/embeddings: the pooled last hidden state of each input, at length 1.

Must not know how hidden states are made. `server/app.py` adds the route.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import Any

import numpy as np
from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.pooling import pool
from treadle.runtime.request import Engine, SamplingParams, fit_to_window
from treadle.server.answers import Work, merge, submitted
from treadle.server.prompts import encode_prompt
from treadle.server.reading import check_model, read_request
from treadle.server.schema import EmbeddingRequest
from treadle.server.sse import encode_json
from treadle.server.state import require_ready


def add_routes(app: web.Application) -> None:
    """Add the embeddings' route."""
    app.router.add_post("/v1/embeddings", create_embeddings)


async def create_embeddings(request: web.Request) -> web.Response:
    """Give the embedding of one or several texts, where the model or `--embeddings` says how."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    body = await read_request(request, EmbeddingRequest)
    check_model(engine, body.model)
    if not engine.pooling:
        raise RequestError(
            "/v1/embeddings is not offered here: the model's folder has no 1_Pooling/config.json "
            "that says how hidden states become an embedding, or asks for what is not offered.",
            remedy="Start the server with --embeddings last or --embeddings mean.",
            code="unsupported_endpoint",
        )
    _check_dimensions(engine, body.dimensions)
    # The engine makes a token of every prompt; the answer is what it would be drawn from. For a
    # mean, the prompt's other tokens are asked about too.
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        prompt_logprobs=0 if engine.pooling == "mean" else None,
        tells_hidden=True,
    )
    work = []
    for text in body.input:
        prompt_ids = await encode_prompt(engine, text, body.add_special_tokens, param="input")
        fitted = fit_to_window(params, len(prompt_ids), engine.max_model_len, prompt_param="input")
        work.append(Work(prompt_ids, fitted))
    name = f"embd-{uuid.uuid4().hex}"
    told: list[list[np.ndarray]] = [[] for _ in work]
    embeddings: dict[int, np.ndarray] = {}
    with submitted(request, work, 1, name, "embeddings", start_s) as answers:
        # Each is pooled as it comes: a long text's hidden states take much memory.
        async for index, step in merge(answers):
            delta = step.delta
            told[index] += [one.hidden for one in (*delta.prompt_logprobs, *delta.logprobs)]
            if step.finish_reason is not None:
                embeddings[index] = pool(told[index])
                told[index].clear()
    listed = [embeddings[index] for index in range(len(work))]
    num_tokens = sum(len(one.prompt_ids) for one in work)
    data = await asyncio.to_thread(_write, engine, body, listed, num_tokens)
    return web.Response(body=data, content_type="application/json")


def _check_dimensions(engine: Engine, dimensions: int | None) -> None:
    if dimensions not in (None, engine.hidden_size):
        raise RequestError(
            f"Expected `dimensions` to be {engine.hidden_size}, the size of the model's hidden "
            f"states, found {dimensions}: a part of an embedding means something only for models "
            "that were trained for it.",
            remedy="Leave it out.",
            param="dimensions",
            code="unsupported_field",
        )


def _write(
    engine: Engine, body: EmbeddingRequest, embeddings: list[np.ndarray], num_tokens: int
) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": _write_one(one, body.encoding_format)}
        for index, one in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "data": data, "model": engine.model_name, "usage": usage}
    return encode_json(answer).encode()


def _write_one(embedding: np.ndarray, encoding_format: str) -> Any:
    """Write numbers, or the bytes of little-endian f32 in base64, as OpenAI's clients read them."""
    if encoding_format == "base64":
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
    return embedding.tolist()
