"""Everything around the endpoints: routes, keys, ids, metrics, and errors in one form."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import treadle
from treadle.ir.errors import ConfigError, RequestError
from treadle.server.errors import error_body
from treadle.server.state import ServerOptions

from .fake_engine import FakeEngine
from .live import LiveServer


@pytest.fixture(scope="module")
def server(start_fake: Any) -> LiveServer:
    return start_fake()


@pytest.fixture(scope="module")
def locked(start_fake: Any) -> LiveServer:
    # No ready probe of the test's own would tell whether /ready is open.
    return start_fake(server={"api_keys": ("first", "second")})


@pytest.mark.parametrize("path", ["/none", "/v1", "/v1/nothing", "/v1/chat", "/healthy", "/%00"])
def test_an_unknown_route_is_404_in_json(server: LiveServer, path: str) -> None:
    reply = server.get(path)
    assert (reply.status, reply.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
    ],
)
def test_a_wrong_method_is_405_in_json(
    server: LiveServer, method: str, path: str, allowed: str
) -> None:
    reply = server.request(method, path)
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert allowed in reply.headers["allow"]
    assert allowed in reply.error["message"]


def test_version_is_that_of_the_package(server: LiveServer) -> None:
    assert server.get("/version").json == {"name": "treadle", "version": treadle.__version__}


def test_probes_can_use_head(server: LiveServer) -> None:
    reply = server.request("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


def test_ready_is_ready(server: LiveServer) -> None:
    assert server.get("/ready").json == {"status": "ready", "phase": "ready"}


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(locked: LiveServer, path: str) -> None:
    assert locked.get(path).status == 200
    # A key does no harm, not even a wrong one.
    assert locked.get(path, Authorization="Bearer wrong").status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/nothing"])
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic first", "first", "Bearer firs"]
)
def test_every_other_route_needs_a_key(locked: LiveServer, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    reply = locked.get(path, **headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.error["type"] == "authentication_error"
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys_opens(locked: LiveServer, key: str) -> None:
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key)
    assert client.completions.create(model="tiny", prompt="hi", max_tokens=1).usage


def test_the_client_raises_its_own_error_for_a_wrong_key(locked: LiveServer) -> None:
    with pytest.raises(openai.AuthenticationError, match="key of this server"):
        locked.client().models.list()


@pytest.mark.parametrize(
    "options",
    [
        {"api_keys": ("",)},
        {"api_keys": ("schlüssel",)},
        {"client_max_size_bytes": 1},
        {"heartbeat_s": 0},
    ],
)
def test_options_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**options)


# --- request ids ----------------------------------------------------------------------------------


def test_29_a_clients_id_is_echoed_and_never_used_inside(server: LiveServer) -> None:
    replies: list[Any] = []

    def ask() -> None:
        headers = {"X-Request-Id": "dup", "Content-Type": "application/json"}
        body = b'{"prompt": "hi", "max_tokens": 60, "stream": true}'
        replies.append(server.request("POST", "/v1/completions", body, headers))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.headers["x-request-id"] for reply in replies] == ["dup"] * 4
    texts = [[e["choices"][0]["text"] for e in reply.events()[:-1]] for reply in replies]
    assert texts[1:] == texts[:-1]
    assert len({reply.events()[0]["id"] for reply in replies}) == 4
    assert server.is_idle()


def test_29_an_id_can_be_used_again_right_after_its_request_was_given_up(start_fake: Any) -> None:
    server = start_fake(step_s=0.01)
    headers = {"X-Request-Id": "again", "Content-Type": "application/json"}
    body = b'{"prompt": "hi", "max_tokens": 20, "stream": true, "seed": 5}'
    first = server.connect()
    first.request("POST", "/v1/completions", body, headers)
    assert first.getresponse().read(10)
    first.close()
    events = server.request("POST", "/v1/completions", body, headers).events()
    assert events[-1] == "[DONE]"
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert len(text) == 20
    server.wait_for(server.is_idle)


def test_29_without_an_id_one_is_made(server: LiveServer) -> None:
    first, second = server.get("/version"), server.get("/version", **{"X-Request-Id": ""})
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert server.get("/nothing").headers["x-request-id"]
    assert server.complete(stream=True, max_tokens=1).headers["x-request-id"]


@pytest.mark.parametrize("given", ["x" * 201, "x" * 10_000, "tab\tid", "\x80id"])
def test_29_an_id_that_cannot_be_echoed_is_refused(server: LiveServer, given: str) -> None:
    reply = server.get("/version", **{"X-Request-Id": given})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request_id")
    assert len(reply.body) < 600


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_parse_and_count(server: LiveServer) -> None:
    before = {
        name: server.metric(name)
        for name in (
            "treadle_generation_tokens_total",
            "treadle_prompt_tokens_total",
            'treadle_answers_total{endpoint="chat",finish_reason="length"}',
            "treadle_time_to_first_token_seconds_count",
            "treadle_answer_seconds_count",
            'treadle_http_responses_total{route="/v1/chat/completions",status="200"}',
        )
    }
    usage = server.chat(max_tokens=5).json["usage"]
    grown = {name: server.metric(name) - value for name, value in before.items()}
    assert list(grown.values()) == [5, usage["prompt_tokens"], 1, 1, 1, 1]
    families = list(text_string_to_metric_families(server.get("/metrics").body.decode()))
    names = {family.name for family in families}
    assert {"treadle_requests_running", "treadle_kv_pages_free", "treadle_preemptions"} <= names
    assert server.metric("treadle_jit_compiles_total") == 0
    assert server.metric("treadle_ready") == 1


def test_odd_paths_do_not_fill_the_metrics(server: LiveServer) -> None:
    for index in range(20):
        server.get(f"/scan/{index}")
        server.get(f"/v1/models/x{index}")
    text = server.get("/metrics").body.decode()
    assert "scan" not in text
    assert 'route="/v1/models/{id}",status="404"' in text


# --- errors ---------------------------------------------------------------------------------------


def test_a_long_message_is_cut() -> None:
    body = error_body(RequestError("x" * 100_000, param="y" * 100_000))["error"]
    assert len(body["message"]) == 4_000
    assert len(body["param"]) == 200


def test_a_fault_of_ours_is_500_and_shows_no_details(
    start_server: Any, tokenizer_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeEngine):
        def submit(self, *arguments: Any) -> Any:
            raise ZeroDivisionError("secret")

    server = start_server(lambda: Broken(tokenizer_folder))
    reply = server.chat()
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert "secret" in caplog.text
    with pytest.raises(openai.InternalServerError):
        server.client().completions.create(model="tiny", prompt="hi")


def test_a_garbled_request_does_not_end_the_server(server: LiveServer) -> None:
    connection = server.connect()
    connection.connect()
    connection.sock.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    connection.sock.recv(1000)
    connection.close()
    assert server.chat(max_tokens=1).status == 200


def test_a_client_that_goes_away_while_it_sends_is_no_fault(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    name = 'treadle_http_responses_total{route="/v1/completions",status="499"}'
    before = server.metric(name)
    connection = server.connect()
    connection.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
    server.wait_for(lambda: server.engine.stats().running == 0)
    connection.close()
    server.wait_for(lambda: server.metric(name) == before + 1)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: "])
def test_a_connection_without_a_request_is_closed(start_fake: Any, sent: bytes) -> None:
    server = start_fake(server={"read_timeout_s": 0.4})
    used, silent = server.connect(), server.connect()
    used.request("GET", "/version")
    used.getresponse().read()
    silent.connect()
    silent.sock.sendall(sent)
    assert silent.sock.recv(1000) == b""
    # One that has sent a request may be idle for longer.
    used.request("GET", "/version")
    assert used.getresponse().status == 200
    used.close()
    silent.close()
