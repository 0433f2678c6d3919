"""Text that comes step by step equals text decoded at once, and ends where and as it should."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.text import IncrementalDetokenizer, StopMatcher, TextStep, TextStream
from treadle.runtime.tokenizer import Tokenizer

from ..server import tiny

KINDS: dict[str, Callable[[Path], Path]] = {
    "byte level": lambda folder: tiny.save_byte_level(folder, ["The qu", " the", "own f", "a⟪7⟫"]),
    "sentencepiece": lambda folder: tiny.save_sentencepiece(folder),
    "sentencepiece, lead kept": lambda folder: tiny.save_sentencepiece(folder, strips_lead=False),
    "metaspace": tiny.save_metaspace,
    "words": tiny.save_words,
    "fused, then replaced": lambda folder: tiny.save_words(
        folder,
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("k", "")]),
    ),
}
# Bytes that make whole, cut and impossible characters likely.
ODD_BYTES = [*b"\xf0\x9f\x99\x82\xe3\x81\x82\xc3\xa9\xff\xed\xa0\x80\xc0\xef\xbf\xbdA "]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        kind: Tokenizer.from_path(save(tmp_path_factory.mktemp("tokenizer")))
        for kind, save in KINDS.items()
    }


@pytest.fixture(scope="module")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte level"]


def stream(
    tokenizer: Tokenizer, token_ids: list[int], *, continues_text: bool = False
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, continues_text=continues_text)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def random_ids(random_: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Draw tokens of all sorts: bytes, words, specials, and some past the vocabulary."""
    bytes_start = 1 if tokenizer.has_byte_fallback else 0
    token_ids = []
    for _ in range(random_.randint(0, 24)):
        if random_.random() < 0.6 and tokenizer.vocab_size > 256:
            token_ids.append(bytes_start + random_.choice(ODD_BYTES))
        else:
            token_ids.append(random_.randrange(tokenizer.vocab_size + 3))
    return token_ids


@pytest.mark.parametrize("continues_text", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_deltas_equal_the_one_shot_decode(
    tokenizers: dict[str, Tokenizer], kind: str, continues_text: bool, rng_seed: int
) -> None:
    random_, tokenizer = random.Random(rng_seed), tokenizers[kind]
    for _ in range(400):
        token_ids = random_ids(random_, tokenizer)
        joined = "".join(stream(tokenizer, token_ids, continues_text=continues_text))
        assert joined == tokenizer.decode(token_ids, continues_text=continues_text), token_ids


@settings(deadline=None)
@given(data=st.lists(st.sampled_from(ODD_BYTES), max_size=40))
def test_a_character_goes_out_with_its_last_byte(byte_level: Tokenizer, data: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    text = ""
    for count, byte in enumerate(data, 1):
        text += detokenizer.push(byte)
        # Missing are at most the last three bytes, which may yet become a character.
        seen = bytes(data[:count])
        cuts = [seen[: len(seen) - held] for held in range(min(4, len(seen) + 1))]
        assert text in [cut.decode("utf-8", "replace") for cut in cuts]
        assert seen.decode("utf-8", "replace").startswith(text)


def test_two_split_characters_in_a_row_come_out_whole(byte_level: Tokenizer) -> None:
    deltas = stream(byte_level, [*"🙂🙃".encode()])
    assert [delta for delta in deltas if delta] == ["🙂", "🙃"]


def test_impossible_bytes_go_out_when_the_next_token_proves_it(byte_level: Tokenizer) -> None:
    piece = byte_level.encode(" the")
    assert len(piece) == 1
    assert stream(byte_level, [0xC3, *piece]) == ["", "\ufffd the", ""]


def test_endless_bad_bytes_do_not_stall_the_stream(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [0xFF] * 50) == ["\ufffd"] * 50 + [""]


def test_cut_character_comes_out_once_at_the_end(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [0xF0, 0x9F]) == ["", "", "\ufffd"]


# --- stop strings -----------------------------------------------------------------------------


def match(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    out = ""
    for part in parts:
        emitted, hit = matcher.push(part)
        out += emitted
        if hit is not None:
            return out, hit
    return out + matcher.flush(), None


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """Say the same by brute force: the first end of any stop; of several, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


WORDS = st.text("ab", min_size=1, max_size=5)


@settings(deadline=None)
@given(stops=st.lists(WORDS, min_size=1, max_size=4), parts=st.lists(st.text("abc", max_size=6)))
def test_stops_are_found_wherever_the_text_is_cut(stops: list[str], parts: list[str]) -> None:
    assert match(stops, parts) == search(stops, "".join(parts))


@settings(deadline=None)
@given(stops=st.lists(WORDS, min_size=1, max_size=4), parts=st.lists(st.text("abc", max_size=6)))
def test_only_text_that_may_begin_a_stop_is_held_back(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for part in parts:
        emitted, hit = matcher.push(part)
        seen, sent = seen + part, sent + emitted
        if hit is not None:
            return
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_no_part_of_a_stop_leaks_before_it_is_complete() -> None:
    matcher = StopMatcher(["own fox"])
    assert matcher.push("The qu") == ("The qu", None)
    assert matcher.push("ick br") == ("ick br", None)
    assert matcher.push("own f") == ("", None)
    assert matcher.push("ox!") == ("", "own fox")


def test_a_match_may_begin_inside_a_near_match() -> None:
    assert match(["abac"], ["ab", "ab", "ac"]) == ("ab", "abac")


def test_the_stop_string_can_be_kept() -> None:
    assert match(["own fox"], ["own f", "ox!"], include=True) == ("own fox", "own fox")


def test_of_two_stops_the_one_complete_first_wins() -> None:
    assert match(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


# --- the whole path -----------------------------------------------------------------------------


def run(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> list[TextStep]:
    text_stream = TextStream(tokenizer, params)
    steps = [text_stream.push([token_id]) for token_id in token_ids]
    if text_stream.finish_reason is None:
        steps.append(text_stream.finish(FinishReason.LENGTH))
    return steps


def join(steps: list[TextStep]) -> tuple[str, FinishReason | None, str | int | None, int]:
    (last,) = [step for step in steps if step.finish_reason is not None]
    text = "".join(step.text for step in steps)
    return text, last.finish_reason, last.stop_reason, sum(len(step.token_ids) for step in steps)


@pytest.fixture(scope="module")
def eos(byte_level: Tokenizer) -> int:
    return byte_level.encode("</s>")[0]


def test_end_of_sequence_counts_and_adds_no_text(byte_level: Tokenizer, eos: int) -> None:
    steps = run(byte_level, [*b"hi", eos, *b"no"], SamplingParams(max_tokens=9))
    assert join(steps) == ("hi", FinishReason.STOP, None, 3)


def test_ignored_end_of_sequence_does_not_end(byte_level: Tokenizer, eos: int) -> None:
    steps = run(byte_level, [*b"hi", eos, *b"go"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert join(steps) == ("higo", FinishReason.LENGTH, None, 5)


@pytest.mark.parametrize(("include", "text"), [(False, "h"), (True, "hi")])
def test_a_stop_token_ends_and_is_named(byte_level: Tokenizer, include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=(ord("i"),), include_stop_str_in_output=include)
    assert join(run(byte_level, [*b"hi!"], params)) == (text, FinishReason.STOP, ord("i"), 2)


def test_max_tokens_ends_with_what_was_held_back(byte_level: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4, stop=("pleasant",))
    assert join(run(byte_level, [*b"pleas"], params)) == ("plea", FinishReason.LENGTH, None, 4)


def test_a_stop_complete_at_the_last_token_is_a_stop(byte_level: Tokenizer) -> None:
    params = SamplingParams(max_tokens=3, stop=("bc",))
    assert join(run(byte_level, [*b"abc"], params)) == ("a", FinishReason.STOP, "bc", 3)


def test_end_of_sequence_lets_go_of_what_was_held_back(byte_level: Tokenizer, eos: int) -> None:
    params = SamplingParams(stop=("assistant:",))
    assert join(run(byte_level, [*b"yes pleas", eos], params))[:2] == (
        "yes pleas",
        FinishReason.STOP,
    )


def test_bytes_cut_by_the_end_may_complete_a_stop(byte_level: Tokenizer, eos: int) -> None:
    params = SamplingParams(stop=("x\ufffd",))
    assert join(run(byte_level, [*b"ax\xf0", eos], params))[:3] == (
        "a",
        FinishReason.STOP,
        "x\ufffd",
    )


def test_min_tokens_outlasts_ends_and_stops(byte_level: Tokenizer, eos: int) -> None:
    params = SamplingParams(min_tokens=5, stop=("b",))
    steps = run(byte_level, [*b"ab", eos, *b"abab"], params)
    assert join(steps) == ("aba", FinishReason.STOP, "b", 5)


def test_special_tokens_are_written_out_where_they_are_wanted(
    byte_level: Tokenizer, rng_seed: int
) -> None:
    random_ = random.Random(rng_seed)
    specials = sorted(byte_level.special_token_ids)
    params = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    for _ in range(60):
        count = random_.randint(1, 12)
        token_ids = [random_.choice((*b"ab \xc3\xa9\xf0", *specials)) for _ in range(count)]
        text = join([*run(byte_level, token_ids, params)])[0]
        assert text == byte_level.decode(token_ids, keeps_special=True)


def test_abort_lets_go_of_what_was_held_back(byte_level: Tokenizer) -> None:
    text_stream = TextStream(byte_level, SamplingParams(stop=("assistant",)))
    assert text_stream.push([*b"an ass"]).text == "an "
    assert text_stream.finish(FinishReason.ABORT) == ("ass", (), FinishReason.ABORT, None)


def test_tokens_after_the_end_are_dropped(byte_level: Tokenizer, eos: int) -> None:
    text_stream = TextStream(byte_level, SamplingParams())
    step = text_stream.push([*b"hi", eos, *b"more"])
    assert (step.text, step.token_ids) == ("hi", (*b"hi", eos))
    assert text_stream.push([*b"more"]) == TextStep("", ())
    assert text_stream.finish(FinishReason.LENGTH) == TextStep("", ())


def test_answers_do_not_depend_on_how_tokens_are_grouped(
    tokenizers: dict[str, Tokenizer], rng_seed: int
) -> None:
    random_ = random.Random(rng_seed)
    for tokenizer in tokenizers.values():
        for _ in range(60):
            token_ids = random_ids(random_, tokenizer)
            text = tokenizer.decode(token_ids)
            start = random_.randrange(len(text) + 1)
            stop = text[start : start + random_.randint(1, 6)] or "zz"
            params = SamplingParams(stop=(stop, "A "), max_tokens=max(1, len(token_ids)))
            whole = TextStream(tokenizer, params)
            parts = [whole.push(token_ids), whole.finish(FinishReason.LENGTH)]
            single = run(tokenizer, token_ids, params)
            assert join([p for p in parts if p != TextStep("", ())]) == join(single)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_a_special_token_that_is_shown_stands_between_what_is_around_it(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    (mark,) = tokenizer.special_ids([tiny.PAD, "no such token"])
    byte = tokenizer.encode("\x07", add_special_tokens=False)[-1]
    hidden = IncrementalDetokenizer(tokenizer)
    shown = IncrementalDetokenizer(tokenizer, shown_token_ids=frozenset({mark}))
    ids = [byte, mark, byte]
    assert "".join(hidden.push(i) for i in ids) + hidden.flush() == "\x07\x07"
    assert "".join(shown.push(i) for i in ids) + shown.flush() == f"\x07{tiny.PAD}\x07"
