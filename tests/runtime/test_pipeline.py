"""The offline pipeline on tiny models: forms of prompts, settings, failures, its end."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import (
    EOS_ID,
    load_oracle,
    make_dice,
    make_llama,
    make_script,
    oracle_answers,
    oracle_hidden,
    oracle_logits,
)
from tests.runtime.serving import compile_tiny
from treadle import EngineConfig, GenerationConfig, Pipeline, Response, pipeline
from treadle.ir.errors import ConfigError, RequestError, TreadleError
from treadle.runtime.pipeline_config import ALIASES, FIXED, NOT_YET

SCRIPTS: dict[str, list[str | bytes]] = {
    "[[S1]]": ["Hello", ", ", "world", "</s>"],
    "[[S2]]": ["grün", "er ", b"\xf0\x9f\x98\x80", "</s>"],
    "[[S3]]": ["on ", "and "],
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A pipeline of the scripted model: a prompt's last cue decides the answer."""
    folder = tmp_path_factory.mktemp("scripted")
    model = make_script(folder / "model", SCRIPTS)
    with pipeline(compile_tiny(model.path, folder / "artifact"), progress="none") as pipe:
        yield pipe
        scheduler = pipe._engine.model.scheduler  # type: ignore[attr-defined]
    scheduler.check_integrity()
    assert scheduler.pool.num_available == scheduler.pool.num_pages


def joined(chunks: Iterator[Response]) -> dict[int, Response]:
    answers: dict[int, Response] = {}
    for chunk in chunks:
        answers.setdefault(chunk.index, Response(index=chunk.index)).extend(chunk)
    return answers


def test_a_prefix_is_shared_under_the_same_salt_only(scripted: Pipeline) -> None:
    prompt = "Shared by those who say the same salt, and no one else. [[S3]]"
    found = []
    for salt in (None, "one", "two", "one", None):
        config = GenerationConfig(max_new_tokens=2, cache_salt=salt)
        found.append(scripted(prompt, config).cached_tokens > 0)
    assert found == [False, False, False, True, True]
    for wrong in ("", 7, "x" * 1025):
        with pytest.raises(RequestError, match="`cache_salt`"):
            GenerationConfig(cache_salt=wrong).sampling()  # type: ignore[arg-type]


def test_a_text_gives_one_response(scripted: Pipeline) -> None:
    answer = scripted("[[S1]]")
    assert (answer.text, answer.finish_reason, answer.index) == ("Hello, world", "stop", 0)
    assert answer.token_ids[-1] == EOS_ID
    assert answer.generate_token_len == len(answer.token_ids) == 4
    assert answer.input_token_len == len(
        scripted.tokenizer.encode_chat([{"role": "user", "content": "[[S1]]"}])
    )
    assert answer.error_code is answer.error_message is None


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text,
        lambda text: [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": text},
        ],
        lambda text: (text, [258, *text.encode()]),
    ],
    ids=["text", "messages", "pair"],
)
def test_a_list_gives_a_list_in_its_order(scripted: Pipeline, form: Callable[[str], Any]) -> None:
    cues = ["[[S2]]", "[[S1]]", "[[S2]]"]
    tokenizer = scripted.tokenizer
    prompts = [form(cue) for cue in cues]
    if isinstance(prompts[0], tuple):
        prompts = [(cue, tokenizer.encode(cue)) for cue in cues]
    answers = scripted(prompts)
    assert [answer.text for answer in answers] == ["grüner 😀", "Hello, world", "grüner 😀"]
    assert [answer.index for answer in answers] == [0, 1, 2]


def test_token_ids_are_a_prompt_as_they_are(scripted: Pipeline) -> None:
    ids = scripted.tokenizer.encode("[[S1]]", add_special_tokens=False)
    answer = scripted(ids)
    assert (answer.text, answer.input_token_len) == ("Hello, world", len(ids))
    assert [a.text for a in scripted([ids, ids])] == ["Hello, world"] * 2


def test_without_preprocessing_a_text_is_not_put_into_the_template(scripted: Pipeline) -> None:
    answer = scripted("[[S1]]", do_preprocess=False)
    assert answer.input_token_len == len(scripted.tokenizer.encode("[[S1]]"))
    assert answer.text == "Hello, world"


def test_progress_is_shown_when_it_is_asked_for(
    scripted: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(["[[S1]]", "[[S2]]"])
    assert capsys.readouterr().err == ""
    scripted(["[[S1]]", "[[S2]]", "[[S1]]"], use_tqdm=True)
    assert "answer: 3 answers, done" in capsys.readouterr().err


def test_an_empty_list_gives_an_empty_list(scripted: Pipeline) -> None:
    assert scripted([]) == []


def test_each_prompt_may_have_a_config_of_its_own(scripted: Pipeline) -> None:
    configs = [
        GenerationConfig(max_new_tokens=3),
        GenerationConfig(stop_words=["wor"]),
        GenerationConfig(stop_words=["wor"], include_stop_str_in_output=True),
    ]
    answers = scripted(["[[S3]]", "[[S1]]", "[[S1]]"], configs)
    assert [(a.text, a.finish_reason, a.stop_reason) for a in answers] == [
        ("on and and ", "length", None),
        ("Hello, ", "stop", "wor"),
        ("Hello, wor", "stop", "wor"),
    ]


def test_a_list_of_configs_of_another_length_is_refused(scripted: Pipeline) -> None:
    with pytest.raises(RequestError, match="each of the 2 prompts; found 1"):
        scripted(["a", "b"], [GenerationConfig()])


def test_the_window_bounds_an_answer(scripted: Pipeline) -> None:
    for most in (512, None):
        answer = scripted("[[S3]]", GenerationConfig(max_new_tokens=most))
        assert answer.finish_reason == "length"
        assert answer.input_token_len + answer.generate_token_len == scripted.max_model_len


def test_what_is_wrong_with_one_prompt_touches_no_other(scripted: Pipeline) -> None:
    prompts = ["[[S1]]", "x" * 500, [{"role": "nobody", "content": "?"}], 5, [1 << 20], "[[S2]]"]
    answers = scripted(prompts)
    assert [a.text for a in answers] == ["Hello, world", "", "", "", "", "grüner 😀"]
    assert [a.error_code for a in answers] == [
        None,
        "context_length_exceeded",
        "chat_template_error",
        "invalid_type",
        "invalid_token_id",
        None,
    ]
    assert {a.finish_reason for a in answers[1:5]} == {"error"}
    assert "Unknown role: nobody" in (answers[2].error_message or "")


def test_prompts_of_no_known_form_are_refused(scripted: Pipeline) -> None:
    with pytest.raises(RequestError, match="Expected `prompts` to be a text"):
        scripted(5)


def test_a_stream_gives_what_the_whole_answer_holds(scripted: Pipeline) -> None:
    prompts = ["[[S1]]", "x" * 500, "[[S2]]", "[[S3]]"]
    wholes = scripted(prompts)
    streamed = joined(scripted.stream_infer(prompts))
    assert [streamed[i].text for i in range(4)] == [a.text for a in wholes]
    assert [streamed[i].token_ids for i in range(4)] == [a.token_ids for a in wholes]
    assert [streamed[i].finish_reason for i in range(4)] == [a.finish_reason for a in wholes]
    assert len(list(scripted.stream_infer("[[S1]]"))) > 1


def test_a_stream_that_is_closed_gives_up_its_answers(scripted: Pipeline) -> None:
    stream = scripted.stream_infer(["[[S3]]"] * 3)
    next(stream)
    stream.close()
    # Every slot is free again: more prompts than slots are answered.
    assert len(scripted(["[[S1]]"] * 40)) == 40


def test_several_threads_may_ask_at_once(scripted: Pipeline) -> None:
    found: list[str] = []

    def ask() -> None:
        found.extend(answer.text for answer in scripted(["[[S1]]"] * 10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["Hello, world"] * 40


def test_a_session_sends_the_conversation_again(scripted: Pipeline) -> None:
    session = scripted.chat("[[S1]]")
    assert session.response is not None and session.response.text == "Hello, world"
    first_len = session.response.input_token_len
    session("[[S2]]")
    assert session.history == [("[[S1]]", "Hello, world"), ("[[S2]]", "grüner 😀")]
    messages = [
        {"role": "user", "content": "[[S1]]"},
        {"role": "assistant", "content": "Hello, world"},
        {"role": "user", "content": "[[S2]]"},
    ]
    assert session.response.input_token_len == len(scripted.tokenizer.encode_chat(messages))
    assert session.response.input_token_len > first_len


def test_a_session_streams_and_keeps_no_turn_that_was_given_up(scripted: Pipeline) -> None:
    with scripted.session() as session:
        pieces = scripted.chat("[[S1]]", session, stream_response=True)
        assert "".join(piece.text for piece in pieces) == "Hello, world"
        for _ in session("[[S3]]", stream_response=True):
            session.abort()
        assert session.response is not None and session.response.finish_reason == "abort"
        assert session.history == [("[[S1]]", "Hello, world")]
    with pytest.raises(RequestError, match="session is closed"):
        session("[[S1]]")


def test_the_default_is_greedy_and_like_transformers(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    generator = random.Random(rng_seed)
    drawn = [[generator.randrange(3, 250) for _ in range(n)] for n in (1, 9, 30)]
    prompts, expected = oracle_answers(load_oracle(model), drawn, 20)
    config = EngineConfig(target="reference", session_len=128, max_batch_size=4, block_size=16)
    with pipeline(compile_tiny(model, tmp_path / "artifact"), progress="none") as pipe:
        answers = pipe(prompts, GenerationConfig(max_new_tokens=20))
    assert config.max_rows == 4
    assert [a.token_ids for a in answers] == expected


def test_a_seed_repeats_an_answer_and_sampling_needs_to_be_asked_for(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_dice(tmp_path / "model", then="face")
    artifact = compile_tiny(model.path, tmp_path / "artifact")
    with pipeline(artifact, progress="none") as pipe:
        drawn = GenerationConfig(
            do_sample=True, temperature=1.0, random_seed=rng_seed % 2**31, max_new_tokens=30
        )
        first, again = pipe(["[[S1]]"] * 2, drawn)
        other = pipe("[[S1]]", GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=30))
        greedy = pipe("[[S1]]", GenerationConfig(random_seed=1, max_new_tokens=30))
    assert first.text == again.text != other.text
    assert greedy.text == "A" * 30


def test_log_probabilities_come_by_token_id(tmp_path: Path) -> None:
    model = make_dice(tmp_path / "model", then="face")
    with pipeline(compile_tiny(model.path, tmp_path / "artifact"), progress="none") as pipe:
        answer, plain = pipe(
            ["[[S1]]"] * 2,
            [GenerationConfig(max_new_tokens=2, logprobs=2), GenerationConfig(max_new_tokens=2)],
        )
    faces = {model.face_ids["A"]: math.log(0.4), model.face_ids["B"]: math.log(0.3)}
    assert answer.logprobs is not None and len(answer.logprobs) == 2
    for told in answer.logprobs:
        assert told == pytest.approx(faces, abs=1e-3)
    assert plain.logprobs is None


def test_a_model_folder_is_compiled_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    model = make_script(tmp_path / "model", SCRIPTS)
    config = EngineConfig(target="reference", session_len=64, max_batch_size=3, num_pages=40)
    with pipeline(model.path, config, progress="none") as pipe:
        assert pipe.max_model_len == 64
        assert pipe("[[S1]]").text == "Hello, world"


def test_settings_that_an_artifact_was_compiled_without_are_refused(tmp_path: Path) -> None:
    model = make_script(tmp_path / "model", SCRIPTS)
    artifact = compile_tiny(model.path, tmp_path / "artifact")
    for config, name in [
        (EngineConfig(max_rows=9), "max_rows"),
        (EngineConfig(dtype="bfloat16"), "dtype"),
        (EngineConfig(target="cuda"), "target"),
    ]:
        with pytest.raises(ConfigError, match=f"`{name}` .* was asked for"):
            pipeline(artifact, config, progress="none")
    with pytest.raises(ConfigError, match="both say how large"):
        pipeline(artifact, EngineConfig(num_pages=8, kv_memory_bytes=1 << 20), progress="none")


def test_a_model_that_can_not_be_loaded_leaves_no_thread(tmp_path: Path) -> None:
    model = make_script(tmp_path / "model", SCRIPTS)
    artifact = compile_tiny(model.path, tmp_path / "artifact")
    (model.path / "model.safetensors").unlink()
    before = threading.active_count()
    with pytest.raises(TreadleError):
        pipeline(artifact, progress="none")
    assert threading.active_count() == before


def test_a_closed_pipeline_says_so(tmp_path: Path) -> None:
    model = make_script(tmp_path / "model", SCRIPTS)
    pipe = pipeline(compile_tiny(model.path, tmp_path / "artifact"), progress="none")
    running = pipe.stream_infer(["[[S3]]"] * 60)
    next(running)
    pipe.close()
    pipe.close()
    rest = list(running)
    assert {chunk.finish_reason for chunk in rest} <= {None, "abort", "error", "length"}
    with pytest.raises(RequestError, match="pipeline is closed"):
        pipe("[[S1]]")


@pytest.mark.parametrize(
    "name", [f.name for f in fields(GenerationConfig) if f.metadata == NOT_YET]
)
def test_a_field_that_is_not_offered_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"`{name}` is not supported yet") as caught:
        GenerationConfig(**{name: "something"}).sampling()  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("random_seed", "x"),
        ("stop_words", "END"),
        ("stop_words", [""]),
        ("stop_token_ids", [-1]),
        ("temperature", 3.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("do_sample", 1),
    ],
)
def test_a_value_out_of_range_is_told_under_the_name_it_was_given(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"`{name}`") as caught:
        GenerationConfig(**{name: value}).sampling()
    assert caught.value.param == name


@pytest.mark.parametrize(("theirs", "ours"), ALIASES.items())
def test_a_setting_has_lmdeploys_name_too(theirs: str, ours: str) -> None:
    value = False if ours == "prefix_cache" else 32
    assert getattr(EngineConfig(**{theirs: value}), ours) == value
    assert EngineConfig(**{theirs: None}) == EngineConfig()
    with pytest.raises(ConfigError, match="same setting"):
        EngineConfig(**{theirs: value, ours: value})


@pytest.mark.parametrize("name", FIXED)
def test_a_setting_of_lmdeploys_that_is_not_offered_takes_its_default_only(name: str) -> None:
    EngineConfig(**{name: FIXED[name]})
    with pytest.raises(ConfigError, match=f"`{name}` is not supported yet"):
        EngineConfig(**{name: "something"})


def test_an_unknown_setting_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"no `max_row`\. Did you mean `max_rows`"):
        EngineConfig(max_row=5)
    with pytest.raises(ConfigError, match="kv_memory_bytes"):
        EngineConfig(cache_max_entry_count=0.8)
    with pytest.raises(ConfigError, match="Expected `max_rows` to be a whole number"):
        EngineConfig(max_rows=-1)


# --- forms and scores -----------------------------------------------------------------------------


def test_forms_and_bad_words_are_those_of_the_server(scripted: Pipeline, rng_seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["ab", 5]}}}
    for settings in ({"do_sample": True, "random_seed": rng_seed}, {}):
        answer = scripted("[[S1]]", GenerationConfig(response_format=form, **settings))
        assert (answer.text in ('"ab"', "5"), answer.finish_reason) == (True, "stop")
    pattern = {"type": "regex_schema", "regex_schema": "x[yz]"}
    assert scripted("[[S1]]", GenerationConfig(response_format=pattern)).text in ("xy", "xz")
    banned = scripted("[[S1]]", GenerationConfig(bad_words=["Hello"], max_new_tokens=4))
    assert "Hello" not in banned.text
    keyword = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    refused = scripted("[[S1]]", GenerationConfig(response_format=keyword))
    assert (refused.finish_reason, refused.error_code) == ("error", "unsupported_structure")
    with pytest.raises(RequestError, match="`response_format`"):
        scripted("[[S1]]", GenerationConfig(response_format={"type": "xml"}))


def test_perplexities_are_the_mean_cross_entropies_of_transformers(
    tmp_path: Path, rng_seed: int
) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    generator = random.Random(rng_seed)
    lists = [[generator.randrange(320) for _ in range(length)] for length in (2, 17, 40)]
    oracle = load_oracle(model)
    expected = []
    for ids in lists:
        told = oracle_logits(oracle, ids).log_softmax(-1)
        expected.append(
            -sum(float(told[i - 1, ids[i]]) for i in range(1, len(ids))) / (len(ids) - 1)
        )
    with pipeline(compile_tiny(model, tmp_path / "artifact"), progress="none") as pipe:
        assert pipe.get_ppl(lists) == pytest.approx(expected, abs=1e-3)
        assert pipe.get_ppl(lists[1]) == pytest.approx(expected[1:2], abs=1e-3)
        with pytest.raises(RequestError, match="at least 2 tokens"):
            pipe.get_ppl([[1, 2], [3]])


def test_several_answers_come_as_a_list_in_their_prompts_place(tmp_path: Path) -> None:
    model = make_dice(tmp_path / "model", then="face")
    drawn = GenerationConfig(n=5, do_sample=True, temperature=1.0, random_seed=3, max_new_tokens=12)
    with pipeline(compile_tiny(model.path, tmp_path / "artifact"), progress="none") as pipe:
        several = pipe("[[S1]]", drawn)
        one, again = pipe(["[[S1]]"] * 2, [GenerationConfig(max_new_tokens=2), drawn])
        chunks = list(pipe.stream_infer("[[S1]]", drawn))
        with pytest.raises(RequestError, match="`n` 1"):
            pipe.chat("[[S1]]", gen_config=drawn)
    texts = [answer.text for answer in several]
    assert len(set(texts)) > 1 and [answer.choice for answer in several] == [0, 1, 2, 3, 4]
    assert isinstance(one, Response) and one.text == "AA"
    assert [answer.text for answer in again] == texts
    assert {answer.index for answer in again} == {1}
    for choice, text in enumerate(texts):
        assert "".join(chunk.text for chunk in chunks if chunk.choice == choice) == text


def test_logits_are_those_of_transformers(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    generator = random.Random(rng_seed)
    lists = [[generator.randrange(320) for _ in range(length)] for length in (1, 2, 35)]
    oracle = load_oracle(model)
    config = {"max_new_tokens": 3, "ignore_eos": True}
    with pipeline(compile_tiny(model, tmp_path / "artifact"), progress="none") as pipe:
        for found, ids in zip(pipe.get_logits(lists), lists, strict=True):
            torch.testing.assert_close(found, oracle_logits(oracle, ids), atol=1e-3, rtol=0)
        assert len(pipe.get_logits(lists[2])) == 1
        generation, everything, none = (
            pipe([lists[2]], GenerationConfig(**config, output_logits=asked))[0]
            for asked in ("generation", "all", None)
        )
    expected = oracle_logits(oracle, [*lists[2], *generation.token_ids])[:-1]
    torch.testing.assert_close(everything.logits, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(generation.logits, expected[-3:], atol=1e-3, rtol=0)
    assert none.logits is None


def test_hidden_states_are_those_of_transformers(tmp_path: Path, rng_seed: int) -> None:
    model = make_llama(tmp_path / "model", seed=rng_seed % 1000)
    generator = random.Random(rng_seed)
    prompt = [generator.randrange(320) for _ in range(35)]
    oracle = load_oracle(model)
    config = {"max_new_tokens": 3, "ignore_eos": True}
    with pipeline(compile_tiny(model, tmp_path / "artifact"), progress="none") as pipe:
        generation, everything, both, none = (
            pipe([prompt], GenerationConfig(**config, **wishes))[0]
            for wishes in (
                {"output_last_hidden_state": "generation"},
                {"output_last_hidden_state": "all"},
                {"output_last_hidden_state": "all", "output_logits": "all"},
                {},
            )
        )
    expected = oracle_hidden(oracle, [*prompt, *generation.token_ids])[:-1]
    torch.testing.assert_close(everything.last_hidden_state, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(generation.last_hidden_state, expected[-3:], atol=1e-3, rtol=0)
    assert generation.logits is None and len(both.logits) == len(both.last_hidden_state) == 37
    assert none.last_hidden_state is None


def test_logits_and_hidden_states_are_of_the_same_tokens() -> None:
    config = GenerationConfig(output_logits="generation", output_last_hidden_state="all")
    with pytest.raises(RequestError, match="of the same tokens"):
        config.sampling()


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 0), ("n", True), ("output_logits", "some"), ("output_last_hidden_state", "some")],
)
def test_a_wish_for_more_is_checked(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"`{name}`"):
        GenerationConfig(**{name: value}).sampling()
