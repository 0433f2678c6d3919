"""Close connections that never send a request, so that nobody can hold them all open for nothing.

aiohttp closes idle connections only after a first request. Must not know endpoints. `server/app.py`
runs it beside the site.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

logger = logging.getLogger("treadle.server")


class Silence:
    """Follow which connections have sent the head of a request. Belongs to the event loop."""

    def __init__(self) -> None:
        self._heard: set[RequestHandler] = set()

    def hear(self, connection: RequestHandler) -> None:
        """Take note of a request."""
        self._heard.add(connection)

    async def close_silent(self, server: web.Server, limit_s: float) -> None:
        """Close every connection that has sent no whole head within about `limit_s`; runs on."""
        loop = asyncio.get_running_loop()
        silent_since_s: dict[RequestHandler, float] = {}
        while True:
            await asyncio.sleep(min(limit_s / 4, 5.0))
            connections = set(server.connections)
            self._heard &= connections
            now_s = loop.time()
            silent_since_s = {
                connection: silent_since_s.get(connection, now_s)
                for connection in connections - self._heard
            }
            for connection, since_s in silent_since_s.items():
                if now_s - since_s >= limit_s:
                    logger.info("closed a connection that sent no request in %g s", limit_s)
                    connection.force_close()
