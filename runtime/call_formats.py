"""How models write tool calls into their text: one declaration per wire format.

A format is found by what a chat template that uses it contains, and read by a generator over a
`Reader`. What turns out not to be a call is content, exactly as it was written; a call that is cut
off stays as far as it came; nothing is repaired. Must not know protocols.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from treadle.runtime.answer_parts import Reader, Steps

# A tool's parameters as JSON Schema, by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]

_NAME_CHARACTER = re.compile(r"[\w.\-]")
_ALPHANUMERIC = string.ascii_letters + string.digits


def make_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _make_short_id() -> str:
    """Give the nine letters or digits that some templates insist on."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class CallFormat:
    """Declare how calls are written.

    `openings` are what a block of calls begins with, anywhere in the text; `read` reads one block
    after its opening and says whether it was one. `leads`: a block may begin the answer without an
    opening. `signs`: a chat template with all texts of one of these uses the format. `tokens` are
    special tokens that must be seen in the text.
    """

    name: str
    example: str
    openings: tuple[str, ...]
    read: Callable[[Reader, str, Tools], Steps[bool]]
    signs: tuple[tuple[str, ...], ...]
    leads: bool = False
    tokens: tuple[str, ...] = ()
    make_id: Callable[[], str] = make_id


# --- calls as JSON --------------------------------------------------------------------------------


def _read_json_call(reader: Reader, tools: Tools | None = None) -> Steps[bool]:
    """Read {"name": ..., "arguments": {...}}, arguments also as "parameters" or as a string.

    With `tools` only an object that begins with the name of one of them is a call.
    """
    if not (yield from reader.accept("{")):
        return False
    name: str | None = None
    held: list[str] = []
    has_arguments = is_whole = False
    while True:
        yield from reader.skip()
        key = yield from reader.read_json_string()
        yield from reader.skip()
        if key is None or not (yield from reader.accept(":")):
            break
        yield from reader.skip()
        if key in ("name", "function") and name is None and (yield from reader.peek()) == '"':
            name = yield from reader.read_json_string()
            if name is None or (tools is not None and name not in tools):
                return False
            if tools is None or has_arguments:
                _begin(reader, name, held)
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if name is not None and not reader.has_open_call:
                _begin(reader, name, held)
            yield from _copy_arguments(reader, held.append if name is None else reader.arguments)
        elif tools is not None and key != "type":
            return False
        elif not (yield from reader.copy_json(lambda text: None)):
            break
        yield from reader.skip()
        if not (yield from reader.accept(",")):
            is_whole = yield from reader.accept("}")
            break
    if name is None or not reader.has_open_call:
        return False
    reader.end_call(is_whole=is_whole)
    return True


def _begin(reader: Reader, name: str, held: list[str]) -> None:
    reader.begin_call(name)
    reader.arguments("".join(held))


def _copy_arguments(reader: Reader, tell: Callable[[str], None]) -> Steps[None]:
    """Tell arguments: an object as it is written, a string as what it holds, null as nothing."""
    first = yield from reader.peek()
    if first == "{":
        yield from reader.copy_json(tell)
    elif first == '"':
        tell((yield from reader.read_json_string()) or "")
    else:
        texts: list[str] = []
        is_whole = yield from reader.copy_json(texts.append)
        tell("".join(texts) if is_whole and texts != ["null"] else "")


def _read_json_calls(reader: Reader, closing: str, tools: Tools | None = None) -> Steps[bool]:
    """Read JSON calls, alone, side by side or in a list, up to the closing tag, if there is one.

    What stands between the last call and the closing tag is dropped.
    """
    num_calls = 0
    while True:
        yield from reader.skip(" \t\r\n,;[")
        if (yield from reader.peek()) != "{":
            break
        if num_calls:
            reader.keep()
        if not (yield from _read_json_call(reader, tools)):
            if num_calls == 0:
                return False
            reader.forget_kept() if closing else reader.give_back()
            break
        num_calls += 1
    if num_calls and closing:
        yield from reader.copy_until((closing,), lambda text: None)
    elif num_calls:
        yield from reader.accept("]")
    return num_calls > 0


def _read_tagged_json(reader: Reader, opening: str, tools: Tools, *, closing: str) -> Steps[bool]:
    return (yield from _read_json_calls(reader, closing))


def _read_internlm(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    yield from reader.skip()
    if not (yield from reader.accept("<|plugin|>")):
        return False
    return (yield from _read_json_calls(reader, "<|action_end|>"))


def _read_llama3(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read JSON, or NAME.call(key="value") as the built-in tools are called."""
    yield from reader.skip()
    if opening and (yield from reader.peek()) != "{":
        name = yield from reader.read_while(_NAME_CHARACTER)
        if not name.endswith(".call") or not (yield from reader.accept("(")):
            return False
        return (yield from _read_python_arguments(reader, name.removesuffix(".call")))
    return (yield from _read_json_calls(reader, "", None if opening else tools))


def _read_mistral(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read a list of JSON calls, or NAME[ARGS]{...} with or without a [CALL_ID]."""
    yield from reader.skip()
    if (yield from reader.peek()) in ("[", "{"):
        return (yield from _read_json_calls(reader, ""))
    name = yield from reader.read_while(_NAME_CHARACTER)
    if not name:
        return False
    if (yield from reader.accept("[CALL_ID]")):
        yield from reader.read_while(_NAME_CHARACTER)
    yield from reader.accept("[ARGS]")
    yield from reader.skip()
    if (yield from reader.peek()) != "{":
        return False
    reader.begin_call(name)
    yield from reader.copy_json(reader.arguments)
    reader.end_call()
    return True


def _read_deepseek(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read NAME, a separator and JSON; the older form has `function` there and a block of code."""
    num_calls = 0
    while True:
        yield from reader.skip()
        if not (yield from reader.accept("<｜tool▁call▁begin｜>")):
            break
        name, marker = yield from reader.read_until("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
        if marker != "<｜tool▁sep｜>":
            break
        is_code = name.strip() == "function"
        if is_code:
            name, _ = yield from reader.read_until("\n")
            yield from reader.accept("```json")
        yield from reader.skip()
        if (yield from reader.peek()) != "{":
            break
        reader.begin_call(name.strip())
        num_calls += 1
        is_whole = yield from reader.copy_json(reader.arguments)
        if is_whole:
            yield from reader.copy_until(("<｜tool▁call▁end｜>",), lambda text: None)
        reader.end_call()
    if num_calls:
        yield from reader.accept("<｜tool▁calls▁end｜>")
    return num_calls > 0


# --- calls as tags --------------------------------------------------------------------------------


def _read_qwen3_coder(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read <function=NAME><parameter=KEY>value</parameter>...</function>; values as the tool's
    schema has them."""
    if opening == "<tool_call>":
        yield from reader.skip()
        if not (yield from reader.accept("<function=")):
            return False
    num_calls = 0
    while True:
        name, marker = yield from reader.read_until(">", "\n", "<")
        if marker != ">" or not name.strip():
            return num_calls > 0
        num_calls += 1
        reader.begin_call(name.strip())
        known = tools.get(name.strip(), {})
        lead = "{"
        while True:
            # What stands between the parameters is dropped.
            _, marker = yield from reader.read_until("<parameter=", "</function>", "</tool_call>")
            if marker != "<parameter=":
                break
            key, marker = yield from reader.read_until(">")
            if not marker:
                break
            reader.arguments(f"{lead}{_to_json(key.strip())}: ")
            lead = ", "
            marker = yield from _copy_value(reader, "</parameter>", _takes_text(known, key.strip()))
            if not marker:
                break
        if not marker:  # cut off
            reader.end_call(is_whole=False)
            return True
        reader.arguments("{}" if lead == "{" else "}")
        reader.end_call()
        if marker == "</tool_call>":
            return True
        yield from reader.skip()
        if (yield from reader.accept("</tool_call>")):
            return True
        if not (yield from reader.accept("<function=")):
            return True


def _read_glm(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read NAME and pairs of <arg_key> and <arg_value>; values as the tool's schema has them."""
    name, marker = yield from reader.read_until("<arg_key>", "</tool_call>")
    name = name.strip()
    if not marker or not name or any(c in name for c in "{}<> \n"):
        return False
    reader.begin_call(name)
    known = tools.get(name, {})
    lead = "{"
    while marker == "<arg_key>":
        key, marker = yield from reader.read_until("</arg_key>")
        if marker:
            _, marker = yield from reader.read_until("<arg_value>")
        if marker:
            reader.arguments(f"{lead}{_to_json(key.strip())}: ")
            lead = ", "
            text_only = _takes_text(known, key.strip())
            marker = yield from _copy_value(reader, "</arg_value>", text_only)
        if marker:
            _, marker = yield from reader.read_until("<arg_key>", "</tool_call>")
    if marker:
        reader.arguments("{}" if lead == "{" else "}")
    reader.end_call(is_whole=bool(marker))
    return True


def _copy_value(reader: Reader, closing: str, takes_text: bool) -> Steps[str]:
    """Tell a value that is written between tags as JSON; give the closing tag if it came.

    Text goes out as it comes; all else once it is whole.
    """
    if not takes_text:
        text, marker = yield from reader.read_until(closing)
        if marker:
            reader.arguments(_value_to_json(text.strip()))
        return marker
    # A line break next to a tag is the tag's.
    yield from reader.accept("\n")
    reader.arguments('"')
    held = ""

    def tell(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        reader.arguments(_to_json(text.removesuffix("\n"))[1:-1])

    marker = yield from reader.copy_until((closing,), tell, tells_partial=False)
    if marker:
        reader.arguments('"')
    return marker


def _takes_text(schema: Mapping[str, Any], key: str) -> bool:
    """Say whether a tool's parameter is a string by its schema; so is an unknown one."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(declared, Mapping):
        return True
    if isinstance(declared.get("enum"), list):
        return all(isinstance(value, str) for value in declared["enum"])
    return declared.get("type") in ("string", ["string"], ["string", "null"], ["null", "string"])


def _value_to_json(text: str) -> str:
    """Give a value written between tags as JSON: as it is, as Python writes it, or as a string."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
        return text
    except (ValueError, RecursionError):
        return _python_to_json(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- calls as Python ------------------------------------------------------------------------------


def _read_pythonic(reader: Reader, opening: str, tools: Tools) -> Steps[bool]:
    """Read [name(key=value), ...], values as Python literals; the first name must be a tool's."""
    yield from reader.skip()
    if not (yield from reader.accept("[")):
        return False
    num_calls = 0
    while True:
        yield from reader.skip(" \t\r\n,")
        name = yield from reader.read_while(_NAME_CHARACTER)
        if not name or not (yield from reader.accept("(")):
            break
        if num_calls == 0 and name not in tools:
            return False
        if not (yield from _read_python_arguments(reader, name)):
            break
        num_calls += 1
    if num_calls:
        yield from reader.accept("]")
        yield from reader.skip()
        yield from reader.accept("<|python_end|>")
    return num_calls > 0


def _read_python_arguments(reader: Reader, name: str) -> Steps[bool]:
    """Read key=value, ... and the closing bracket; each value goes out once it is whole."""
    reader.begin_call(name)
    lead = "{"
    while True:
        yield from reader.skip(" \t\r\n,")
        if (yield from reader.accept(")")):
            reader.arguments("{}" if lead == "{" else "}")
            break
        key = yield from reader.read_while(_NAME_CHARACTER)
        yield from reader.skip()
        if not key or not (yield from reader.accept("=")):
            break
        yield from reader.skip()
        value = yield from _read_python_value(reader)
        if value is None:
            break
        reader.arguments(f"{lead}{_to_json(key)}: {_python_to_json(value)}")
        lead = ", "
    # Arguments that are whole were told above, empty ones too.
    reader.end_call(is_whole=False)
    return True


def _read_python_value(reader: Reader) -> Steps[str | None]:
    """Give a value's text, up to the comma or bracket that ends it; None if it is cut off."""
    texts: list[str] = []
    depth, quote, escaped = 0, "", False
    while following := (yield from reader.peek()):
        if escaped:
            escaped = False
        elif quote:
            escaped = following == "\\"
            quote = "" if following == quote else quote
        elif following in "'\"":
            quote = following
        elif depth == 0 and following in ",)":
            return "".join(texts).strip()
        else:
            depth += (following in "[{(") - (following in ")}]")
        yield from reader.accept(following)
        texts.append(following)
    return None


def _python_to_json(text: str) -> str:
    try:
        # What has no JSON form, such as a set or NaN, is a string like all that can't be read.
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {"true": "true", "false": "false", "null": "null"}.get(text, _to_json(text))


# --- the table ------------------------------------------------------------------------------------

# In the order in which templates are searched: a format stands before those whose signs it has too.
CALL_FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        "qwen3-coder",
        "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
        ("<tool_call>", "<function="),
        _read_qwen3_coder,
        signs=(("<tool_call>", "<function=", "<parameter="),),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    CallFormat(
        "glm",
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
        ("<tool_call>",),
        _read_glm,
        signs=(("<tool_call>", "<arg_key>"),),
        tokens=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    CallFormat(
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>",),
        _read_deepseek,
        signs=(("<｜tool▁call▁begin｜>",),),
        tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    CallFormat(
        "internlm",
        '<|action_start|><|plugin|>{"name": NAME, "parameters": {...}}<|action_end|>',
        ("<|action_start|>",),
        _read_internlm,
        signs=(("<|action_start|>",), ("<|plugin|>",)),
        tokens=("<|action_start|>", "<|plugin|>", "<|interpreter|>", "<|action_end|>"),
    ),
    CallFormat(
        "mistral",
        '[TOOL_CALLS][{"name": NAME, "arguments": {...}}] or [TOOL_CALLS]NAME[ARGS]{...}',
        ("[TOOL_CALLS]",),
        _read_mistral,
        signs=(("[TOOL_CALLS]",),),
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        make_id=_make_short_id,
    ),
    CallFormat(
        "pythonic",
        "[NAME(KEY=VALUE), ...]",
        ("<|python_start|>",),
        _read_pythonic,
        signs=(("<|python_start|>",), ("[func_name1(params_name1=params_value1",)),
        leads=True,
        tokens=("<|python_start|>", "<|python_end|>"),
    ),
    CallFormat(
        "llama3",
        '{"name": NAME, "parameters": {...}}, with <|python_tag|> or without',
        ("<|python_tag|>",),
        _read_llama3,
        signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        leads=True,
        tokens=("<|python_tag|>",),
    ),
    CallFormat(
        "hermes",
        '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>',
        ("<tool_call>",),
        partial(_read_tagged_json, closing="</tool_call>"),
        signs=(("<tool_call>",),),
        tokens=("<tool_call>", "</tool_call>"),
    ),
)
