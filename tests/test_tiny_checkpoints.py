"""The tiny checkpoints themselves: do they force, in transformers, what other tests build upon?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import (
    BOS_ID,
    EOS,
    EOS_ID,
    load_oracle,
    make_dice,
    make_llama,
    make_random,
    make_script,
    oracle_answers,
    oracle_greedy,
    oracle_logits,
)

SMILE = "\N{SLIGHTLY SMILING FACE}"
SCRIPTS: dict[str, list[str | bytes]] = {
    "[[S1]]": ["The qu", "ick br", "own f", "ox!", EOS],
    "[[S2]]": ["ab", "ab", "ac", EOS],
    "[[S3]]": [(SMILE * 2).encode(), "ok", EOS],
    "[[S4]]": [b"\xc3", " the", b"\xf0\x9f", EOS],
    "[[S5]]": ["yes ple", "as"],
    "[[S6]]": ["again ", "[[S1]]"],
    "[[S7]]": ["é", "é", "\n", EOS],
    "[[S8]]": [],
}
TEXTS = {
    "[[S1]]": "The quick brown fox!",
    "[[S2]]": "ababac",
    "[[S3]]": SMILE * 2 + "ok",
    "[[S4]]": "\ufffd the\ufffd",
    "[[S5]]": "yes ple" + "as" * 11,
    "[[S6]]": "again [[S1]]The quick brown fox!",
    "[[S7]]": "éé\n",
    "[[S8]]": "",
}


def prompt_ids(tokenizer: Any, content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_cue_is_followed_by_its_script_in_transformers(tmp_path: Path) -> None:
    script = make_script(tmp_path, SCRIPTS)
    oracle = load_oracle(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for cue, text in TEXTS.items():
        prompt = prompt_ids(tokenizer, cue)
        assert prompt[0] == BOS_ID
        assert prompt[-1] == script.cue_ids[cue]
        tokens = oracle_greedy(oracle, prompt, 12)
        answer = script.answer_ids[cue]
        assert tuple(tokens[: len(answer)]) == answer
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_scripted_token_leads_by_the_root_of_the_vocabulary(tmp_path: Path, dtype: str) -> None:
    script = make_script(tmp_path, SCRIPTS, dtype=dtype)
    oracle = load_oracle(tmp_path)
    for cue, answer in script.answer_ids.items():
        logits = oracle_logits(oracle, [BOS_ID, 97, script.cue_ids[cue], *answer])  # [T, V]
        best = logits.topk(2)
        assert best.values[:, 0] == pytest.approx(script.vocab_size**0.5, rel=1e-3)
        assert best.values[:, 1] == pytest.approx(0, abs=1e-6)
        assert best.indices[2 : 2 + len(answer), 0].tolist() == list(answer)


def test_random_bytes_come_out_as_one_decoder_would_read_them(
    tmp_path: Path, rng_seed: int
) -> None:
    rng = random.Random(rng_seed)
    contents = {f"[[S{number}]]": rng.randbytes(rng.randint(1, 24)) for number in range(40)}
    script = make_script(tmp_path, {cue: [content, EOS] for cue, content in contents.items()})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for cue, content in contents.items():
        assert len(script.answer_ids[cue]) == len(content) + 1
        decoded = tokenizer.decode(list(script.answer_ids[cue]), skip_special_tokens=True)
        assert decoded == content.decode(errors="replace")


def test_a_token_outside_every_script_is_followed_by_the_end(tmp_path: Path) -> None:
    make_script(tmp_path, {"[[S1]]": ["word", EOS]})
    assert oracle_greedy(load_oracle(tmp_path), [BOS_ID, 97], 4) == [EOS_ID]


def test_pieces_in_a_prompt_are_their_own_tokens(tmp_path: Path) -> None:
    script = make_script(tmp_path, {"[[S1]]": ["The qu", "ick", EOS]})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.encode("[[S1]]The quick", add_special_tokens=True)
    assert tokens == [BOS_ID, script.cue_ids["[[S1]]"], *script.answer_ids["[[S1]]"][:-1]]
    assert tokenizer.encode("\xff~", add_special_tokens=False) == [0xC3, 0xBF, ord("~")]


@pytest.mark.parametrize("items", [[EOS, "x"], ["a", "[[S1]]", "x"]])
def test_a_script_that_goes_on_after_its_end_is_refused(tmp_path: Path, items: list[str]) -> None:
    with pytest.raises(AssertionError, match="must be the last item"):
        make_script(tmp_path, {"[[S1]]": items})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("roles", "named"),
    [(["user", "banana"], "banana"), (["user", "system"], "must come first")],
)
def test_the_template_refuses_roles_it_does_not_know(
    tmp_path: Path, roles: list[str], named: str
) -> None:
    make_random(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(Exception, match=named):
        tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_template_renders_turns_parts_and_tools(tmp_path: Path) -> None:
    make_random(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "y"}],
        },
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "[[S1]]"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s><|system|>Be brief.<|user|>Hey<|assistant|>Hello</s><|user|>[[S1]]<|assistant|>[[S1]]"
    )
    tools: list[Any] = [{"type": "function", "function": {"name": "get_w"}}]
    text = str(tokenizer.apply_chat_template(messages[3:], tokenize=False, tools=tools))
    assert text.startswith('<s><|system|>[{"type"') and text.endswith("<|user|>[[S1]]")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("then", ["cue", "face", "end"])
def test_dice_fall_with_their_probabilities(tmp_path: Path, dtype: str, then: str) -> None:
    dice = make_dice(tmp_path, dtype=dtype, then=then)  # type: ignore[arg-type]
    oracle = load_oracle(tmp_path)
    expected = {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}
    throw = torch.zeros(dice.vocab_size)
    for face, probability in expected.items():
        throw[dice.face_ids[face]] = probability
    after = {"cue": torch.zeros_like(throw), "face": throw, "end": torch.zeros_like(throw)}[then]
    if then != "face":
        after[dice.cue_id if then == "cue" else EOS_ID] = 1.0
    for face in expected:
        logits = oracle_logits(oracle, [BOS_ID, dice.cue_id, dice.face_ids[face]])  # [3, V]
        found = logits.softmax(-1)
        torch.testing.assert_close(found[1], throw, rtol=0, atol=2e-4)
        torch.testing.assert_close(found[2], after, rtol=0, atol=2e-4)


def test_the_random_model_repeats_with_its_seed_and_only_then(tmp_path: Path) -> None:
    weights = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_random(tmp_path / folder, seed=seed)
        weights.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_the_random_model_attends_to_every_earlier_token(tmp_path: Path, rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    oracle = load_oracle(make_random(tmp_path, seed=rng_seed))
    tokens = [rng.randrange(320) for _ in range(24)]
    before = oracle_logits(oracle, tokens)[-1]
    for position in (0, 5, 22):
        changed = list(tokens)
        changed[position] = (changed[position] + 1) % 320
        assert (oracle_logits(oracle, changed)[-1] - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architecture": "mistral"},
        {"tie": True},
        {"attention_bias": True, "mlp_bias": True},
        {"shards": 3, "dtype": "bfloat16"},
        {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 72, "head_dim": 80},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_transformers_loads_every_weight_of_every_variant(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_llama(tmp_path, **changes)
    oracle = load_oracle(tmp_path)
    tokens = oracle_greedy(oracle, [BOS_ID, 97, 98], 5)
    assert 1 <= len(tokens) <= 5
    assert torch.isfinite(oracle_logits(oracle, [BOS_ID, 97, 98])).all()
    assert "newly initialized" not in caplog.text
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 320


def test_a_prompt_whose_answer_rounding_decides_is_drawn_again(tmp_path: Path) -> None:
    # Two logits of its 42nd token differ by 5e-7.
    oracle = load_oracle(make_llama(tmp_path, seed=987, architecture="mistral"))
    generator = random.Random(1780395987)
    *sound, tied = [[generator.randrange(320) for _ in range(n)] for n in (1, 15, 16, 17, 40, 5)]
    (kept, other), (answer, of_other) = oracle_answers(oracle, [sound[0], tied], 64)
    assert kept == sound[0] and answer == oracle_greedy(oracle, kept, 64)
    assert other != tied and len(other) == len(tied)
    assert of_other == oracle_greedy(oracle, other, 64)
