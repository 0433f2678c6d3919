"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}}.

On the routes of another protocol it has that protocol's form.

Must not know endpoints. `server/app.py` installs the middleware; streams send the same body as an
event.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from treadle.ir.errors import QueueFullError, RequestError, TreadleError

MAX_MESSAGE_CHARS = 4_000
MAX_PARAM_CHARS = 200
MAX_RETRY_AFTER_S = 3_600

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger("treadle.server")

# As nginx counts a client that went away before its answer.
CLIENT_GONE = 499

# A request's mistakes are 400 unless their code says more.
STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "response_not_found": 404,
    "method_not_allowed": 405,
    "read_timeout": 408,
    "duplicate_request_id": 409,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "aborted": 499,
    # `QueueFullError`:
    "overloaded": 429,
    "loading": 503,
    "draining": 503,
    "sleeping": 503,
}
TYPE_OF_STATUS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# The routes whose clients read another form than OpenAI's.
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
CODE_OF_HTTP_STATUS = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def status_of(error: Exception) -> int:
    """Give the status of the answer to a failed request: 4xx what the client can mend, else 5xx."""
    if isinstance(error, QueueFullError):
        return STATUS_OF_CODE.get(error.code or "", 429)
    if isinstance(error, RequestError):
        return STATUS_OF_CODE.get(error.code or "", 400)
    if isinstance(error, web.HTTPException):
        return error.status
    return 500


def error_body(error: Exception) -> dict[str, Any]:
    """Give the error object of an exception. An unknown fault shows the client no details."""
    status = status_of(error)
    param = code = None
    if isinstance(error, RequestError):
        message, param, code = str(error), error.param, error.code
    elif isinstance(error, TreadleError):
        message, code = str(error), "engine_error"
    elif isinstance(error, web.HTTPException):
        message = _explain(error)
        code = CODE_OF_HTTP_STATUS.get(status, "http_error")
    else:
        message, code = "The server failed at this request; its log says why.", "internal_error"
    return {
        "error": {
            "message": _cut(message, MAX_MESSAGE_CHARS),
            "type": TYPE_OF_STATUS.get(status, "invalid_request_error"),
            "param": param if param is None else _cut(param, MAX_PARAM_CHARS),
            "code": code,
        }
    }


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """Give the same failure in the form that Anthropic's clients read."""
    kind = ANTHROPIC_TYPE_OF_STATUS.get(status_of(error), "invalid_request_error")
    told = error_body(error)["error"]
    return {"type": "error", "error": {"type": kind, "message": told["message"]}}


def error_response(error: Exception, path: str = "") -> web.Response:
    """Give the JSON answer to a failed request, in the form of the route's protocol."""
    headers = {}
    if isinstance(error, QueueFullError):
        # Whole seconds, and at least one: clients read 0 as "at once".
        seconds = min(max(1, math.ceil(error.retry_after_s)), MAX_RETRY_AFTER_S)
        headers["Retry-After"] = str(seconds)
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = error.headers["Allow"]
    status = status_of(error)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = anthropic_error_body(error) if path in ANTHROPIC_PATHS else error_body(error)
    response = web.json_response(body, status=status, headers=headers)
    if status == 413:
        # What is left of the body is not worth reading.
        response.force_close()
    return response


def error_event(error: Exception) -> bytes:
    """Give the event that ends a stream which failed after it began."""
    return f"data: {json.dumps(error_body(error))}\n\n".encode()


def log_fault(error: Exception, what: str) -> None:
    """Log what is our fault with its traceback; a client's mistake is the client's to read."""
    if status_of(error) >= 500 and not isinstance(error, QueueFullError):
        logger.error("%s failed: %s", what, error, exc_info=error)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into the error object: the boundary of a request."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(error, request.path)
    except ConnectionError:
        # The client has gone. Nobody reads this; the metrics count it.
        return web.Response(status=CLIENT_GONE)
    except Exception as error:
        log_fault(error, f"{request.method} {request.path}")
        return error_response(error, request.path)


def _explain(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods))
        return f"Expected {allowed} for this route, found {error.method}."
    if error.status == 404:
        return "There is no such route. /v1/models lists what is served."
    return f"{error.reason}."


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
