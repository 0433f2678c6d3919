"""Answers told apart: every wire format, wherever its text is cut, and what only looks like one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from treadle.ir.errors import ConfigError
from treadle.runtime.answer_formats import AnswerFormat, find_format
from treadle.runtime.answer_parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
)
from treadle.runtime.call_formats import CALL_FORMATS

TOOLS = {
    "get_w": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"type": "object"},
            "unit": {"enum": ["C", "F"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


class Answer(NamedTuple):
    """Hold an answer's parts, joined."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def join(parts: Sequence[Part]) -> Answer:
    """Join parts as a client does, having checked their order."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    is_open = False
    for part in parts:
        if isinstance(part, CallBegin):
            assert not is_open and part.call == len(calls)
            calls.append((part.name, ""))
            is_open = True
        elif isinstance(part, CallArguments):
            assert is_open and part.call == len(calls) - 1 and part.text
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        elif isinstance(part, CallEnd):
            assert is_open and part.call == len(calls) - 1
            is_open = False
        else:
            assert not is_open and part.text
            reasoning += part.text if isinstance(part, Reasoning) else ""
            content += part.text if isinstance(part, Content) else ""
    assert not is_open
    return Answer(reasoning, content, calls)


def read(
    format_: AnswerFormat, pieces: Sequence[str], prompt: str = "", tools: Any = TOOLS
) -> Answer:
    parser = format_.parser(prompt, tools)
    assert parser is not None
    parts = [part for piece in pieces for part in parser.push(piece)]
    return join(parts + parser.finish())


def read_cut_anywhere(
    format_: AnswerFormat, text: str, prompt: str = "", tools: Any = TOOLS, seed: int = 0
) -> Answer:
    """Read a text whole, by characters and cut at random; give what all of them give."""
    whole = read(format_, [text], prompt, tools)
    assert read(format_, list(text), prompt, tools) == whole
    random_ = random.Random(seed)
    for _ in range(8):
        cuts = sorted(random_.randrange(len(text) + 1) for _ in range(random_.randint(1, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(format_, pieces, prompt, tools) == whole
    return whole


def format_named(name: str) -> AnswerFormat:
    return find_format("", name)


# --- every format ---------------------------------------------------------------------------------

ODD = {"a": {"b": [1, 2]}, "s": 'x}"y\\'}
ODD_JSON = r'{"a":{"b":[1,2]},"s":"x}\"y\\"}'
W = '{"city": "Bern", "days": 2}'

# format, text, content, calls
EXAMPLES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_w", "arguments": {ODD_JSON}}}\n</tool_call>',
        "Let me see.",
        [("get_w", ODD_JSON)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        f'<tool_call>{{"arguments": {W}, "name": "get_w"}}</tool_call>\nDone.\n',
        "Done.\n",
        [("now", "{}"), ("get_w", W)],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "get_w", "arguments": "{\\"days\\": 1}"}</tool_call>',
        "",
        [("get_w", '{"days": 1}')],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "now", "arguments": null}, {"name": "now"}]</tool_call>',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    (
        "qwen3-coder",
        'Sure.\n\n<tool_call>\n<function=get_w>\n<parameter=city>\nBern\n"B"\n</parameter>\n'
        '<parameter=days>\n2\n</parameter>\n<parameter=deep>\n{"x": [1]}\n</parameter>\n'
        "<parameter=unit>C</parameter>\n</function>\n</tool_call>",
        "Sure.",
        [
            (
                "get_w",
                '{"city": "Bern\\n\\"B\\"", "days": 2, "deep": {"x": [1]}, "unit": "C"}',
            )
        ],
    ),
    (
        "qwen3-coder",
        "<function=now>\n</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>",
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    (
        "glm",
        "<tool_call>get_w\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "",
        [("get_w", W), ("now", "{}")],
    ),
    (
        "deepseek",
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_w\n```json\n"
        f"{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok.",
        [("get_w", W), ("now", "{}")],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_w<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("get_w", W)],
    ),
    (
        "internlm",
        f'Hm.<|action_start|><|plugin|>\n{{"name": "get_w", "parameters": {W}}}<|action_end|>\n',
        "Hm.",
        [("get_w", W)],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_w", "arguments": {W}}}, {{"name": "now"}}]',
        "",
        [("get_w", W), ("now", "{}")],
    ),
    (
        "mistral",
        f"Hm.[TOOL_CALLS]get_w[CALL_ID]abc123def[ARGS]{W}[TOOL_CALLS]now[ARGS]{{}}",
        "Hm.",
        [("get_w", W), ("now", "{}")],
    ),
    ("llama3", f'{{"name": "get_w", "parameters": {W}}}', "", [("get_w", W)]),
    (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "get_w", "parameters": {W}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [("get_w", W), ("now", "{}")],
    ),
    (
        "llama3",
        '<|python_tag|>brave_search.call(query="a, \\"b\\")")',
        "",
        [("brave_search", '{"query": "a, \\"b\\")"}')],
    ),
    (
        "pythonic",
        "[get_w(city='Bern', days=2), now(), get_w(deep={'x': [1, (2,)]}, ok=True, no=None)]",
        "",
        [
            ("get_w", W),
            ("now", "{}"),
            ("get_w", '{"deep": {"x": [1, [2]]}, "ok": true, "no": null}'),
        ],
    ),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    (
        "harmony",
        f"<|channel|>commentary to=functions.get_w <|constrain|>json<|message|>{W}<|call|>",
        "",
        [("get_w", W)],
    ),
    (
        "harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Noon.<|return|>",
        "Noon.",
        [("now", "{}")],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_calls_are_read_alike_wherever_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]], rng_seed: int
) -> None:
    answer = read_cut_anywhere(format_named(name), text, seed=rng_seed)
    assert answer == Answer("", content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in answer.calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_without_tools_a_call_is_content_as_it_was_written(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    parser = format_named(name).parser("", None)
    if name != "harmony":
        assert parser is None
        return
    assert parser is not None
    answer = join(parser.push(text) + parser.finish())
    assert answer.calls == [] and all(arguments in answer.content for _, arguments in calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_a_call_that_is_cut_off_stays_as_far_as_it_came(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for end in range(len(text)):
        answer = read(format_named(name), [text[:end]])
        assert read(format_named(name), list(text[:end])) == answer
        assert len(answer.calls) <= len(calls)
        for (found_name, found), (right_name, right) in zip(answer.calls, calls, strict=False):
            assert found_name == right_name
            assert right.startswith(found)


def test_arguments_stream_as_they_come() -> None:
    parser = format_named("hermes").parser("", TOOLS)
    assert parser is not None
    (begin,) = parser.push('<tool_call>{"name": "get_w", "argu')
    assert isinstance(begin, CallBegin) and begin.name == "get_w" and begin.id.startswith("call_")
    assert parser.push('ments": {"ci') == [CallArguments(0, '{"ci')]
    assert parser.push('ty": "Be') == [CallArguments(0, 'ty": "Be')]
    assert parser.push('rn"}}</tool') == [CallArguments(0, 'rn"}'), CallEnd(0)]
    assert parser.push("_call>") == parser.finish() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>no JSON</tool_call> and on"),
        ("hermes", "a <tool_call> [1, 2] </tool_call>\n"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_cal"),
        ("hermes", '<tool_call>{"nam'),
        ("qwen3-coder", "<tool_call>\n{}</tool_call>"),
        ("qwen3-coder", "<function=\n>"),
        ("glm", '<tool_call>{"name": 1}</tool_call>'),
        ("deepseek", "<｜tool▁calls▁begin｜>?<｜tool▁calls▁end｜>"),
        ("internlm", "<|action_start|><|interpreter|>print(1)<|action_end|>"),
        ("mistral", "[TOOL_CALLS] ?"),
        ("llama3", '{"name": "Alice", "parameters": {}}'),
        ("llama3", '{"city": "Bern"}\n'),
        ("llama3", '  {"a": 1}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", '{"name": "get_w"}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", " [x](y)\n"),
        ("harmony", "just text"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(name: str, text: str, rng_seed: int) -> None:
    assert read_cut_anywhere(format_named(name), text, seed=rng_seed) == Answer("", text, [])


def test_several_calls_without_a_closing_tag_are_followed_by_what_is_none() -> None:
    text = '{"name": "now", "parameters": {}}; {"x": 1}'
    answer = read_cut_anywhere(format_named("llama3"), text)
    assert answer == Answer("", '{"x": 1}', [("now", "{}")])


def test_ids_are_what_the_formats_templates_accept() -> None:
    for one in CALL_FORMATS:
        ids = {one.make_id() for _ in range(100)}
        assert len(ids) == 100
        assert all(len(i) == 9 and i.isalnum() for i in ids) == (one.name == "mistral")


# --- reasoning ------------------------------------------------------------------------------------

THINK = find_format("<think>", "none")
THINK_HERMES = find_format("<think> <tool_call>")
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("user: hi", "<think>abc</think> answer", "abc", " answer"),
        ("user: hi", "\n<think>\nabc\n\n</think>\n\nanswer\n", "abc", "answer\n"),
        ("user: hi<think>", "abc</think>answer", "abc", "answer"),
        ("user: hi<think>\n", "abc\n", "abc\n", ""),
        ("user: hi<think>\n\n</think>\n\n", "no <think>x</think>", "", "no <think>x</think>"),
        ("user: hi", "no tags\n\n", "", "no tags\n\n"),
        ("user: hi", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("user: hi", "<think>a <thi</think>b", "a <thi", "b"),
        ("user: hi", "\n<thin", "", "\n<thin"),
        ("user: hi", "", "", ""),
    ],
)
def test_reasoning_is_told_apart(
    prompt: str, text: str, reasoning: str, content: str, rng_seed: int
) -> None:
    answer = read_cut_anywhere(THINK, text, prompt, None, rng_seed)
    assert answer == Answer(reasoning, content, [])
    assert read_cut_anywhere(THINK_HERMES, text, prompt) == answer


def test_calls_follow_reasoning_and_in_it_they_are_reasoning() -> None:
    text = f"<think>\n{CALL}\n</think>\n\nNow:\n{CALL}"
    assert read_cut_anywhere(THINK_HERMES, text) == Answer(CALL, "Now:", [("now", "{}")])


def test_it_is_known_when_reasoning_goes_on() -> None:
    parser = THINK.parser("<think>", None)
    assert parser is not None and parser.is_reasoning
    parser.push("a</think>")
    assert not parser.is_reasoning


def test_channels_are_reasoning_and_content() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>"
    )
    harmony = find_format("<|channel|>analysis<|message|>")
    assert read_cut_anywhere(harmony, text) == Answer("Hm.", "I look.", [("now", "{}")])
    assert read_cut_anywhere(harmony, text[:20]).content == ""


# --- which format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<tool_call>", "hermes", None),
        ("<think></think><tool_call>", "hermes", "think"),
        ("<tool_call><function=example><parameter=x>", "qwen3-coder", None),
        ("<tool_call>{name}<arg_key></think>", "glm", "think"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek", None),
        ("<|plugin|>", "internlm", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|python_tag|> ipython", "llama3", None),
        ("<|python_start|>", "pythonic", None),
        ("{{ messages }}", None, None),
    ],
)
def test_a_template_shows_its_formats(
    template: str, calls: str | None, reasoning: str | None
) -> None:
    found = find_format(template)
    assert (found.calls and found.calls.name) == calls
    assert (found.reasoning and found.reasoning.name) == reasoning
    assert not find_format(template, "none", "none").has_calls


def test_a_name_overrules_the_template_and_an_unknown_one_is_refused() -> None:
    found = find_format("<tool_call>", "mistral", "think")
    assert found.calls is not None and found.calls.name == "mistral"
    assert found.reasoning is not None and found.reasoning.name == "think"
    for calls, reasoning in [("odd", "auto"), ("auto", "odd"), ("harmony", "think")]:
        with pytest.raises(ConfigError):
            find_format("", calls, reasoning)


# --- random scripts -------------------------------------------------------------------------------

WORDS = ["The ", "sky\n", "is\n\n", "<", "ta", "🙂", "é", "\n", '"', "{", "}", "[", "ok", " "]
_write: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, a: f'<tool_call>\n{{"name": "{name}", "arguments": {a}}}\n</tool_call>',
    "internlm": lambda n, a: (
        f'<|action_start|><|plugin|>{{"name": "{n}", "parameters": {a}}}<|action_end|>'
    ),
    "mistral": lambda name, a: f"[TOOL_CALLS]{name}[ARGS]{a}",
    "deepseek": lambda name, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "llama3": lambda n, a: f'<|python_tag|>{{"name": "{n}", "parameters": {a}}}',
}


def random_json(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [random_json(random_, depth + 1) for _ in range(random_.randrange(3))]
    if kind == 5:
        return {f"k{i}": random_json(random_, depth + 1) for i in range(random_.randrange(3))}
    return [None, random_.randrange(-9, 99), True, "".join(random_.choices(WORDS, k=3))][kind]


@pytest.mark.parametrize("name", _write)
def test_random_answers_are_told_apart_alike_wherever_they_are_cut(
    name: str, rng_seed: int
) -> None:
    random_ = random.Random(rng_seed)
    format_ = find_format("", name, "think")
    for _ in range(60):
        text, content, calls = "", "", []
        reasoning = "r" + "".join(random_.choices(WORDS, k=5)) + "r"
        has_reasoning = random_.random() < 0.5
        if has_reasoning:
            text += f"<think>\n{reasoning}\n</think>\n\n"
        for _ in range(random_.randrange(4)):
            said = "c" + "".join(random_.choices(WORDS, k=4)) + "c"
            arguments = json.dumps({"a": random_json(random_)}, ensure_ascii=random_.random() < 0.5)
            text += said + "\n" + _write[name]("get_w", arguments) + "\n"
            content += said
            calls.append(("get_w", arguments))
        expected = Answer(reasoning if has_reasoning else "", content, calls)
        assert read_cut_anywhere(format_, text, seed=rng_seed) == expected, text
