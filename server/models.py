"""/v1/models: what is served.

Must not know how answers are made. `server/app.py` adds these routes.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from treadle.server.reading import check_model
from treadle.server.state import ENGINE, STATE


def add_routes(app: web.Application) -> None:
    """Add the list of models and its entries."""
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", show_model)


async def list_models(request: web.Request) -> web.Response:
    """List what is served: one model. Answers while it loads: clients ask before they wait."""
    return web.json_response({"object": "list", "data": [_describe_model(request.app)]})


async def show_model(request: web.Request) -> web.Response:
    """Describe one model by its name."""
    check_model(request.app[ENGINE], request.match_info["id"])
    return web.json_response(_describe_model(request.app))


def _describe_model(app: web.Application) -> dict[str, Any]:
    engine = app[ENGINE]
    model: dict[str, Any] = {
        "id": engine.model_name,
        "object": "model",
        "created": app[STATE].started_at_unix_s,
        "owned_by": "treadle",
    }
    if engine.ready:
        model["max_model_len"] = engine.max_model_len
    return model
