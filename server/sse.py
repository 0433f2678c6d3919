"""Server-sent events: a response that stays open, with signs of life while there is no news.

Must not know what the events say. Called by the protocols.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from treadle.server.state import OPTIONS

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

# Made once: a stream writes one object per token.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


# Stands for a text while a template is made; no protocol's own words hold it.
_MARK = "\ue000text\ue001"


class TextEvents:
    """Write events that differ in one text, as most of a stream's do: only the text is encoded.

    The first of a kind shows what is around the text in all of them.
    """

    def __init__(self) -> None:
        self._around: dict[Hashable, tuple[str, str]] = {}

    def write(self, kind: Hashable, text: str, make: Callable[[str], bytes]) -> bytes:
        """Give `make(text)`, having called it once for each kind."""
        around = self._around.get(kind)
        if around is None:
            before, mark, after = make(_MARK).decode().partition(encode_json(_MARK))
            assert mark and _MARK not in after, "an event of this kind holds the text once"
            around = self._around[kind] = (before, after)
        return f"{around[0]}{encode_json(text)}{around[1]}".encode()


class EventStream:
    """Send events to one client. Raises: ConnectionError: it has gone."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response
        self._held: list[bytes] = []

    async def send(self, events: bytes, *, more_follow: bool = False) -> None:
        """Send events, or none; those that others follow without a wait are sent with the others.

        Each write is a packet, which costs as much as the making of several events.
        """
        if events:
            self._held.append(events)
        if self._held and not more_follow:
            held, self._held = self._held, []
            await self.response.write(b"".join(held))


@asynccontextmanager
async def open_stream(request: web.Request) -> AsyncIterator[EventStream]:
    """Give a stream of events; it is ended with the block, unless the client has gone."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    heartbeat = asyncio.create_task(_beat(response, request.app[OPTIONS].heartbeat_s))
    try:
        yield EventStream(response)
    finally:
        heartbeat.cancel()
    await response.write_eof()


async def _beat(response: web.StreamResponse, interval_s: float) -> None:
    """Send a comment now and then, so that no proxy takes a long prefill for a dead connection."""
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(interval_s)
            await response.write(b": waiting\n\n")
