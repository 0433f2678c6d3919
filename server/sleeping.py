"""/sleep, /wakeup and /is_sleeping: a server that gives its model's memory back for a while.

For those who train and serve on one GPU in turn. Only with the server's option --allow-sleep: who
reaches the port could end the service otherwise. `server/app.py` adds the routes.
"""

from __future__ import annotations

from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.request import show_value
from treadle.server.state import ENGINE, OPTIONS, STATE, require_ready

LEVELS = ("1", "2")
TAGS = ("weights", "kv_cache")


def add_routes(app: web.Application) -> None:
    """Add the routes."""
    app.router.add_post("/sleep", sleep)
    app.router.add_post("/wakeup", wake_up)
    app.router.add_get("/is_sleeping", show_sleeping)


async def sleep(request: web.Request) -> web.Response:
    """Let running answers end, take no new ones, and give back weights, KV cache and graphs.

    `level` 1 or 2, as other servers have it: both give back everything, and nothing is kept.
    """
    _check_allowed(request, "/sleep")
    _check_query(request, "level", LEVELS)
    engine = request.app[ENGINE]
    if not engine.is_sleeping:
        require_ready(request.app)
        await engine.sleep()
    return web.json_response({"is_sleeping": engine.is_sleeping})


async def wake_up(request: web.Request) -> web.Response:
    """Load the model again; answers when requests are taken.

    `tags` weights and kv_cache, as other servers have it: whichever is named, both come back.
    """
    _check_allowed(request, "/wakeup")
    _check_query(request, "tags", TAGS)
    engine = request.app[ENGINE]
    if request.app[STATE].draining:
        require_ready(request.app)
    await engine.wake()
    return web.json_response({"is_sleeping": engine.is_sleeping})


async def show_sleeping(request: web.Request) -> web.Response:
    """Say whether the server sleeps."""
    return web.json_response({"is_sleeping": request.app[ENGINE].is_sleeping})


def _check_allowed(request: web.Request, route: str) -> None:
    if not request.app[OPTIONS].allow_sleep:
        raise RequestError(
            f"{route} is not offered here: whoever reaches this server could stop it.",
            remedy="The server's option --allow-sleep offers it.",
            code="unsupported_endpoint",
        )


def _check_query(request: web.Request, name: str, values: tuple[str, ...]) -> None:
    for key, value in request.query.items():
        if key != name:
            raise RequestError(
                f"Unknown parameter {show_value(key)}: expected `{name}` or none.",
                param=key[:64],
                code="unknown_field",
            )
        if value not in values:
            raise RequestError(
                f"Expected `{name}` to be one of {', '.join(values)}; found {show_value(value)}.",
                param=name,
                code="invalid_value",
            )
