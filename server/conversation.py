"""Prompts and conversations as clients send them, read into what the tokenizer and templates take.

Must not know requests, engines or HTTP. Used by the declarations of `server/schema.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import RequestError
from treadle.runtime.request import show_value
from treadle.server.fields import (
    Check,
    boolean,
    check_names,
    json_object,
    list_of,
    one_of,
    only,
    refuse,
    string,
)

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_TOOL_CALLS = 256
MAX_PROMPTS = 1_000

_TEXT = string()
_NAME = string(256, 1)


def _read_prompt(value: object, path: str) -> tuple[str | tuple[int, ...], ...]:
    """Read one text, one list of token ids, or a list of either, as a tuple of prompts."""
    if isinstance(value, str):
        return (_TEXT.read(value, path),)
    if not isinstance(value, list):
        refuse(path, PROMPT.expects, value, "invalid_type")
    if not value:
        raise RequestError(
            f"Expected `{path}` to hold a prompt, found an empty list.", param=path, code="empty"
        )
    if isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise RequestError(
                f"Expected at most {MAX_PROMPTS} prompts in one request, found {len(value)}.",
                param=path,
                code="invalid_value",
            )
        kind = type(value[0])
        prompts: list[str | tuple[int, ...]] = []
        for index, entry in enumerate(value):
            if not isinstance(entry, kind):
                raise RequestError(
                    f"Expected all entries of `{path}` to be of one kind, found "
                    f"{show_value(entry)} at index {index}.",
                    param=path,
                    code="invalid_type",
                )
            if isinstance(entry, str):
                _TEXT.read(entry, path)
                prompts.append(entry)
            else:
                prompts.append(_read_token_ids(entry, path))
        return tuple(prompts)
    return (_read_token_ids(value, path),)


def _read_token_ids(value: list[Any], path: str) -> tuple[int, ...]:
    if not value:
        raise RequestError(
            f"Expected `{path}` to hold token ids, found an empty list of them.",
            param=path,
            code="empty",
        )
    for index, entry in enumerate(value):
        if type(entry) is not int:
            raise RequestError(
                f"Expected `{path}` to hold token ids, which are whole numbers, found "
                f"{show_value(entry)} at index {index}.",
                param=path,
                code="invalid_type",
            )
    return tuple(value)


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT = Check(
    "a string, a list of strings, a list of token ids, or a list of such lists",
    _read_prompt,
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
            _IDS_SCHEMA,
            {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
        ]
    },
)

ROLES = ("system", "developer", "user", "assistant", "tool")


def _read_content(value: object, path: str) -> str:
    """Read a message's text: a string, or parts of type text, which are joined by line breaks."""
    if isinstance(value, str):
        return _TEXT.read(value, path)
    expects = "a string or a list of text parts"
    if not isinstance(value, list):
        refuse(path, expects, value, "invalid_type")
    if not 1 <= len(value) <= MAX_PARTS:
        refuse(path, f"a list of 1 to {MAX_PARTS} parts", value)
    texts = []
    for index, part in enumerate(value):
        here = f"{path}.{index}"
        if not isinstance(part, dict):
            refuse(here, 'a part such as {"type": "text", "text": "..."}', part, "invalid_type")
        if part.get("type") != "text":
            raise RequestError(
                f"Expected `{here}.type` to be 'text', because this model reads text only; "
                f"found {show_value(part.get('type'))}.",
                param=f"{here}.type",
                code="unsupported_part",
            )
        check_names(part, ("type", "text"), here)
        texts.append(_TEXT.read(part.get("text"), f"{here}.text"))
    return "\n".join(texts)


def _read_tool_calls(value: object, path: str) -> list[dict[str, Any]]:
    """Read the calls an assistant made earlier; templates want their arguments as objects."""
    if not isinstance(value, list) or len(value) > MAX_TOOL_CALLS:
        refuse(path, f"a list of at most {MAX_TOOL_CALLS} calls", value, "invalid_type")
    calls = []
    for index, call in enumerate(value):
        here = f"{path}.{index}"
        if not isinstance(call, dict):
            refuse(here, "a call of type function", call, "invalid_type")
        check_names(call, ("id", "type", "function", "index"), here)
        if call.get("type", "function") != "function":
            refuse(f"{here}.type", "'function'", call["type"])
        function = call.get("function")
        if not isinstance(function, dict):
            refuse(f"{here}.function", "an object with name and arguments", function)
        check_names(function, ("name", "arguments"), f"{here}.function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = load_arguments(arguments, f"{here}.function.arguments")
        arguments = json_object().read(arguments, f"{here}.function.arguments")
        name = _NAME.read(function.get("name"), f"{here}.function.name")
        known = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if call.get("id") is not None:
            known["id"] = _NAME.read(call["id"], f"{here}.id")
        calls.append(known)
    return calls


def load_arguments(text: str, path: str) -> Any:
    """Read a call's arguments from the JSON that they are written in. Raises: RequestError."""
    if text.strip() == "":
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        refuse(path, "a JSON object written as a string", text)


# What a message may hold beside its role and content. A client sends an answer back as it got it,
# so fields of OpenAI's answers are known too, as long as they hold nothing.
_MESSAGE_FIELDS: dict[str, Check] = {
    "name": _NAME,
    "tool_calls": Check("a list of tool calls", _read_tool_calls),
    "tool_call_id": _NAME,
    "reasoning_content": _TEXT,
    "refusal": only(),
    "audio": only(),
    "annotations": only([]),
    "function_call": only(),
}
_FIELD_OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


def _read_message(value: object, path: str) -> dict[str, Any]:
    """Read one message into what templates get: no nulls, no empty lists, text as a string."""
    if not isinstance(value, dict):
        refuse(path, "an object with role and content", value, "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        refuse(f"{path}.role", f"one of {', '.join(ROLES)}", role)
    check_names(value, ("role", "content", *_MESSAGE_FIELDS), path)
    # The newer name of the same thing; templates know the older one.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": ""}
    for name, check in _MESSAGE_FIELDS.items():
        given = value.get(name)
        if given is None:
            continue
        read = check.read(given, f"{path}.{name}")
        # Templates ask whether a field is defined, so one that holds nothing is left out.
        if read is None or read == []:
            continue
        if _FIELD_OF_ROLE.get(name, role) != role:
            raise RequestError(
                f"Expected `{name}` only in a message of role {_FIELD_OF_ROLE[name]}, found it in "
                f"`{path}` of role {role}.",
                param=f"{path}.{name}",
                code="invalid_value",
            )
        message[name] = read
    content = value.get("content")
    if content is not None:
        message["content"] = _read_content(content, f"{path}.content")
    elif "tool_calls" not in message:
        raise RequestError(
            f"Expected `{path}.content` to be a string or a list of text parts, found none. Only "
            "an assistant message with tool calls may do without.",
            param=f"{path}.content",
            code="missing_field",
        )
    return message


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "additionalProperties": False,
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CALL_SCHEMA = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 256},
                "arguments": {"type": ["string", "object"]},
            },
        },
    },
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": ["string", "null"]},
                {"type": "array", "items": _TEXT_PART, "minItems": 1, "maxItems": MAX_PARTS},
            ]
        },
        "tool_calls": {
            "type": ["array", "null"],
            "items": _CALL_SCHEMA,
            "maxItems": MAX_TOOL_CALLS,
        },
        **{
            name: {"anyOf": [check.schema, {"type": "null"}]}
            for name, check in _MESSAGE_FIELDS.items()
            if name != "tool_calls"
        },
    },
}
MESSAGES = list_of(
    Check("a message with role and content", _read_message, _MESSAGE_SCHEMA), MAX_MESSAGES, 1
)


# --- tools ----------------------------------------------------------------------------------------

MAX_TOOLS = 1_000
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class ToolChoice:
    """Say whether tools may or must be called: `mode` none, auto, required, or named."""

    mode: str = "auto"
    name: str = ""


AUTO = ToolChoice()


def read_tool_name(value: object, path: str) -> str:
    """Read a function's name. Raises: RequestError."""
    expects = "a name of 1 to 256 letters, digits, `_`, `-` and `.`"
    if not isinstance(value, str):
        refuse(path, expects, value, "invalid_type")
    return value if TOOL_NAME.fullmatch(value) else refuse(path, expects, value)


_FUNCTION_FIELDS: dict[str, Check] = {
    "description": _TEXT,
    "parameters": json_object(),
    "strict": boolean(),
}


def read_function(value: object, path: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Read a function's declaration, in the client's order, without nulls."""
    if not isinstance(value, dict):
        refuse(path, "an object with name, description and parameters", value, "invalid_type")
    check_names(value, ("name", *_FUNCTION_FIELDS, *others), path)
    read_tool_name(value.get("name"), f"{path}.name")
    for name, check in _FUNCTION_FIELDS.items():
        if value.get(name) is not None:
            check.read(value[name], f"{path}.{name}")
    known = {"name", *_FUNCTION_FIELDS}
    return {name: one for name, one in value.items() if name in known and one is not None}


def _read_tool(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "a tool of type function", value, "invalid_type")
    check_names(value, ("type", "function"), path)
    if value.get("type") != "function":
        refuse(f"{path}.type", "'function'", value.get("type"))
    return {
        "type": "function",
        "function": read_function(value.get("function"), f"{path}.function"),
    }


def check_tool_names(tools: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse two functions of one name. Raises: RequestError."""
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(
                f"Expected every function's name once in `{path}`, found `{name}` twice.",
                param=path,
                code="invalid_value",
            )


def _read_tools(value: object, path: str) -> tuple[dict[str, Any], ...]:
    tools: tuple[dict[str, Any], ...] = _TOOL_LIST.read(value, path)
    check_tool_names(tools, path)
    return tools


def _read_tool_choice(value: object, path: str) -> ToolChoice:
    if isinstance(value, str):
        return ToolChoice(_CHOICE_WORD.read(value, path))
    if not isinstance(value, dict):
        refuse(path, TOOL_CHOICE.expects, value, "invalid_type")
    check_names(value, ("type", "function"), path)
    if value.get("type") != "function":
        refuse(f"{path}.type", "'function'", value.get("type"))
    function = value.get("function")
    if not isinstance(function, dict):
        refuse(f"{path}.function", "an object with a name", function, "invalid_type")
    check_names(function, ("name",), f"{path}.function")
    return ToolChoice("named", read_tool_name(function.get("name"), f"{path}.function.name"))


def check_tool_choice(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a choice that forces a tool that isn't there. Raises: RequestError."""
    names = [tool["function"]["name"] for tool in tools]
    if choice.mode in ("required", "named") and not names:
        raise RequestError(
            "Expected `tool_choice` to force a call only with `tools`, found none.",
            param="tool_choice",
            code="invalid_value",
        )
    if choice.mode == "named" and choice.name not in names:
        raise RequestError(
            f"Expected `tool_choice` to name one of {', '.join(names[:20])}; found {choice.name}.",
            param="tool_choice",
            code="invalid_value",
        )


NAME_SCHEMA = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
FUNCTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": NAME_SCHEMA,
        **{n: {"anyOf": [c.schema, {"type": "null"}]} for n, c in _FUNCTION_FIELDS.items()},
    },
}
_TOOL_LIST = list_of(
    Check(
        'a tool {"type": "function", "function": {"name", "description", "parameters"}}',
        _read_tool,
        {
            "type": "object",
            "required": ["type", "function"],
            "additionalProperties": False,
            "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
        },
    ),
    MAX_TOOLS,
)
TOOLS = Check(_TOOL_LIST.expects, _read_tools, _TOOL_LIST.schema)
_CHOICE_WORD = one_of("none", "auto", "required")
TOOL_CHOICE = Check(
    _CHOICE_WORD.expects + ', or {"type": "function", "function": {"name"}}',
    _read_tool_choice,
    {
        "anyOf": [
            _CHOICE_WORD.schema,
            {
                "type": "object",
                "required": ["type", "function"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "additionalProperties": False,
                        "properties": {"name": NAME_SCHEMA},
                    },
                },
            },
        ]
    },
)
