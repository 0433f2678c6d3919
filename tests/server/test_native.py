"""The endpoints that are no other vendor's, and those that are refused with the reason."""

from __future__ import annotations

import base64
import math
import socket
import threading
import time
import weakref
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.checkpoints import make_dice
from treadle.ir.errors import MachineError

from .fake_engine import FakeEngine, say
from .live import LiveServer


@pytest.fixture(scope="module")
def dice(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Serve fixture D: after the cue A comes with .4, B with .3, C with .2, D with .1."""
    return start_model(make_dice(tmp_path_factory.mktemp("dice")).path)


@pytest.fixture(scope="module")
def slow(start_fake: Any) -> LiveServer:
    return start_fake(step_s=0.02, max_running=4)


def test_generate_gives_text_ids_and_figures(dice: LiveServer) -> None:
    fields = {"prompt": "[[S1]]", "max_tokens": 2, "temperature": 0, "return_logprob": True}
    reply = dice.post("/generate", fields | {"top_logprobs_num": 2}).json
    assert reply["text"].startswith("A")
    told = reply["meta_info"]
    assert (told["completion_tokens"], told["finish_reason"]["type"]) == (2, "length")
    logprob, token_id = told["output_token_logprobs"][0]
    assert token_id == reply["output_ids"][0] and math.exp(logprob) == pytest.approx(0.4, abs=2e-4)
    assert told["output_top_logprobs"][0][1][0] == pytest.approx(math.log(0.3), abs=2e-3)


def test_generate_streams_what_each_step_adds(dice: LiveServer) -> None:
    fields = {"input_ids": [65, 66], "max_tokens": 4, "seed": 1}
    whole = dice.post("/generate", fields).json
    *chunks, done = dice.post("/generate", fields | {"stream": True}).events()
    assert done == "[DONE]"
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [i for chunk in chunks for i in chunk["output_ids"]] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def read_logits(told: dict[str, Any]) -> np.ndarray:
    assert told["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(told["base64"]), np.float32).reshape(told["shape"])


def test_generate_gives_logits(dice: LiveServer) -> None:
    fields = {"prompt": "[[S1]]AB", "add_special_tokens": False, "max_tokens": 2, "temperature": 0}
    answer = dice.post("/generate", fields | {"output_logits": "generation"}).json
    rows = read_logits(answer["meta_info"]["output_logits"])
    assert list(rows.argmax(-1)) == answer["output_ids"]
    assert "output_token_logprobs" not in answer["meta_info"]
    everything = dice.post("/generate", fields | {"output_logits": "all"}).json
    all_rows = read_logits(everything["meta_info"]["output_logits"])
    assert len(all_rows) == 4 and np.allclose(all_rows[-2:], rows, atol=1e-4)
    shares = np.sort(all_rows[0])[:-5:-1]
    assert np.exp(shares - shares[0]) == pytest.approx([1, 0.75, 0.5, 0.25], abs=1e-3)
    *chunks, _ = dice.post(
        "/generate", fields | {"output_logits": "generation", "stream": True}
    ).events()
    told = [chunk["meta_info"]["output_logits"] for chunk in chunks]
    assert np.allclose(np.concatenate([read_logits(one) for one in told]), rows, atol=1e-4)


def test_generate_gives_hidden_states_beside_logits(dice: LiveServer) -> None:
    fields = {"prompt": "[[S1]]AB", "add_special_tokens": False, "max_tokens": 2, "temperature": 0}
    wish = {"output_last_hidden_state": "generation"}
    answer = dice.post("/generate", fields | wish).json["meta_info"]
    rows = read_logits(answer["output_last_hidden_state"])
    assert len(rows) == 2 and "output_logits" not in answer
    asked = {"output_last_hidden_state": "all", "output_logits": "all"}
    everything = dice.post("/generate", fields | asked).json["meta_info"]
    all_rows = read_logits(everything["output_last_hidden_state"])
    assert len(all_rows) == len(read_logits(everything["output_logits"])) == 4
    assert np.allclose(all_rows[-2:], rows, atol=1e-4)
    *chunks, _ = dice.post("/generate", fields | wish | {"stream": True}).events()
    told = [read_logits(chunk["meta_info"]["output_last_hidden_state"]) for chunk in chunks]
    assert np.allclose(np.concatenate(told), rows, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [("output_logits", "vocab_size"), ("output_last_hidden_state", "hidden_size")]
)
def test_rows_that_would_flood_the_answer_are_refused(
    start_fake: Any, name: str, size: str
) -> None:
    server = start_fake(**{size: 2**20}, max_model_len=128)
    reply = server.post("/generate", {"prompt": "a", "max_tokens": 17, name: "all"})
    assert (reply.status, reply.error["param"]) == (400, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "output_logits": "some"}, "output_logits"),
        ({"prompt": "a", "output_last_hidden_state": "some"}, "output_last_hidden_state"),
        (
            {"prompt": "a", "output_logits": "all", "output_last_hidden_state": "generation"},
            "output_last_hidden_state",
        ),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"input_ids": [10**6]}, "prompt"),
        ({"prompt": "a", "sampling_params": {}}, "sampling_params"),
    ],
)
def test_generate_names_mistakes(dice: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = dice.post("/generate", fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_perplexity_is_the_mean_cross_entropy(dice: LiveServer) -> None:
    ids = dice.post("/tokenize", {"prompt": "[[S1]]A[[S1]]D", "add_special_tokens": False}).json
    reply = dice.post("/get_ppl", {"input_ids": ids["tokens"]}).json
    expected = -(math.log(0.4) + math.log(1.0) + math.log(0.1)) / 3
    assert reply["num_tokens"] == 3
    assert reply["ppl"] == pytest.approx(expected, abs=2e-3)
    assert reply["exp"] == pytest.approx(math.exp(reply["ppl"]))
    assert dice.post("/get_ppl", {"input_ids": [5]}).error["param"] == "input_ids"
    assert dice.post("/get_ppl", {"input": "a", "input_ids": [5]}).error["param"] == "input"


def test_encode_gives_ids_of_one_text_or_several(dice: LiveServer) -> None:
    one = dice.post("/v1/encode", {"input": "hi", "add_bos": False}).json
    assert one == {"input_ids": [104, 105], "length": 2}
    both = dice.post("/v1/encode", {"input": ["hi", "h"], "add_bos": False}).json
    assert both == {"input_ids": [[104, 105], [104]], "length": [2, 1]}
    chat = dice.post("/v1/encode", {"input": "hi", "do_preprocess": True}).json
    asked = [{"role": "user", "content": "hi"}]
    assert chat["input_ids"] == dice.post("/tokenize", {"messages": asked}).json["tokens"]


@pytest.mark.parametrize("route", ["/sleep", "/wakeup", "/v1/embeddings"])
def test_what_the_engine_can_not_do_is_refused_by_name(dice: LiveServer, route: str) -> None:
    reply = dice.post(route, {"input": "x"})
    assert (reply.status, reply.error["code"]) == (400, "unsupported_endpoint")
    assert route in reply.error["message"]


# --- sleep ----------------------------------------------------------------------------------------


def test_a_server_sleeps_and_wakes(
    start_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = start_model(make_dice(tmp_path_factory.mktemp("dice")).path, allow_sleep=True)
    fields = {"temperature": 0, "max_tokens": 60}
    before = server.complete("[[S1]]", **fields).json["choices"]
    executor = weakref.ref(server.engine.model.executor)
    tensor = weakref.ref(server.engine.model.executor.state.packed)
    counted = server.metric("treadle_generation_tokens_total")
    found: list[Any] = []
    running = threading.Thread(target=lambda: found.append(server.complete("[[S1]]", **fields)))
    running.start()
    server.wait_for(lambda: bool(server.engine._generations) or bool(found))
    assert server.post("/sleep?level=1", b"").json == {"is_sleeping": True}
    running.join()
    # The running answer came to its end, and nothing of the model is left.
    assert found[0].json["choices"][0]["text"] == before[0]["text"]
    assert executor() is None and tensor() is None
    assert server.get("/is_sleeping").json == {"is_sleeping": True}
    assert (server.get("/health").status, server.get("/ready").status) == (200, 503)
    reply = server.complete("[[S1]]")
    assert (reply.status, reply.error["code"]) == (503, "sleeping")
    assert reply.headers["retry-after"]
    assert server.get("/v1/models").status == 200 and server.get("/status").status == 200
    assert server.metric("treadle_kv_pages") == 0
    assert server.post("/sleep", b"").status == 200

    def fail(report: Any) -> Any:
        raise MachineError("The disk is gone.")

    load, server.engine._load = server.engine._load, fail
    reply = server.post("/wakeup", b"")
    assert reply.status == 500 and "disk" in reply.error["message"]
    assert server.get("/is_sleeping").json == {"is_sleeping": True}
    server.engine._load = load
    for _ in range(2):
        assert server.post("/wakeup?tags=weights&tags=kv_cache", b"").json == {"is_sleeping": False}
    assert server.complete("[[S1]]", **fields).json["choices"] == before
    assert server.metric("treadle_generation_tokens_total") >= counted + 2 * 60 - 1


@pytest.mark.parametrize("query", ["/sleep?level=3", "/sleep?x=1", "/wakeup?tags=graphs"])
def test_sleep_checks_its_parameters(start_fake: Any, query: str) -> None:
    server = start_fake(server={"allow_sleep": True})
    reply = server.post(query, b"")
    assert reply.status == 400 and reply.error["param"] in ("level", "x", "tags")
    assert server.chat(max_tokens=1).status == 200


# --- ending answers from outside ------------------------------------------------------------------


def in_background(server: LiveServer, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    replies: list[Any] = []
    headers = {"X-Request-Id": fields.pop("request_id", "")} if "request_id" in fields else {}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100} | fields
    thread = threading.Thread(
        target=lambda: replies.append(server.post("/v1/chat/completions", body, **headers))
    )
    thread.start()
    server.wait_for(lambda: bool(server.engine.live))
    return thread, replies


def test_a_request_is_ended_by_the_clients_own_id(slow: LiveServer) -> None:
    thread, replies = in_background(slow, request_id="mine")
    assert slow.post("/abort_request", {"request_id": "other"}).json == {"aborted": 0}
    assert slow.post("/abort_request", {"request_id": "mine"}).json == {"aborted": 1}
    thread.join()
    assert (replies[0].status, replies[0].error["code"]) == (499, "aborted")
    slow.wait_for(slow.is_idle)
    assert slow.post("/abort_request", {"request_id": "mine"}).json == {"aborted": 0}


def test_all_requests_are_ended_streams_with_an_error(slow: LiveServer) -> None:
    thread, replies = in_background(slow, stream=True, n=2)
    assert slow.post("/abort_request", {"abort_all": True}).json == {"aborted": 2}
    thread.join()
    assert replies[0].events()[-1]["error"]["code"] == "aborted"
    slow.wait_for(slow.is_idle)


def test_abort_wants_to_know_which(slow: LiveServer) -> None:
    for body in ({}, {"request_id": "a", "abort_all": True}):
        assert slow.post("/abort_request", body).error["param"] == "request_id"


# --- limits ---------------------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_given_up(start_fake: Any) -> None:
    server = start_fake(server={"read_timeout_s": 0.3})
    host, port = urlsplit(server.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        began = time.monotonic()
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408") and time.monotonic() - began < 5


def test_the_status_page_tells_what_runs(start_fake: Any, eos: int) -> None:
    server = start_fake(next_token=say("ok", then=eos))
    server.complete("hi")
    status = server.get("/status").json
    assert (status["model"], status["phase"], status["ready"]) == ("tiny", "ready", True)
    assert status["generation_tokens_total"] == 3 and status["has_report"] is False
    assert server.get("/report").status == 404


def test_a_report_is_shown_where_there_is_one(start_server: Any, tokenizer_folder: Any) -> None:
    server = start_server(
        lambda: FakeEngine(tokenizer_folder), make_report=lambda: "<p>kernels</p>"
    )
    reply = server.get("/report")
    assert (reply.status, reply.body) == (200, b"<p>kernels</p>")
    assert server.get("/status").json["has_report"] is True
