"""OpenAI's responses: through the openai package, and the raw order of events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from treadle.server.response_store import ResponseStore

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer, Reply
from .test_tools import CALL, TEMPLATE

TOOL = {
    "type": "function",
    "name": "get_w",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
FULL = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("responses"), template=TEMPLATE)
    return start_server(lambda: FakeEngine(folder, max_model_len=2048))


@pytest.fixture
def says(server: LiveServer, eos: int) -> Any:
    def set_text(text: str | bytes, then: int = eos) -> None:
        server.engine.next_token = say(text, then=then)

    return set_text


def ask(server: LiveServer, input: Any = "hi", **fields: Any) -> Reply:
    return server.post("/v1/responses", {"model": "tiny", "input": input} | fields)


def prompt_of(server: LiveServer) -> str:
    prompt_ids, _ = server.engine.seen[-1]
    return bytes(i for i in prompt_ids if i < 256).decode()


def events_of(reply: Reply) -> list[dict[str, Any]]:
    events = []
    for block in reply.body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def join_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a stream up to its output, and compare that with the response in its last event."""
    first, second, *middle, last = events
    assert first["type"] == "response.created" and first["response"]["status"] == "in_progress"
    assert second["type"] == "response.in_progress"
    output: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            texts.append("")
        elif kind == "output_item.done":
            item = output[event["output_index"]] = event["item"]
            text = item.get("arguments")
            assert texts[-1] == (item["content"][0]["text"] if text is None else text)
        else:
            assert event["output_index"] == len(output) - 1
            assert event["item_id"] == output[-1]["id"]
            texts[-1] += event["delta"] if kind.endswith(".delta") else ""
            if kind.endswith("text.done"):
                assert event["text"] == texts[-1]
            if kind == "function_call_arguments.done":
                assert event["arguments"] == texts[-1]
    assert last["response"]["output"] == output
    assert last["type"] == f"response.{last['response']['status']}"
    return last["response"]


def both_ways(server: LiveServer, input: Any = "hi", **fields: Any) -> dict[str, Any]:
    """Ask whole and streamed; give the response, having compared the two."""
    whole = ask(server, input, **fields).json
    Response.model_validate(whole)
    streamed = join_events(events_of(ask(server, input, **fields, stream=True)))
    for response in (whole, streamed):
        del response["id"], response["created_at"]
        for item in response["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert streamed == whole
    return whole


def test_items_are_added_filled_and_done_in_order(server: LiveServer, says: Any) -> None:
    says(FULL)
    response = both_ways(server, tools=[TOOL])
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], call["arguments"]) == ("get_w", '{"city": "Bern"}')
    assert {item["status"] for item in response["output"]} == {"completed"}
    usage = response["usage"]
    assert usage["output_tokens"] == len(FULL) + 1
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_an_answer_cut_by_its_limit_is_incomplete(server: LiveServer, says: Any) -> None:
    says("a long answer")
    response = both_ways(server, max_output_tokens=6)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "a long"


def test_an_empty_answer_is_an_empty_message(server: LiveServer, says: Any) -> None:
    says("")
    (message,) = both_ways(server)["output"]
    assert message["content"][0]["text"] == ""


def test_the_package_reads_a_stream(server: LiveServer, says: Any) -> None:
    says(FULL)
    with server.client().responses.stream(
        model="tiny",
        input="hi",
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert response.output_text == "I look."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


def test_a_conversation_goes_on_from_a_stored_response(server: LiveServer, says: Any) -> None:
    says(FULL)
    create = server.client().responses.create
    first = create(model="tiny", input="hi", instructions="A.", tools=[TOOL])  # type: ignore[list-item]
    call = first.output[2]
    says("Sunny.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}  # type: ignore[union-attr]
    answer = create(model="tiny", input=[output], previous_response_id=first.id)  # type: ignore[list-item]
    assert answer.output_text == "Sunny."
    conversation = '(user)hi(assistant)[calls get_w {"city": "Bern"}]I look.(tool)sun'
    assert prompt_of(server) == conversation
    create(model="tiny", input="And?", previous_response_id=answer.id, instructions="B.")
    assert prompt_of(server) == f"(system)B.{conversation}(assistant)Sunny.(user)And?"


def test_the_whole_conversation_gives_the_same_prompt(server: LiveServer, says: Any) -> None:
    says(FULL)
    create = server.client().responses.create
    first = create(model="tiny", input="hi", tools=[TOOL])  # type: ignore[list-item]
    says("ok")
    create(model="tiny", input="go on", previous_response_id=first.id)
    stored = prompt_of(server)
    items: list[Any] = [{"role": "user", "content": "hi"}, *first.model_dump()["output"]]
    create(model="tiny", input=[*items, {"role": "user", "content": "go on"}])
    assert prompt_of(server) == stored


def test_20_instructions_and_a_developers_item_are_one_system_turn(
    server: LiveServer, says: Any
) -> None:
    says("ok")
    part = {"type": "input_text", "text": "hi"}
    items = [{"role": "developer", "content": "D."}, {"role": "user", "content": [part, part]}]
    assert ask(server, items, instructions="I.").status == 200
    assert prompt_of(server) == "(system)I.\n\nD.(user)hi\nhi"


def test_a_schema_reaches_the_engine_and_is_told_again(server: LiveServer, says: Any) -> None:
    says("{}")
    schema = {"type": "object", "additionalProperties": False}
    format_ = {"type": "json_schema", "name": "empty", "schema": schema, "strict": True}
    response = ask(server, text={"format": format_}).json
    assert response["text"] == {"format": format_}
    _, params = server.engine.seen[-1]
    assert (params.structure.kind, json.loads(params.structure.text)) == ("json_schema", schema)


def test_a_stored_response_can_be_read_and_deleted(server: LiveServer, says: Any) -> None:
    says("ok")
    client = server.client()
    made = client.responses.create(model="tiny", input="hi", metadata={"k": "v"})
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    assert made.metadata == {"k": "v"}
    assert server.request("DELETE", f"/v1/responses/{made.id}").json["deleted"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="x", previous_response_id=made.id)


def test_what_is_not_to_be_stored_is_not(server: LiveServer, says: Any) -> None:
    says("ok")
    made = ask(server, store=False).json
    reply = ask(server, previous_response_id=made["id"])
    assert (reply.status, reply.error["param"]) == (404, "previous_response_id")


def test_a_streamed_response_is_stored_too(server: LiveServer, says: Any) -> None:
    says("ok")
    response = join_events(events_of(ask(server, stream=True)))
    assert server.get(f"/v1/responses/{response['id']}").json == response


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input.0.content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools.0.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"reasoning": {"effort": "odd"}}, "reasoning.effort"),
        ({"messages": []}, "messages"),
    ],
)
def test_mistakes_are_named(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    reply = ask(server, **fields)
    assert reply.status == 400
    assert reply.error["param"].startswith(named)


def test_a_failure_in_a_stream_is_told(start_server: Any, server: LiveServer) -> None:
    folder = server.engine.folder
    failing = start_server(lambda: FakeEngine(folder, fault_at=3, step_s=0.01))
    *_, last = events_of(ask(failing, stream=True, max_output_tokens=50))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"]


def test_the_store_keeps_the_latest_within_its_bounds() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1_000)
    for name in "abc":
        store.add({"id": name}, [{"content": "x"}])
    assert store.get("a") is None and store.get("c") is not None and len(store) == 2
    store.add({"id": "d"}, [{"content": "x" * 900}])
    assert len(store) == 2 or store.get("b") is None
    store.add({"id": "huge"}, [{"content": "x" * 2_000}])
    assert len(store) == 0 and store.size_bytes == 0
    store.add({"id": "e"}, [])
    assert store.remove("e") and not store.remove("e") and store.size_bytes == 0
