"""/tokenize, /detokenize and /tokenizer_info, as clients without the tokenizer use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from treadle.runtime.tokenizer import Tokenizer

from .live import LiveServer
from .tiny import BOS, EOS


@pytest.fixture(scope="module")
def server(start_fake: Any) -> LiveServer:
    return start_fake()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_path(tokenizer_folder)


def test_a_text_gets_what_the_tokenizer_adds_unless_told_otherwise(
    server: LiveServer, tokenizer: Tokenizer
) -> None:
    text = "Grüße, 世界 😀"
    reply = server.post("/tokenize", {"prompt": text}).json
    ids = tokenizer.encode(text)
    assert reply == {"tokens": ids, "count": len(ids), "max_model_len": 128}
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_an_empty_text_has_no_tokens(server: LiveServer) -> None:
    reply = server.post("/tokenize", {"prompt": "", "add_special_tokens": False})
    assert reply.json["tokens"] == []


def test_a_conversation_goes_through_the_template(server: LiveServer, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    reply = server.post("/tokenize", {"messages": messages}).json
    assert reply["tokens"] == tokenizer.encode_chat(messages)
    reply = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json
    assert reply["tokens"] == tokenizer.encode_chat(messages, add_generation_prompt=False)


def test_spellings_come_on_request(server: LiveServer) -> None:
    reply = server.post("/tokenize", {"prompt": "Hi", "return_token_strs": True}).json
    assert reply["token_strs"] == [BOS, "H", "i"]


def test_what_was_tokenized_comes_back_special_tokens_too(server: LiveServer) -> None:
    text = f"Grüße{EOS} 世界"
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": BOS + text}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_a_remote_tokenizer_finds_what_it_needs(server: LiveServer, tokenizer: Tokenizer) -> None:
    # What lm-eval does: eos_token and chat_template from here, ids and texts from the other two.
    info = server.get("/tokenizer_info").json
    assert (info["bos_token"], info["eos_token"]) == (BOS, EOS)
    eos = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json
    assert eos["tokens"] == info["eos_token_ids"] == sorted(tokenizer.eos_token_ids)
    messages = [{"role": "user", "content": "Hi"}]
    template = jinja2.Environment().from_string(info["chat_template"])
    rendered = template.render(
        messages=messages, add_generation_prompt=True, bos_token=BOS, eos_token=EOS
    )
    assert rendered == tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "invalid_value"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "prompt",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"prompt": "a", "chat_template_kwargs": {}},
            "chat_template_kwargs",
            "invalid_value",
        ),
        ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "unknown_field"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "model_not_found"),
        ("/detokenize", {}, "tokens", "missing_field"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "invalid_value"),
        ("/detokenize", {"tokens": [1, 1 << 20]}, "tokens.1", "invalid_token_id"),
        ("/detokenize", {"tokens": "abc"}, "tokens", "invalid_type"),
    ],
)
def test_a_mistake_is_named(
    server: LiveServer, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    error = server.post(path, body).error
    assert (error["param"], error["code"]) == (param, code)
