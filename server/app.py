"""The server as a whole: routes, keys, request ids; and its life from the first byte to the last.

Must not know what the endpoints say. The command line calls `run_server`; tests and other hosts
call `serve`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import signal
import ssl
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web

from treadle.ir.errors import MachineError, RequestError
from treadle.runtime.request import Engine
from treadle.server import (
    chat,
    completions,
    cors,
    embeddings,
    health,
    messages,
    models,
    native,
    openapi,
    responses,
    sleeping,
    tokens,
    webpages,
)
from treadle.server.errors import Handler, error_middleware
from treadle.server.metrics import Metrics
from treadle.server.state import (
    ENGINE,
    METRICS,
    OPEN_ROUTES,
    OPTIONS,
    STATE,
    ServerOptions,
    ServerState,
)

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
# The extra `speed`: the same loop with less work per event, where it is installed.
with suppress(ImportError):
    import uvloop

    new_event_loop = uvloop.new_event_loop

MAX_REQUEST_ID_CHARS = 200
WATCH_INTERVAL_S = 0.25
# How long the last bytes of a finished answer may take to reach its client.
FLUSH_S = 1.0
# How long a handler may take to end once its connection is closed under it.
CANCEL_S = 0.25
# How long an engine may take to close before the process goes without it.
CLOSE_S = 1.5
# Room for the header `X-Request-Id`, so that a long one gets an answer that says so.
MAX_HEADER_BYTES = 32 * 2**10

# How long the rest of a refused body is read, so that its client gets to see the answer.
LINGER_S = 0.5

ENDPOINTS = (
    chat,
    completions,
    embeddings,
    responses,
    messages,
    models,
    tokens,
    native,
    sleeping,
    health,
    webpages,
)

logger = logging.getLogger("treadle.server")


def build_app(engine: Engine, options: ServerOptions | None = None) -> web.Application:
    """Build the application; its engine starts once `STATE`'s `listening` is set."""
    options = options or ServerOptions()
    app = web.Application(
        # The outermost comes first: whatever fails inside is answered and counted.
        middlewares=[
            _count_middleware,
            error_middleware,
            cors.middleware,
            _request_id_middleware,
            _key_middleware,
        ],
        client_max_size=options.client_max_size_bytes,
    )
    app[ENGINE] = engine
    app[OPTIONS] = options
    app[STATE] = ServerState()
    app[METRICS] = Metrics(engine, vllm_names=options.vllm_metric_names)
    for endpoints in ENDPOINTS:
        endpoints.add_routes(app)
    openapi.add_routes(app)
    app.on_response_prepare.append(_echo_request_id)
    app.on_response_prepare.append(cors.allow_origin)
    app.cleanup_ctx.append(_engine_lifetime)
    return app


async def serve(
    engine: Engine,
    *,
    stop: asyncio.Event,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_s: float = 30.0,
    options: ServerOptions | None = None,
    ssl_context: ssl.SSLContext | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> bool:
    """Listen, start the engine, serve until `stop` is set, drain, and close everything.

    /health answers from the moment of listening, while the model loads. At `stop`, readiness goes
    off at once, running answers have `drain_s` to end, and what is left is broken off visibly.
    `on_listening` is told the address, with the port that was chosen where `port` is 0.
    Returns: whether the engine closed in time; if not, its threads may still be busy.
    Raises: MachineError: the address can't be listened at. TreadleError: what the engine's start
    raised, or what broke it later.
    """
    app = build_app(engine, options)
    runner = web.AppRunner(
        app,
        # A client that goes away cancels its handler, which gives up its answers.
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CANCEL_S,
        max_field_size=MAX_HEADER_BYTES,
        lingering_time=LINGER_S,
    )
    state = app[STATE]
    closing_silent: asyncio.Task[None] | None = None
    await runner.setup()
    try:
        url = await _listen(runner, host, port, ssl_context)
        logger.info("listening at %s", url)
        state.listening.set()
        assert runner.server is not None, "the runner has been set up"
        limit_s = app[OPTIONS].read_timeout_s
        closing_silent = asyncio.create_task(state.silence.close_silent(runner.server, limit_s))
        if on_listening is not None:
            on_listening(url)
        await _wait_for_end(app, stop)
        await _drain(app, drain_s)
    finally:
        state.draining = True
        if closing_silent is not None:
            closing_silent.cancel()
        await runner.cleanup()
    return state.engine_closed


def run_server(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_s: float = 30.0,
    *,
    options: ServerOptions | None = None,
    ssl_context: ssl.SSLContext | None = None,
    on_listening: Callable[[str], None] | None = None,
    exit_now: Callable[[int], object] = os._exit,
) -> None:
    """Serve until SIGTERM or SIGINT, drain, and return. A second signal ends the process at once.

    Raises: MachineError, TreadleError: see `serve`.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if stop.is_set():
                logger.warning("%s again: leaving at once", number.name)
                _leave(exit_now, 128 + number)
            logger.info("%s: draining for at most %g s", number.name, drain_s)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        is_closed = await serve(
            engine,
            stop=stop,
            host=host,
            port=port,
            drain_s=drain_s,
            options=options,
            ssl_context=ssl_context,
            on_listening=on_listening,
        )
        if not is_closed:
            # Python would wait for the engine's threads, which may load a model for minutes more.
            logger.info("the engine was still busy; leaving without it")
            _leave(exit_now, 0)

    with asyncio.Runner(loop_factory=new_event_loop) as asyncio_runner:
        asyncio_runner.run(main())


def _leave(exit_now: Callable[[int], object], status: int) -> None:
    """End the process without waiting for anything but its last words."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(status)


async def _listen(
    runner: web.AppRunner, host: str, port: int, ssl_context: ssl.SSLContext | None
) -> str:
    try:
        await web.TCPSite(runner, host, port, ssl_context=ssl_context).start()
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"Can't listen at {host}:{port}: {getattr(error, 'strerror', None) or error}.",
            remedy="Choose another --port or --host, or end the program that has this one.",
        ) from error
    bound_host, bound_port = runner.addresses[0][:2]
    shown = f"[{bound_host}]" if ":" in bound_host else bound_host
    return f"{'https' if ssl_context else 'http'}://{shown}:{bound_port}"


async def _wait_for_end(app: web.Application, stop: asyncio.Event) -> None:
    """Wait for `stop`. Raises: what the engine's start raised, or what broke the engine."""
    start = app[STATE].engine_start
    assert start is not None, "the application has been set up"
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await start
        while not stop.is_set():
            failure = app[ENGINE].failure
            if failure is not None:
                # The requests in flight learn of it through their own answers.
                app[STATE].draining = True
                await _wait_for_handlers(app, FLUSH_S)
                raise failure
            await asyncio.wait({stopping}, timeout=WATCH_INTERVAL_S)
    finally:
        stopping.cancel()


async def _drain(app: web.Application, drain_s: float) -> None:
    """Take no new requests, let the running ones end, break off those left after `drain_s`."""
    app[STATE].draining = True
    start = app[STATE].engine_start
    if start is None or not start.done():
        return
    await app[ENGINE].drain(drain_s)
    # The engine is done; the last chunks may still be on their way.
    await _wait_for_handlers(app, FLUSH_S)


async def _wait_for_handlers(app: web.Application, limit_s: float) -> None:
    """Wait until no request is being answered, but not for a client that doesn't read."""
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while app[STATE].num_active and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.01)


async def _engine_lifetime(app: web.Application) -> AsyncIterator[None]:
    """Start the engine once the socket listens, and close it with the application."""
    engine, state = app[ENGINE], app[STATE]

    async def start() -> None:
        await state.listening.wait()
        await engine.start()

    state.engine_start = asyncio.create_task(start())
    yield
    state.engine_start.cancel()
    # Its failure has been raised by `_wait_for_end`; here it only has to be over.
    await asyncio.wait({state.engine_start})
    try:
        await asyncio.wait_for(engine.close(), CLOSE_S)
    except TimeoutError:
        state.engine_closed = False


@web.middleware
async def _count_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count requests in flight and answers by route and status."""
    state = request.app[STATE]
    state.silence.hear(request.protocol)
    state.num_active += 1
    try:
        response = await handler(request)
    finally:
        state.num_active -= 1
    # Only known routes: a scan for odd paths must not fill the metrics.
    resource = request.match_info.route.resource
    route = "none" if resource is None else resource.canonical
    request.app[METRICS].http_responses.labels(route, str(response.status)).inc()
    return response


@web.middleware
async def _request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse an X-Request-Id that can't be echoed. It is never used inside; none gets a new one."""
    given = request.headers.get("X-Request-Id", "")
    if not _is_usable_id(given):
        raise RequestError(
            f"Expected the header `X-Request-Id` to have at most {MAX_REQUEST_ID_CHARS} printable "
            f"ASCII characters, found {len(given)} characters.",
            remedy="Leave it out to get one.",
            code="invalid_request_id",
        )
    return await handler(request)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    given = request.headers.get("X-Request-Id", "")
    response.headers["X-Request-Id"] = (_is_usable_id(given) and given) or uuid.uuid4().hex


def _is_usable_id(given: str) -> bool:
    return len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()


@web.middleware
async def _key_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests without one of the keys; every route needs one unless listed as open."""
    options = request.app[OPTIONS]
    keys = options.api_keys
    resource = request.match_info.route.resource
    route = "" if resource is None else resource.canonical
    is_open = route in OPEN_ROUTES or (options.open_metrics and route == "/metrics")
    if keys and not is_open:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Anthropic's clients send the key in a header of its own.
        if "X-Api-Key" in request.headers:
            scheme, given = "bearer", request.headers["X-Api-Key"]
        # Digests have one length, and every key is compared, so the time tells nothing.
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, _digest(key)) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestError(
                "Expected the header `Authorization: Bearer KEY` with a key of this server, found "
                f"{'another key' if given else 'none'}.",
                code="invalid_api_key",
            )
    return await handler(request)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
