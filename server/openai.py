"""OpenAI's /v1/models, /v1/completions and /v1/chat/completions, whole or streamed.

Must not know how tokens are made: it reads a request, submits prompts, and writes down what comes
back. `server/app.py` adds these routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

import treadle
from treadle.ir.errors import QueueFullError, RequestError, TreadleError
from treadle.runtime.request import (
    Delta,
    Engine,
    FinishReason,
    Generation,
    SamplingParams,
    TokenLogprobs,
    collect,
    fit_to_window,
    show_value,
)
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.errors import error_event, log_fault
from treadle.server.reading import check_model, read_request
from treadle.server.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
)
from treadle.server.state import ENGINE, METRICS, OPTIONS, STATE, Metrics, require_ready

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

logger = logging.getLogger("treadle.server")

# Made once: a stream writes one object per token.
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def add_routes(app: web.Application) -> None:
    """Add the /v1 routes."""
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", show_model)
    app.router.add_post("/v1/chat/completions", create_chat_completion)
    app.router.add_post("/v1/completions", create_completion)


async def list_models(request: web.Request) -> web.Response:
    """List what is served: one model. Answers while it loads: clients ask before they wait."""
    return web.json_response({"object": "list", "data": [_describe_model(request.app)]})


async def show_model(request: web.Request) -> web.Response:
    """Describe one model by its name."""
    check_model(request.app[ENGINE], request.match_info["id"])
    return web.json_response(_describe_model(request.app))


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    chat = await read_request(request, ChatRequest)
    check_model(engine, chat.model)
    prompt_ids = await asyncio.to_thread(_encode_chat, engine, chat)
    params = fit_to_window(
        _check_stop_ids(engine, chat.sampling()),
        len(prompt_ids),
        engine.max_model_len,
        prompt_param="messages",
        max_tokens_param=chat.max_tokens_param,
    )
    writer = _ChatWriter(*_identity(engine, "chatcmpl-"), engine.tokenizer)
    return await _answer(request, chat, [(prompt_ids, params)], writer, start_s)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Go on from one or several prompts."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    completion = await read_request(request, CompletionRequest)
    check_model(engine, completion.model)
    params = _check_stop_ids(engine, completion.sampling())
    work = []
    for prompt in completion.prompt:
        prompt_ids = await _encode_prompt(engine, prompt, completion.add_special_tokens)
        fitted = fit_to_window(
            params,
            len(prompt_ids),
            engine.max_model_len,
            default_max_tokens=max(DEFAULT_COMPLETION_TOKENS, params.min_tokens),
            max_tokens_param=completion.max_tokens_param,
        )
        # With nothing but special tokens before it, the answer is the beginning of a text.
        continues = any(i not in engine.tokenizer.special_token_ids for i in prompt_ids)
        work.append((prompt_ids, replace(fitted, continues_text=continues)))
    writer = _CompletionWriter(*_identity(engine, "cmpl-"), engine.tokenizer)
    if completion.echo:
        for index in range(len(work) * completion.n):
            prompt = completion.prompt[index // completion.n]
            prompt_ids, _ = work[index // completion.n]
            text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt_ids)
            writer.echoes[index] = (text, prompt_ids)
    return await _answer(request, completion, work, writer, start_s)


# --- reading --------------------------------------------------------------------------------------


def _check_stop_ids(engine: Engine, params: SamplingParams) -> SamplingParams:
    for token_id in params.stop_token_ids:
        if token_id >= engine.vocab_size:
            raise RequestError(
                f"Expected `stop_token_ids` from 0 to {engine.vocab_size - 1}, the model's "
                f"vocabulary; found {token_id}.",
                param="stop_token_ids",
                code="invalid_token_id",
            )
    return params


def _encode_chat(engine: Engine, chat: ChatRequest) -> list[int]:
    tokenizer = engine.tokenizer
    text = tokenizer.render_chat(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        **(chat.chat_template_kwargs or {}),
    )
    if not text:
        raise RequestError(
            "Expected messages that give a prompt, found that the chat template writes nothing.",
            param="messages",
            code="empty",
        )
    _check_length(engine, text, "messages")
    return tokenizer.encode(text, add_special_tokens=False)


def _check_length(engine: Engine, text: str, param: str) -> None:
    """Refuse a text that is far too long without tokenising all of it."""
    most = engine.max_model_len
    if engine.tokenizer.surely_exceeds(text, most):
        raise RequestError(
            f"Expected a prompt of at most {most - 1} tokens, because the model's window holds "
            f"{most} tokens, prompt and answer together; found a text of {len(text)} characters, "
            "which has more.",
            remedy="Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )


async def _encode_prompt(
    engine: Engine, prompt: str | tuple[int, ...], add_special_tokens: bool
) -> Sequence[int]:
    """Give a prompt's token ids. Ids from the client are checked and never changed.

    Raises: RequestError: an id outside the vocabulary, or a text that gives no token at all.
    """
    if not isinstance(prompt, str):
        # Long lists are refused by their length alone.
        if len(prompt) < engine.max_model_len:
            for token_id in prompt:
                if not 0 <= token_id < engine.vocab_size:
                    raise RequestError(
                        f"Expected token ids from 0 to {engine.vocab_size - 1}, the model's "
                        f"vocabulary; found {show_value(token_id)}.",
                        param="prompt",
                        code="invalid_token_id",
                    )
        return prompt
    tokenizer = engine.tokenizer
    prompt_ids = await asyncio.to_thread(_encode_text, engine, prompt, add_special_tokens)
    bos = tokenizer.bos_token_id
    if bos is not None and add_special_tokens and prompt_ids[:2] == [bos, bos]:
        logger.warning(
            "A raw prompt begins with the BOS token and the tokenizer added another; "
            "send `add_special_tokens: false` with a text that has its own."
        )
    return prompt_ids


def _encode_text(engine: Engine, text: str, add_special_tokens: bool) -> list[int]:
    tokenizer = engine.tokenizer
    _check_length(engine, text, "prompt")
    prompt_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not prompt_ids and add_special_tokens and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    if not prompt_ids:
        raise RequestError(
            "Expected a prompt, found an empty text, and no BOS token to begin with.",
            param="prompt",
            code="empty",
        )
    return prompt_ids


# --- answering ------------------------------------------------------------------------------------


async def _answer(
    request: web.Request,
    body: GenerateRequest,
    work: Sequence[tuple[Sequence[int], SamplingParams]],
    writer: _Writer,
    start_s: float,
) -> web.StreamResponse:
    """Submit every prompt `n` times and send what comes back, whole or as a stream."""
    engine = request.app[ENGINE]
    endpoint = writer.endpoint
    with _submitted(engine, work, body.n, writer.id, endpoint, request.app[METRICS]) as answers:
        for answer in answers:
            answer.start_s = start_s
        if body.stream:
            return await _stream(request, body, answers, writer)
        wholes = await asyncio.gather(*(collect(answer.deltas()) for answer in answers))
        for whole in wholes:
            _check_end(whole.finish_reason)
        choices = [writer.whole(index, whole) for index, whole in enumerate(wholes)]
        usages = _Usages(body.n)
        for index, whole in enumerate(wholes):
            usages.add(index, whole)
        return web.json_response(
            {**writer.head(is_chunk=False), "choices": choices, "usage": usages.to_json()}
        )


@dataclass
class _Answer:
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
def _submitted(
    engine: Engine,
    work: Sequence[tuple[Sequence[int], SamplingParams]],
    n: int,
    response_id: str,
    endpoint: str,
    metrics: Metrics,
) -> Iterator[list[_Answer]]:
    """Submit all generations; end every one of them when the request is over, however it ends."""
    answers: list[_Answer] = []
    try:
        for prompt_ids, params in work:
            for choice in range(n):
                name = f"{response_id}-{len(answers)}"
                generation = engine.submit(prompt_ids, params.for_choice(choice), name)
                answers.append(_Answer(generation, endpoint, metrics))
        yield answers
    finally:
        for answer in answers:
            answer.close()


def _check_end(reason: FinishReason | None) -> None:
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


async def _stream(
    request: web.Request, body: GenerateRequest, answers: list[_Answer], writer: _Writer
) -> web.StreamResponse:
    """Send chunks as they come. A failure after the first byte is an error event without [DONE]."""
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    in_every_chunk = options is not None and options.continuous_usage_stats
    head = writer.head(is_chunk=True)
    usages = _Usages(body.n)
    opened: set[int] = set()

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**head, "choices": choices}
        if in_every_chunk or usage is not None:
            chunk["usage"] = usage or usages.to_json()
        elif include_usage:
            chunk["usage"] = None
        return f"data: {_encode_json(chunk)}\n\n".encode()

    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    heartbeat = asyncio.create_task(_beat(response, request.app[OPTIONS].heartbeat_s))
    try:
        async with aclosing(_merge(answers)) as merged:
            async for index, delta in merged:
                _check_end(delta.finish_reason)
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
    finally:
        heartbeat.cancel()
    await response.write_eof()
    return response


async def _beat(response: web.StreamResponse, interval_s: float) -> None:
    """Send a comment now and then, so that no proxy takes a long prefill for a dead connection."""
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(interval_s)
            await response.write(b": waiting\n\n")


async def _merge(answers: Sequence[_Answer]) -> AsyncGenerator[tuple[int, Delta], None]:
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


class _Usages:
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


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ChatWriter:
    id: str
    created_unix_s: int
    model: str
    tokenizer: Tokenizer
    endpoint: str = "chat"

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return _head(self.id, kind, self.created_unix_s, self.model)

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


@dataclass(frozen=True)
class _CompletionWriter:
    id: str
    created_unix_s: int
    model: str
    tokenizer: Tokenizer
    endpoint: str = "completions"
    # Where in its answer each choice's next token begins, in characters.
    offsets: dict[int, int] = field(default_factory=dict)
    # The prompt's text and tokens that each choice begins with.
    echoes: dict[int, tuple[str, Sequence[int]]] = field(default_factory=dict)

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        return _head(self.id, "text_completion", self.created_unix_s, self.model)

    def whole(self, index: int, answer: Delta) -> dict[str, Any]:
        choice = self._choice(index, "", answer.finish_reason)
        for part in (*self.opening(index, answer), self.piece(index, answer)):
            choice["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
        return choice

    def opening(self, index: int, first: Delta) -> list[dict[str, Any]]:
        """Give the prompt where it is to be echoed; of its first token nothing can be said."""
        if index not in self.echoes:
            return []
        text, prompt_ids = self.echoes[index]
        choice = self._choice(index, text, None)
        if first.logprobs:
            told = self._logprobs(index, first.prompt_logprobs, unknown=prompt_ids[:1])
            choice["logprobs"] = told
        return [choice]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._choice(index, delta.text, None)
        if delta.logprobs:
            choice["logprobs"] = self._logprobs(index, delta.logprobs)
        return choice

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, "", reason)

    def _choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _logprobs(
        self, index: int, told: Sequence[TokenLogprobs], unknown: Sequence[int] = ()
    ) -> dict[str, list[Any]]:
        """Write log probabilities; `unknown` are tokens before them that have none."""
        token_ids = [*unknown, *(one.token_id for one in told)]
        nothing: list[Any] = [None] * len(unknown)
        offsets = []
        for token_id in token_ids:
            offsets.append(self.offsets.get(index, 0))
            # Special tokens are no part of the text.
            if token_id not in self.tokenizer.special_token_ids:
                length = len(self.tokenizer.token_text(token_id)[0])
                self.offsets[index] = offsets[-1] + length
        return {
            "tokens": [self._spell(token_id) for token_id in token_ids],
            "token_logprobs": nothing + [one.logprob for one in told],
            "top_logprobs": nothing + [self._top(one) for one in told],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Map the likeliest tokens, and the one that was drawn, to their values.

        Of tokens that read the same the likelier one stays.
        """
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._spell(token_id), logprob)
        return found

    def _spell(self, token_id: int) -> str:
        """Give a token's text; bytes that are no whole characters as OpenAI writes them."""
        text, data = self.tokenizer.token_text(token_id)
        if text.encode() == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# How an endpoint writes its choices.
_Writer = _ChatWriter | _CompletionWriter


def _head(response_id: str, kind: str, created_unix_s: int, model: str) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": created_unix_s,
        "model": model,
        "system_fingerprint": f"treadle-{treadle.__version__}",
    }


def _identity(engine: Engine, prefix: str) -> tuple[str, int, str]:
    return f"{prefix}{uuid.uuid4().hex}", int(time.time()), engine.model_name


def _describe_model(app: web.Application) -> dict[str, Any]:
    engine = app[ENGINE]
    model: dict[str, Any] = {
        "id": engine.model_name,
        "object": "model",
        "created": app[STATE].started_at_unix_s,
        "owned_by": "treadle",
    }
    if engine.ready:
        model["max_model_len"] = engine.max_model_len
    return model
