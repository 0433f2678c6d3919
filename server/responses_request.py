"""The requests of OpenAI's /v1/responses, read into a turn.

Must not know engines or HTTP; `server/responses.py` answers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import RequestError
from treadle.runtime.request import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    SamplingParams,
    Structure,
    show_value,
)
from treadle.server.conversation import (
    AUTO,
    FUNCTION_SCHEMA,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    NAME_SCHEMA,
    REASONING_EFFORTS,
    ToolChoice,
    check_tool_choice,
    check_tool_names,
    load_arguments,
    read_function,
    read_tool_name,
)
from treadle.server.fields import (
    Check,
    anything,
    boolean,
    check_names,
    declare,
    json_object,
    list_of,
    number,
    object_of,
    one_of,
    one_or_many,
    only,
    refuse,
    string,
    whole,
)
from treadle.server.schema import CACHE_SALT, CACHE_SALT_MEANING, WITHOUT_EFFECT_OF, Request
from treadle.server.structure_fields import FLAT_FORMAT
from treadle.server.turns import Turn

_TEXT = string()
_ID = string(256, 1)
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


# --- items ----------------------------------------------------------------------------------------


def _read_content(value: object, path: str) -> str:
    """Read a text, or parts of text, which are joined by line breaks."""
    if isinstance(value, str):
        return _TEXT.read(value, path)
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        refuse(path, f"a string or a list of at most {MAX_PARTS} parts", value, "invalid_type")
    texts = []
    for index, part in enumerate(value):
        here = f"{path}.{index}"
        if not isinstance(part, dict):
            refuse(here, 'a part such as {"type": "input_text", "text": "..."}', part)
        if part.get("type") not in _TEXT_PARTS:
            raise RequestError(
                f"Expected `{here}.type` to be 'input_text' or 'output_text', because this model "
                f"reads text only; found {show_value(part.get('type'))}.",
                param=f"{here}.type",
                code="unsupported_part",
            )
        check_names(part, ("type", "text", "annotations", "logprobs"), here)
        texts.append(_TEXT.read(part.get("text"), f"{here}.text"))
    return "\n".join(texts)


def _read_message(item: dict[str, Any], path: str) -> dict[str, Any]:
    check_names(item, ("type", "role", "content", "id", "status", "phase"), path)
    role = one_of(*_ROLES).read(item.get("role"), f"{path}.role")
    content = _read_content(item.get("content"), f"{path}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _read_call(item: dict[str, Any], path: str) -> dict[str, Any]:
    check_names(item, ("type", "id", "call_id", "name", "arguments", "status"), path)
    call_id = _ID.read(item.get("call_id"), f"{path}.call_id")
    name = read_tool_name(item.get("name"), f"{path}.name")
    text = _TEXT.read(item.get("arguments"), f"{path}.arguments")
    arguments = load_arguments(text, f"{path}.arguments")
    json_object().read(arguments, f"{path}.arguments")
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _read_output(item: dict[str, Any], path: str) -> dict[str, Any]:
    check_names(item, ("type", "id", "call_id", "output", "status"), path)
    call_id = _ID.read(item.get("call_id"), f"{path}.call_id")
    content = _read_content(item.get("output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _read_reasoning(item: dict[str, Any], path: str) -> dict[str, Any]:
    names = ("type", "id", "summary", "content", "status", "encrypted_content")
    check_names(item, names, path)
    if item.get("encrypted_content") is not None:
        only().read(item["encrypted_content"], f"{path}.encrypted_content")
    content = item.get("content") or []
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        refuse(f"{path}.content", f"a list of at most {MAX_PARTS} parts", content, "invalid_type")
    texts = []
    for index, part in enumerate(content):
        here = f"{path}.content.{index}"
        if not isinstance(part, dict) or part.get("type") != "reasoning_text":
            refuse(here, "a part of type reasoning_text", part)
        texts.append(_TEXT.read(part.get("text"), f"{here}.text"))
    return {"role": "assistant", "reasoning_content": "\n".join(texts)}


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def _read_item(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "an item with a type, or a message with role and content", value)
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in _READERS:
        raise RequestError(
            f"Expected `{path}.type` to be one of {', '.join(_READERS)}; found {show_value(kind)}.",
            param=f"{path}.type",
            code="unsupported_part",
        )
    # Clients send items back with all the fields that they know, those that say nothing as null.
    return _READERS[kind]({name: one for name, one in value.items() if one is not None}, path)


def _read_input(value: object, path: str) -> tuple[dict[str, Any], ...]:
    """Read a text or items as messages."""
    if isinstance(value, str):
        return ({"role": "user", "content": _TEXT.read(value, path)},)
    items: tuple[dict[str, Any], ...] = _ITEMS.read(value, path)
    return items


def join_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join what one turn of the assistant's gave as several items, and system texts that lead."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last["role"] != message["role"]:
            joined.append({"content": "", **message})
        elif message["role"] == "assistant":
            content = "\n".join(filter(None, (last["content"], message.get("content"))))
            merged = {**last, "content": content}
            if "reasoning_content" in message:
                texts = (last.get("reasoning_content"), message["reasoning_content"])
                merged["reasoning_content"] = "\n".join(filter(None, texts))
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            joined[-1] = merged | ({"tool_calls": calls} if calls else {})
        elif message["role"] == "system" and len(joined) == 1:
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(dict(message))
    return joined


# --- tools ----------------------------------------------------------------------------------------


def _read_tool(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "a tool of type function", value, "invalid_type")
    if value.get("type") != "function":
        raise RequestError(
            f"Expected `{path}.type` to be 'function', because the server runs no tools itself; "
            f"found {show_value(value.get('type'))}.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    return {"type": "function", "function": read_function(value, path, others=("type",))}


def _read_tools(value: object, path: str) -> tuple[dict[str, Any], ...]:
    tools: tuple[dict[str, Any], ...] = _TOOL_LIST.read(value, path)
    check_tool_names(tools, path)
    return tools


def _read_tool_choice(value: object, path: str) -> ToolChoice:
    if isinstance(value, str):
        return ToolChoice(one_of("none", "auto", "required").read(value, path))
    if not isinstance(value, dict):
        refuse(path, _TOOL_CHOICE.expects, value, "invalid_type")
    check_names(value, ("type", "name"), path)
    if value.get("type") != "function":
        refuse(f"{path}.type", "'function'", value.get("type"))
    return ToolChoice("named", read_tool_name(value.get("name"), f"{path}.name"))


_ITEMS = list_of(
    Check(f"an item of type {', '.join(_READERS)}", _read_item, {"type": "object"}),
    MAX_MESSAGES,
    1,
)
_INPUT = Check(
    f"a string, or {_ITEMS.expects}", _read_input, {"anyOf": [{"type": "string"}, _ITEMS.schema]}
)
_TOOL_LIST = list_of(
    Check(
        'a tool {"type": "function", "name", "description", "parameters"}',
        _read_tool,
        {
            **FUNCTION_SCHEMA,
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, **FUNCTION_SCHEMA["properties"]},
        },
    ),
    MAX_TOOLS,
)
_TOOL_CHOICE = Check(
    'none, auto, required, or {"type": "function", "name"}',
    _read_tool_choice,
    {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "name"],
                "additionalProperties": False,
                "properties": {"type": {"const": "function"}, "name": NAME_SCHEMA},
            },
        ]
    },
)


# --- the request ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReasoningOptions:
    """Say how much the model is to reason."""

    effort: str | None = declare(
        one_of(*REASONING_EFFORTS), None, doc="For templates that have a switch for it."
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Say what form the text has."""

    format: tuple[Structure | None, dict[str, Any]] | None = declare(
        FLAT_FORMAT, None, doc="Plain text, any JSON object, or what fits a JSON Schema."
    )
    verbosity: None = declare(only("medium"), None, doc="Not supported yet.")


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(Request):
    """Hold the body of /v1/responses."""

    input: tuple[dict[str, Any], ...] = declare(
        _INPUT, doc="A text, or items: messages, function calls, their outputs, reasoning."
    )
    instructions: str | None = declare(
        string(), None, doc="What comes before the conversation; not kept for the next response."
    )
    previous_response_id: str | None = declare(
        string(256, 1), None, doc="Go on from a stored response."
    )
    store: bool = declare(boolean(), True, doc="Keep the response, for a while, in memory.")
    max_output_tokens: int | None = declare(
        whole(1, INT32_MAX),
        None,
        doc="The most tokens of the answer. More than the window has left is an error.",
    )
    temperature: float = declare(
        number(0, MAX_TEMPERATURE), 1.0, doc="0: always the likeliest token."
    )
    top_p: float = declare(number(0, 1), 1.0, doc="Draw from the likeliest that have this share.")
    top_k: int = declare(whole(-1, INT32_MAX), 0, doc="Draw from the k likeliest; 0: from all.")
    min_p: float = declare(number(0, 1), 0.0, doc="Leave out tokens less likely than this share.")
    seed: int | None = declare(
        whole(INT64_MIN, INT64_MAX), None, doc="The same seed gives the same answer."
    )
    stop: tuple[str, ...] = declare(
        one_or_many(string(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS),
        (),
        doc="Texts that end the answer.",
    )
    cache_salt: str | None = declare(CACHE_SALT, None, doc=CACHE_SALT_MEANING)
    tools: tuple[dict[str, Any], ...] = declare(
        Check(_TOOL_LIST.expects, _read_tools, _TOOL_LIST.schema),
        (),
        doc="Functions that the model may call.",
    )
    tool_choice: ToolChoice | None = declare(  # noqa: RUF009, as every field here
        _TOOL_CHOICE, None, doc="`none`: the model isn't told of the tools. `auto`: it may call."
    )
    parallel_tool_calls: bool = declare(
        boolean(), True, doc="Allow several calls in one answer; else it ends with the first."
    )
    reasoning: ReasoningOptions | None = declare(  # noqa: RUF009, as every field here
        object_of(ReasoningOptions, {"summary": anything(), "generate_summary": anything()}),
        None,
        doc="`effort`. `summary` has no effect: reasoning is given in full.",
    )
    text: TextOptions | None = declare(  # noqa: RUF009, as every field here
        object_of(TextOptions), None, doc="The form of the text."
    )
    metadata: dict[str, Any] | None = declare(  # noqa: RUF009, as every field here
        json_object(), None, doc="Given back with the response."
    )
    stream: bool = declare(boolean(), False, doc="Send the answer as it grows, as SSE.")
    chat_template_kwargs: dict[str, Any] | None = declare(  # noqa: RUF009, as every field here
        json_object(("messages", "tools", "add_generation_prompt")),
        None,
        doc="The chat template's own switches.",
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        check_tool_choice(self.tool_choice or AUTO, self.tools)

    @property
    def format(self) -> tuple[Structure | None, dict[str, Any]]:
        """The answer's form: what holds it to that, and as the client wrote it."""
        if self.text is None or self.text.format is None:
            return None, {"type": "text"}
        return self.text.format

    def turn(self, before: Sequence[dict[str, Any]]) -> Turn:
        """Give the turn that is asked for; `before` are the messages it goes on from."""
        lead = [] if not self.instructions else [{"role": "system", "content": self.instructions}]
        is_greedy = self.top_p == 0
        return Turn(
            join_turns([*lead, *before, *self.input]),
            SamplingParams(
                max_tokens=self.max_output_tokens,
                temperature=0.0 if is_greedy else self.temperature,
                top_k=max(self.top_k, 0),
                top_p=1.0 if is_greedy else self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                stop=self.stop,
                structure=self.format[0],
                cache_salt=self.cache_salt,
            ),
            tools=self.tools,
            tool_choice=self.tool_choice or AUTO,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            template_kwargs=self.chat_template_kwargs or {},
            messages_param="input",
            max_tokens_param="max_output_tokens",
            effort_param="reasoning.effort",
        )

    def echo(self) -> dict[str, Any]:
        """Give what a response repeats of its request."""
        choice = self.tool_choice or AUTO
        tools = [
            {"type": "function", "parameters": None, "strict": False, **tool["function"]}
            for tool in self.tools
        ]
        named = {"type": "function", "name": choice.name}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            "store": self.store,
            "temperature": self.temperature,
            "text": {"format": self.format[1]},
            "tool_choice": named if choice.mode == "named" else choice.mode,
            "tools": tools,
            "top_p": self.top_p,
            "truncation": "disabled",
        }


WITHOUT_EFFECT_OF[ResponsesRequest] = {
    "user": string(),
    "safety_identifier": string(),
    "prompt_cache_key": string(),
    "prompt_cache_retention": anything(),
    "include": list_of(one_of("reasoning.encrypted_content"), 8),
    "service_tier": only("auto", "default"),
    "truncation": only("disabled"),
    "background": only(False),
    "stream_options": only({}, {"include_obfuscation": False}),
    "top_logprobs": only(0),
    "max_tool_calls": only(),
    "prompt": only(),
    "conversation": only(),
}
