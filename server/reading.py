"""The way of every request with a JSON body: its bytes, its fields, its model, its text.

Must not know what the endpoints answer. Called by the handlers.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from treadle.ir.errors import RequestError
from treadle.runtime.request import Engine, show_value
from treadle.server.schema import Request, parse_request
from treadle.server.state import OPTIONS

# Reading a body of this size takes about a millisecond; longer ones are read beside the event loop.
INLINE_BODY_BYTES = 64 * 2**10

Q = TypeVar("Q", bound=Request)


async def read_request(request: web.Request, kind: type[Q]) -> Q:
    """Read and check a request's body.

    Raises: RequestError: a wrong content type, too large a body, or a mistake in it.
    """
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        found = request.headers.get("Content-Type")
        raise RequestError(
            "Expected the header `Content-Type: application/json`, found "
            f"{'none' if found is None else show_value(found)}.",
            remedy="Send the request as JSON in UTF-8.",
            code="unsupported_media_type",
        )
    most = request.app[OPTIONS].client_max_size_bytes
    size = request.content_length
    if size is not None and size > most:
        raise _too_large(f"{size}", most)
    try:
        body = await asyncio.wait_for(request.read(), request.app[OPTIONS].read_timeout_s)
    except TimeoutError:
        raise RequestError(
            f"Expected the whole body within {request.app[OPTIONS].read_timeout_s:g} s.",
            remedy="Send it again, faster.",
            code="read_timeout",
        ) from None
    except HTTPRequestEntityTooLarge:
        raise _too_large("more", most) from None
    except (web.RequestPayloadError, ValueError) as error:
        # A broken chunk or a body that is not compressed as its header says.
        raise RequestError(
            f"Expected a body that can be read, found that it can't: {type(error).__name__}.",
            code="invalid_body",
        ) from error
    if len(body) <= INLINE_BODY_BYTES:
        return parse_request(kind, body)
    return await asyncio.to_thread(parse_request, kind, body)


def _too_large(found: str, most: int) -> RequestError:
    return RequestError(
        f"Expected a body of at most {most} bytes, found {found}.",
        remedy="Send less at once; the server's operator can raise the limit.",
        code="body_too_large",
    )


def check_model(engine: Engine, name: str | None) -> None:
    if name is not None and name != engine.model_name:
        raise RequestError(
            f"The model {show_value(name)} is not served here.",
            remedy=f"This server has `{engine.model_name}`.",
            param="model",
            code="model_not_found",
        )
