"""Tool calls and reasoning over HTTP: whole and streamed answers are the same, byte for byte."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    + tiny.TEMPLATE
    + "{# <tool_call> <think> #}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_w",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_w", "arguments": {"city": "Bern"}}\n</tool_call>'
NESTED = r'{"a":{"b":[1,2]},"s":"x}\"y"}'
TWO_CALLS = f'Two:\n{CALL}\n<tool_call>{{"name": "get_w", "arguments": {NESTED}}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_byte_level(tmp_path_factory.mktemp("tools"), template=TEMPLATE)


@pytest.fixture(scope="module")
def server(start_server: Any, folder: Path) -> LiveServer:
    """Serve a model whose tokens are bytes, so that every character and tag comes in parts."""
    return start_server(lambda: FakeEngine(folder, max_model_len=4096))


@pytest.fixture
def says(server: LiveServer, eos: int) -> Any:
    """Give `says(text)`: from now on every answer is this text."""

    def set_text(text: str | bytes, then: int = eos) -> None:
        server.engine.next_token = say(text, then=then)

    return set_text


def join_stream(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a stream up to the choice of a whole answer, by index, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    ending: dict[str, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(message["tool_calls"]):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                message["tool_calls"].append(json.loads(json.dumps(part)))
            else:
                assert part["index"] == len(message["tool_calls"]) - 1
                assert set(part) == {"index", "function"}
                call = message["tool_calls"][part["index"]]
                call["function"]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"]:
            assert not ending
            ending = {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return message | ending


def both_ways(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """Ask whole and streamed; give the message with its end, having compared the two."""
    whole = server.chat(**fields).json
    ChatCompletion.model_validate(whole)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = server.chat(**fields, **options).events()
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    streamed = join_stream(chunks)
    choice = whole["choices"][0]
    message = choice["message"]
    for call in (*streamed["tool_calls"], *message.get("tool_calls", [])):
        call.pop("id"), call.pop("index", None)
    assert streamed == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }
    return message | {"finish_reason": choice["finish_reason"], "usage": whole["usage"]}


def arguments_of(message: dict[str, Any]) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls", [])]


# --- 22: tool_choice ------------------------------------------------------------------------------


def test_22_a_call_has_no_content_and_its_own_finish_reason(server: LiveServer, says: Any) -> None:
    says(CALL)
    message = both_ways(server, tools=[TOOL])
    assert message["content"] is None and message["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_w", "arguments": '{"city": "Bern"}'}


def test_22_prose_with_tools_is_content(server: LiveServer, says: Any) -> None:
    says("Just <tool_ talk.\n")
    message = both_ways(server, tools=[TOOL])
    assert (message["content"], message["finish_reason"]) == ("Just <tool_ talk.\n", "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {}, {"tools": []}])
def test_22_without_tools_a_call_is_text(
    server: LiveServer, says: Any, fields: dict[str, Any]
) -> None:
    says(CALL)
    message = both_ways(server, **fields)
    assert (message["content"], message["finish_reason"]) == (CALL, "stop")
    prompt_ids, _ = server.engine.seen[-1]
    assert b"[tool" not in bytes(i for i in prompt_ids if i < 256)


def test_22_the_template_is_told_of_the_tools(server: LiveServer, says: Any) -> None:
    says("ok")
    server.chat(tools=[TOOL])
    prompt_ids, _ = server.engine.seen[-1]
    assert b"[tool get_w]" in bytes(i for i in prompt_ids if i < 256)


@pytest.mark.parametrize("max_tokens", range(1, len(CALL), 7))
def test_22_a_call_cut_by_max_tokens_ends_by_length(
    server: LiveServer, says: Any, max_tokens: int
) -> None:
    says(CALL)
    message = both_ways(server, tools=[TOOL], max_tokens=max_tokens)
    assert message["finish_reason"] == "length"
    assert message["usage"]["completion_tokens"] == max_tokens


NAMED = {"type": "function", "function": {"name": "get_w"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_22_forcing_a_tool_that_is_not_there_is_refused(server: LiveServer, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for tools in ([], [TOOL | {"function": {"name": "x"}}] if choice == NAMED else []):
        reply = server.chat(tools=tools, tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert server.chat(tools=[TOOL], tool_choice=other).status == 400


# --- 23: parallel calls ---------------------------------------------------------------------------


def test_23_parallel_calls_keep_their_order_and_every_byte(server: LiveServer, says: Any) -> None:
    says(TWO_CALLS)
    message = both_ways(server, tools=[TOOL])
    assert message["content"] == "Two:"
    assert arguments_of(message) == ['{"city": "Bern"}', NESTED]


def test_23_ids_differ(server: LiveServer, says: Any) -> None:
    says(TWO_CALLS)
    calls = server.chat(tools=[TOOL]).json["choices"][0]["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2


def test_23_without_parallel_calls_the_answer_ends_with_the_first(
    server: LiveServer, says: Any
) -> None:
    says(TWO_CALLS)
    message = both_ways(server, tools=[TOOL], parallel_tool_calls=False)
    assert arguments_of(message) == ['{"city": "Bern"}']
    assert message["finish_reason"] == "tool_calls"
    assert message["usage"]["completion_tokens"] < len(TWO_CALLS.split("\n<tool_call>{")[0])
    server.wait_for(server.is_idle)


def test_23_the_openai_package_accumulates_a_stream(server: LiveServer, says: Any) -> None:
    says(TWO_CALLS)
    with server.client().chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"city": "Bern"},
        {"a": {"b": [1, 2]}, "s": 'x}"y'},
    ]


def test_a_conversation_with_calls_goes_on(server: LiveServer, says: Any) -> None:
    says(CALL)
    client = server.client()
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    message = (
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[TOOL],  # type: ignore[list-item]
        )
        .choices[0]
        .message
    )
    says("Sunny.")
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},  # type: ignore[index]
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.content == "Sunny."


# --- 53: reasoning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("hi", "<think>abc</think> answer", "abc", " answer"),
        ("hi<think>", "abc</think>answer", "abc", "answer"),
        ("hi<think>", "abc", "abc", ""),
        ("hi", "no tags", "", "no tags"),
        ("hi", "<think>a</think>b <think>", "a", "b <think>"),
    ],
)
def test_53_reasoning_is_told_apart(
    server: LiveServer, says: Any, prompt: str, text: str, reasoning: str, content: str
) -> None:
    says(text)
    message = both_ways(server, messages=prompt, add_generation_prompt=False)
    assert message.get("reasoning_content", "") == reasoning
    assert (message["content"], message["finish_reason"]) == (content, "stop")
    tagged = len(text) - len(content)
    counted = message["usage"]["completion_tokens_details"]["reasoning_tokens"]
    # The opening tag is known to be one with its last character.
    assert counted in (tagged, tagged - len("<think>") + 1, tagged + 1)


def test_53_a_stop_in_the_reasoning_ends_the_answer(server: LiveServer, says: Any) -> None:
    says("<think>one STOP two</think>answer")
    message = both_ways(server, stop=["STOP"])
    assert message["reasoning_content"] == "one "
    assert (message["content"], message["finish_reason"]) == ("", "stop")


def test_53_a_call_follows_reasoning(server: LiveServer, says: Any) -> None:
    says(f"<think>\nLook.\n</think>\n\n{CALL}")
    message = both_ways(server, tools=[TOOL])
    assert (message["reasoning_content"], message["content"]) == ("Look.", None)
    assert arguments_of(message) == ['{"city": "Bern"}']


def test_reasoning_effort_turns_the_templates_switch(server: LiveServer, says: Any) -> None:
    says("ok")
    for effort, seen in [("none", b"[thinking False]"), ("high", b"[thinking True]")]:
        assert server.chat(reasoning_effort=effort).status == 200
        prompt_ids, _ = server.engine.seen[-1]
        assert seen in bytes(i for i in prompt_ids if i < 256)


# --- what can't be offered ------------------------------------------------------------------------


def test_tools_that_the_model_would_not_hear_of_are_refused(start_fake: Any) -> None:
    server = start_fake(server={"tool_parser": "hermes"})
    reply = server.chat(tools=[TOOL])
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "no place for `tools`" in reply.error["message"]
    assert server.chat(reasoning_effort="low").error["param"] == "reasoning_effort"


def test_tools_without_a_known_form_name_the_option(start_server: Any, folder: Path) -> None:
    server = start_server(lambda: FakeEngine(folder), tool_parser="none")
    reply = server.chat(tools=[TOOL])
    assert reply.status == 400 and "--tool-parser" in reply.error["message"]


def test_a_parser_can_be_named(start_server: Any, folder: Path, eos: int) -> None:
    server = start_server(
        lambda: FakeEngine(folder, say('[TOOL_CALLS]get_w[ARGS]{"city": "Bern"}', then=eos)),
        tool_parser="mistral",
        reasoning_parser="none",
    )
    message = both_ways(server, tools=[TOOL])
    assert arguments_of(message) == ['{"city": "Bern"}']


def test_marks_that_are_special_tokens_are_seen(
    start_server: Any, tmp_path: Path, eos: int
) -> None:
    """The end of `tiny`'s special tokens stands in for a mark: it is no text unless asked for."""
    pad = eos + 1
    template = TEMPLATE + "{# [TOOL_CALLS] #}"
    folder = tiny.save_byte_level(tmp_path / "t", template=template, specials=["[TOOL_CALLS]"])
    tokens = [*b"Hm.", pad + 1, *b'get_w[ARGS]{"city": "B"}', eos]
    server = start_server(
        lambda: FakeEngine(folder, lambda generated, seed: tokens[len(generated)]),
        tool_parser="mistral",
    )
    message = both_ways(server, tools=[TOOL])
    assert (message["content"], arguments_of(message)) == ("Hm.", ['{"city": "B"}'])
    assert both_ways(server)["content"] == 'Hm.get_w[ARGS]{"city": "B"}'


# --- streamed = whole -----------------------------------------------------------------------------

WORDS = ["The ", "sky\n", "<", "tool", "🙂", "é", "\n", '"', "{", "}", "ok", "STOP", "</", " "]


def random_script(random_: random.Random) -> str | bytes:
    text = ""
    if random_.random() < 0.5:
        text += "<think>" + "".join(random_.choices(WORDS, k=4)) + "</think>"
    for _ in range(random_.randrange(4)):
        text += "".join(random_.choices(WORDS, k=random_.randrange(6)))
        if random_.random() < 0.5:
            value = "".join(random_.choices(WORDS, k=4))
            arguments = json.dumps({"city": value}, ensure_ascii=random_.random() < 0.5)
            text += f'<tool_call>{{"name": "get_w", "arguments": {arguments}}}</tool_call>'
    data = text.encode()
    if random_.random() < 0.3:
        # Cut anywhere, characters included, or broken by a byte that belongs to none.
        data = data[: random_.randrange(len(data) + 1)] + random_.choice(
            [b"", b"\xf0\x9f", b"\xff"]
        )
    return data


def test_random_scripts_stream_what_they_answer_whole(
    server: LiveServer, says: Any, rng_seed: int
) -> None:
    random_ = random.Random(rng_seed)
    for _ in range(40):
        says(random_script(random_))
        fields: dict[str, Any] = {"tools": [TOOL] if random_.random() < 0.8 else []}
        if random_.random() < 0.5:
            fields["stop"] = random_.sample(["STOP", "sky", "🙂", "</", "\n{"], k=2)
        if random_.random() < 0.3:
            fields["max_tokens"] = random_.randint(1, 60)
        if random_.random() < 0.3:
            fields["parallel_tool_calls"] = False
        message = both_ways(server, **fields)
        assert (message["finish_reason"] == "tool_calls") <= bool(message.get("tool_calls"))


def test_every_choice_is_told_apart_by_itself(server: LiveServer, says: Any) -> None:
    says(TWO_CALLS)
    choices = server.chat(tools=[TOOL], n=3).json["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2, 2]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_22_a_forced_call_reaches_the_engine_as_a_grammar(
    server: LiveServer, says: Any, choice: Any
) -> None:
    says(TWO_CALLS)
    assert server.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=True).status == 200
    structure = server.engine.seen[-1][1].structure
    assert (structure.kind, structure.param) == ("grammar", "tool_choice")
    assert '"const": "get_w"' in structure.text
    assert ("{0,15}" in structure.text) == (choice == "required")
    form = {"type": "json_object"}
    reply = server.chat(tools=[TOOL], tool_choice=choice, response_format=form)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


STRICT = TOOL | {"function": TOOL["function"] | {"strict": True}}


def test_a_strict_tool_has_its_form_from_where_a_call_begins(server: LiveServer, says: Any) -> None:
    says(CALL)
    assert both_ways(server, tools=[STRICT])["tool_calls"]
    prompt, params = server.engine.seen[-1]
    assert params.structure_after == "<tool_call>"
    assert (params.structure.kind, params.structure.param) == ("grammar", "tools")
    assert '"properties": {"city"' in params.structure.text
    # What templates were never trained on is not shown to them.
    server.chat(tools=[TOOL])
    assert server.engine.seen[-1][0] == prompt


def test_only_strict_tools_have_their_form(server: LiveServer, says: Any) -> None:
    says(CALL)
    loose = TOOL | {"function": {"name": "other", "parameters": {"type": "object", "title": "t"}}}
    assert server.chat(tools=[STRICT, loose]).status == 200
    text = server.engine.seen[-1][1].structure.text
    assert '"const": "other"' in text and '"title"' not in text
    assert server.chat(tools=[loose]).status == 200
    assert server.engine.seen[-1][1].structure is None


def test_strict_tools_and_another_form_are_refused(server: LiveServer) -> None:
    reply = server.chat(tools=[STRICT], response_format={"type": "json_object"})
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_strict_tools_of_a_form_without_a_mark_are_refused(
    start_server: Any, folder: Path, eos: int
) -> None:
    server = start_server(
        lambda: FakeEngine(folder, say("x", then=eos), max_model_len=4096), tool_parser="pythonic"
    )
    reply = server.chat(tools=[STRICT])
    assert (reply.status, reply.error["code"]) == (400, "unsupported_field")
    assert "`strict`" in reply.error["message"]
