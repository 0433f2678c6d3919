"""Cross-origin calls: which web pages may use this server from a browser.

A preflight is answered before keys are asked for, because a browser sends none with it. Must not
know endpoints. `server/app.py` installs both halves.
"""

from __future__ import annotations

from aiohttp import web

from treadle.server.errors import Handler
from treadle.server.state import OPTIONS

METHODS = "GET, POST, DELETE, OPTIONS"
# What a page may read of an answer's headers.
EXPOSED = "X-Request-Id, Retry-After"
MAX_AGE_S = 600


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflights of origins that are allowed; leave everything else to its handler."""
    is_preflight = (
        request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    )
    if not is_preflight or not _allowed(request):
        return await handler(request)
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
    if asked:
        headers["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the browser that the page may read this answer, errors and streams included."""
    if not request.app[OPTIONS].cors_origins:
        return
    # A cache must not give one origin's answer to another.
    response.headers.add("Vary", "Origin")
    if allowed := _allowed(request):
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = EXPOSED


def _allowed(request: web.Request) -> str:
    """Give the value of Access-Control-Allow-Origin, or nothing."""
    origin = request.headers.get("Origin", "")
    origins = request.app[OPTIONS].cors_origins
    if origin and "*" in origins:
        return "*"
    return origin if origin in origins else ""
