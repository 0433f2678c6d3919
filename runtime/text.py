"""Tokens to the text a client sees, one step at a time: detokenise, stop strings, end of answer.

The only path from tokens to text: a whole answer is a collected stream. Must not know engines or
HTTP. Called by the engine's generations.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokenizer:
    """Turn tokens into text as they come; the joined text equals `Tokenizer.decode` of them all.

    Text is given out as soon as no later token can change it, at constant work per token.
    Byte-level tokenizers: at most the three bytes of an unfinished character are held back.
    Others: a run of byte tokens is held until it ends, because the one-shot decoder judges it as
    a whole (one bad byte turns every byte of the run into U+FFFD).
    `shown_token_ids` are special tokens that are written as they are spelt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        continues_text: bool = False,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_token_ids = shown_token_ids
        self._is_first = not continues_text
        self._byte_run: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one token and give the text that is now certain."""
        if token_id in self._shown_token_ids:
            return self.flush() + self._tokenizer.spelling(token_id)
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        if self._tokenizer.has_byte_fallback and _BYTE_PIECE.fullmatch(piece):
            self._byte_run.append(piece)
            return ""
        return self._end_byte_run() + self._join([piece])

    def flush(self) -> str:
        """Give what is still held back, when no token will follow."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._end_byte_run()

    def _end_byte_run(self) -> str:
        if not self._byte_run:
            return ""
        run, self._byte_run = self._byte_run, []
        return self._join(run)

    def _join(self, pieces: list[str]) -> str:
        text = self._tokenizer.join_pieces(pieces, first=self._is_first)
        self._is_first = False
        return text


class StopMatcher:
    """Find the first stop string in a text that comes in parts, wherever the parts are cut.

    The stop that is complete first ends the text; of several that are complete at the same
    character, the longest. Only text that may yet turn out to be part of a stop is held back.
    Source: Knuth, Morris, Pratt 1977: one automaton per stop, constant work per character.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere; `SamplingParams` refuses it"
        # Longest first, so that the first one found complete is the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_measure_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take a part of the text; give what may go out, and the stop string that ended it.

        `armed` False: a stop that becomes complete in this part does not end the text.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        pending = self._held + text
        offset = len(self._held)
        for end, character in enumerate(text, offset + 1):
            hit = self._advance(character)
            if hit is not None and armed:
                self._held = ""
                return pending[: end if self._include_stop else end - len(hit)], hit
        num_held = max(self._matched)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """Give what is held back, when no text will follow."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; give the longest stop that is now complete."""
        hit = None
        for index, stop in enumerate(self._stops):
            borders = self._borders[index]
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                hit = hit or stop
                matched = borders[matched - 1]
            self._matched[index] = matched
        return hit


class TextStep(NamedTuple):
    """Hold what some tokens add to an answer.

    `token_ids` are those that count: none after the one that ended the answer. `stop_reason` is
    the stop string or stop token of a `FinishReason.STOP`; None for an end of sequence.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """Follow one answer from its tokens: its text, its length, and why and where it ends.

    An end of sequence or stop token counts as a token and adds no text; with
    `include_stop_str_in_output` a stop token adds its own. At the end, however it comes, text that
    was held back goes out.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        self._end_token_ids = self._eos_token_ids.union(params.stop_token_ids)
        shown = params.shown_token_ids
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            continues_text=params.continues_text,
            shown_token_ids=shown if params.skip_special_tokens else tokenizer.special_token_ids,
        )
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Take the next tokens. Those after the end of the answer are dropped."""
        texts: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            num_used += 1
            texts.append(self._push_token(token_id))
        used = tuple(token_ids[:num_used])
        if not used:
            return TextStep("", ())
        return TextStep("".join(texts), used, self.finish_reason, self.stop_reason)

    def finish(self, reason: FinishReason) -> TextStep:
        """End the answer for a reason that its tokens don't show: full window, abort, failure."""
        if self.finish_reason is not None:
            return TextStep("", ())
        text = self._end(reason, None)
        return TextStep(text, (), self.finish_reason, self.stop_reason)

    def _push_token(self, token_id: int) -> str:
        params = self._params
        self.completion_tokens += 1
        # `min_tokens` counts the token that ends the answer, so the promise shows in the usage.
        armed = self.completion_tokens >= params.min_tokens
        if armed and token_id in self._end_token_ids:
            is_eos = token_id in self._eos_token_ids
            text = ""
            if params.include_stop_str_in_output and not is_eos:
                text = self._detokenizer.push(token_id)
            return text + self._end(FinishReason.STOP, None if is_eos else token_id)
        text, hit = self._matcher.push(self._detokenizer.push(token_id), armed=armed)
        if hit is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, hit
        elif self.completion_tokens == params.max_tokens:
            text += self._end(FinishReason.LENGTH, None)
        return text

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> str:
        """Let go of the text held back. It may complete a stop string, which then ends the text."""
        text, hit = self._matcher.push(self._detokenizer.flush())
        if hit is None:
            text += self._matcher.flush()
        else:
            reason, stop_reason = FinishReason.STOP, hit
        self.finish_reason, self.stop_reason = reason, stop_reason
        return text


def _measure_borders(pattern: str) -> list[int]:
    """Give for each prefix the length of its longest border: a proper prefix that also ends it."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
