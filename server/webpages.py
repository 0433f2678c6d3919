"""Pages for people: a chat at /, the interface at /docs, the tuning report, and the status.

Plain files beside this one, which ask for nothing from any network. Must not know how answers are
made. `server/app.py` adds the routes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web

import treadle
from treadle.ir.errors import RequestError
from treadle.server.state import ENGINE, OPTIONS, STATE
from treadle.server.turns import answer_format

FOLDER = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Everything comes from this server and nothing is written into the page's own text as a script.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
FILES: web.AppKey[dict[str, bytes]] = web.AppKey("files", dict)


def add_routes(app: web.Application) -> None:
    """Add the pages and their files."""
    app[FILES] = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
    app.router.add_get("/", show_chat)
    app.router.add_get("/docs", show_interface)
    app.router.add_get("/report", show_report)
    app.router.add_get("/status", show_status)
    app.router.add_get("/pages/{name}", show_file)


async def show_chat(request: web.Request) -> web.Response:
    """Give the page to chat on, with the engine's gauges."""
    return _file(request, "chat.html")


async def show_interface(request: web.Request) -> web.Response:
    """Give the page of all routes and fields, from /openapi.json."""
    return _file(request, "docs.html")


async def show_file(request: web.Request) -> web.Response:
    """Give a file that a page asks for."""
    return _file(request, request.match_info["name"])


def _file(request: web.Request, name: str) -> web.Response:
    body = request.app[FILES].get(name)
    if body is None:
        raise web.HTTPNotFound
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    content_type = TYPES[Path(name).suffix]
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)


async def show_report(request: web.Request) -> web.Response:
    """Give the report of the kernels and their tuning, as `treadle report --html` writes it."""
    make = request.app[OPTIONS].make_report
    if make is None:
        raise RequestError("This server was started without a report.", code="not_found")
    text = await asyncio.to_thread(make)
    return web.Response(text=text, content_type="text/html")


async def show_status(request: web.Request) -> web.Response:
    """Give what runs here, and the engine's gauges, as JSON."""
    app = request.app
    engine, state = app[ENGINE], app[STATE]
    stats = engine.stats()
    status = {
        "version": treadle.__version__,
        "model": engine.model_name,
        "phase": "draining" if state.draining else engine.phase,
        "ready": engine.ready and engine.failure is None and not state.draining,
        "uptime_s": int(time.time()) - state.started_at_unix_s,
        "requests_running": stats.running,
        "requests_waiting": stats.waiting,
        "kv_pages": stats.pages_total,
        "kv_pages_free": stats.pages_free,
        "prompt_tokens_total": stats.prompt_tokens_total,
        "generation_tokens_total": stats.generation_tokens_total,
        "steps_total": stats.steps_total,
        "preemptions_total": stats.preemptions_total,
        "jit_compiles_total": stats.jit_compiles_total,
        "has_report": app[OPTIONS].make_report is not None,
    }
    if status["ready"]:
        format_ = answer_format(app)
        status |= {
            "max_model_len": engine.max_model_len,
            "has_chat_template": engine.tokenizer.has_chat_template,
            "reads_tool_calls": format_.has_calls,
        }
    return web.json_response(status)
