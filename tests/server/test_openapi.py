"""The interface describes itself: /openapi.json, /docs, and schemathesis against both."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from treadle.server import openapi
from treadle.server.app import ENDPOINTS, build_app

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer
from .test_tools import TEMPLATE, TOOL

CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory, eos: int) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("openapi"), template=TEMPLATE)
    return start_server(
        lambda: FakeEngine(folder, say("ok", then=eos), max_model_len=4096, max_waiting=64)
    )


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    return server.get("/openapi.json").json


def test_every_route_is_described(document: dict[str, Any], server: LiveServer) -> None:
    app = build_app(server.engine)
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, one in document["paths"].items() for method in one}
    assert routes - described == {("get", "/pages/{name}")}
    assert described <= routes
    assert all(op["summary"] for one in document["paths"].values() for op in one.values())
    assert len(ENDPOINTS) > 5


def test_every_route_that_reads_a_body_says_which(document: dict[str, Any]) -> None:
    without = {"/sleep", "/wakeup"}
    posts = {path for path, one in document["paths"].items() if "post" in one}
    assert posts - without == set(openapi.BODIES)
    for path in posts - without:
        assert "requestBody" in document["paths"][path]["post"]


VALID: list[tuple[str, dict[str, Any]]] = [
    ("ChatRequest", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
    ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "stop": ["a"], "n": 2}),
    ("CompletionRequest", {"prompt": [[1, 2], [3]], "max_tokens": 3, "logprobs": 1}),
    ("ResponsesRequest", {"input": "hi", "text": {"format": {"type": "text"}}}),
    ("MessagesRequest", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("TokenizeRequest", {"prompt": "x"}),
]
INVALID: list[tuple[str, dict[str, Any]]] = [
    ("ChatRequest", {}),
    ("ChatRequest", {"messages": []}),
    ("ChatRequest", {"messages": [{"role": "odd", "content": "x"}]}),
    ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "temperature": 3}),
    ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "odd": 1}),
    ("CompletionRequest", {"prompt": 5}),
    ("CompletionRequest", {"prompt": "x", "best_of": 0}),
    ("MessagesRequest", {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(
    ("name", "body", "is_valid"),
    [
        *((name, body, True) for name, body in VALID),
        *((name, body, False) for name, body in INVALID),
    ],
)
def test_the_schema_says_what_the_server_does(
    document: dict[str, Any], server: LiveServer, name: str, body: dict[str, Any], is_valid: bool
) -> None:
    schema = document["components"]["schemas"][name]
    assert jsonschema_rs.is_valid(schema, body) is is_valid
    (path,) = [path for path, kind in openapi.BODIES.items() if kind.__name__ == name]
    assert (server.post(path, body).status == 200) is is_valid


def test_a_range_is_given_with_the_field(document: dict[str, Any]) -> None:
    field = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert field["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert field["default"] == 1.0 and field["description"]


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_nothing_that_schemathesis_sends_breaks_the_server(
    server: LiveServer, document: dict[str, Any], examples: int
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    checked = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        checked += 1

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30)

        check()
    assert checked > 20
    assert server.get("/health").status == 200
    server.wait_for(server.is_idle)
