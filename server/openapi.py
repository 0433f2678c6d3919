"""/openapi.json: the interface described from the very declarations that requests are read with.

Must not know how requests are answered. `server/app.py` adds the route last, when all others are
known.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

import treadle
from treadle.server.errors import ANTHROPIC_PATHS
from treadle.server.fields import object_schema
from treadle.server.messages_request import CountTokensRequest, MessagesRequest
from treadle.server.native_request import (
    AbortRequest,
    EncodeRequest,
    GenerateTextRequest,
    PerplexityRequest,
)
from treadle.server.responses_request import ResponsesRequest
from treadle.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Request,
    TokenizeRequest,
    other_fields,
)
from treadle.server.state import OPEN_ROUTES

# What each route reads; a route that takes a body and is missing here fails a test.
BODIES: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/encode": EncodeRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/generate": GenerateTextRequest,
    "/get_ppl": PerplexityRequest,
    "/abort_request": AbortRequest,
}
# Fields that the whole answers of a route always have.
ANSWERS: dict[str, tuple[str, ...]] = {
    "/v1/models": ("object", "data"),
    "/v1/models/{id}": ("id", "object", "created", "owned_by"),
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/embeddings": ("object", "data", "model", "usage"),
    "/v1/responses": ("id", "object", "created_at", "model", "status", "output", "usage"),
    "/v1/messages": ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/v1/encode": ("input_ids", "length"),
    "/tokenize": ("tokens", "count", "max_model_len"),
    "/detokenize": ("prompt",),
    "/get_ppl": ("ppl",),
    "/abort_request": ("aborted",),
    "/health": ("status", "phase"),
    "/ready": ("status", "phase"),
    "/version": ("name", "version"),
    "/sleep": ("is_sleeping",),
    "/wakeup": ("is_sleeping",),
    "/is_sleeping": ("is_sleeping",),
    "/generate": ("text", "output_ids", "meta_info"),
    "/status": ("model", "phase", "ready"),
}
# Routes whose answers are no JSON, and those that can be streams.
OTHER_TYPES = {"/metrics": "text/plain", "/": "text/html", "/docs": "text/html"}
OTHER_TYPES["/report"] = "text/html"
STREAMS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
)
DOCUMENT: web.AppKey[bytes] = web.AppKey("openapi", bytes)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_NOT_WELL = {"type": "object", "required": ["status", "phase"]}

# One event of a stream. An OpenAPI document can't say how many follow.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def add_routes(app: web.Application) -> None:
    """Add the document of all routes that are there by now."""
    app.router.add_get("/openapi.json", show_document)
    app[DOCUMENT] = json.dumps(build_document(app)).encode()


async def show_document(request: web.Request) -> web.Response:
    """Describe every route and field as OpenAPI 3.1."""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


def build_document(app: web.Application) -> dict[str, Any]:
    """Describe an application's routes."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for route in app.router.routes():
        if route.method == "HEAD" or route.resource is None or route.resource.canonical == "":
            continue
        path = route.resource.canonical
        if "{name}" in path:
            continue  # the files of the pages
        operation = _operation(path, inspect.cleandoc(route.handler.__doc__ or ""), schemas)
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Treadle",
            "version": treadle.__version__,
            "description": "Language models, served at the interfaces that clients know.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, doc: str, schemas: dict[str, Any]) -> dict[str, Any]:
    summary, _, rest = doc.partition("\n")
    operation: dict[str, Any] = {"summary": summary, "responses": _responses(path)}
    if rest.strip():
        operation["description"] = rest.strip()
    if path not in OPEN_ROUTES:
        # An empty requirement stands for a server that asks for no key.
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    if "{id}" in path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    kind = BODIES.get(path)
    if kind is not None:
        schemas[kind.__name__] = _plain(object_schema(kind, other_fields(kind)))
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": reference}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(path: str) -> dict[str, Any]:
    if path in OTHER_TYPES:
        good: dict[str, Any] = {OTHER_TYPES[path]: {"schema": {"type": "string"}}}
    else:
        schema = {"type": "object", "required": list(ANSWERS.get(path, ()))}
        good = {"application/json": {"schema": schema}}
    if path in STREAMS:
        good["text/event-stream"] = {"schema": _EVENT}
    name = "AnthropicError" if path in ANTHROPIC_PATHS else "Error"
    error: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    if path in ("/health", "/ready"):
        error = {"schema": {"anyOf": [error["schema"], _NOT_WELL]}}
    return {
        "200": {"description": "What was asked for.", "content": good},
        "default": {"description": "A failure.", "content": {"application/json": error}},
    }


def _plain(value: Any) -> Any:
    """Give a schema in JSON's own types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
