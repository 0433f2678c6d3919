"""Options of the server: calls from web pages, metrics without a key, the event loop."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from treadle.ir.errors import ConfigError
from treadle.server import app
from treadle.server.state import ServerOptions

from .live import LiveServer

PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def server(start_fake: Any) -> LiveServer:
    return start_fake(server={"api_keys": ("key",), "cors_origins": (PAGE,), "open_metrics": True})


def preflight(server: LiveServer, origin: str, path: str = "/v1/chat/completions") -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return server.request("OPTIONS", path, headers=headers)


def test_a_preflight_needs_no_key(server: LiveServer) -> None:
    reply = preflight(server, PAGE)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["vary"] == "Origin"


def test_another_origin_is_told_nothing(server: LiveServer) -> None:
    reply = preflight(server, "http://evil.example")
    assert reply.status in (401, 405)
    assert "access-control-allow-origin" not in reply.headers
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("key", ["key", "wrong"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_errors_and_streams_can_be_read(server: LiveServer, key: str, stream: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "stream": stream}
    reply = server.post("/v1/completions", body, Origin=PAGE, Authorization=f"Bearer {key}")
    assert reply.status == (200 if key == "key" else 401)
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_every_origin_can_be_allowed(start_fake: Any) -> None:
    server = start_fake(server={"cors_origins": ("*",)})
    assert preflight(server, "http://any.example").headers["access-control-allow-origin"] == "*"


def test_without_origins_nothing_is_said(start_fake: Any) -> None:
    server = start_fake()
    reply = server.get("/v1/models", Origin=PAGE)
    assert "access-control-allow-origin" not in reply.headers
    assert "vary" not in reply.headers
    assert preflight(server, PAGE).status == 405


def test_metrics_can_be_opened_and_nothing_else_with_them(server: LiveServer) -> None:
    assert server.get("/metrics").status == 200
    assert server.get("/v1/models").status == 401


@pytest.mark.parametrize("origin", ["localhost", "http://a/b", "", "null"])
def test_what_is_not_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="Expected an origin"):
        ServerOptions(cors_origins=(origin,))


def test_the_loop_is_uvloops_where_it_is_installed() -> None:
    try:
        expected = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        expected = asyncio.new_event_loop
    assert app.new_event_loop is expected
