"""The requests as Treadle reads them: one declaration per field, and nothing ignored.

Must not know engines or HTTP. The protocols read bodies with it; the reference page of the
documentation is printed from it.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from treadle.ir.errors import RequestError
from treadle.runtime.request import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_BAD_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    SamplingParams,
    Structure,
)
from treadle.server.conversation import (
    AUTO,
    MESSAGES,
    PROMPT,
    REASONING_EFFORTS,
    TOOL_CHOICE,
    TOOLS,
    ToolChoice,
    check_tool_choice,
)
from treadle.server.fields import (
    Check,
    anything,
    boolean,
    declare,
    json_object,
    list_of,
    number,
    object_of,
    one_of,
    one_or_many,
    only,
    parse_json,
    read_fields,
    refuse,
    string,
    whole,
)
from treadle.server.structure_fields import GUIDED, RESPONSE_FORMAT, STRUCTURED_OUTPUTS

MAX_CHOICES = 128
CACHE_SALT = string(MAX_CACHE_SALT_CHARS, 1)
CACHE_SALT_MEANING = (
    "Share prefixes in the cache with requests of the same salt only; without one, with those that "
    "have none."
)
FORM_FIELDS = ("response_format", "structured_outputs", *GUIDED)
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

_BIAS = number(-MAX_BIAS, MAX_BIAS)


def _read_logit_bias(value: object, path: str) -> tuple[tuple[int, float], ...]:
    """Read an object whose names are token ids, which JSON writes as strings."""
    if not isinstance(value, dict):
        refuse(path, LOGIT_BIAS.expects, value, "invalid_type")
    if len(value) > MAX_BIASED_TOKENS:
        refuse(path, LOGIT_BIAS.expects, value)
    biases = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdecimal() and int(name[:20]) <= INT32_MAX):
            refuse(path, "an object whose names are token ids", name)
        biases[int(name)] = _BIAS.read(bias, f"{path}.{name}")
    if len(biases) != len(value):
        refuse(path, "an object that names each token once", value)
    return tuple(biases.items())


LOGIT_BIAS = Check(
    f"an object of at most {MAX_BIASED_TOKENS} token ids, each with {_BIAS.expects}",
    _read_logit_bias,
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _BIAS.schema,
        "maxProperties": MAX_BIASED_TOKENS,
    },
)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Say what a stream tells beside its text."""

    include_usage: bool = declare(
        boolean(), False, doc="One more chunk at the end, with empty `choices` and the usage."
    )
    continuous_usage_stats: bool = declare(boolean(), False, doc="The usage so far in every chunk.")


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
    presence_penalty: float = declare(
        number(-MAX_PENALTY, MAX_PENALTY),
        0.0,
        doc="Taken from the logits of tokens that the answer has; the prompt's don't count.",
    )
    frequency_penalty: float = declare(
        number(-MAX_PENALTY, MAX_PENALTY),
        0.0,
        doc="Taken from a token's logit as often as the answer has it.",
    )
    repetition_penalty: float = declare(
        number(0, MAX_REPETITION_PENALTY, above=True),
        1.0,
        doc="Divides the logits of tokens that prompt or answer have; multiplies negative ones.",
    )
    logit_bias: tuple[tuple[int, float], ...] = declare(
        LOGIT_BIAS, (), doc="What is added to the logits of tokens; before penalties."
    )
    bad_token_ids: tuple[int, ...] = declare(
        list_of(whole(0, INT32_MAX), MAX_BAD_TOKEN_IDS), (), doc="Tokens that are never drawn."
    )
    bad_words: tuple[str, ...] = declare(
        list_of(string(MAX_BAD_WORD_CHARS, 1), MAX_BAD_WORDS),
        (),
        doc="Texts that are never written in the tokens that the tokenizer makes of them.",
    )
    response_format: Structure | None = declare(  # noqa: RUF009, as every field here
        RESPONSE_FORMAT, None, doc="The answer's form; it is always enforced, `strict` or not."
    )
    structured_outputs: Structure | None = declare(  # noqa: RUF009, as every field here
        STRUCTURED_OUTPUTS,
        None,
        doc="The answer's form by vLLM's names; `grammar` is in llguidance's Lark dialect.",
    )
    guided_json: Structure | None = declare(  # noqa: RUF009, as every field here
        GUIDED["guided_json"], None, doc="As `structured_outputs.json`."
    )
    guided_regex: Structure | None = declare(  # noqa: RUF009, as every field here
        GUIDED["guided_regex"], None, doc="As `structured_outputs.regex`."
    )
    guided_choice: Structure | None = declare(  # noqa: RUF009, as every field here
        GUIDED["guided_choice"], None, doc="As `structured_outputs.choice`."
    )
    guided_grammar: Structure | None = declare(  # noqa: RUF009, as every field here
        GUIDED["guided_grammar"], None, doc="As `structured_outputs.grammar`."
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
        whole(0, INT32_MAX),
        0,
        doc="Before this many tokens no end or stop token is drawn, and no stop text counts.",
    )
    include_stop_str_in_output: bool = declare(
        boolean(), False, doc="Keep the stop text or token that ended the answer."
    )
    skip_special_tokens: bool = declare(
        boolean(), True, doc="Leave special tokens out of the text; the end is never part of it."
    )
    cache_salt: str | None = declare(CACHE_SALT, None, doc=CACHE_SALT_MEANING)
    n: int = declare(whole(1, MAX_CHOICES), 1, doc="How many answers to give to each prompt.")
    stream: bool = declare(boolean(), False, doc="Send the answer as it grows, as SSE.")
    stream_options: StreamOptions | None = declare(  # noqa: RUF009, as every field here
        object_of(StreamOptions, {"include_obfuscation": only(False)}),
        None,
        doc="`include_usage`, `continuous_usage_stats`; only with `stream`.",
    )

    @property
    def num_candidates(self) -> int:
        """The answers that are made for each prompt; the best `n` of them are given."""
        return self.n

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "Expected `stream_options` only with `stream` true, found it without.",
                param="stream_options",
                code="invalid_value",
            )
        forms = self._forms()
        if len(forms) > 1:
            names = list(forms)
            raise RequestError(
                f"Expected one form of the answer, found `{'` and `'.join(names)}`.",
                param=names[-1],
                code="invalid_value",
            )
        self.sampling().validate()

    def _forms(self) -> dict[str, Structure]:
        """Give the answer's forms by the fields that ask for them."""
        given = {name: getattr(self, name) for name in FORM_FIELDS}
        return {name: form for name, form in given.items() if form is not None}

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
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            bad_token_ids=self.bad_token_ids,
            bad_words=self.bad_words,
            structure=next(iter(self._forms().values()), None),
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            cache_salt=self.cache_salt,
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
    tools: tuple[dict[str, Any], ...] = declare(
        TOOLS, (), doc="Functions that the model may call: name, description, JSON Schema."
    )
    tool_choice: ToolChoice | None = declare(  # noqa: RUF009, as every field here
        TOOL_CHOICE,
        None,
        doc="`none`: the model isn't told of the tools. `auto`, as without: it may call them.",
    )
    parallel_tool_calls: bool = declare(
        boolean(), True, doc="Allow several calls in one answer; else it ends with the first."
    )
    reasoning_effort: str | None = declare(
        one_of(*REASONING_EFFORTS),
        None,
        doc="For models whose chat template has a switch for it; `none` turns reasoning off.",
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
        check_tool_choice(self.tool_choice or AUTO, self.tools)
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
    max_tokens: int | None = declare(
        whole(0, INT32_MAX),
        None,
        doc="The most tokens of one answer. More than the window has left is an error. Absent: "
        f"{DEFAULT_COMPLETION_TOKENS}. 0, with `echo`: the prompt alone.",
    )
    best_of: int | None = declare(
        whole(1, MAX_CHOICES),
        None,
        doc="Make so many answers to each prompt and give the `n` that the model finds likeliest "
        "per token; all count in `usage`. Not in a stream, unless it is `n`.",
    )

    @property
    def num_candidates(self) -> int:
        """The answers that are made for each prompt; the best `n` of them are given."""
        return self.best_of or self.n

    @property
    def scores_only(self) -> bool:
        """Say whether no answer is wanted, only the prompt with what is known of it."""
        return self.max_tokens == 0 and self.max_completion_tokens is None

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if self.scores_only and not self.echo:
            raise RequestError(
                "Expected `max_tokens` of at least 1, or 0 with `echo` true; found 0.",
                param="max_tokens",
                code="invalid_value",
            )
        if self.num_candidates < self.n:
            raise RequestError(
                f"Expected `best_of` of at least `n` = {self.n}, found {self.best_of}.",
                param="best_of",
                code="invalid_value",
            )
        if self.stream and self.num_candidates > self.n:
            raise RequestError(
                "Expected `best_of` above `n` only without `stream`: which answers are best is "
                "known when all have ended.",
                param="best_of",
                code="invalid_value",
            )
        super().check()

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        params = super().sampling()
        ranks = self.num_candidates > self.n and self.logprobs is None
        # The engine always makes a token; where none is wanted, it is left out of the answer.
        return replace(
            params,
            max_tokens=1 if self.scores_only else params.max_tokens,
            min_tokens=0 if self.scores_only else params.min_tokens,
            logprobs=0 if ranks else self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest(Request):
    """Hold the body of /v1/embeddings."""

    input: tuple[str | tuple[int, ...], ...] = declare(
        PROMPT, doc="What to embed: text or token ids, one or several."
    )
    encoding_format: str = declare(
        one_of("float", "base64"),
        "float",
        doc="Numbers, or the bytes of little-endian 32-bit floats.",
    )
    dimensions: int | None = declare(
        whole(1, INT32_MAX), None, doc="The size of the model's hidden states; no other is offered."
    )
    add_special_tokens: bool = declare(
        boolean(), True, doc="Add what the tokenizer puts around a raw text, such as BOS."
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
    "service_tier": only("auto", "default"),
}
UNSUPPORTED: dict[type[Request], dict[str, Check]] = {
    ChatRequest: {
        **_UNSUPPORTED,
        "functions": only([]),
        "function_call": only("none", "auto"),
        "modalities": only(["text"]),
        "audio": only(),
        "prediction": only(),
        "verbosity": only("medium"),
        "web_search_options": only(),
    },
    CompletionRequest: {
        **_UNSUPPORTED,
        "suffix": only(""),
    },
}

# What the requests of other protocols accept without effect; each declares its own.
WITHOUT_EFFECT_OF: dict[type[Request], dict[str, Check]] = {EmbeddingRequest: {"user": string()}}

Q = TypeVar("Q", bound=Request)


def other_fields(kind: type[Request]) -> dict[str, Check]:
    """Give the fields of a request that are checked and dropped."""
    if kind in UNSUPPORTED:
        return WITHOUT_EFFECT | UNSUPPORTED[kind]
    return WITHOUT_EFFECT_OF.get(kind, {})


def parse_request(kind: type[Q], body: bytes) -> Q:
    """Read a request's body.

    Raises: RequestError: not JSON; a field unknown, missing, out of range or not supported. The
    first mistake found is reported, with the field's path as `param`.
    """
    request = read_fields(kind, other_fields(kind), parse_json(body), "")
    request.check()
    return request


def describe(kind: type[Request]) -> list[tuple[str, str, str, str]]:
    """List a request's fields for the documentation: name, what is accepted, default, meaning."""
    rows = []
    for declared in fields(kind):
        default = "required" if declared.default is MISSING else json.dumps(declared.default)
        check: Check = declared.metadata["check"]
        rows.append((declared.name, check.expects, default, str(declared.metadata["doc"])))
    refused = UNSUPPORTED.get(kind, {})
    for name, check in other_fields(kind).items():
        refusal = "Not supported yet; other values are refused."
        doc = refusal if name in refused else "Accepted; has no effect."
        rows.append((name, check.expects, "null", doc))
    return rows
