"""The parts of an answer's text (reasoning, content, tool calls), told apart as the text comes.

A format is a generator that reads text as if it were all there and waits where it is not, so that
the parts can't depend on how the text was cut. A whole answer takes the same way as a streamed one.
Must not know protocols; the formats are in `runtime/call_formats.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
# What a format is made of: each `yield` waits for more text.
Steps = Generator[None, None, T]

WHITE_SPACE = " \t\r\n"
# Brackets and quotes of JSON outside of strings, and what ends or escapes inside of them.
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,:}\]]")


class Reasoning(NamedTuple):
    """Hold text that the model wrote for itself."""

    text: str


class Content(NamedTuple):
    """Hold text of the answer proper."""

    text: str


class CallBegin(NamedTuple):
    """Open tool call number `call` of the answer."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """Hold a piece of a call's arguments, a JSON object when joined, as the model wrote it."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """Close a tool call."""

    call: int


Part = Reasoning | Content | CallBegin | CallArguments | CallEnd
Tell = Callable[[str], None]


class Reader:
    """Hold the text that has come and not been read, and the parts that were found in it.

    Line breaks next to a tag belong to the tag: they are no part of reasoning or content.
    """

    def __init__(self, make_id: Callable[[], str]) -> None:
        self.parts: list[Part] = []
        self.is_reasoning = False
        self.has_open_call = False
        self._make_id = make_id
        self._text = ""
        self._at = 0
        self._kept_from: int | None = None
        self._ended = False
        self._line_breaks = ""
        self._after_tag = False
        self._num_calls = 0
        self._has_arguments = False

    # --- from outside ---------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        """Append text; drop what has been read for good."""
        done = self._at if self._kept_from is None else self._kept_from
        self._text = self._text[done:] + text
        self._at -= done
        if self._kept_from is not None:
            self._kept_from = 0

    def end(self) -> None:
        """Say that no text will follow."""
        self._ended = True

    # --- reading --------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Give the next character without reading it; nothing at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self, literal: str) -> Steps[bool]:
        """Read this text if it comes next; say whether it did."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._at += len(literal)
                return True
            if self._ended or not literal.startswith(found):
                return False
            yield

    def skip(self, characters: str = WHITE_SPACE) -> Steps[None]:
        """Read over these characters."""
        while (following := (yield from self.peek())) and following in characters:
            self._at += 1

    def copy_until(
        self, markers: Sequence[str], tell: Tell, *, tells_partial: bool = True
    ) -> Steps[str]:
        """Tell the text up to the first marker and read that; give it, or nothing at the end.

        No marker may be a part of another one: then which comes first is clear at once.
        `tells_partial` False: a beginning of a marker at the very end is not told.
        """
        while True:
            text, begin = self._text, self._at
            places = [(text.find(marker, begin), marker) for marker in markers]
            found = min((place for place in places if place[0] >= 0), default=None)
            if found is not None:
                self._at = found[0] + len(found[1])
                tell(text[begin : found[0]])
                return found[1]
            held_from = max(begin, _held_from(text, markers))
            if self._ended:
                self._at = len(text)
                tell(text[begin : len(text) if tells_partial else held_from])
                return ""
            self._at = held_from
            tell(text[begin:held_from])
            yield

    def copy_rest(self, tell: Tell) -> Steps[None]:
        """Tell all text to the end."""
        while True:
            begin, self._at = self._at, len(self._text)
            tell(self._text[begin:])
            if self._ended:
                return
            yield

    def read_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Give the text up to the first marker, and the marker; it is empty at the end."""
        texts: list[str] = []
        marker = yield from self.copy_until(markers, texts.append)
        return "".join(texts), marker

    def read_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the characters that fit a pattern of single characters."""
        texts = []
        while (following := (yield from self.peek())) and pattern.match(following):
            self._at += 1
            texts.append(following)
        return "".join(texts)

    def read_json_string(self) -> Steps[str | None]:
        """Read a JSON string; None if none comes next, or it is not valid or not whole."""
        if (yield from self.peek()) != '"':
            return None
        texts: list[str] = []
        if not (yield from self.copy_json(texts.append)):
            return None
        try:
            return str(json.loads("".join(texts), strict=False))
        except ValueError:
            return None

    def copy_json(self, tell: Tell) -> Steps[bool]:
        """Tell one JSON value exactly as it is written, as it comes; say whether it was whole.

        Only strings and brackets are looked at; nothing is ever repaired.
        """
        first = yield from self.peek()
        if first == "" or first in ",:}]":
            return False
        if first not in '"{[':
            return (yield from self._copy_scalar(tell))
        depth, in_string = 0, False
        while True:
            begin = self._at
            while True:
                pattern = _STRING_END if in_string else _STRUCTURE
                match = pattern.search(self._text, self._at)
                if match is None:
                    self._at = len(self._text)
                    break
                self._at = match.end()
                mark = match.group()
                if mark == "\\":
                    if self._at == len(self._text) and not self._ended:
                        self._at -= 1  # what it escapes has not come yet
                        break
                    self._at = min(self._at + 1, len(self._text))
                    continue
                if mark == '"':
                    in_string = not in_string
                else:
                    depth += 1 if mark in "{[" else -1
                if depth == 0 and not in_string:
                    tell(self._text[begin : self._at])
                    return True
            tell(self._text[begin : self._at])
            if self._ended:
                return False
            yield

    def _copy_scalar(self, tell: Tell) -> Steps[bool]:
        while True:
            match = _SCALAR_END.search(self._text, self._at)
            if match is not None or self._ended:
                end = len(self._text) if match is None else match.start()
                begin, self._at = self._at, end
                tell(self._text[begin:end])
                return match is not None
            yield

    # --- telling --------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Tell text of the answer proper."""
        self._tell(Content, text)

    def reasoning(self, text: str) -> None:
        """Tell reasoning."""
        self._tell(Reasoning, text)

    def tag(self) -> None:
        """Say that a tag was read here; the line breaks around it are its own."""
        self._line_breaks = ""
        self._after_tag = True

    def keep(self, read: str = "") -> None:
        """From here on, and from `read` before it, keep what is read: it may have to go back."""
        self._kept_from = self._at - len(read)

    def give_back(self) -> None:
        """Tell as content what was read since `keep`: it was not what it looked like."""
        assert self._kept_from is not None, "`keep` comes first"
        text = self._text[self._kept_from : self._at]
        self._kept_from = None
        self.content(text)

    def forget_kept(self) -> None:
        """Read for good what was kept: it was what it looked like."""
        self._kept_from = None

    def begin_call(self, name: str) -> None:
        """Open a call. What was kept is a call's for good."""
        self._kept_from = None
        self._has_arguments = False
        self.has_open_call = True
        self.tag()
        self.parts.append(CallBegin(self._num_calls, self._make_id(), name))

    def arguments(self, text: str) -> None:
        """Tell a piece of the open call's arguments."""
        if not text:
            return
        self._has_arguments = True
        last = self.parts[-1] if self.parts else None
        if isinstance(last, CallArguments):
            self.parts[-1] = CallArguments(last.call, last.text + text)
        else:
            self.parts.append(CallArguments(self._num_calls, text))

    def end_call(self, *, is_whole: bool = True) -> None:
        """Close the open call; one that is whole and has no arguments has an empty object."""
        if is_whole and not self._has_arguments:
            self.arguments("{}")
        self.parts.append(CallEnd(self._num_calls))
        self.has_open_call = False
        self._num_calls += 1
        self.tag()

    def flush(self) -> None:
        """Tell the line breaks that were held back, when nothing follows them."""
        held, self._line_breaks = self._line_breaks, ""
        if held:
            self._add(Reasoning if self.is_reasoning else Content, held)

    def _tell(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if self._after_tag:
            text = text.lstrip("\n")
        if not text:
            return
        self._after_tag = False
        body = text.rstrip("\n")
        if body:
            self._add(kind, self._line_breaks + body)
            self._line_breaks = ""
        self._line_breaks += text[len(body) :]

    def _add(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            self.parts[-1] = kind(last.text + text)
        else:
            self.parts.append(kind(text))


def _held_from(text: str, markers: Sequence[str]) -> int:
    """Give where the longest end of a text begins that a marker may begin with."""
    longest = max(len(marker) for marker in markers)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[begin:]) for marker in markers):
            return begin
    return len(text)


class AnswerParser:
    """Follow one answer: text in, parts out. `format_` is a generator function over the reader."""

    def __init__(
        self, format_: Callable[[Reader], Steps[None]], make_id: Callable[[], str]
    ) -> None:
        self._reader = Reader(make_id)
        self._steps: Steps[None] | None = format_(self._reader)
        self._resume()

    @property
    def is_reasoning(self) -> bool:
        """Say whether what comes next is reasoning, as far as is known."""
        return self._reader.is_reasoning

    def push(self, text: str) -> list[Part]:
        """Take the next text; give the parts that are now certain, neighbours of a kind joined."""
        if text:
            self._reader.feed(text)
            self._resume()
        return self._take()

    def finish(self) -> list[Part]:
        """Give what was held back, when no text will follow."""
        self._reader.end()
        self._resume()
        self._reader.flush()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return parts

    def _resume(self) -> None:
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
