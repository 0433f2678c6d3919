"""Malformed requests: each is answered as a client's mistake, and life goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from treadle.server.openapi import BODIES

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer
from .test_tools import TEMPLATE, TOOL

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e400, -0.0, 1.5, "", "x", "\ud800", "\0",
    [], [[]], {}, [None], [{}], {"type": "text"}, {"type": "function", "function": {}}, [1, "a"],
    {"a": {"a": {"a": []}}}, ["a"] * 2000, [-1], "data:,", "required", "x" * 3000,
]  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/encode": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/generate": {"prompt": "hi"},
    "/get_ppl": {"input": "hello"},
    "/abort_request": {"request_id": "x"},
}


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory, eos: int) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("fuzz"), template=TEMPLATE)
    return start_server(
        lambda: FakeEngine(
            folder, say("ok", then=eos), max_running=64, max_waiting=4096, pooling="last"
        )
    )


def put(random_: random.Random, value: Any, odd: Any) -> Any:
    """Put an odd value somewhere into a JSON value."""
    if isinstance(value, dict) and value and random_.random() < 0.8:
        name = random_.choice(list(value))
        return value | {name: put(random_, value[name], odd)}
    if isinstance(value, list) and value and random_.random() < 0.8:
        index = random_.randrange(len(value))
        return [*value[:index], put(random_, value[index], odd), *value[index + 1 :]]
    return odd


def malform(random_: random.Random, path: str) -> bytes:
    """Give the bytes of a request with one to three things wrong, or likely wrong."""
    names = [*BODIES[path].__dataclass_fields__, "odd", "__class__"]
    body: Any = BASES[path]
    for _ in range(random_.randint(1, 3)):
        if random_.random() < 0.5:
            body = put(random_, body, random_.choice(ODD))
        elif isinstance(body, dict):
            body = body | {random_.choice(names): random_.choice(ODD)}
    data = json.dumps(body).encode()
    if random_.random() < 0.2:
        cut = random_.randrange(len(data) + 1)
        data = data[:cut] + random_.choice([b"", b"\xff", b"}", b",", b"NaN", b"\x00"]) + data[cut:]
    if random_.random() < 0.1:
        data = data[: random_.randrange(len(data) + 1)]
    return data


def test_every_route_is_fuzzed() -> None:
    assert set(BASES) == set(BODIES)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_malformed_requests_break_nothing(server: LiveServer, count: int, rng_seed: int) -> None:
    random_ = random.Random(rng_seed)
    connection = server.connect()
    alive = server.chat("hi").json["choices"]
    for number in range(count):
        path = random_.choice(list(BASES))
        data = malform(random_, path)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status in (200, 400, 404, 413, 429), (path, data, answer)
        assert len(answer) < 200_000
        if response.status != 200:
            error = json.loads(answer)["error"]
            assert error["message"] and len(answer) < 16_000, (path, data)
        if number % 100 == 99:
            server.wait_for(server.is_idle)
            assert server.chat("hi").json["choices"] == alive
            assert server.get("/health").status == 200
    connection.close()
    server.wait_for(server.is_idle)
