"""`cache_salt` over HTTP: what the prefix cache shares, and with whom, on every protocol."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints import make_llama

from .live import LiveServer

# A number of each test's own, so that none finds what another one left.
MESSAGES = [{"role": "user", "content": "{} " + "The same long prompt as everyone's. " * 3}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": MESSAGES[0]["content"], "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": MESSAGES[0]["content"], "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/generate": {"prompt": MESSAGES[0]["content"], "max_tokens": 1},
}


@pytest.fixture(scope="module")
def server(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    return start_model(make_llama(tmp_path_factory.mktemp("random"), window=512))


def count_cached(path: str, answer: Any) -> int:
    """Give the prompt tokens that came from the cache, by each protocol's name."""
    if path == "/v1/messages":
        return answer["usage"]["cache_read_input_tokens"]
    if path == "/v1/responses":
        return answer["usage"]["input_tokens_details"]["cached_tokens"]
    if path == "/generate":
        return answer["meta_info"]["cached_tokens"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def numbered(value: Any, number: str) -> Any:
    """Write a number into the prompt of a body."""
    if isinstance(value, dict):
        return {name: numbered(each, number) for name, each in value.items()}
    if isinstance(value, list):
        return [numbered(each, number) for each in value]
    return value.replace("{}", number) if isinstance(value, str) else value


@pytest.mark.parametrize("path", BODIES)
def test_case_31_a_prefix_is_shared_under_the_same_salt_only(server: LiveServer, path: str) -> None:
    body = numbered(BODIES[path], path)
    found = []
    salts = [None, "one", "two", "", "one", "two", None]
    for salt in salts:
        reply = server.post(path, body if salt is None else {**body, "cache_salt": salt})
        found.append(count_cached(path, reply.json) if reply.status == 200 else reply.status)
    assert found[:3] == [0, 0, 0]
    assert found[3] == 400, "an empty salt is none that anybody means"
    assert all(cached >= 64 for cached in found[4:])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("salt", ["", 7, ["one"], "x" * 1025])
def test_a_salt_that_is_no_text_is_refused_by_name(
    server: LiveServer, path: str, salt: object
) -> None:
    reply = server.post(path, {**BODIES[path], "cache_salt": salt})
    assert reply.status == 400
    assert "`cache_salt`" in reply.json["error"]["message"]


def test_choices_and_prompts_of_one_request_share_its_salt(server: LiveServer) -> None:
    prompt = numbered(MESSAGES[0]["content"], "several")
    body = {"prompt": prompt, "max_tokens": 1, "n": 2, "cache_salt": "several"}
    assert server.post("/v1/completions", body).status == 200
    usage = server.post("/v1/completions", {**body, "prompt": [prompt, prompt]}).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * 64


def test_an_openai_client_sends_it_as_an_extra_field(server: LiveServer) -> None:
    cached = []
    for salt in ("mine", "mine", "other"):
        answer = server.client().chat.completions.create(
            model="tiny",
            messages=numbered(MESSAGES, "extra"),
            max_tokens=1,
            extra_body={"cache_salt": salt},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[0] == cached[2] == 0 < cached[1]


def test_case_31_the_same_tokens_are_shared_whatever_wrote_them(server: LiveServer) -> None:
    messages = numbered(MESSAGES, "written")
    tokens = server.post("/tokenize", {"messages": messages}).json["tokens"]
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert count_cached("/v1/chat/completions", chat.json) == 0
    raw = server.post("/v1/completions", {"prompt": tokens, "max_tokens": 1})
    assert count_cached("/v1/completions", raw.json) >= 64
