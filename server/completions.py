"""OpenAI's /v1/completions, whole or streamed.

Must not know how tokens are made: it reads a request, submits its prompts, and writes down what
comes back. `server/app.py` adds the route.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from treadle.runtime.request import TokenLogprobs, fit_to_window
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.answers import Step, Work
from treadle.server.openai import answer, head, identity
from treadle.server.prompts import encode_prompt, prepare_params
from treadle.server.reading import check_model, read_request
from treadle.server.schema import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from treadle.server.state import require_ready


def add_routes(app: web.Application) -> None:
    """Add the completions' route."""
    app.router.add_post("/v1/completions", create_completion)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Go on from one or several prompts."""
    start_s = time.monotonic()
    engine = require_ready(request.app)
    completion = await read_request(request, CompletionRequest)
    check_model(engine, completion.model)
    params = await prepare_params(engine, completion.sampling())
    work = []
    for prompt in completion.prompt:
        prompt_ids = await encode_prompt(engine, prompt, completion.add_special_tokens)
        fitted = fit_to_window(
            params,
            len(prompt_ids),
            engine.max_model_len,
            default_max_tokens=max(DEFAULT_COMPLETION_TOKENS, params.min_tokens),
            max_tokens_param=completion.max_tokens_param,
        )
        # With nothing but special tokens before it, the answer is the beginning of a text.
        continues = any(i not in engine.tokenizer.special_token_ids for i in prompt_ids)
        fitted = replace(fitted, continues_text=continues)
        work.append(Work(prompt_ids, fitted, scores_only=completion.scores_only))
    tells_logprobs = completion.logprobs is not None
    writer = _CompletionWriter(*identity(engine, "cmpl-"), engine.tokenizer, tells_logprobs)
    if completion.echo:
        for index in range(len(work) * completion.n):
            prompt = completion.prompt[index // completion.n]
            prompt_ids = work[index // completion.n].prompt_ids
            text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt_ids)
            writer.echoes[index] = (text, prompt_ids)
    return await answer(request, completion, work, writer, start_s)


@dataclass(frozen=True)
class _CompletionWriter:
    id: str
    created_unix_s: int
    model: str
    tokenizer: Tokenizer
    tells_logprobs: bool
    endpoint: str = "completions"
    # Where in its answer each choice's next token begins, in characters.
    offsets: dict[int, int] = field(default_factory=dict)
    # The prompt's text and tokens that each choice begins with.
    echoes: dict[int, tuple[str, Sequence[int]]] = field(default_factory=dict)

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        return head(self.id, "text_completion", self.created_unix_s, self.model)

    def whole(self, index: int, step: Step) -> dict[str, Any]:
        choice = self.end(index, step)
        for part in (*self.opening(index, step), *self.pieces(index, step)):
            choice["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
        return choice

    def opening(self, index: int, first: Step) -> list[dict[str, Any]]:
        """Give the prompt where it is to be echoed; of its first token nothing can be said."""
        if index not in self.echoes:
            return []
        text, prompt_ids = self.echoes[index]
        choice = self._choice(index, text)
        if self.tells_logprobs:
            told = self._logprobs(index, first.delta.prompt_logprobs, unknown=prompt_ids[:1])
            choice["logprobs"] = told
        return [choice]

    def pieces(self, index: int, step: Step) -> list[dict[str, Any]]:
        delta = step.delta
        logprobs = delta.logprobs if self.tells_logprobs else ()
        if not delta.text and not logprobs:
            return []
        choice = self._choice(index, delta.text)
        if logprobs:
            choice["logprobs"] = self._logprobs(index, delta.logprobs)
        return [choice]

    def end(self, index: int, last: Step) -> dict[str, Any]:
        ending = {"finish_reason": last.finish_reason, "stop_reason": last.delta.stop_reason}
        return self._choice(index, "") | ending

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

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
