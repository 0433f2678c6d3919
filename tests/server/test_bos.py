"""55: one BOS on every path. A template owns the special tokens of a chat, wherever it comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer

BOS_ID = 256


@pytest.fixture(scope="module", params=[tiny.TEMPLATE, tiny.TEMPLATE_WITH_BOS], ids=["no", "yes"])
def server(request: Any, start_server: Any, tmp_path_factory: Any, eos: int) -> LiveServer:
    folder = tmp_path_factory.mktemp("bos")
    tiny.save_byte_level(folder, template=request.param, adds_bos=True)
    made: LiveServer = start_server(lambda: FakeEngine(Path(folder), say("ok", then=eos)))
    made.__dict__["template_has_bos"] = request.param == tiny.TEMPLATE_WITH_BOS
    return made


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_55_all_chats_give_what_the_template_writes(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    assert server.post(path, body).status == 200
    ids, _ = server.engine.seen[-1]
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    assert list(ids) == server.post("/tokenize", asked).json["tokens"]
    assert ids.count(BOS_ID) == server.__dict__["template_has_bos"]


RAW: list[tuple[dict[str, Any], int]] = [
    ({"prompt": "hi"}, 1),
    ({"prompt": "hi", "add_special_tokens": False}, 0),
    ({"prompt": "<s>hi", "add_special_tokens": False}, 1),
    ({"prompt": "<s>hi"}, 2),
    ({"prompt": [104, 105]}, 0),
    ({"prompt": [BOS_ID, 104]}, 1),
]


@pytest.mark.parametrize(("body", "count"), RAW)
def test_55_raw_prompts_get_what_the_tokenizer_adds_and_ids_nothing(
    server: LiveServer, body: dict[str, Any], count: int
) -> None:
    assert server.complete(**body).status == 200
    ids, _ = server.engine.seen[-1]
    assert ids.count(BOS_ID) == count
