"""Tokenizers load from folders, keep prompts whole, render chats and refuse what they can't do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from treadle.ir.errors import CheckpointError, RequestError
from treadle.runtime.tokenizer import Tokenizer

from ..server import tiny

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(tiny.save_byte_level(tmp_path_factory.mktemp("bytes"), ["The qu"]))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tiny.save_byte_level(
        tmp_path_factory.mktemp("bos"), adds_bos=True, template=tiny.TEMPLATE_WITH_BOS
    )
    return Tokenizer.from_path(folder)


def test_encode_then_decode_gives_the_text_back(byte_level: Tokenizer, rng_seed: int) -> None:
    random_ = random.Random(rng_seed)
    text = "".join(chr(random_.choice([*range(32, 127), 0xE9, 0x3042, 0x1F642])) for _ in range(80))
    assert byte_level.decode(byte_level.encode(text)) == text


def test_decode_leaves_special_tokens_out(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a</s>b")) == "ab"


def test_decode_equals_the_transformers_library(byte_level: Tokenizer, tmp_path: Path) -> None:
    folder = tiny.save_byte_level(tmp_path, ["The qu"])
    judge = AutoTokenizer.from_pretrained(folder)
    token_ids = [*byte_level.encode("The quiet</s> day"), 0xC3, 0xFF]
    assert byte_level.decode(token_ids) == judge.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("class_name", ["TokenizersBackend", "LlamaTokenizer", None])
def test_a_folder_of_its_own_loads_as_the_transformers_library_loads_it(
    tmp_path: Path, class_name: str | None
) -> None:
    folder = tiny.save_byte_level(tmp_path, ["The qu"], template=tiny.TEMPLATE_WITH_BOS)
    (folder / "config.json").unlink(missing_ok=True)
    edit_class(folder, class_name)
    found, judge = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    assert type(found._hf) is type(judge)
    assert found._hf.get_vocab() == judge.get_vocab()
    assert found._hf.special_tokens_map == judge.special_tokens_map
    assert found._hf.chat_template == judge.chat_template
    assert found.encode("The quiet</s> day") == judge.encode("The quiet</s> day")


def edit_class(folder: Path, class_name: str | None) -> None:
    """Name the tokenizer's class in its config, or no class."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("tokenizer_class", None)
    file.write_text(json.dumps(settings | ({"tokenizer_class": class_name} if class_name else {})))


def test_ids_outside_the_vocabulary_add_no_text(byte_level: Tokenizer) -> None:
    padded_id = byte_level.vocab_size + 7
    assert byte_level.decode([0x41, padded_id, 0x42]) == "AB"
    assert byte_level.token_bytes(padded_id) == b""


def test_a_tokenizer_that_cuts_and_pads_is_told_not_to(tmp_path: Path) -> None:
    folder = tiny.save_byte_level(tmp_path)
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    path.write_text(json.dumps(settings))
    assert len(Tokenizer.from_path(folder).encode("a" * 50)) == 50


def test_raw_text_gets_bos_and_a_chat_only_the_templates_own(with_bos: Tokenizer) -> None:
    bos = with_bos.bos_token_id
    assert with_bos.encode("hi")[0] == bos
    assert with_bos.encode("hi", add_special_tokens=False)[0] != bos
    assert with_bos.encode_chat(CHAT).count(bos) == 1


def test_a_template_without_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(tiny.save_byte_level(tmp_path, adds_bos=True))
    assert tokenizer.bos_token_id not in tokenizer.encode_chat(CHAT)


def test_half_a_surrogate_pair_is_the_clients_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate pair at character 2"):
        byte_level.encode("ab\ud800")


def test_a_templates_own_exception_is_the_clients_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no such role: banana") as caught:
        byte_level.render_chat([{"role": "banana", "content": "hi"}])
    assert caught.value.param == "messages"


def test_a_message_that_breaks_the_template_is_the_clients_mistake(tmp_path: Path) -> None:
    folder = tiny.save_byte_level(tmp_path, template="{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer.from_path(folder).render_chat(CHAT)


def test_no_template_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(tiny.save_byte_level(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="found none") as caught:
        tokenizer.render_chat(CHAT)
    assert caught.value.code == "no_chat_template"


def test_a_request_may_set_the_templates_switches(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    tokenizer = Tokenizer.from_path(tiny.save_byte_level(tmp_path, template=template))
    assert tokenizer.render_chat(CHAT, shout=True) == "hi!"


@pytest.mark.parametrize("name", ["chat_template", "conversation", "messages", "bos_token"])
def test_a_request_may_not_set_what_the_template_is_given(byte_level: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match="not a request's") as caught:
        byte_level.encode_chat(CHAT, **{name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("generation_config", "config", "extra"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2}),
        ({"eos_token_id": 1}, {}, {1}),
        ({}, {"eos_token_id": 3}, {3}),
        ({"eos_token_id": None}, {"eos_token_id": None}, set()),
    ],
)
def test_ends_come_from_generation_config_or_config_and_tokenizer(
    tmp_path: Path, generation_config: dict, config: dict, extra: set[int]
) -> None:
    source = SimpleNamespace(
        path=tiny.save_byte_level(tmp_path),
        kind="safetensors",
        config=config,
        generation_config=generation_config,
    )
    tokenizer = Tokenizer.from_source(source)
    assert tokenizer.eos_token_ids == extra | {tokenizer.encode("</s>")[0]}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing there"):
        Tokenizer.from_path(tmp_path / "absent")


def test_a_folder_without_tokenizer_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.CTC(), "more than one token"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "replaces 'ab'"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "strips"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(
    tmp_path: Path, decoder: decoders.Decoder, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer.from_path(tiny.save_words(tmp_path, decoder))


def test_text_that_continues_another_keeps_its_leading_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(tiny.save_sentencepiece(tmp_path))
    token_ids = tokenizer.encode("a the")
    assert tokenizer.decode(token_ids) == "a the"
    assert tokenizer.decode(token_ids, continues_text=True) == " a the"
