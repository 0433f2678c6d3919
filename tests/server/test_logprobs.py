"""Log probabilities over HTTP, in the shapes of both endpoints, whole and streamed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.checkpoints import EOS, make_dice, make_script

from .live import LiveServer

VALUES = {face: math.log(p) for face, p in {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}.items()}
SMILE = b"\xf0\x9f\x99\x82"


@pytest.fixture(scope="module")
def dice(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    return start_model(make_dice(tmp_path_factory.mktemp("dice"), then="face").path)


@pytest.fixture(scope="module")
def script(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    scripts: dict[str, list[str | bytes]] = {"[[S1]]": ["Oh ", SMILE, "!", EOS]}
    return start_model(make_script(tmp_path_factory.mktemp("script"), scripts).path)


def test_07_two_streamed_choices_with_logprobs_0(dice: LiveServer) -> None:
    stream = dice.client().completions.create(
        model="tiny",
        prompt="[[S1]]",
        n=2,
        max_tokens=2,
        logprobs=0,
        temperature=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    usage = chunks.pop().usage
    assert usage is not None and usage.completion_tokens == 4
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        text = "".join(choice.text for choice in choices)
        told = [choice.logprobs for choice in choices if choice.logprobs]
        tokens = [token for one in told for token in one.tokens or []]
        assert "".join(tokens) == text and len(tokens) == 2
        assert [o for one in told for o in one.text_offset or []] == [0, 1]
        values = [value for one in told for value in one.token_logprobs or []]
        assert values == pytest.approx([VALUES[token] for token in tokens], abs=1e-3)
        assert [choice.finish_reason for choice in choices].count("length") == 1


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
def test_08_a_chat_with_logprobs_alone_lists_no_others(dice: LiveServer, fields: Any) -> None:
    answer = dice.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "[[S1]]"}],
        max_tokens=3,
        logprobs=True,
        **fields,
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert "".join(one.token for one in told.content) == answer.choices[0].message.content
    for one in told.content:
        assert one.logprob == pytest.approx(VALUES[one.token], abs=1e-3)
        assert bytes(one.bytes or []) == one.token.encode()
        assert one.top_logprobs == []


def test_08_a_chat_lists_as_many_others_as_it_is_asked_for(dice: LiveServer) -> None:
    reply = dice.chat("[[S1]]", max_tokens=2, logprobs=True, top_logprobs=3, temperature=0)
    first = reply.json["choices"][0]["logprobs"]["content"][0]
    assert [one["token"] for one in first["top_logprobs"]] == ["A", "B", "C"]
    assert first["top_logprobs"][0] == {key: first[key] for key in ("token", "logprob", "bytes")}


def test_08_top_logprobs_without_logprobs_is_refused_by_name(dice: LiveServer) -> None:
    reply = dice.chat("[[S1]]", top_logprobs=2)
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


def test_08_completions_have_a_shape_of_their_own(dice: LiveServer) -> None:
    reply = dice.complete("[[S1]]", max_tokens=2, logprobs=0, temperature=0)
    told = reply.json["choices"][0]["logprobs"]
    value = told["token_logprobs"][0]
    assert told["tokens"] == ["A", "A"] and told["text_offset"] == [0, 1]
    assert told["top_logprobs"] == [{"A": value}, {"A": value}]
    assert value == pytest.approx(VALUES["A"], abs=1e-3)


def test_08_without_asking_there_are_none(dice: LiveServer) -> None:
    assert dice.complete("[[S1]]", max_tokens=2).json["choices"][0]["logprobs"] is None
    assert dice.chat("[[S1]]", max_tokens=2).json["choices"][0]["logprobs"] is None


def test_a_drawn_token_is_told_beside_the_likeliest(dice: LiveServer) -> None:
    reply = dice.complete("[[S1]]", max_tokens=40, logprobs=1, temperature=2, seed=5)
    told = reply.json["choices"][0]["logprobs"]
    for token, value, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        # Of the model, not of what temperature 2 makes of it.
        assert value == pytest.approx(VALUES[token], abs=1e-3)
        assert set(top) == {"A", token} and top[token] == value
        assert max(top.values()) == top["A"]


def test_13_at_tiny_temperatures_they_are_those_of_the_model(dice: LiveServer) -> None:
    for temperature in (1e-4, 1e-6, 0):
        reply = dice.complete("[[S1]]", max_tokens=3, logprobs=20, temperature=temperature)
        told = json.loads(reply.body, parse_constant=lambda name: pytest.fail(name))
        logprobs = told["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["A"] * 3
        assert logprobs["token_logprobs"] == pytest.approx([VALUES["A"]] * 3, abs=1e-3)


def test_parts_of_characters_are_told_as_bytes(script: LiveServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0}
    chat = script.chat("[[S1]]", logprobs=True, **fields).json["choices"][0]
    content = chat["logprobs"]["content"]
    joined = b"".join(bytes(one["bytes"]) for one in content)
    assert joined.decode() == chat["message"]["content"] + EOS
    assert [one["token"] for one in content] == ["Oh ", *["�"] * 4, "!", EOS]
    told = script.complete("[[S1]]", logprobs=0, **fields).json["choices"][0]["logprobs"]
    assert told["tokens"][1:5] == [f"bytes:\\x{byte:02x}" for byte in SMILE]


@pytest.mark.parametrize("chat", [False, True])
def test_streamed_logprobs_are_the_whole_ones(script: LiveServer, chat: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "seed": 1}
    ask: Any = script.chat if chat else script.complete
    fields |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    whole = ask("[[S1]]", **fields).json["choices"][0]["logprobs"]
    events = ask("[[S1]]", stream=True, **fields).events()
    assert events.pop() == "[DONE]"
    told = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    names = ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    for name in names:
        assert [one for part in told for one in part[name]] == whole[name]
