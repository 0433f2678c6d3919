"""Streams of events: what is encoded once, and what leaves in one packet."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from treadle.server.sse import EventStream, TextEvents, encode_json

from .fake_engine import FakeGeneration
from .live import LiveServer

TEXTS = [
    "",
    "a",
    '"',
    "\\",
    "\n\t\x00\x1f",
    "</script>",
    "é",
    "\u2028",
    "🙂",
    "{}",
    '","',
    "\ue000",
]


def make(text: str) -> bytes:
    chunk = {"id": 'an "id"', "choices": [{"delta": {"content": text}, "logprobs": None}]}
    return f"data: {encode_json(chunk)}\n\n".encode()


@pytest.mark.parametrize("text", TEXTS)
def test_an_event_is_what_it_would_be_if_made_as_a_whole(text: str) -> None:
    texts = TextEvents()
    assert texts.write("chat", "first", make) == make("first")
    assert texts.write("chat", text, make) == make(text)


def test_each_kind_is_made_once() -> None:
    made = []

    def count(text: str) -> bytes:
        made.append(text)
        return make(text)

    texts = TextEvents()
    for kind in (0, 1, 0, 1, 0):
        texts.write(kind, str(kind), count)
    assert len(made) == 2


class Response:
    """Take writes as aiohttp's response does."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.writes.append(data)


def test_events_wait_for_those_that_follow_at_once(rng_seed: int) -> None:
    random_ = random.Random(rng_seed)
    response = Response()
    stream = EventStream(response)  # type: ignore[arg-type]
    sent = [(random_.choice([b"", b"a", b"bc"]), random_.random() < 0.5) for _ in range(50)]

    async def send() -> None:
        for events, more_follow in sent:
            await stream.send(events, more_follow=more_follow)
        await stream.send(b"")

    asyncio.run(send())
    assert b"".join(response.writes) == b"".join(events for events, _ in sent)
    assert len(response.writes) <= 1 + sum(not more_follow for _, more_follow in sent)
    assert all(response.writes)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_tokens_of_one_step_leave_in_one_packet(
    start_fake: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server: LiveServer = start_fake(step_s=0.02)
    advance = FakeGeneration.advance

    def advance_four(self: FakeGeneration, token_id: int) -> None:
        for _ in range(4):
            advance(self, token_id)

    monkeypatch.setattr(FakeGeneration, "advance", advance_four)
    prompt: Any = {"prompt": "hi"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(prompt | {"max_tokens": 20, "stream": True}).encode()
    connection = server.connect()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    num_chunks = num_events = 0
    # `read1` gives one chunk of HTTP's chunked encoding at a time.
    while data := response.read1(2**20):
        num_chunks += 1
        num_events += data.count(b"data: ")
    connection.close()
    assert num_events >= 21
    assert num_chunks <= 8
