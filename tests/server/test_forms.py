"""Forms of answers over HTTP on a real engine: cases 05, 22, 25 and 26 of public bug reports."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema_rs
import pytest

from tests.checkpoints import CHAT_TEMPLATE, make_dice, make_llama
from treadle.runtime.structure import Grammar, GrammarCompiler

from .live import LiveServer

TOOLS_TEMPLATE = CHAT_TEMPLATE + "{# tools <tool_call> #}"


@pytest.fixture(scope="module")
def random_model(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Serve random weights: the best fuzzer of a grammar."""
    folder = make_llama(tmp_path_factory.mktemp("random"), window=512)
    template = folder / "chat_template.jinja"
    assert template.exists()
    template.write_text(TOOLS_TEMPLATE)
    return start_model(folder)


@pytest.fixture(scope="module")
def dice(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    return start_model(make_dice(tmp_path_factory.mktemp("dice")).path)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


# --- 05: seeds of several answers -----------------------------------------------------------------


def test_05_answers_have_seeds_of_their_own_alone_and_in_company(dice: LiveServer) -> None:
    fields = {"n": 8, "seed": 7, "temperature": 1, "max_tokens": 12}

    def texts(**others: Any) -> list[str]:
        choices = dice.complete("[[S1]]", **fields | others).json["choices"]
        return [choice["text"] for choice in choices]

    alone = texts()
    assert len(set(alone)) > 1
    assert texts() == alone
    company = [
        threading.Thread(target=dice.complete, args=("[[S1]]",), kwargs={"max_tokens": 60})
        for _ in range(5)
    ]
    for thread in company:
        thread.start()
    assert texts() == alone
    for thread in company:
        thread.join()
    assert texts(seed=8) != alone


# --- 22: forced calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_w"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_22_forced_calls_satisfy_their_schema(
    random_model: LiveServer, choice: Any, stream: bool
) -> None:
    schema = closed({"city": {"enum": ["Rome", "Bonn"]}, "days": {"enum": [1, 7]}})
    tool = {"type": "function", "function": {"name": "get_w", "parameters": schema}}
    num_whole = 0
    for seed in range(4):
        fields = {"tools": [tool], "tool_choice": choice, "seed": seed, "max_tokens": 150}
        reply = random_model.chat("hi", stream=stream, parallel_tool_calls=False, **fields)
        assert reply.status == 200, reply.body
        if stream:
            deltas = [event["choices"][0] for event in reply.events()[:-1]]
            parts = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
            arguments = "".join(part["function"]["arguments"] for part in parts)
            names, reason = [parts[0]["function"]["name"]], deltas[-1]["finish_reason"]
        else:
            (answer,) = reply.json["choices"]
            calls, reason = answer["message"]["tool_calls"], answer["finish_reason"]
            names = [call["function"]["name"] for call in calls]
            arguments = calls[0]["function"]["arguments"]
        assert names == ["get_w"]
        if reason == "tool_calls":
            num_whole += 1
            assert jsonschema_rs.is_valid(schema, json.loads(arguments))
    assert num_whole


# --- 25: schemas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
        {"$ref": "https://example.com/x.json"},
        {"type": "array", "uniqueItems": True},
    ],
    ids=["endless", "elsewhere", "not enforceable"],
)
def test_25_a_schema_that_can_not_be_is_refused(random_model: LiveServer, schema: Any) -> None:
    reply = random_model.chat("hi", response_format=form(schema), max_tokens=4)
    assert reply.status == 400
    assert reply.error["param"].startswith("response_format")
    assert random_model.chat("hi", max_tokens=1).status == 200


def test_25_answers_that_end_satisfy_their_schema(random_model: LiveServer) -> None:
    name = {"$ref": "#/$defs/N"}
    schema = {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": closed({"who": name}),
        "$defs": {"N": {"enum": ["Ann", "Bo"]}},
    }
    texts = set()
    for seed in range(6):
        fields = {"response_format": form(schema), "seed": seed, "max_tokens": 120}
        (choice,) = random_model.chat("hi", **fields).json["choices"]
        if choice["finish_reason"] == "stop":
            texts.add(choice["message"]["content"])
    assert texts and all(jsonschema_rs.is_valid(schema, json.loads(text)) for text in texts)


# --- 26: white space, and time --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_26_white_space_does_not_run_on(random_model: LiveServer, temperature: float) -> None:
    schema = closed({"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 4}})
    likes = {str(byte): 60 for byte in b" \n\t"} | {str(ord("}")): 20, str(ord('"')): 10}
    reply = random_model.chat(
        "hi",
        response_format=form(schema),
        logit_bias=likes,
        max_tokens=200,
        temperature=temperature,
        seed=1,
    )
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop"
    assert jsonschema_rs.is_valid(schema, json.loads(choice["message"]["content"]))


def test_26_others_go_on_while_a_schema_compiles(
    random_model: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, may_go_on = threading.Event(), threading.Event()
    compile_at_once = GrammarCompiler.compile

    def compile_slowly(self: GrammarCompiler, structure: Any) -> Grammar:
        compiling.set()
        assert may_go_on.wait(30)
        return compile_at_once(self, structure)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    found: list[int] = []

    def ask() -> None:
        schema = closed({"a": {"enum": [1]}})
        reply = random_model.chat("hi", response_format=form(schema), max_tokens=80)
        found.append(reply.status)

    asking = threading.Thread(target=ask)
    asking.start()
    assert compiling.wait(30)
    # The event loop and the engine's worker are both free: whole answers come meanwhile.
    for _ in range(3):
        assert random_model.chat("hi", max_tokens=8).status == 200
    assert not found
    may_go_on.set()
    asking.join()
    assert found == [200]


def test_26_a_large_schema_is_compiled_or_refused_in_time(random_model: LiveServer) -> None:
    nested: Any = {"type": "integer"}
    for _ in range(12):
        nested = {"oneOf": [closed({"a": nested}), {"type": "string"}]}
    reply = random_model.chat("hi", response_format=form(nested), max_tokens=2)
    assert reply.status == 200
    many = closed({f"property_{index}": nested for index in range(200)})
    reply = random_model.chat("hi", response_format=form(many), max_tokens=2)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_structure")
    deep = b'{"items": ' * 2000 + b"{}" + b"}" * 2000
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()[:-1]
    body += b', "response_format": {"type": "json_schema", "json_schema": {"schema": '
    assert random_model.post("/v1/chat/completions", body + deep + b"}}}").status == 400
    assert random_model.chat("hi", max_tokens=1).status == 200
