"""Endpoints that are no other vendor's: /generate, /get_ppl, /v1/encode, /abort_request.

Must not know how tokens are made. `server/app.py` adds the routes.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.request import Engine, SamplingParams, fit_to_window
from treadle.server.answers import Answer, Step, Work, collect_answer, submitted
from treadle.server.errors import error_event, log_fault
from treadle.server.native_request import (
    DEFAULT_GENERATE_TOKENS,
    MAX_ROWS_BYTES,
    AbortRequest,
    EncodeRequest,
    GenerateTextRequest,
    PerplexityRequest,
)
from treadle.server.prompts import encode_prompt, prepare_params
from treadle.server.reading import check_model, read_request
from treadle.server.sse import encode_json, open_stream
from treadle.server.state import STATE, require_ready


def add_routes(app: web.Application) -> None:
    """Add the native routes."""
    app.router.add_post("/generate", generate)
    app.router.add_post("/get_ppl", get_perplexity)
    app.router.add_post("/v1/encode", encode)
    app.router.add_post("/abort_request", abort_request)


async def generate(request: web.Request) -> web.StreamResponse:
    """Go on from a text or token ids; the answer has text, token ids and what is known of them."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    body = await read_request(request, GenerateTextRequest)
    check_model(engine, body.model)
    prompt = body.input_ids if body.prompt is None else body.prompt
    assert prompt is not None, "the request's check wants one of them"
    prompt_ids = await encode_prompt(engine, prompt, body.add_special_tokens)
    params = await prepare_params(engine, body.sampling())
    fitted = fit_to_window(
        params,
        len(prompt_ids),
        engine.max_model_len,
        default_max_tokens=max(DEFAULT_GENERATE_TOKENS, params.min_tokens),
        max_tokens_param=body.max_tokens_param,
    )
    if body.output_logits is not None:
        _check_rows("output_logits", engine.vocab_size, len(prompt_ids), fitted)
    if body.output_last_hidden_state is not None:
        _check_rows("output_last_hidden_state", engine.hidden_size, len(prompt_ids), fitted)
    work = Work(prompt_ids, _continue_text(engine, prompt_ids, fitted))
    name = f"gen-{uuid.uuid4().hex}"
    with submitted(request, [work], 1, name, "generate", start_s) as (answer,):
        if body.stream:
            return await _stream(request, answer, name, body.return_logprob)
        whole = await collect_answer(answer)
    return web.json_response(_describe(name, whole, body.return_logprob))


def _check_rows(param: str, columns: int, prompt_tokens: int, params: SamplingParams) -> None:
    """Refuse an answer whose logits or hidden states would be too large. Raises: RequestError."""
    most = params.max_tokens or 0
    if params.prompt_logprobs is not None:
        most += prompt_tokens - 1
    size_bytes = 4 * most * columns
    if size_bytes > MAX_ROWS_BYTES:
        raise RequestError(
            f"Expected `{param}` of at most {MAX_ROWS_BYTES} bytes, found that {most} rows of "
            f"{columns} take {size_bytes}.",
            remedy="Lower `max_tokens`, or use the offline pipeline, which has no such limit.",
            param=param,
            code="invalid_value",
        )


async def _stream(
    request: web.Request, answer: Answer, name: str, tells_logprobs: bool
) -> web.StreamResponse:
    """Send what each step adds, as an object of the same form, and [DONE]."""
    async with open_stream(request) as stream:
        try:
            async for step in answer.steps():
                data = f"data: {encode_json(_describe(name, step, tells_logprobs))}\n\n".encode()
                await stream.send(data, more_follow=answer.has_more)
            await stream.send(b"data: [DONE]\n\n")
        except ConnectionError:
            raise  # the client has gone; the answer is given up on the way out
        except Exception as error:
            log_fault(error, f"a stream of {request.path}")
            await stream.send(error_event(error))
    return stream.response


def _describe(name: str, step: Step, tells_logprobs: bool) -> dict[str, Any]:
    delta, usage = step.delta, step.usage
    reason = None
    if step.finish_reason is not None:
        reason = {"type": step.finish_reason, "matched": delta.stop_reason}
    told: dict[str, Any] = {
        "id": name,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "finish_reason": reason,
    }
    scored = (*delta.prompt_logprobs, *delta.logprobs)
    for field, rows in (
        ("output_logits", [one.logits for one in scored if one.logits is not None]),
        ("output_last_hidden_state", [one.hidden for one in scored if one.hidden is not None]),
    ):
        if rows:
            told[field] = {
                "dtype": "float32",
                "shape": [len(rows), len(rows[0])],
                "base64": base64.b64encode(b"".join(row.tobytes() for row in rows)).decode(),
            }
    if delta.logprobs and tells_logprobs:
        told["output_token_logprobs"] = [[one.logprob, one.token_id] for one in delta.logprobs]
        told["output_top_logprobs"] = [
            [[logprob, token_id] for token_id, logprob in one.top] for one in delta.logprobs
        ]
    return {"text": delta.text, "output_ids": list(delta.token_ids), "meta_info": told}


async def get_perplexity(request: web.Request) -> web.Response:
    """Give the mean cross-entropy of a text's tokens, as `ppl`, and its exponential."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    body = await read_request(request, PerplexityRequest)
    check_model(engine, body.model)
    prompt = body.input_ids if body.input is None else body.input
    assert prompt is not None, "the request's check wants one of them"
    param = "input_ids" if body.input is None else "input"
    prompt_ids = await encode_prompt(engine, prompt, body.add_special_tokens, param=param)
    if len(prompt_ids) < 2:
        raise RequestError(
            "Expected at least 2 tokens, because the first has nothing before it; found 1.",
            param=param,
            code="invalid_value",
        )
    params = fit_to_window(
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        len(prompt_ids),
        engine.max_model_len,
        prompt_param=param,
    )
    name = f"ppl-{uuid.uuid4().hex}"
    with submitted(request, [Work(prompt_ids, params)], 1, name, "get_ppl", start_s) as (answer,):
        whole = await collect_answer(answer)
    told = [-one.logprob for one in whole.delta.prompt_logprobs]
    mean = sum(told) / len(told)
    perplexity = math.exp(mean) if mean < 700 else None
    return web.json_response({"ppl": mean, "exp": perplexity, "num_tokens": len(told)})


async def encode(request: web.Request) -> web.Response:
    """Give the token ids of one or several texts."""
    engine = require_ready(request.app)
    body = await read_request(request, EncodeRequest)
    check_model(engine, body.model)
    encoded = await asyncio.to_thread(_encode_all, engine, body)
    is_single = len(encoded) == 1
    return web.json_response(
        {
            "input_ids": encoded[0] if is_single else encoded,
            "length": len(encoded[0]) if is_single else [len(ids) for ids in encoded],
        }
    )


def _encode_all(engine: Engine, body: EncodeRequest) -> list[list[int]]:
    tokenizer = engine.tokenizer
    if body.do_preprocess:
        turns = ([{"role": "user", "content": text}] for text in body.input)
        return [tokenizer.encode_chat(turn) for turn in turns]
    return [tokenizer.encode(text, add_special_tokens=body.add_bos) for text in body.input]


def _continue_text(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams
) -> SamplingParams:
    """With nothing but special tokens before it, an answer is the beginning of a text."""
    special = engine.tokenizer.special_token_ids
    return replace(params, continues_text=any(i not in special for i in prompt_ids))


async def abort_request(request: web.Request) -> web.Response:
    """End running answers: one request's, by its id or its X-Request-Id, or all."""
    body = await read_request(request, AbortRequest)
    running = request.app[STATE].running
    found = {
        id(answer): answer
        for name, answers in running.items()
        if body.abort_all or name == body.request_id
        for answer in answers
    }
    num_aborted = sum(answer.cancel() for answer in found.values())
    return web.json_response({"aborted": num_aborted})
