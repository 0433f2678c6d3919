"""Structured output: what is refused by name, what is enforced, and with what it composes."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_dice, make_llama
from tests.runtime.serving import answer, compile_tiny, serving
from treadle.ir.errors import RequestError
from treadle.runtime.engine import Engine
from treadle.runtime.forced_calls import CALL_FORMS, force_calls
from treadle.runtime.request import JSON_OBJECT, Delta, FinishReason, SamplingParams, Structure
from treadle.runtime.structure import GrammarCompiler, TokenConstraint
from treadle.runtime.tokenizer import Tokenizer


def schema(value: Any) -> Structure:
    return Structure("json_schema", json.dumps(value), "response_format")


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PEOPLE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": closed({"who": {"$ref": "#/$defs/N"}}),
    "$defs": {"N": {"enum": ["Ann", "Bo"]}},
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            {
                "v": {"enum": [1, 2]},
                "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            }
        )
    },
}
PAIR = closed({"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}})
PATTERN = {"type": "string", "pattern": "^[ab]{3}$"}


def is_people(value: Any) -> bool:
    return len(value) == 2 and all(one in ({"who": "Ann"}, {"who": "Bo"}) for one in value)


def is_tree(value: Any) -> bool:
    return (
        set(value) == {"v", "kids"}
        and value["v"] in (1, 2)
        and len(value["kids"]) <= 2
        and all(map(is_tree, value["kids"]))
    )


def is_pair(value: Any) -> bool:
    return set(value) == {"a", "b"} and all(type(one) is int for one in value.values())


def is_pattern(value: Any) -> bool:
    return re.fullmatch("[ab]{3}", value) is not None


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structure")
    model = make_llama(folder / "model", seed=5, window=256)
    return compile_tiny(model, folder / "artifact")


@pytest.fixture(scope="module")
def compiler(artifact: Path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.from_path(artifact.parent / "model"), 320)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"if": {"type": "string"}, "then": {"minLength": 3}}), "if.*then"),
        (schema({"type": "array", "contains": {"type": "integer"}}), "contains"),
        (schema({"type": "object", "propertyNames": {"pattern": "^a"}}), "propertyNames"),
        (schema({"type": "string", "format": "odd"}), "odd"),
        (schema({"$ref": "https://example.com/x.json"}), "example.com"),
        (schema({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}), "."),
        (schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "'a'"),
        (schema(True), "not an object"),
        (Structure("regex", "[a"), "regex"),
        (Structure("regex", "(?=a)b"), "regex"),
        (Structure("grammar", "start: missing"), "missing"),
        (Structure("grammar", "x" * 200_001), "200000"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(
    compiler: GrammarCompiler, structure: Structure, named: str
) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        compiler.compile(structure)
    assert caught.value.param == structure.param
    assert caught.value.code == "unsupported_structure"


def test_a_missing_library_is_named(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance") as caught:
        compiler.compile(schema(PAIR))
    assert caught.value.param == "response_format"


def test_the_same_structure_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(schema(PAIR))
    assert compiler.compile(schema(PAIR)) is first
    assert compiler.compile(schema(TREE)) is not first


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "holds"),
    [
        (schema(PEOPLE), lambda text: is_people(json.loads(text))),
        (schema(TREE), lambda text: is_tree(json.loads(text))),
        (schema(PAIR), lambda text: is_pair(json.loads(text))),
        (schema(PATTERN), lambda text: is_pattern(json.loads(text))),
        (Structure("regex", "[ab]{2}-[0-9]{1,3}"), re.compile("[ab]{2}-[0-9]{1,3}").fullmatch),
        (Structure("choice", '["yes", "no", "may\\"be"]'), {"yes", "no", 'may"be'}.__contains__),
        (Structure("grammar", 'start: "<" word+ ">"\nword: /[xy]/'), re.compile("<[xy]+>").match),
    ],
    ids=["case 25 enum", "case 25 tree", "case 25 ref", "pattern", "regex", "choice", "grammar"],
)
def test_every_answer_that_stops_has_the_form(
    artifact: Path, structure: Structure, holds: Callable[[str], Any]
) -> None:
    async def run() -> list[Delta]:
        async with serving(artifact) as engine:
            # One step ahead, as on a GPU.
            engine.model.scheduler.max_in_flight = 2
            params = {"temperature": 1.0, "max_tokens": 120, "structure": structure}
            return await asyncio.gather(
                *(answer(engine, [65, seed], seed=seed, **params) for seed in range(16))
            )

    found = asyncio.run(run())
    stopped = [delta for delta in found if delta.finish_reason is FinishReason.STOP]
    assert len(stopped) >= 8, [delta.text for delta in found]
    for delta in stopped:
        assert holds(delta.text), delta.text
    assert len({delta.text for delta in stopped}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("any_object", [False, True])
def test_case_26_white_space_has_an_end(
    tmp_path: Path, temperature: float, any_object: bool
) -> None:
    dice = make_dice(tmp_path / "model", {"A": 1.0})
    artifact = compile_tiny(dice.path, tmp_path / "artifact")
    wanted = closed({"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 4}})
    white_space = tuple((byte, 60.0) for byte in b" \n\t")

    async def run() -> Delta:
        async with serving(artifact) as engine:
            return await answer(
                engine,
                [dice.cue_id],
                temperature=temperature,
                seed=3,
                max_tokens=100,
                logit_bias=(*white_space, (ord("}"), 20.0), (ord('"'), 10.0), (ord(","), 5.0)),
                structure=JSON_OBJECT if any_object else schema(wanted),
            )

    delta = asyncio.run(run())
    if delta.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(delta.text), dict)
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', delta.text)
    assert "   " not in outside.replace("\n", " ") and "\t" not in outside
    if not any_object:
        assert delta.finish_reason is FinishReason.STOP or '"' in delta.text


def test_case_14_neighbours_of_a_constrained_answer_go_on_as_alone(artifact: Path) -> None:
    async def run() -> None:
        async with serving(artifact) as engine:
            engine.model.scheduler.max_in_flight = 2
            plain: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True}
            wishes: list[dict[str, Any]] = [
                {"temperature": 0.0, **plain},
                {"temperature": 1.0, "top_p": 0.9, "seed": 1, **plain},
                {"temperature": 0.0, "logit_bias": ((7, -100.0),), **plain},
                {"temperature": 0.0, "max_tokens": 60, "structure": schema(TREE)},
                {"temperature": 1.0, "seed": 9, "max_tokens": 60, "structure": schema(PEOPLE)},
            ]
            alone = [await answer(engine, [65, 66], **wish) for wish in wishes]
            together = await asyncio.gather(*(answer(engine, [65, 66], **wish) for wish in wishes))
            assert [d.token_ids for d in together] == [d.token_ids for d in alone]

    asyncio.run(run())


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_34_a_grammar_s_state_survives_preemption(artifact: Path, prefix_cache: bool) -> None:
    wanted = {"type": "array", "minItems": 12, "maxItems": 12, "items": {"enum": ["ab", "cde", 10]}}
    wishes: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": seed, "max_tokens": 100, "structure": schema(wanted)}
        for seed in range(2)
    ] + [{"temperature": 0.0, "max_tokens": 100, "ignore_eos": True, "frequency_penalty": 1.0}] * 2

    async def run(num_pages: int) -> tuple[list[Delta], int]:
        async with serving(artifact, num_pages=num_pages, prefix_cache=prefix_cache) as engine:
            engine.model.scheduler.max_in_flight = 2
            found = await asyncio.gather(
                *(answer(engine, [65, *range(i, i + 19)], **w) for i, w in enumerate(wishes))
            )
            return found, engine.stats().preemptions_total

    roomy, no_preemptions = asyncio.run(run(64))
    tight, preemptions = asyncio.run(run(10))
    assert [d.token_ids for d in tight] == [d.token_ids for d in roomy]
    assert no_preemptions == 0 < preemptions
    assert len(json.loads(tight[0].text)) == len(json.loads(tight[1].text)) == 12


def test_a_form_composes_with_stops_and_log_probabilities_and_min_tokens(artifact: Path) -> None:
    digits = Structure("regex", "[0-9]{1,30}")

    async def run() -> None:
        async with serving(artifact) as engine:
            params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "structure": digits}
            whole = await answer(engine, [65], max_tokens=40, min_tokens=12, logprobs=1, **params)
            assert len(whole.token_ids) >= 12 and whole.finish_reason is FinishReason.STOP
            assert len(whole.logprobs) == len(whole.token_ids)
            stop = whole.text[5]
            cut = await answer(engine, [65], max_tokens=40, min_tokens=0, stop=(stop,), **params)
            assert stop not in cut.text
            short = await answer(engine, [65], max_tokens=3, **params, min_tokens=3)
            assert len(short.token_ids) == 3
            # A form that ends before `min_tokens` ends the answer.
            early = await answer(
                engine,
                [65],
                max_tokens=9,
                min_tokens=8,
                structure=Structure("choice", '["ab"]'),
            )
            assert (early.text, early.finish_reason) == ("ab", FinishReason.STOP)
            endless = await answer(
                engine, [65], ignore_eos=True, structure=Structure("choice", '["ab"]')
            )
            assert endless.text == "ab"

    asyncio.run(run())


def test_forced_tool_calls_have_their_arguments_form(artifact: Path) -> None:
    tools = {
        "get_w": closed({"city": {"enum": ["Rome", "Bonn"]}}),
        "add": closed({"x": {"enum": [1, 22]}, "y": {"type": "boolean"}}),
    }
    structure = force_calls(CALL_FORMS["hermes"], tools, lambda text: None, several=True)

    async def run() -> list[Delta]:
        async with serving(artifact) as engine:
            params = {"temperature": 1.0, "max_tokens": 180, "structure": structure}
            return await asyncio.gather(
                *(answer(engine, [66, seed], seed=seed, **params) for seed in range(8))
            )

    names = set()
    for delta in asyncio.run(run()):
        if delta.finish_reason is not FinishReason.STOP:
            continue
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", delta.text, re.DOTALL)
        assert 1 <= len(calls) <= 16
        for call in map(json.loads, calls):
            names.add(call["name"])
            expected = {"get_w": {"city"}, "add": {"x", "y"}}[call["name"]]
            assert set(call["arguments"]) == expected
    assert names <= set(tools) and names


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMS.items() if form.opening])
@pytest.mark.parametrize("lead", ["", "\n"])
def test_a_call_that_the_model_began_goes_on_in_its_form(
    compiler: GrammarCompiler, name: str, lead: str
) -> None:
    form = CALL_FORMS[name]
    tools = {"f": closed({"x": {"enum": [1, 22]}})}
    structure = force_calls(form, tools, lambda text: None, several=True, is_opened=True)
    matcher = compiler.compile(structure).start()
    call = json.dumps({"name": "f", form.arguments_field: {"x": 22}})
    rest = "".join(text for text in form.opening[1:] if text.strip())
    good = f"{rest}{lead}{call}" + "".join(form.closing)
    # Every token of this vocabulary is a byte.
    assert matcher.validate_tokens(list(good.encode())) == len(good)
    bad = good.replace("22", "23")
    assert matcher.validate_tokens(list(bad.encode())) == bad.index("23") + 1


@pytest.mark.parametrize("name", CALL_FORMS)
@pytest.mark.parametrize("is_special", [False, True])
def test_every_form_of_calls_is_a_grammar(
    compiler: GrammarCompiler, name: str, is_special: bool
) -> None:
    tools = {"f": closed({"x": {"type": "integer"}}), "g": {}}
    special_ids = {text: 258 + i for i, text in enumerate(CALL_FORMS[name].opening[:1])}
    structure = force_calls(
        CALL_FORMS[name], tools, special_ids.get if is_special else lambda text: None, several=True
    )
    compiler.compile(structure)
    assert ("<[258]>" in structure.text) == (is_special and bool(special_ids))


def test_a_form_may_begin_behind_a_text(artifact: Path) -> None:
    async def run() -> Delta:
        async with serving(artifact) as engine:
            wishes = {"structure": Structure("choice", '["yes"]'), "structure_after": "</t>"}
            # A model of bytes that says what it is told to: one bias after another would not do.
            matcher = (await engine.prepare(SamplingParams(**wishes))).grammar.start()
            constraint = TokenConstraint(
                SamplingParams(**wishes),
                engine.tokenizer.eos_token_ids,
                matcher,
                token_bytes=lambda token: bytes([token]),
            )
            words = np.zeros(10, np.uint32)
            for token in b"no </t </t>":
                constraint.write_allowed(words, ())
                assert words.all() and constraint.accept(token) is None
            allowed = []
            for token in b"yes":
                constraint.write_allowed(words, ())
                allowed.append(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0])
                reason = constraint.accept(token)
            assert [found.tolist() for found in allowed] == [[ord(c)] for c in "yes"]
            assert reason is FinishReason.STOP
            return await answer(engine, [65], temperature=0.0, max_tokens=6, **wishes)

    assert len(asyncio.run(run()).token_ids) <= 6


# --- bad words ------------------------------------------------------------------------------------


def test_bad_words_of_several_tokens_are_never_written(artifact: Path) -> None:
    async def run(engine: Engine, **params: Any) -> Delta:
        return await answer(
            engine, [65, 66], temperature=0.0, max_tokens=40, ignore_eos=True, **params
        )

    async def check() -> None:
        async with serving(artifact) as engine:
            engine.model.scheduler.max_in_flight = 2
            free = await run(engine)
            seen = [t for t in free.token_ids if t < 128]
            assert len(seen) > 4
            text = engine.tokenizer.decode(free.token_ids)
            pairs = [text[i : i + 2] for i in range(len(text) - 1) if text[i : i + 2].isascii()]
            banned = await run(engine, bad_words=(pairs[0], "zq"))
            assert pairs[0] in text and pairs[0] not in banned.text
            letter = next(c for c in text if c.isascii())
            assert letter not in (await run(engine, bad_words=(letter,))).text

    asyncio.run(check())


@pytest.mark.parametrize("words", [("",), ("x" * 257,), (5,), ("a",) * 65])
def test_bad_words_out_of_range_are_refused(words: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=words).validate()
