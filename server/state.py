"""What the handlers of one server share: its options and its moods.

Must not know endpoints. Made by `server/app.py`; handlers find it under the keys below.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from treadle.ir.errors import ConfigError, QueueFullError
from treadle.runtime.answer_formats import find_format
from treadle.runtime.request import Engine
from treadle.server.metrics import Metrics
from treadle.server.silence import Silence

# These say nothing about requests, and what asks for them often can't hold a key.
OPEN_ROUTES = frozenset({"/health", "/ready", "/", "/docs", "/openapi.json", "/pages/{name}"})

# What a browser sends as `Origin`.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")


@dataclass(frozen=True)
class ServerOptions:
    """Fix how a server behaves.

    Units: `client_max_size_bytes` of a request's body; `heartbeat_s` between comment lines in a
    stream that has nothing to say; `stuck_after_s` without a step while requests run makes /health
    fail. `api_keys`: one of them is needed for every route but /health and /ready, and /metrics
    with `open_metrics`; none: open. `cors_origins`: web pages of these origins may call, `*`: all.
    `tool_parser`, `reasoning_parser`: how the model writes them; `auto`: as its template shows.
    `read_timeout_s`: the head of a connection's first request must have come by then, and each body
    after its head. `make_report`: gives the page of the kernels' tuning; takes time.
    `vllm_metric_names`: give metrics under those names too. `allow_sleep`: offer /sleep, /wakeup.
    Raises: ConfigError: a value out of range.
    """

    api_keys: tuple[str, ...] = ()
    client_max_size_bytes: int = 32 * 2**20
    heartbeat_s: float = 15.0
    stuck_after_s: float = 300.0
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    read_timeout_s: float = 60.0
    make_report: Callable[[], str] | None = None
    vllm_metric_names: bool = False
    allow_sleep: bool = False

    def __post_init__(self) -> None:
        if self.client_max_size_bytes < 1024:
            raise ConfigError(
                "Expected a limit of at least 1024 bytes for request bodies, found "
                f"{self.client_max_size_bytes}."
            )
        if min(self.heartbeat_s, self.stuck_after_s, self.read_timeout_s) <= 0:
            raise ConfigError("Expected times above 0 s: heartbeats, stuck engine, reading.")
        find_format("", self.tool_parser, self.reasoning_parser)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"Expected an origin such as http://localhost:3000, or *; found `{origin}`.",
                    remedy="An origin has a scheme, a host and perhaps a port, and no path.",
                )
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("Expected API keys of ASCII characters, found an empty or other one.")


class Cancellable(Protocol):
    """Stand for a running answer that can be ended from outside."""

    def cancel(self) -> bool:
        """End it; say whether it still ran."""
        ...


@dataclass
class ServerState:
    """Follow what a server is doing. Belongs to the event loop."""

    started_at_unix_s: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_active: int = 0
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    # Running answers by their id and by the client's; several may share the latter.
    running: dict[str, list[Cancellable]] = field(default_factory=dict)
    silence: Silence = field(default_factory=Silence)
    engine_start: asyncio.Task[None] | None = None
    engine_closed: bool = True


ENGINE: web.AppKey[Engine] = web.AppKey("engine")
OPTIONS: web.AppKey[ServerOptions] = web.AppKey("options", ServerOptions)
STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)


def require_ready(app: web.Application) -> Engine:
    """Give the engine if it takes requests.

    Raises: QueueFullError: it is loading or draining. TreadleError: what broke it for good.
    """
    engine = app[ENGINE]
    if app[STATE].draining:
        raise QueueFullError(
            "The server is shutting down and takes no new requests.",
            remedy="Send it to another server, or again when this one is back.",
            retry_after_s=5,
            code="draining",
        )
    if engine.failure is not None:
        raise engine.failure
    if engine.is_sleeping:
        raise QueueFullError(
            f"The server sleeps, and gave its model's memory back ({engine.phase}).",
            remedy="POST /wakeup loads it again.",
            retry_after_s=5,
            code="sleeping",
        )
    if not engine.ready:
        raise QueueFullError(
            f"The model is not ready yet: {engine.phase}.",
            remedy="/ready says when it is.",
            retry_after_s=5,
            code="loading",
        )
    return engine
