"""Anthropic's messages: through the anthropic package, and the raw order of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer, Reply
from .test_tools import CALL, TEMPLATE

TOOL = {
    "name": "get_w",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FULL = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("messages"), template=TEMPLATE)
    return start_server(lambda: FakeEngine(folder, max_model_len=2048))


@pytest.fixture
def says(server: LiveServer, eos: int) -> Any:
    def set_text(text: str | bytes, then: int = eos) -> None:
        server.engine.next_token = say(text, then=then)

    return set_text


def client(server: LiveServer, key: str = "EMPTY") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(server: LiveServer, messages: Any = "hi", **fields: Any) -> Reply:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 512} | fields
    return server.post("/v1/messages", body)


def prompt_of(server: LiveServer) -> str:
    prompt_ids, _ = server.engine.seen[-1]
    return bytes(i for i in prompt_ids if i < 256).decode()


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Read a stream strictly: the event's name is its data's type."""
    events = []
    for block in reply.body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def join_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a stream up to a message, having checked the order of its events."""
    first, *middle, ending, last = events
    assert (first["type"], ending["type"], last["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    kinds = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    is_open, json_text = False, ""
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, json_text = True, ""
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(json_text)
        else:
            block, delta = message["content"][-1], event["delta"]
            assert is_open
            if delta["type"] == "signature_delta":
                assert block["type"] == "thinking"
                block["signature"] = delta["signature"]
                continue
            assert delta["type"] == kinds[block["type"]]
            if delta["type"] == "input_json_delta":
                json_text += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    assert not is_open
    return message | ending["delta"] | {"usage": ending["usage"]}


def both_ways(server: LiveServer, messages: Any = "hi", **fields: Any) -> dict[str, Any]:
    """Ask whole and streamed; give the message, having compared the two."""
    whole = ask(server, messages, **fields).json
    Message.model_validate(whole)
    streamed = join_events(events_of(ask(server, messages, **fields, stream=True)))
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    return whole


# --- 50 -------------------------------------------------------------------------------------------


def test_50_blocks_are_opened_filled_and_closed_in_order(server: LiveServer, says: Any) -> None:
    says(FULL)
    message = both_ways(server, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_w", "input": {"city": "Bern"}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens"] == len(FULL) + 1


@pytest.mark.parametrize(
    ("text", "fields", "stop_reason", "stop_sequence"),
    [
        ("plain", {}, "end_turn", None),
        ("plain STOP more", {"stop_sequences": ["STOP", "no"]}, "stop_sequence", "STOP"),
        ("plain", {"max_tokens": 3}, "max_tokens", None),
        ("", {}, "end_turn", None),
    ],
)
def test_50_the_stop_reason_is_told(
    server: LiveServer,
    says: Any,
    text: str,
    fields: dict[str, Any],
    stop_reason: str,
    stop_sequence: str | None,
) -> None:
    says(text)
    message = both_ways(server, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


@pytest.mark.parametrize("max_tokens", [len(FULL) - 30, len(FULL) - 15])
def test_50_a_call_that_is_cut_off_is_told_as_it_is(
    server: LiveServer, says: Any, max_tokens: int
) -> None:
    says(FULL)
    message = ask(server, tools=[TOOL], max_tokens=max_tokens).json
    assert message["stop_reason"] == "max_tokens"
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    assert call["input"] == {"city": "Bern"} or set(call["input"]) == {"INVALID_JSON"}


def test_50_an_over_long_prompt_is_refused_in_anthropics_form(server: LiveServer) -> None:
    for fields in ({"messages": "x" * 5000}, {"max_tokens": 4000}):
        for stream in (False, True):
            reply = ask(server, **fields, stream=stream)
            assert reply.status == 400
            assert reply.json["type"] == "error"
            assert reply.json["error"]["type"] == "invalid_request_error"
            assert "2048" in reply.json["error"]["message"]


def test_50_the_package_reads_a_stream(server: LiveServer, says: Any) -> None:
    says(FULL)
    with client(server).messages.stream(
        model="tiny",
        max_tokens=512,
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        names = [event.type for event in stream]
        message = stream.get_final_message()
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Bern"}  # type: ignore[union-attr]


def test_50_a_conversation_goes_on_with_the_packages_own_blocks(
    server: LiveServer, says: Any
) -> None:
    says(FULL)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    create = client(server).messages.create
    first = create(model="tiny", max_tokens=512, messages=messages, tools=[TOOL])  # type: ignore[list-item]
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "sun"}  # type: ignore[union-attr]
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
    says("Sunny.")
    answer = create(model="tiny", max_tokens=64, messages=messages, system="Be brief.")
    assert answer.content[0].text == "Sunny."  # type: ignore[union-attr]
    assert prompt_of(server) == (
        '(system)Be brief.(user)hi(assistant)[calls get_w {"city": "Bern"}]I look.'
        "(tool)sun(user)so?"
    )


def test_a_schema_reaches_the_engine(server: LiveServer, says: Any) -> None:
    says("{}")
    schema = {"type": "object", "additionalProperties": False}
    format_ = {"type": "json_schema", "schema": schema}
    assert ask(server, output_config={"format": format_}).status == 200
    _, params = server.engine.seen[-1]
    assert (params.structure.kind, json.loads(params.structure.text)) == ("json_schema", schema)


def test_tokens_are_counted_as_the_message_would_have_them(server: LiveServer, says: Any) -> None:
    says("ok")
    body = {"messages": [{"role": "user", "content": "hi"}], "system": "S", "tools": [TOOL]}
    counted = client(server).messages.count_tokens(model="tiny", **body)  # type: ignore[arg-type]
    usage = ask(server, **body).json["usage"]
    assert counted.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"] > 20


def test_a_last_message_of_the_assistants_is_gone_on_with(server: LiveServer, says: Any) -> None:
    says("sky")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The "}]
    assert ask(server, turns).json["content"] == [{"type": "text", "text": "sky"}]
    assert prompt_of(server) == "(user)hi(assistant)The "


def test_blocks_of_text_and_marks_for_a_cache_are_read(server: LiveServer, says: Any) -> None:
    says("ok")
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    reply = ask(server, [{"role": "user", "content": [text, text]}], system=[text, text])
    assert reply.status == 200
    assert prompt_of(server) == "(system)a\na(user)a\na"


@pytest.mark.parametrize("kind", ["disabled", "enabled", "adaptive"])
def test_thinking_turns_the_templates_switch(server: LiveServer, says: Any, kind: str) -> None:
    says("ok")
    ask(server, thinking={"type": kind})
    assert f"[thinking {kind != 'disabled'}]" in prompt_of(server)


def test_calls_can_be_kept_from_being_parallel(server: LiveServer, says: Any) -> None:
    says(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(both_ways(server, tools=[TOOL], tool_choice=choice)["content"]) == 1
    assert len(both_ways(server, tools=[TOOL])["content"]) == 2
    says("text")
    assert both_ways(server, tools=[TOOL], tool_choice={"type": "none"})["content"]


# --- what is refused ------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "name"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "get_w"),
        ({"tools": [TOOL | {"input_schema": None}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "odd"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "odd"}}}, "output_config.format.type"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"model": "other"}, "other"),
    ],
)
def test_mistakes_are_named(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = ask(server, **fields)
    assert reply.status == (404 if "model" in fields else 400)
    assert named in reply.json["error"]["message"]
    assert set(reply.json) == {"type", "error"} and set(reply.json["error"]) == {"type", "message"}


def test_the_package_raises_its_own_errors(server: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client(server).messages.create(
            model="other", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        )


def test_either_header_carries_the_key(start_server: Any, tokenizer_folder: Path, eos: int) -> None:
    server = start_server(
        lambda: FakeEngine(tokenizer_folder, say("ok", then=eos)),
        api_keys=("secret",),
        wait_until_ready=True,
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert client(server, "secret").messages.create(model="tiny", **body).content  # type: ignore[call-overload]
    bearer = server.post("/v1/messages", body, Authorization="Bearer secret")
    assert bearer.status == 200
    with pytest.raises(anthropic.AuthenticationError):
        client(server, "other").messages.create(model="tiny", **body)  # type: ignore[call-overload]
    assert server.post("/v1/messages", body).json["error"]["type"] == "authentication_error"


def test_a_failure_in_a_stream_is_an_error_event(
    start_server: Any, tokenizer_folder: Path, eos: int
) -> None:
    server = start_server(lambda: FakeEngine(tokenizer_folder, fault_at=3, step_s=0.01))
    *events, last = events_of(ask(server, stream=True, max_tokens=50))
    assert events[0]["type"] == "message_start"
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert all(event["type"] != "message_stop" for event in events)
