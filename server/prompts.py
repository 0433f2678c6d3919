"""From what a request holds to prompt token ids, checked and never changed.

Must not know what the endpoints answer. Called by the protocols.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from treadle.ir.errors import RequestError
from treadle.runtime.request import Engine, SamplingParams, show_value

logger = logging.getLogger("treadle.server")


async def prepare_params(engine: Engine, params: SamplingParams) -> SamplingParams:
    """Give parameters that can be submitted, grammars compiled beside the event loop.

    Raises: RequestError: a token id outside the vocabulary, or a form that can't be enforced.
    """
    params.check_vocabulary(engine.vocab_size)
    return await engine.prepare(params)


class ChatPrompt(NamedTuple):
    """Hold a rendered conversation: what the template wrote, and its tokens."""

    text: str
    token_ids: list[int]


def encode_chat(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    param: str = "messages",
) -> ChatPrompt:
    """Render a conversation and tokenise it; takes time, so call it in a thread.

    Raises: RequestError: the template refuses it or writes nothing, or it can't fit; `param` is
    the field that held it.
    """
    text = engine.tokenizer.render_chat(
        messages, tools, add_generation_prompt, continue_final_message, **(template_kwargs or {})
    )
    if not text:
        raise RequestError(
            "Expected messages that give a prompt, found that the chat template writes nothing.",
            param=param,
            code="empty",
        )
    _check_length(engine, text, param)
    return ChatPrompt(text, engine.tokenizer.encode(text, add_special_tokens=False))


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


async def encode_prompt(
    engine: Engine, prompt: str | tuple[int, ...], add_special_tokens: bool, param: str = "prompt"
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
                        param=param,
                        code="invalid_token_id",
                    )
        return prompt
    tokenizer = engine.tokenizer
    prompt_ids = await asyncio.to_thread(_encode_text, engine, prompt, add_special_tokens, param)
    bos = tokenizer.bos_token_id
    if bos is not None and add_special_tokens and prompt_ids[:2] == [bos, bos]:
        logger.warning(
            "A raw prompt begins with the BOS token and the tokenizer added another; "
            "send `add_special_tokens: false` with a text that has its own."
        )
    return prompt_ids


def _encode_text(engine: Engine, text: str, add_special_tokens: bool, param: str) -> list[int]:
    tokenizer = engine.tokenizer
    _check_length(engine, text, param)
    prompt_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not prompt_ids and add_special_tokens and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    if not prompt_ids:
        raise RequestError(
            "Expected a prompt, found an empty text, and no BOS token to begin with.",
            param=param,
            code="empty",
        )
    return prompt_ids
