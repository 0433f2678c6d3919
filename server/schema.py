"""The requests as Treadle reads them: one declaration per field, and nothing ignored.

Must not know engines or HTTP. `server/openai.py` reads bodies with it; the reference page of the
documentation is printed from it.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

from treadle.ir.errors import RequestError
from treadle.runtime.request import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    SamplingParams,
    show_value,
)

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
MAX_TOOL_CALLS = 256
MAX_PROMPTS = 1_000
MAX_CHOICES = 128
MAX_DEPTH = 64
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

R = TypeVar("R")


@dataclass(frozen=True)
class Check:
    """Say what a value must be, and read it: `read(value, path)` gives it in our own form."""

    expects: str
    read: Callable[[Any, str], Any]


def refuse(path: str, expects: str, value: object, code: str = "invalid_value") -> NoReturn:
    """Raise the error for a value that is not what its field expects."""
    raise RequestError(
        f"Expected `{path}` to be {expects}, found {show_value(value)}.", param=path, code=code
    )


def boolean() -> Check:
    """Accept true and false."""
    expects = "true or false"

    def read(value: object, path: str) -> bool:
        return value if isinstance(value, bool) else refuse(path, expects, value, "invalid_type")

    return Check(expects, read)


def whole(least: int, most: int) -> Check:
    """Accept whole numbers of a range; `2.0` and `"2"` are not whole numbers."""
    expects = f"a whole number from {least} to {most}"

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(path, expects, value, "invalid_type")
        return value if least <= value <= most else refuse(path, expects, value)

    return Check(expects, read)


def number(least: float, most: float) -> Check:
    """Accept finite numbers of a range."""
    expects = f"a number from {least:g} to {most:g}"

    def read(value: object, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(path, expects, value, "invalid_type")
        if not math.isfinite(value) or not least <= value <= most:
            refuse(path, expects, value)
        return float(value)

    return Check(expects, read)


def string(most_characters: int | None = None, least_characters: int = 0) -> Check:
    """Accept Unicode strings; half a surrogate pair is not Unicode."""
    expects = "a string"
    if most_characters is not None:
        expects += f" of {least_characters} to {most_characters} characters"

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            refuse(path, expects, value, "invalid_type")
        if len(value) < least_characters:
            refuse(path, expects, value)
        if most_characters is not None and len(value) > most_characters:
            refuse(path, expects, value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"Expected `{path}` to be Unicode, found half of a surrogate pair at character "
                f"{error.start}.",
                param=path,
                code="invalid_text",
            ) from None
        return value

    return Check(expects, read)


def list_of(item: Check, most: int, least: int = 0) -> Check:
    """Accept lists whose entries all pass; long ones are refused before their entries are read."""
    expects = f"a list of {least} to {most} entries, each {item.expects}"

    def read(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            refuse(path, expects, value, "invalid_type")
        if not least <= len(value) <= most:
            refuse(path, expects, value)
        return tuple(item.read(entry, f"{path}.{index}") for index, entry in enumerate(value))

    return Check(expects, read)


def one_or_many(item: Check, most: int) -> Check:
    """Accept one entry or a list of them; give a tuple."""
    many = list_of(item, most)
    expects = f"{item.expects}, or {many.expects}"

    def read(value: object, path: str) -> tuple[Any, ...]:
        return many.read(value, path) if isinstance(value, list) else (item.read(value, path),)

    return Check(expects, read)


def json_object(refused_names: Iterable[str] = ()) -> Check:
    """Accept objects of any fields but the refused ones, not too deep."""
    expects = f"an object, at most {MAX_DEPTH} deep"
    refused = frozenset(refused_names)

    def read(value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(path, expects, value, "invalid_type")
        for name in refused.intersection(value):
            raise RequestError(
                f"Expected no `{name}` in `{path}`: the request has a field of that name.",
                param=path,
                code="reserved_name",
            )
        _check_depth(value, path)
        return value

    return Check(expects, read)


def anything() -> Check:
    """Accept every JSON value, for fields that have no effect."""
    return Check("any value", lambda value, path: value)


def only(*values: object) -> Check:
    """Accept what asks for nothing: null or one of `values`. For features not there yet."""
    expects = " or ".join(["null", *(json.dumps(value) for value in values)])

    def read(value: object, path: str) -> None:
        # `0 == False` in Python, and they are two different wishes.
        if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            return
        raise RequestError(
            f"`{path}` is not supported yet: expected {expects}, found {show_value(value)}.",
            remedy="Leave it out.",
            param=path,
            code="unsupported_field",
        )

    return Check(expects, read)


def declare(check: Check, default: Any = MISSING, *, doc: str) -> Any:
    """Declare a field of a request. Without a default it is required; null means the default."""
    metadata = {"check": check, "doc": doc}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


# --- prompts and messages -------------------------------------------------------------------------

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


PROMPT = Check(
    "a string, a list of strings, a list of token ids, or a list of such lists", _read_prompt
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
        _check_names(part, ("type", "text"), here)
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
        _check_names(call, ("id", "type", "function", "index"), here)
        if call.get("type", "function") != "function":
            refuse(f"{here}.type", "'function'", call["type"])
        function = call.get("function")
        if not isinstance(function, dict):
            refuse(f"{here}.function", "an object with name and arguments", function)
        _check_names(function, ("name", "arguments"), f"{here}.function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _load_arguments(arguments, f"{here}.function.arguments")
        arguments = json_object().read(arguments, f"{here}.function.arguments")
        name = _NAME.read(function.get("name"), f"{here}.function.name")
        known = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if call.get("id") is not None:
            known["id"] = _NAME.read(call["id"], f"{here}.id")
        calls.append(known)
    return calls


def _load_arguments(text: str, path: str) -> object:
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
    _check_names(value, ("role", "content", *_MESSAGE_FIELDS), path)
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


MESSAGES = list_of(Check("a message with role and content", _read_message), MAX_MESSAGES, 1)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Say what a stream tells beside its text."""

    include_usage: bool = declare(
        boolean(), False, doc="One more chunk at the end, with empty `choices` and the usage."
    )
    continuous_usage_stats: bool = declare(boolean(), False, doc="The usage so far in every chunk.")


_NO_OBFUSCATION = {"include_obfuscation": only(False)}


def _read_stream_options(value: object, path: str) -> StreamOptions:
    return _read_fields(StreamOptions, _NO_OBFUSCATION, value, path)


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """Hold what all requests have."""

    model: str | None = declare(
        string(512), None, doc="The model's name as /v1/models gives it; may be left out."
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Request):
    """Hold the fields that /v1/chat/completions and /v1/completions share."""

    max_tokens: int | None = declare(
        whole(1, INT32_MAX),
        None,
        doc="The most tokens of one answer. More than the window has left is an error. Absent: "
        f"what the window has left (chat), {DEFAULT_COMPLETION_TOKENS} (completions).",
    )
    max_completion_tokens: int | None = declare(
        whole(1, INT32_MAX), None, doc="The newer name of `max_tokens`; wins if both are given."
    )
    temperature: float = declare(
        number(0, MAX_TEMPERATURE), 1.0, doc="0: always the likeliest token."
    )
    top_p: float = declare(
        number(0, 1), 1.0, doc="Draw from the likeliest tokens that have this share; 0: the first."
    )
    top_k: int = declare(
        whole(-1, INT32_MAX), 0, doc="Draw from the k likeliest tokens; 0 or -1: from all."
    )
    min_p: float = declare(
        number(0, 1), 0.0, doc="Leave out tokens less likely than this share of the likeliest."
    )
    seed: int | None = declare(
        whole(INT64_MIN, INT64_MAX),
        None,
        doc="The same seed gives the same answer; each of `n` choices derives its own from it.",
    )
    stop: tuple[str, ...] = declare(
        one_or_many(string(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS),
        (),
        doc="Texts that end the answer. They are not part of it.",
    )
    stop_token_ids: tuple[int, ...] = declare(
        list_of(whole(0, INT32_MAX), MAX_STOP_TOKEN_IDS), (), doc="Tokens that end the answer."
    )
    ignore_eos: bool = declare(
        boolean(), False, doc="Go on after an end of sequence, to `max_tokens`."
    )
    min_tokens: int = declare(
        whole(0, INT32_MAX), 0, doc="The fewest tokens of one answer: no end or stop counts before."
    )
    include_stop_str_in_output: bool = declare(
        boolean(), False, doc="Keep the stop text or token that ended the answer."
    )
    n: int = declare(whole(1, MAX_CHOICES), 1, doc="How many answers to give to each prompt.")
    stream: bool = declare(boolean(), False, doc="Send the answer as it grows, as SSE.")
    stream_options: StreamOptions | None = declare(  # noqa: RUF009, as every field here
        Check("an object of stream options", _read_stream_options),
        None,
        doc="`include_usage`, `continuous_usage_stats`; only with `stream`.",
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "Expected `stream_options` only with `stream` true, found it without.",
                param="stream_options",
                code="invalid_value",
            )
        self.sampling().validate()

    @property
    def max_tokens_param(self) -> str:
        """The name under which the client gave the limit of tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        # To draw from the likeliest token alone is to take it.
        is_greedy = self.top_p == 0
        return SamplingParams(
            max_tokens=getattr(self, self.max_tokens_param),
            temperature=0.0 if is_greedy else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=1.0 if is_greedy else self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, kw_only=True)
class ChatRequest(GenerateRequest):
    """Hold the body of /v1/chat/completions."""

    messages: tuple[dict[str, Any], ...] = declare(
        MESSAGES,
        doc="The conversation. Roles: system, developer (the same), user, assistant, tool.",
    )
    add_generation_prompt: bool = declare(
        boolean(), True, doc="End the prompt with the opening of an assistant's turn."
    )
    chat_template_kwargs: dict[str, Any] | None = declare(  # noqa: RUF009, as every field here
        json_object(("messages", "tools", "add_generation_prompt")),
        None,
        doc="The chat template's own switches, such as `enable_thinking`.",
    )
    logprobs: bool = declare(boolean(), False, doc="Tell the log probability of each token.")
    top_logprobs: int = declare(
        whole(0, MAX_LOGPROBS), 0, doc="With `logprobs`: of this many likeliest tokens too."
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "Expected `top_logprobs` only with `logprobs` true, found it without.",
                param="top_logprobs",
                code="invalid_value",
            )
        super().check()

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        params = super().sampling()
        return replace(params, logprobs=self.top_logprobs) if self.logprobs else params


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerateRequest):
    """Hold the body of /v1/completions."""

    prompt: tuple[str | tuple[int, ...], ...] = declare(
        PROMPT, doc="What the answers go on from: text or token ids, one or several."
    )
    add_special_tokens: bool = declare(
        boolean(), True, doc="Add what the tokenizer puts around a raw text, such as BOS."
    )
    logprobs: int | None = declare(
        whole(0, MAX_LOGPROBS),
        None,
        doc="Tell the log probability of each token, and of this many likeliest ones.",
    )
    echo: bool = declare(
        boolean(), False, doc="Give the prompt before the answer; with `logprobs` for both."
    )

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        return replace(
            super().sampling(),
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


MAX_TOKEN_IDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest(Request):
    """Hold the body of /tokenize."""

    prompt: str | None = declare(string(), None, doc="A text; either this or `messages`.")
    messages: tuple[dict[str, Any], ...] | None = declare(
        MESSAGES, None, doc="A conversation, which the chat template writes as a text."
    )
    add_special_tokens: bool | None = declare(
        boolean(),
        None,
        doc="Add what the tokenizer puts around a raw text, such as BOS: true for a `prompt` "
        "unless told otherwise. With `messages` the template has them, and true is refused.",
    )
    add_generation_prompt: bool = declare(
        boolean(), True, doc="With `messages`: end with the opening of an assistant's turn."
    )
    chat_template_kwargs: dict[str, Any] | None = declare(  # noqa: RUF009, as every field here
        json_object(("messages", "tools", "add_generation_prompt")),
        None,
        doc="With `messages`: the chat template's own switches.",
    )
    return_token_strs: bool = declare(
        boolean(), False, doc="Give each token as the vocabulary spells it too, as `token_strs`."
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if (self.prompt is None) == (self.messages is None):
            found = "neither" if self.prompt is None else "both"
            raise RequestError(
                f"Expected either `prompt` or `messages`, found {found}.",
                param="prompt",
                code="invalid_value",
            )
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "Expected `add_special_tokens` false with `messages`, found true: the chat "
                "template writes all special tokens.",
                remedy="Leave it out.",
                param="add_special_tokens",
                code="invalid_value",
            )
        if self.messages is None and self.chat_template_kwargs is not None:
            raise RequestError(
                "Expected `chat_template_kwargs` only with `messages`, found it without.",
                param="chat_template_kwargs",
                code="invalid_value",
            )


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest(Request):
    """Hold the body of /detokenize."""

    tokens: tuple[int, ...] = declare(
        list_of(whole(0, INT32_MAX), MAX_TOKEN_IDS), doc="Token ids; special ones are written out."
    )


# Accepted because clients send them as a matter of course; they say nothing about the answer.
WITHOUT_EFFECT: dict[str, Check] = {
    "user": string(),
    "store": boolean(),
    "metadata": anything(),
    "safety_identifier": string(),
    "prompt_cache_key": string(),
}
# Known and not offered: only the value that asks for nothing is accepted.
_UNSUPPORTED: dict[str, Check] = {
    "frequency_penalty": only(0),
    "presence_penalty": only(0),
    "repetition_penalty": only(1),
    "logit_bias": only({}),
    "service_tier": only("auto", "default"),
}
UNSUPPORTED: dict[type[Request], dict[str, Check]] = {
    ChatRequest: {
        **_UNSUPPORTED,
        "response_format": only({"type": "text"}),
        "tools": only([]),
        "tool_choice": only("none", "auto"),
        "parallel_tool_calls": only(True, False),
        "functions": only([]),
        "function_call": only("none", "auto"),
        "modalities": only(["text"]),
        "audio": only(),
        "prediction": only(),
        "reasoning_effort": only(),
        "verbosity": only("medium"),
        "web_search_options": only(),
    },
    CompletionRequest: {
        **_UNSUPPORTED,
        "best_of": only(1),
        "suffix": only(""),
    },
}

Q = TypeVar("Q", bound=Request)


def parse_request(kind: type[Q], body: bytes) -> Q:
    """Read a request's body.

    Raises: RequestError: not JSON; a field unknown, missing, out of range or not supported. The
    first mistake found is reported, with the field's path as `param`.
    """
    others = WITHOUT_EFFECT | UNSUPPORTED[kind] if kind in UNSUPPORTED else {}
    request = _read_fields(kind, others, parse_json(body), "")
    request.check()
    return request


def parse_json(body: bytes) -> object:
    """Read strict JSON: UTF-8, no NaN, no field twice, nothing after it.

    Raises: RequestError: anything else; the message gives the place and not the body.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_json(f"byte {error.start} is not UTF-8")
    try:
        return json.loads(text, object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _refuse_json(f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        _refuse_json("it is nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        _refuse_json(str(error))


def describe(kind: type[Request]) -> list[tuple[str, str, str, str]]:
    """List a request's fields for the documentation: name, what is accepted, default, meaning."""
    rows = []
    for declared in fields(kind):
        default = "required" if declared.default is MISSING else json.dumps(declared.default)
        check: Check = declared.metadata["check"]
        rows.append((declared.name, check.expects, default, str(declared.metadata["doc"])))
    if kind not in UNSUPPORTED:
        return rows
    for name, check in WITHOUT_EFFECT.items():
        rows.append((name, check.expects, "null", "Accepted; has no effect."))
    for name, check in UNSUPPORTED[kind].items():
        rows.append((name, check.expects, "null", "Not supported yet; other values are refused."))
    return rows


def _read_fields(kind: type[R], others: dict[str, Check], value: object, path: str) -> R:
    """Read an object into a declared class; `others` are checked and dropped."""
    if not isinstance(value, dict):
        where = f"`{path}`" if path else "the body"
        raise RequestError(
            f"Expected {where} to be a JSON object, found {show_value(value)}.",
            param=path or None,
            code="invalid_type",
        )
    declared = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    _check_names(value, (*declared, *others), path)
    for name, check in others.items():
        if value.get(name) is not None:
            check.read(value[name], _join(path, name))
    read = {}
    for name, one in declared.items():
        if value.get(name) is not None:
            read[name] = one.metadata["check"].read(value[name], _join(path, name))
        elif one.default is MISSING:
            found = "null" if name in value else "nothing"
            raise RequestError(
                f"Expected `{_join(path, name)}` to be {one.metadata['check'].expects}, "
                f"found {found}.",
                param=_join(path, name),
                code="missing_field",
            )
    return kind(**read)


def _check_names(value: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in value:
        if name in known:
            continue
        close = difflib.get_close_matches(name[:64], known, n=1)
        where = f" of `{path}`" if path else ""
        raise RequestError(
            f"Unknown field {show_value(name)}{where}.",
            remedy=f"Did you mean `{close[0]}`?" if close else "Leave it out.",
            param=_join(path, name[:64]),
            code="unknown_field",
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_depth(value: object, path: str) -> None:
    """Refuse what a recursive reader, such as a template's `tojson`, would choke on."""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return
    raise RequestError(
        f"Expected `{path}` to be at most {MAX_DEPTH} deep, found it deeper.",
        param=path,
        code="invalid_value",
    )


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        _refuse_json(f"the field {show_value(twice)} is given twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    _refuse_json(f"{name} is not a JSON value")


def _refuse_json(reason: str) -> NoReturn:
    raise RequestError(f"Expected the body to be JSON: {reason}.", code="invalid_json")
