"""The endpoints as the openai client sees them: whole and streamed, one choice and several."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer

TEXT = "Grüße, 🙂 and so on."


@pytest.fixture(scope="module")
def server(start_fake: Any, eos: int) -> LiveServer:
    return start_fake(next_token=say(TEXT, then=eos), max_model_len=256)


@pytest.fixture(scope="module")
def letters(start_fake: Any) -> LiveServer:
    """Serve letters that depend on the seed."""
    return start_fake(max_model_len=256)


def test_chat_answers_as_openai_does(server: LiveServer) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.message.tool_calls is None
    tokens = len(TEXT.encode()) + 1  # the end of sequence is a token too
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_answers_as_openai_does(server: LiveServer) -> None:
    answer = server.client().completions.create(model="tiny", prompt="hi", max_tokens=200)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)


def test_a_completion_without_max_tokens_has_sixteen(server: LiveServer) -> None:
    reply = server.complete().json
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


def test_streamed_chat_joins_to_the_whole_one(server: LiveServer) -> None:
    stream = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks)


def test_streamed_completion_joins_to_the_whole_one(server: LiveServer) -> None:
    chunks = list(
        server.client().completions.create(
            model="tiny", prompt="hi", max_tokens=200, stream=True, seed=1
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_async_clients_stream_side_by_side(letters: LiveServer) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="hi", max_tokens=40, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with letters.async_client() as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(6)))

    texts = asyncio.run(run())
    alone = [
        letters.complete(max_tokens=40, seed=seed).json["choices"][0]["text"] for seed in range(6)
    ]
    assert texts == alone
    assert len(set(texts)) == 6


def test_stream_headers_keep_proxies_from_buffering(server: LiveServer) -> None:
    reply = server.chat(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.events()[-1] == "[DONE]"


def test_several_choices_have_seeds_of_their_own_and_repeat(letters: LiveServer) -> None:
    fields = {"n": 4, "seed": 7, "max_tokens": 12}
    first = letters.complete(**fields).json
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [c["text"] for c in letters.complete(**fields).json["choices"]] == texts
    assert letters.complete(**fields | {"n": 1}).json["choices"][0]["text"] == texts[0]
    assert first["usage"]["completion_tokens"] == 48


def test_streamed_choices_equal_the_whole_ones(letters: LiveServer) -> None:
    fields = {"n": 3, "seed": 7, "max_tokens": 12}
    whole = [choice["message"]["content"] for choice in letters.chat(**fields).json["choices"]]
    events = letters.chat(**fields, stream=True).events()[:-1]
    for index in range(3):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == whole[index]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


def test_several_prompts_come_back_in_order(server: LiveServer) -> None:
    reply = server.complete(["a", "bc"], n=2, max_tokens=3).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [len(prompt) for prompt, _ in list(server.engine.seen)[-4:]]
    assert prompts == [2, 2, 3, 3]  # with BOS
    # A prompt counts once, however many answers it gets.
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == 12


def test_prompts_can_be_token_ids(server: LiveServer) -> None:
    assert server.complete([65, 66], max_tokens=1).status == 200
    assert server.engine.seen[-1][0] == (65, 66)
    assert server.complete([[65], [66, 67]], max_tokens=1).status == 200
    assert [prompt for prompt, _ in list(server.engine.seen)[-2:]] == [(65,), (66, 67)]


def test_sampling_fields_reach_the_engine(server: LiveServer) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": "zz",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": 5},
        "bad_token_ids": [66],
        "skip_special_tokens": False,
    }
    assert server.chat(**fields, max_tokens=9).status == 200
    params = server.engine.seen[-1][1]
    expected = fields | {"stop": ("zz",), "stop_token_ids": (7,), "max_tokens": 9}
    expected |= {"logit_bias": ((65, 5.0),), "bad_token_ids": (66,)}
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "temperature", "top_k"),
    [({"top_p": 0}, 0.0, 0), ({"top_k": -1}, 1.0, 0), ({"temperature": None}, 1.0, 0)],
)
def test_values_that_other_servers_know_mean_the_same(
    server: LiveServer, fields: dict, temperature: float, top_k: int
) -> None:
    assert server.chat(**fields).status == 200
    params = server.engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p) == (temperature, top_k, 1.0)


def test_only_completions_continue_a_text(server: LiveServer) -> None:
    server.chat()
    assert not server.engine.seen[-1][1].continues_text
    server.complete("hi")
    assert server.engine.seen[-1][1].continues_text
    server.complete("")  # nothing but BOS
    assert not server.engine.seen[-1][1].continues_text


def test_models_are_listed_and_shown(server: LiveServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "treadle"
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("org/other")


def test_another_model_is_not_found(server: LiveServer) -> None:
    reply = server.chat(model="other")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert "`tiny`" in reply.error["message"]


def test_the_model_may_be_left_out(server: LiveServer) -> None:
    assert server.chat(model=None).json["model"] == "tiny"


def test_template_switches_reach_the_template(start_server: Any, tmp_path: Path) -> None:
    template = (
        "{{ messages[0].content }}{{ 'X' * extra }}{% if add_generation_prompt %}:{% endif %}"
    )
    folder = tiny.save_byte_level(tmp_path, template=template)
    server = start_server(lambda: FakeEngine(folder))
    assert server.chat("a", chat_template_kwargs={"extra": 2}).status == 200
    assert bytes(server.engine.seen[-1][0]) == b"aXX:"
    server.chat("a", chat_template_kwargs={"extra": 1}, add_generation_prompt=False)
    assert bytes(server.engine.seen[-1][0]) == b"aX"
    for name in ("tools", "messages", "chat_template", "bos_token"):
        reply = server.chat("a", chat_template_kwargs={name: "x"})
        assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


def test_a_long_wait_is_filled_with_comments(start_fake: Any, eos: int) -> None:
    server = start_fake(next_token=say("ab", then=eos), step_s=0.2, server={"heartbeat_s": 0.05})
    reply = server.chat(stream=True)
    assert b": waiting\n\n" in reply.body
    texts = [e["choices"][0]["delta"].get("content", "") for e in reply.events()[:-1]]
    assert "".join(texts) == "ab"
    # The client takes no notice of them.
    chunks = server.client().completions.create(model="tiny", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"


def test_a_fault_in_a_stream_is_an_error_event_and_no_normal_end(start_fake: Any) -> None:
    server = start_fake(fault_at=3)
    events = server.chat(stream=True).events()
    assert "error" in events[-1]
    assert "[DONE]" not in events
    with pytest.raises(openai.APIError, match="A fault of the fake engine"):
        list(server.client().completions.create(model="tiny", prompt="x", stream=True))
    reply = server.chat()
    assert (reply.status, reply.error["type"]) == (500, "server_error")
