"""Log probabilities over HTTP, in the shapes of both endpoints, whole and streamed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import (
    BOS,
    EOS,
    load_oracle,
    make_dice,
    make_random,
    make_script,
    oracle_greedy,
    oracle_logits,
)

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


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def scored(start_model: Any, random_model: Path) -> LiveServer:
    return start_model(random_model)


def test_10_the_likelihood_of_a_prompt_as_lm_eval_asks_for_it(
    scored: LiveServer, random_model: Path, rng_seed: int
) -> None:
    oracle = load_oracle(random_model)
    generator = random.Random(rng_seed)
    greedy = oracle_greedy(oracle, [7, 8], 10)
    prompts = [[generator.randrange(3, 250) for _ in range(12)], [7, 8, *greedy][:12], [9]]
    reply = scored.complete(prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    for prompt, choice in zip(prompts, reply.json["choices"], strict=True):
        told = choice["logprobs"]
        assert {len(values) for values in told.values()} == {len(prompt) + 1}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        new = oracle_greedy(oracle, prompt, 1)
        expected = torch.log_softmax(oracle_logits(oracle, prompt), -1)
        for row, token, value, top in zip(
            expected,
            [*prompt, *new][1:],
            told["token_logprobs"][1:],
            told["top_logprobs"][1:],
            strict=True,
        ):
            assert value == pytest.approx(float(row[token]), abs=2e-3)
            # The harness compares floats to see whether a token is the greedy one.
            assert (max(top.values()) == value) == (int(row.argmax()) == token)


def test_10_tokens_are_texts_of_their_own_and_join_to_the_text(scored: LiveServer) -> None:
    reply = scored.complete("Hi there", max_tokens=1, temperature=0, logprobs=0, echo=True)
    choice = reply.json["choices"][0]
    told = choice["logprobs"]
    assert told["tokens"][:9] == [BOS, *"Hi there"]
    assert told["text_offset"][:9] == [0, *range(8)]
    assert choice["text"].startswith("Hi there")
    assert reply.json["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 0, "n": 2}])
@pytest.mark.parametrize("prompt", ["[[S1]]", ["[[S1]]", "Oh [[S1]]"]])
def test_an_echo_stands_before_the_answer_whole_and_streamed(
    script: LiveServer, prompt: Any, fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "echo": True} | fields
    wholes = script.complete(prompt, **asked).json["choices"]
    alone = script.complete(prompt, **asked | {"echo": False}).json["choices"]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    for index, (whole, bare) in enumerate(zip(wholes, alone, strict=True)):
        assert whole["text"] == prompts[index // asked.get("n", 1)] + bare["text"]
    events = script.complete(prompt, stream=True, **asked).events()
    assert events.pop() == "[DONE]"
    for whole in wholes:
        pieces = [c for e in events for c in e["choices"] if c["index"] == whole["index"]]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        if "logprobs" not in fields:
            assert told == [] and whole["logprobs"] is None
            continue
        for name, values in whole["logprobs"].items():
            assert [one for part in told for one in part[name]] == values


def test_an_echo_of_token_ids_is_their_text(script: LiveServer) -> None:
    reply = script.complete(list(b"Hi"), max_tokens=1, temperature=0, echo=True)
    assert reply.json["choices"][0]["text"].startswith("Hi")


def test_an_echo_comes_even_where_nothing_follows(script: LiveServer) -> None:
    # A token that is part of no script is followed by the end at once.
    reply = script.complete("x", max_tokens=3, temperature=0, echo=True)
    assert reply.json["choices"][0]["text"] == "x"
    events = script.complete("x", max_tokens=3, temperature=0, echo=True, stream=True).events()
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "x"


@pytest.mark.parametrize("stream", [False, True])
def test_11_no_tokens_with_echo_is_the_prompt_alone(dice: LiveServer, stream: bool) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    reply = dice.complete("[[S1]]AB", **fields)
    assert reply.status == 200
    if stream:
        *events, ending = reply.events()
        assert ending == "[DONE]"
        choices = [event["choices"][0] for event in events]
        told = choices[0]["logprobs"]
        assert "".join(choice["text"] for choice in choices) == "[[S1]]AB"
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]
        assert not any(choice["logprobs"] for choice in choices[1:])
    else:
        (choice,) = reply.json["choices"]
        told = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == ("[[S1]]AB", "length")
        assert reply.json["usage"]["completion_tokens"] == 0
    assert told["tokens"] == [BOS, "[[S1]]", "A", "B"]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][2:] == pytest.approx([VALUES["A"], VALUES["B"]], abs=1e-3)


def test_11_no_tokens_of_a_prompt_of_one_token(dice: LiveServer) -> None:
    fields = {"echo": True, "max_tokens": 0, "add_special_tokens": False}
    reply = dice.complete("[[S1]]", logprobs=1, **fields)
    told = reply.json["choices"][0]["logprobs"]
    assert (told["tokens"], told["token_logprobs"]) == (["[[S1]]"], [None])
    assert dice.complete("[[S1]]", **fields).json["choices"][0]["logprobs"] is None


def test_11_no_tokens_without_echo_is_refused(dice: LiveServer) -> None:
    for stream in (False, True):
        reply = dice.complete("[[S1]]", max_tokens=0, stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "max_tokens")
        assert dice.chat("[[S1]]", max_tokens=0, stream=stream).status == 400


def test_best_of_gives_the_likeliest_answers_first(dice: LiveServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "seed": 3, "temperature": 1}
    made = dice.complete("[[S1]]", n=6, logprobs=0, **fields).json["choices"]
    ranked = sorted(made, key=lambda c: sum(c["logprobs"]["token_logprobs"]), reverse=True)
    reply = dice.complete(["[[S1]]", "[[S1]]"], n=2, best_of=6, **fields)
    choices = reply.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [c["text"] for c in choices] == [c["text"] for c in ranked[:2]] * 2
    assert all(choice["logprobs"] is None for choice in choices)
    assert reply.json["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
def test_a_best_of_that_can_not_be_is_refused(dice: LiveServer, fields: Any) -> None:
    reply = dice.complete("[[S1]]", **fields)
    assert (reply.status, reply.error["param"]) == (400, "best_of")
    assert dice.complete("[[S1]]", best_of=1, max_tokens=1, stream=True).status == 200
