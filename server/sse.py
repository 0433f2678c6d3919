"""Server-sent events: a response that stays open, with signs of life while there is no news.

Must not know what the events say. Called by the protocols.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
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


@asynccontextmanager
async def open_stream(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """Give a response that takes events; it is ended with the block, unless the client has gone."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    heartbeat = asyncio.create_task(_beat(response, request.app[OPTIONS].heartbeat_s))
    try:
        yield response
    finally:
        heartbeat.cancel()
    await response.write_eof()


async def _beat(response: web.StreamResponse, interval_s: float) -> None:
    """Send a comment now and then, so that no proxy takes a long prefill for a dead connection."""
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(interval_s)
            await response.write(b": waiting\n\n")
