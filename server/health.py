"""Alive, ready, metrics, version: what an operator's tools ask for.

Must not know the API's endpoints. `server/app.py` adds these routes.
"""

from __future__ import annotations

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

import treadle
from treadle.server.state import ENGINE, METRICS, OPTIONS, STATE

RETRY_AFTER_S = "5"


def add_routes(app: web.Application) -> None:
    """Add /health, /ready, /metrics and /version."""
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)


async def health(request: web.Request) -> web.Response:
    """Say whether the process is alive: 200 while it loads, serves or drains, 503 when broken.

    Broken is an engine that failed, or that has requests and completes no step.
    """
    app = request.app
    engine = app[ENGINE]
    if engine.failure is not None:
        return _not_well("failed", f"{engine.failure}"[:1000])
    stats = engine.stats()
    limit_s = app[OPTIONS].stuck_after_s
    # Requests that run without a step, or a step that does not end.
    without_step_s = stats.last_step_age_s if stats.running else 0.0
    stuck_s = max(without_step_s, stats.step_in_flight_s)
    if engine.ready and stuck_s > limit_s:
        return _not_well(
            "stuck", f"Requests run and no step was completed in the last {stuck_s:.0f} s."
        )
    return web.json_response({"status": "alive", "phase": _phase(app)})


async def ready(request: web.Request) -> web.Response:
    """Say whether requests are taken: 200, or 503 with the phase while loading or draining."""
    app = request.app
    engine = app[ENGINE]
    if engine.ready and engine.failure is None and not app[STATE].draining:
        return web.json_response({"status": "ready", "phase": engine.phase})
    return _not_well("not ready", _phase(app))


async def metrics(request: web.Request) -> web.Response:
    """Give all metrics in Prometheus' text form."""
    body = generate_latest(request.app[METRICS].registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(request: web.Request) -> web.Response:
    """Give the version of the server."""
    return web.json_response({"name": "treadle", "version": treadle.__version__})


def _phase(app: web.Application) -> str:
    return "draining" if app[STATE].draining else app[ENGINE].phase


def _not_well(status: str, phase: str) -> web.Response:
    return web.json_response(
        {"status": status, "phase": phase}, status=503, headers={"Retry-After": RETRY_AFTER_S}
    )
