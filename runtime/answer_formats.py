"""A model's answers told apart: its format found from the chat template, reasoning and calls read.

Must not know protocols. The server asks once for a model's format, and for a parser per answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from treadle.ir.errors import ConfigError
from treadle.runtime.answer_parts import AnswerParser, Reader, Steps
from treadle.runtime.call_formats import CALL_FORMATS, CallFormat, Tools, make_id


@dataclass(frozen=True)
class ReasoningFormat:
    """Declare the tags around reasoning, which begins the answer or has begun in the prompt."""

    name: str
    opening: str
    closing: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tags; where they are special tokens, they must be seen in the text."""
        return (self.opening, self.closing)


HARMONY = "harmony"

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
)
CALL_FORMAT_NAMES = (*(one.name for one in CALL_FORMATS), HARMONY)
REASONING_FORMAT_NAMES = (*(one.name for one in REASONING_FORMATS), HARMONY)


@dataclass(frozen=True)
class AnswerFormat:
    """Say how a model's answers are told apart; None: they hold no calls, or no reasoning.

    `is_harmony`: messages in channels, which are calls and reasoning both.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_harmony: bool = False

    @property
    def has_calls(self) -> bool:
        """Say whether tool calls can be read."""
        return self.calls is not None or self.is_harmony

    def tokens(self, *, with_calls: bool) -> frozenset[str]:
        """Give the special tokens that must be seen in the text of an answer."""
        found = _HARMONY_TOKENS if self.is_harmony else ()
        calls = self.calls.tokens if self.calls is not None and with_calls else ()
        reasoning = () if self.reasoning is None else self.reasoning.tokens
        return frozenset((*found, *calls, *reasoning))

    def parser(self, prompt: str, tools: Tools | None) -> AnswerParser | None:
        """Give the parser of one answer; None if there is nothing to tell apart.

        `prompt` is the rendered conversation, which may have opened the reasoning already.
        `tools` None: the answer is to hold no calls, and what looks like one is content.
        """
        if self.is_harmony:
            return AnswerParser(lambda reader: _read_harmony(reader, tools), make_id)
        calls = None if tools is None else self.calls
        if calls is None and self.reasoning is None:
            return None
        end = prompt.rstrip()
        format_ = partial(
            _read_answer, calls=calls, reasoning=self.reasoning, prompt_end=end, tools=tools or {}
        )
        return AnswerParser(format_, make_id if calls is None else calls.make_id)


@lru_cache(maxsize=16)
def find_format(template: str, calls: str = "auto", reasoning: str = "auto") -> AnswerFormat:
    """Give the formats of a model by its chat template; names other than `auto` overrule it.

    Raises: ConfigError: there is no format of that name, or harmony is mixed with another.
    """
    _check_name(calls, CALL_FORMAT_NAMES, "--tool-parser")
    _check_name(reasoning, REASONING_FORMAT_NAMES, "--reasoning-parser")
    writes_channels = "<|channel|>" in template and "<|message|>" in template
    if HARMONY in (calls, reasoning) or (writes_channels and calls == reasoning == "auto"):
        if not {calls, reasoning} <= {"auto", HARMONY}:
            raise ConfigError(
                f"The format `{HARMONY}` is for tool calls and reasoning both, found "
                f"--tool-parser {calls} and --reasoning-parser {reasoning}."
            )
        return AnswerFormat(is_harmony=True)
    found_calls: CallFormat | None = None
    for one in CALL_FORMATS:
        is_signed = any(all(text in template for text in sign) for sign in one.signs)
        if calls == one.name or (calls == "auto" and is_signed):
            found_calls = one
            break
    found_reasoning: ReasoningFormat | None = None
    for each in REASONING_FORMATS:
        is_signed = each.opening in template or each.closing in template
        if reasoning == each.name or (reasoning == "auto" and is_signed):
            found_reasoning = each
            break
    return AnswerFormat(found_calls, found_reasoning)


def _check_name(name: str, known: Sequence[str], option: str) -> None:
    if name not in ("auto", "none", *known):
        raise ConfigError(f"Expected {option} auto, none, {', '.join(known)}; found {name}.")


def _read_answer(
    reader: Reader,
    *,
    calls: CallFormat | None,
    reasoning: ReasoningFormat | None,
    prompt_end: str,
    tools: Tools,
) -> Steps[None]:
    """Read reasoning, if it comes first, and then content with calls in it."""
    if reasoning is not None:
        yield from _read_reasoning(reader, reasoning, prompt_end)
    if calls is None:
        yield from reader.copy_rest(reader.content)
        return
    if calls.leads:
        reader.keep()
        if not (yield from calls.read(reader, "", tools)):
            reader.give_back()
    while opening := (yield from reader.copy_until(calls.openings, reader.content)):
        reader.keep(opening)
        if not (yield from calls.read(reader, opening, tools)):
            reader.give_back()


def _read_reasoning(reader: Reader, tags: ReasoningFormat, prompt_end: str) -> Steps[None]:
    if prompt_end.endswith(tags.closing):
        reader.tag()
        return
    if not prompt_end.endswith(tags.opening):
        reader.keep()
        yield from reader.skip()
        if not (yield from reader.accept(tags.opening)):
            reader.give_back()
            return
        reader.forget_kept()
    reader.is_reasoning = True
    reader.tag()
    # Reasoning that is never closed is reasoning to its end.
    if (yield from reader.copy_until((tags.closing,), reader.reasoning)):
        reader.is_reasoning = False
        reader.tag()


# --- messages in channels -------------------------------------------------------------------------

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|constrain|>", *_HARMONY_ENDS)


def _read_harmony(reader: Reader, tools: Tools | None) -> Steps[None]:
    """Read messages with headers: analysis is reasoning, one that is sent to a tool is a call.

    The prompt ends with the opening of the assistant's message. Without `tools` no message is a
    call. Source: OpenAI's harmony response format.
    """
    while (yield from reader.peek()):
        reader.keep()
        header, marker = yield from reader.read_until("<|message|>")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if not marker and header.startswith("<|"):
            reader.forget_kept()  # cut off in a header, which is no text
            return
        if not marker or channel is None:
            reader.give_back()
            continue
        reader.tag()
        is_call = tools is not None and recipient is not None
        if is_call:
            assert recipient is not None, "tested above"
            reader.begin_call(recipient[1].removeprefix("functions."))
            end = yield from reader.copy_until(_HARMONY_ENDS, reader.arguments, tells_partial=False)
            reader.end_call(is_whole=bool(end))
        else:
            reader.forget_kept()
            reader.is_reasoning = channel[1] == "analysis"
            tell = reader.reasoning if reader.is_reasoning else reader.content
            if (yield from reader.copy_until(_HARMONY_ENDS, tell)):
                reader.tag()
                reader.is_reasoning = False
        # The next message's role, up to its channel, is part of its header.
