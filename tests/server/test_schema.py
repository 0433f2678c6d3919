"""Every declared field has a range that is kept, and no field is ever ignored."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.ir.errors import RequestError
from treadle.runtime.request import SamplingParams
from treadle.server import schema
from treadle.server.schema import ChatRequest, CompletionRequest, parse_request

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
KINDS: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatRequest, CHAT),
    (CompletionRequest, COMPLETION),
]


def parse(kind: type[Any], **body: Any) -> Any:
    return parse_request(kind, json.dumps(body).encode())


def refused(kind: type[Any], **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(kind, **body)
    return caught.value


# Each field, with values it must take and values it must refuse.
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["tiny", "org/name"], [5, "x" * 513, ["tiny"]]),
    "max_tokens": ([1, 2**31 - 1], [0, -1, "5", 2.5, True, 2**31]),
    "max_completion_tokens": ([1], [0, -1, "5", 2.5, False]),
    "temperature": ([0, 1e-8, 2], [-0.1, 2.5, "0", True, [1]]),
    "top_p": ([0, 0.5, 1], [-0.1, 1.1, "1"]),
    "top_k": ([-1, 0, 50], [-2, 1.5, "5"]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "seed": ([0, -(2**63), 2**63 - 1], [2**63, 1.0, "1"]),
    "stop": (["a", ["a", "b"], []], ["", [""], 5, [5], ["a"] * 33, "x" * 1025, {"a": 1}]),
    "stop_token_ids": ([[], [0, 5]], [[-1], [1.5], ["a"], 5, list(range(129))]),
    "ignore_eos": ([True, False], [1, "true"]),
    "min_tokens": ([0, 5], [-1, 0.5]),
    "include_stop_str_in_output": ([True], [0]),
    "cache_salt": (["x", "x" * 1024], ["", 5, ["x"], "x" * 1025]),
    "n": ([1, 128], [0, 129, 10**6, 1.0]),
    "stream": ([True], ["yes", 1]),
    "user": (["u"], [5]),
    "store": ([True], ["yes"]),
    "metadata": ([{"a": "b"}], []),
    "frequency_penalty": ([0, -2.0, 2], [2.1, -3, "0", False]),
    "presence_penalty": ([0, 0.1], [2.1, -2.1]),
    "repetition_penalty": ([1, 1.1, 5, 1e-3], [0, -1, True, "1"]),
    "logit_bias": (
        [{}, {"5": 1, "0": -100}],
        [{"5": 101}, {"5": "1"}, {"a": 1}, {"-5": 1}, {"5": 1, "05": 2}, {"2147483648": 1}, []],
    ),
    "bad_token_ids": ([[], [0, 5]], [[-1], [1.5], 5, list(range(257))]),
    "skip_special_tokens": ([True, False], [0]),
    "bad_words": ([[], ["a b"]], ["a", [""], [5], ["x" * 257], ["a"] * 65]),
    "response_format": (
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}},
            {"type": "regex_schema", "regex_schema": "[a]+"},
        ],
        [
            "text",
            {},
            {"type": "xml"},
            {"type": "text", "json_schema": {"schema": {}}},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "n"}},
            {"type": "json_schema", "json_schema": {"schema": {}, "odd": 1}},
            {"type": "json_schema", "json_schema": {"schema": "{"}},
            {"type": "regex_schema", "regex_schema": ""},
        ],
    ),
    "structured_outputs": (
        [
            {"json": {"type": "object"}},
            {"json": '{"type": "object"}'},
            {"json_object": True},
            {"regex": "a+"},
            {"choice": ["a", "b"]},
            {"grammar": 'start: "a"'},
            {"regex": "a", "choice": None},
        ],
        [{}, {"regex": "a", "choice": ["b"]}, {"xml": 1}, {"choice": []}, {"choice": [5]}, "json"],
    ),
    "guided_json": ([{"type": "object"}, '{"type": "object"}'], ["{", 5, []]),
    "guided_regex": (["a+"], ["", 5]),
    "guided_choice": ([["a", "b"]], [[], [5], "a"]),
    "guided_grammar": (['start: "a"'], ["", 5]),
    "service_tier": (["auto"], ["flex"]),
}
CHAT_RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "logprobs": ([False, True], [0, 1, "yes"]),
    "top_logprobs": ([0], [2, -1, 21, True]),
    "tools": (
        [[], [TOOL], [TOOL | {"function": {"name": "f.g-h", "strict": False}}]],
        [[{"type": "function"}], {}, [TOOL, TOOL], [TOOL | {"x": 1}], [{"type": "web"}], "f"],
    ),
    "tool_choice": (
        ["none", "auto"],
        [
            "required",
            {"type": "function"},
            "any",
            5,
            {"type": "function", "function": {"name": "f"}},
        ],
    ),
    "parallel_tool_calls": ([True, False], [1]),
    "functions": ([[]], [[{}]]),
    "reasoning_effort": (["none", "low"], ["much", 5]),
    "add_generation_prompt": ([True, False], ["no"]),
    "chat_template_kwargs": ([{}, {"enable_thinking": False}], [[], {"tools": []}]),
}
COMPLETION_RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "logprobs": ([0, 1, 20], [True, -1, 21, 0.5]),
    "echo": ([False, True], [0, "yes"]),
    "best_of": ([1, 2], [0, 129, "2"]),
    "suffix": ([""], ["end"]),
    "add_special_tokens": ([True, False], [1]),
}
ALL_RANGES = [
    (kind, base, field, good, bad)
    for kind, base in KINDS
    for field, (good, bad) in (
        RANGES | (CHAT_RANGES if kind is ChatRequest else COMPLETION_RANGES)
    ).items()
]


@pytest.mark.parametrize(("kind", "base", "field", "good", "bad"), ALL_RANGES)
def test_a_fields_range_is_kept(
    kind: type[Any], base: dict, field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in [*good, None]:
        parse(kind, **base, **{field: value})
    for value in bad:
        error = refused(kind, **base, **{field: value})
        assert (error.param or "").split(".")[0] == field
        assert field in error.message


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_every_field_that_has_no_range_here_is_tested_elsewhere(
    kind: type[Any], base: dict
) -> None:
    del base
    tested = set(RANGES) | set(CHAT_RANGES) | set(COMPLETION_RANGES)
    declared = {field.name for field in dataclasses.fields(kind)}
    assert declared - tested <= {"messages", "prompt", "stream_options"}


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_forms_have_the_names_of_older_clients_too(kind: type[Any], base: dict) -> None:
    for form, value in {"json": {"type": "object"}, "regex": "a", "choice": ["a"]}.items():
        guided = parse(kind, **base, **{f"guided_{form}": value}).sampling().structure
        assert guided == parse(kind, **base, structured_outputs={form: value}).sampling().structure
        assert guided is not None and guided.param == f"guided_{form}"
    both = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    assert refused(kind, **base, **both).param == "guided_regex"


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_an_unknown_field_is_refused_by_name(kind: type[Any], base: dict) -> None:
    error = refused(kind, **base, temprature=1)
    assert (error.param, error.code) == ("temprature", "unknown_field")
    assert "`temperature`" in error.remedy
    assert refused(kind, **base, extra_body={}).param == "extra_body"


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_null_means_the_default(kind: type[Any], base: dict) -> None:
    nulls = {f.name: None for f in dataclasses.fields(kind) if f.name not in base}
    assert parse(kind, **base, **nulls) == parse(kind, **base)
    for name in base:
        assert refused(kind, **{name: None}).param == name
        assert refused(kind).param == name


def test_a_form_is_asked_for_once() -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert refused(ChatRequest, **CHAT, **both).param == "structured_outputs"
    asked = parse(CompletionRequest, **COMPLETION, structured_outputs={"choice": ["a", "b"]})
    structure = asked.sampling().structure
    assert (structure.kind, json.loads(structure.text)) == ("choice", ["a", "b"])
    assert structure.param == "structured_outputs.choice"
    body = json.dumps(CHAT)[:-1] + ', "structured_outputs": {"json": ' + nest(2000) + "}}"
    with pytest.raises(RequestError):
        parse_request(ChatRequest, body.encode())


def nest(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def test_defaults_are_those_of_openai() -> None:
    assert parse(ChatRequest, **CHAT).sampling() == SamplingParams()


@settings(deadline=None)
@given(value=st.floats() | st.integers() | st.text() | st.booleans() | st.lists(st.integers()))
def test_a_temperature_is_taken_or_refused_and_never_bent(value: Any) -> None:
    body = json.dumps(CHAT | {"temperature": value}).encode()
    is_good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= 2
    )
    if is_good:
        assert parse_request(ChatRequest, body).temperature == value
    else:
        with pytest.raises(RequestError):
            parse_request(ChatRequest, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = sorted(
    {field.name for kind, _ in KINDS for field in dataclasses.fields(kind)}
    | {"role", "content", "tool_calls", "type", "text", "function", "arguments"}
)


@settings(deadline=None, max_examples=300)
@given(
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
    messages=JSON | st.lists(st.dictionaries(st.sampled_from(NAMES), JSON), max_size=3),
)
def test_any_json_gives_a_request_or_a_request_error(body: Any, messages: Any) -> None:
    for kind, base in KINDS:
        for data in (body, {**base, **body}, {**body, "messages": messages}):
            try:
                parse_request(kind, json.dumps(data).encode())
            except RequestError as error:
                assert len(str(error)) < 2_000


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert refused(ChatRequest, **CHAT, min_tokens=5, max_tokens=4).param == "min_tokens"


def test_stream_options_are_checked() -> None:
    good = {"include_usage": True, "include_obfuscation": False}
    assert parse(ChatRequest, **CHAT, stream=True, stream_options=good).stream_options
    for bad, param in [
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"usage": True}, "stream_options.usage"),
        ([], "stream_options"),
    ]:
        assert refused(ChatRequest, **CHAT, stream=True, stream_options=bad).param == param


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    (_, message) = parse(ChatRequest, messages=[*CHAT["messages"], answer]).messages
    assert message == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("arguments", ['{"a": [1]}', {"a": [1]}])
def test_arguments_of_calls_reach_the_template_as_objects(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    (_, message) = parse(ChatRequest, messages=[*CHAT["messages"], turn]).messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
    assert message["content"] == ""


@pytest.mark.parametrize("arguments", ["{", "5", "[1]", 5, '{"a": NaN'])
def test_arguments_that_are_no_object_are_refused_by_name(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    error = refused(ChatRequest, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages.0.tool_calls.0.function.arguments"


def test_the_reference_page_lists_every_field() -> None:
    for kind, base in KINDS:
        rows = {row[0]: row for row in schema.describe(kind)}
        assert set(rows) >= {field.name for field in dataclasses.fields(kind)}
        assert all(all(row) for row in rows.values())
        assert [rows[name][2] for name in base] == ["required"]


@pytest.mark.parametrize("name", ["", "a b", "x" * 257, 5, None, "é"])
def test_a_functions_name_is_checked(name: Any) -> None:
    error = refused(ChatRequest, **CHAT, tools=[{"type": "function", "function": {"name": name}}])
    assert error.param == "tools.0.function.name"


def test_tools_reach_the_template_in_the_clients_order() -> None:
    function = {"parameters": {"b": 1, "a": 2}, "name": "f", "description": None, "strict": False}
    (tool,) = parse(ChatRequest, **CHAT, tools=[{"type": "function", "function": function}]).tools
    found = [("parameters", {"b": 1, "a": 2}), ("name", "f"), ("strict", False)]
    assert list(tool["function"].items()) == found


def test_a_forced_tool_must_be_there() -> None:
    named = {"type": "function", "function": {"name": "g"}}
    for choice, tools in [("required", []), (named, []), (named, [TOOL])]:
        assert refused(ChatRequest, **CHAT, tool_choice=choice, tools=tools).param == "tool_choice"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        assert parse(ChatRequest, **CHAT, tool_choice=choice, tools=[TOOL]).tool_choice
