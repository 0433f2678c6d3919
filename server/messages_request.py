"""The requests of Anthropic's /v1/messages, read into a turn.

Must not know engines or HTTP; `server/messages.py` answers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    NAME_SCHEMA,
    REASONING_EFFORTS,
    ToolChoice,
    check_tool_choice,
    check_tool_names,
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
    refuse,
    string,
    whole,
)
from treadle.server.schema import CACHE_SALT, CACHE_SALT_MEANING, WITHOUT_EFFECT_OF, Request
from treadle.server.structure_fields import FLAT_FORMAT
from treadle.server.turns import Turn

_TEXT = string()

# What may stand in a block without effect: the prefix cache needs no marks.
_BLOCK_EXTRAS = ("cache_control",)


def _read_block(value: object, path: str, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "a block with a type", value, "invalid_type")
    check_names(value, ("type", *fields, *_BLOCK_EXTRAS), path)
    return value


def _refuse_block(value: Mapping[str, Any], path: str, known: str) -> None:
    raise RequestError(
        f"Expected `{path}.type` to be {known}, because this model reads text only; found "
        f"{show_value(value.get('type'))}.",
        param=f"{path}.type",
        code="unsupported_part",
    )


def _read_texts(value: object, path: str) -> str:
    """Read a text, or blocks of text, which are joined by line breaks."""
    if isinstance(value, str):
        return _TEXT.read(value, path)
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        refuse(path, f"a string or a list of at most {MAX_PARTS} blocks of text", value)
    texts = []
    for index, block in enumerate(value):
        here = f"{path}.{index}"
        if isinstance(block, dict) and block.get("type") != "text":
            _refuse_block(block, here, "'text'")
        read = _read_block(block, here, ("text", "citations"))
        texts.append(_TEXT.read(read.get("text"), f"{here}.text"))
    return "\n".join(texts)


def _read_user(value: object, path: str) -> list[dict[str, Any]]:
    """Read a user's content: each result of a tool is a message of its own, as templates want."""
    if isinstance(value, str):
        return [{"role": "user", "content": _TEXT.read(value, path)}]
    messages: list[dict[str, Any]] = []
    for here, block in _blocks(value, path):
        if block.get("type") == "tool_result":
            _read_block(block, here, ("tool_use_id", "content", "is_error"))
            content = block.get("content")
            message = {
                "role": "tool",
                "tool_call_id": string(256, 1).read(
                    block.get("tool_use_id"), f"{here}.tool_use_id"
                ),
                "content": "" if content is None else _read_texts(content, f"{here}.content"),
            }
            if block.get("is_error") is not None:
                boolean().read(block["is_error"], f"{here}.is_error")
            messages.append(message)
        elif block.get("type") == "text":
            _read_block(block, here, ("text", "citations"))
            text = _TEXT.read(block.get("text"), f"{here}.text")
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text})
        else:
            _refuse_block(block, here, "'text' or 'tool_result'")
    return messages


def _read_assistant(value: object, path: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": _TEXT.read(value, path)}]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for here, block in _blocks(value, path):
        kind = block.get("type")
        if kind == "text":
            _read_block(block, here, ("text", "citations"))
            message["content"] += _TEXT.read(block.get("text"), f"{here}.text")
        elif kind == "thinking":
            _read_block(block, here, ("thinking", "signature"))
            thinking = _TEXT.read(block.get("thinking"), f"{here}.thinking")
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking
        elif kind == "tool_use":
            _read_block(block, here, ("id", "name", "input", "caller"))
            arguments = json_object().read(block.get("input", {}), f"{here}.input")
            name = read_tool_name(block.get("name"), f"{here}.name")
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            call["id"] = string(256, 1).read(block.get("id"), f"{here}.id")
            message.setdefault("tool_calls", []).append(call)
        else:
            _refuse_block(block, here, "'text', 'thinking' or 'tool_use'")
    return [message]


def _blocks(value: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        refuse(path, f"a string or a list of 1 to {MAX_PARTS} blocks", value, "invalid_type")
    for index, block in enumerate(value):
        here = f"{path}.{index}"
        if not isinstance(block, dict):
            refuse(here, "a block with a type", block, "invalid_type")
        yield here, block


def _read_message(value: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        refuse(path, "an object with role and content", value, "invalid_type")
    check_names(value, ("role", "content"), path)
    role = value.get("role")
    if role == "user":
        return _read_user(value.get("content"), f"{path}.content")
    if role == "assistant":
        return _read_assistant(value.get("content"), f"{path}.content")
    if role == "system":
        text = _read_texts(value.get("content"), f"{path}.content")
        return [{"role": "system", "content": text}]
    refuse(f"{path}.role", "one of user, assistant, system", role)


def _read_tool(value: object, path: str) -> dict[str, Any]:
    """Read a tool into the form that templates take."""
    if not isinstance(value, dict):
        refuse(path, "a tool with name, description and input_schema", value, "invalid_type")
    if value.get("type") not in (None, "custom"):
        raise RequestError(
            f"Expected `{path}.type` to be 'custom', because the server runs no tools itself; "
            f"found {show_value(value['type'])}.",
            param=f"{path}.type",
            code="unsupported_field",
        )
    names = ("type", "name", "description", "input_schema", "strict", *_BLOCK_EXTRAS)
    check_names(value, names, path)
    function: dict[str, Any] = {"name": read_tool_name(value.get("name"), f"{path}.name")}
    if value.get("strict") is not None:
        function["strict"] = boolean().read(value["strict"], f"{path}.strict")
    if value.get("description") is not None:
        function["description"] = _TEXT.read(value["description"], f"{path}.description")
    schema = json_object().read(value.get("input_schema"), f"{path}.input_schema")
    return {"type": "function", "function": function | {"parameters": schema}}


def _read_tools(value: object, path: str) -> tuple[dict[str, Any], ...]:
    tools: tuple[dict[str, Any], ...] = _TOOL_LIST.read(value, path)
    check_tool_names(tools, path)
    return tools


def _read_tool_choice(value: object, path: str) -> tuple[ToolChoice, bool]:
    """Read the choice, and whether calls may be parallel."""
    if not isinstance(value, dict):
        refuse(path, _TOOL_CHOICE.expects, value, "invalid_type")
    kind = one_of("auto", "any", "tool", "none").read(value.get("type"), f"{path}.type")
    check_names(value, ("type", "name", "disable_parallel_tool_use"), path)
    alone = boolean().read(
        value.get("disable_parallel_tool_use") or False, f"{path}.disable_parallel_tool_use"
    )
    if kind == "tool":
        return ToolChoice("named", read_tool_name(value.get("name"), f"{path}.name")), not alone
    return ToolChoice({"any": "required"}.get(kind, kind)), not alone


_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object", "required": ["type"]}},
    ]
}
_TEXTS = Check("a string or a list of blocks of text", _read_texts, _CONTENT_SCHEMA)
_MESSAGES = list_of(
    Check(
        "a message with role and content",
        _read_message,
        {
            "type": "object",
            "required": ["role", "content"],
            "additionalProperties": False,
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": _CONTENT_SCHEMA,
            },
        },
    ),
    MAX_MESSAGES,
    1,
)
_TOOL_LIST = list_of(
    Check(
        "a tool with name, description and input_schema",
        _read_tool,
        {
            "type": "object",
            "required": ["name", "input_schema"],
            "additionalProperties": False,
            "properties": {
                "type": {"enum": [None, "custom"]},
                "name": NAME_SCHEMA,
                "description": {"type": ["string", "null"]},
                "input_schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
                "cache_control": {},
            },
        },
    ),
    MAX_TOOLS,
)
_TOOL_CHOICE = Check(
    'an object such as {"type": "auto"}; type any, tool (with name) or none too',
    _read_tool_choice,
    {
        "type": "object",
        "required": ["type"],
        "additionalProperties": False,
        "properties": {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": NAME_SCHEMA,
            "disable_parallel_tool_use": {"type": ["boolean", "null"]},
        },
    },
)


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """Say whether the model is to think first."""

    type: str = declare(one_of("enabled", "disabled", "adaptive"), doc="Turn thinking on or off.")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Say how much the model is to think, and what form the answer has."""

    effort: str | None = declare(
        one_of(*REASONING_EFFORTS), None, doc="For templates that have a switch for it."
    )
    format: tuple[Structure | None, dict[str, Any]] | None = declare(
        FLAT_FORMAT, None, doc="What fits a JSON Schema: `type` json_schema, and `schema`."
    )


@dataclass(frozen=True, kw_only=True)
class CountTokensRequest(Request):
    """Hold the body of /v1/messages/count_tokens."""

    messages: tuple[list[dict[str, Any]], ...] = declare(
        _MESSAGES,
        doc="The conversation: text, thinking, tool_use and tool_result. A last message of the "
        "assistant's is gone on with.",
    )
    system: str | None = declare(_TEXTS, None, doc="What comes before the conversation.")
    tools: tuple[dict[str, Any], ...] = declare(
        Check(_TOOL_LIST.expects, _read_tools, _TOOL_LIST.schema),
        (),
        doc="Functions that the model may call.",
    )
    tool_choice: tuple[ToolChoice, bool] | None = declare(
        _TOOL_CHOICE, None, doc="`none`: the model isn't told of the tools. `auto`: it may call."
    )
    thinking: Thinking | None = declare(  # noqa: RUF009, as every field here
        object_of(Thinking, {"budget_tokens": whole(1, INT32_MAX), "display": anything()}),
        None,
        doc="Sets `enable_thinking` of a template that has it. `budget_tokens` has no effect.",
    )
    output_config: OutputConfig | None = declare(  # noqa: RUF009, as every field here
        object_of(OutputConfig), None, doc="`effort`, `format`."
    )
    chat_template_kwargs: dict[str, Any] | None = declare(  # noqa: RUF009, as every field here
        json_object(("messages", "tools", "add_generation_prompt")),
        None,
        doc="The chat template's own switches.",
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        check_tool_choice(self.choice, self.tools)

    @property
    def choice(self) -> ToolChoice:
        """Whether tools may be called."""
        return AUTO if self.tool_choice is None else self.tool_choice[0]

    def turn(self, params: SamplingParams) -> Turn:
        """Give the turn that is asked for."""
        messages = [message for group in self.messages for message in group]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        switches = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            switches.setdefault("enable_thinking", self.thinking.type != "disabled")
        return Turn(
            messages,
            params,
            tools=self.tools,
            tool_choice=self.choice,
            parallel_tool_calls=self.tool_choice is None or self.tool_choice[1],
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            continue_final_message=messages[-1]["role"] == "assistant",
            template_kwargs=switches,
            effort_param="output_config.effort",
        )


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    """Hold the body of /v1/messages."""

    max_tokens: int = declare(
        whole(1, INT32_MAX),
        doc="The most tokens of the answer. More than the window has left is an error.",
    )
    stream: bool = declare(boolean(), False, doc="Send the answer as it grows, as SSE.")
    stop_sequences: tuple[str, ...] = declare(
        list_of(string(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS), (), doc="Texts that end the answer."
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
    cache_salt: str | None = declare(CACHE_SALT, None, doc=CACHE_SALT_MEANING)

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        config = self.output_config
        is_greedy = self.top_p == 0
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if is_greedy else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=1.0 if is_greedy else self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop_sequences,
            structure=None if config is None or config.format is None else config.format[0],
            cache_salt=self.cache_salt,
        )


_IGNORED = {"cache_control": anything()}
WITHOUT_EFFECT_OF[CountTokensRequest] = _IGNORED
WITHOUT_EFFECT_OF[MessagesRequest] = _IGNORED | {
    "metadata": anything(),
    "service_tier": one_of("auto", "standard_only"),
    "inference_geo": anything(),
}
