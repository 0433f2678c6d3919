"""What a request asks for, what comes back for it, and the engine's face towards a front end.

Must not know how tokens are made (no torch) nor how they travel (no HTTP). Used by the scheduler,
the engine, every protocol of the server and the offline pipeline.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from treadle.ir.errors import RequestError, TreadleError
from treadle.runtime.host_pages import HostStats

if TYPE_CHECKING:
    from treadle.runtime.tokenizer import Tokenizer

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BIASED_TOKENS = 512
MAX_BAD_TOKEN_IDS = 256
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class FinishReason(StrEnum):
    """Say why an answer ended. The first two are a model's own end, the others are failures."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Structure:
    """Say what form an answer has: a JSON schema, a regex, a grammar, or one of some texts.

    `kind`: json_schema, regex, grammar (in llguidance's Lark dialect) or choice; `text` is a schema
    or a list of texts as JSON, or the regex or grammar itself. `param` names the request's field.
    """

    kind: str
    text: str
    param: str = field(default="structured_outputs", compare=False)


JSON_OBJECT = Structure("json_schema", '{"type": "object"}', "response_format")


@dataclass(frozen=True)
class SamplingParams:
    """Say how an answer is drawn and where it ends.

    `max_tokens` None: as many as the window holds. `temperature` 0: always the likeliest token.
    `top_k` 0, `top_p` 1, `min_p` 0: off. `seed` None: the engine picks one.
    `presence_penalty` and `frequency_penalty` look at the answer alone, `repetition_penalty` at the
    prompt too; 0, 0 and 1: off. `logit_bias`: pairs of a token and what is added to its logit.
    `bad_token_ids` are never drawn, `bad_words` never written. `structure`: the answer's form, from
    the end of the text `structure_after` on, where there is one.
    `bad_sequences` of tokens and the compiled `grammar` are made of them by `Engine.prepare`.
    `skip_special_tokens` False: special tokens are written out.
    `min_tokens`: no end of sequence and no stop token is drawn before this many tokens, and no stop
    string that is complete before them ends the answer. `continues_text`: the answer goes on with
    the prompt's text, so the leading space of its first word is kept; otherwise it is a text of its
    own, decoded as such.
    `shown_token_ids`: special tokens that the text shows, as the marks of a tool call.
    `logprobs`: tell the log probability of each token, and of this many likeliest; None: of none.
    `prompt_logprobs`: the same for the prompt, which then takes a slice of a step per token.
    `tells_logits`: with either, give the logits of those places too; `tells_hidden`: the final
    norm's output, of which they are made.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    structure: Structure | None = None
    structure_after: str = ""
    grammar: Any = field(default=None, compare=False, repr=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    continues_text: bool = False
    shown_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tells_logits: bool = False
    tells_hidden: bool = False
    cache_salt: str | None = None

    def validate(self) -> SamplingParams:
        """Return these parameters if every one is in range.

        Raises: RequestError: a value out of range; `param` names the field.
        """
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, 0, INT32_MAX)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number(
            "repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above=True
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        self._check_biases()
        if self.seed is not None:
            _check_int("seed", self.seed, INT64_MIN, INT64_MAX)
        _check_count("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"Expected each `stop` string to have 1 to {MAX_STOP_CHARS} characters, "
                    f"found {show_value(text)}.",
                    param="stop",
                )
        salt = self.cache_salt
        if salt is not None and not (
            isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS
        ):
            raise RequestError(
                f"Expected `cache_salt` to be a string of 1 to {MAX_CACHE_SALT_CHARS} characters, "
                f"found {show_value(salt)}.",
                param="cache_salt",
            )
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, INT32_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_int("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"Expected `min_tokens` of at most `max_tokens` = {self.max_tokens}, "
                f"found {self.min_tokens}.",
                param="min_tokens",
            )
        return self

    def _check_biases(self) -> None:
        _check_count("logit_bias", self.logit_bias, MAX_BIASED_TOKENS)
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias", token_id, 0, INT32_MAX)
            _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise RequestError(
                "Expected each token once in `logit_bias`, found one twice.", param="logit_bias"
            )
        _check_count("bad_token_ids", self.bad_token_ids, MAX_BAD_TOKEN_IDS)
        for token_id in self.bad_token_ids:
            _check_int("bad_token_ids", token_id, 0, INT32_MAX)
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise RequestError(
                    f"Expected each of `bad_words` to have 1 to {MAX_BAD_WORD_CHARS} characters, "
                    f"found {show_value(word)}.",
                    param="bad_words",
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids that these parameters name.

        Raises: RequestError: one is not of the model's vocabulary; `param` names the field.
        """
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "bad_token_ids": self.bad_token_ids,
        }
        for name, token_ids in named.items():
            if token_ids and max(token_ids) >= vocab_size:
                raise RequestError(
                    f"Expected `{name}` from 0 to {vocab_size - 1}, the model's vocabulary; found "
                    f"{max(token_ids)}.",
                    param=name,
                    code="invalid_token_id",
                )

    def for_choice(self, choice: int) -> SamplingParams:
        """Give the parameters of one of several answers to one request: each has its own seed."""
        if self.seed is None:
            return self
        return replace(self, seed=derive_seed(self.seed, choice))


class Usage(NamedTuple):
    """Count an answer's tokens. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Hold the log probability of a token, and of the likeliest ones at its place, best first.

    `logits`, where asked for: what the model gave for that place, f32[V] of numpy; `hidden`: the
    last hidden state that it made them of, after the final norm, f32[D].
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    logits: Any = field(default=None, compare=False, repr=False)
    hidden: Any = field(default=None, compare=False, repr=False)


class Delta(NamedTuple):
    """Hold what one step adds to an answer.

    `usage` counts the answer up to here. The last delta, and only it, has a `finish_reason`.
    `stop_reason` is the stop string or stop token that ended the answer; None for an end of
    sequence. `logprobs` has an entry per token where they are asked for. The first delta has
    `prompt_logprobs` where they are: an entry per token of the prompt but the first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


async def collect(deltas: AsyncIterable[Delta]) -> Delta:
    """Join a stream into the whole answer, which has the form of one delta.

    Raises: RequestError: the stream held nothing.
    """
    return join_deltas([delta async for delta in deltas])


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas of an answer into one. Raises: RequestError: there are none."""
    if not deltas:
        raise RequestError("Expected an answer, found a stream that ended before it began.")
    return deltas[-1]._replace(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def derive_seed(seed: int, choice: int) -> int:
    """Give the seed of answer number `choice`; answer 0 has the request's own, as if alone."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def fit_to_window(
    params: SamplingParams,
    prompt_tokens: int,
    max_model_len: int,
    *,
    default_max_tokens: int | None = None,
    prompt_param: str = "prompt",
    max_tokens_param: str = "max_tokens",
) -> SamplingParams:
    """Give the parameters with `max_tokens` set to a number that the window holds.

    An absent `max_tokens` becomes `default_max_tokens`, or the room left if that is less.
    Raises: RequestError: the prompt, or prompt and `max_tokens`, exceed the window; nothing is cut.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"Expected a prompt of at most {max_model_len - 1} tokens, because the model's window "
            f"holds {max_model_len} tokens, prompt and answer together; found {prompt_tokens}.",
            remedy="Shorten the prompt.",
            param=prompt_param,
            code="context_length_exceeded",
        )
    if params.max_tokens is None:
        most = room if default_max_tokens is None else min(room, default_max_tokens)
        if params.min_tokens > most:
            raise RequestError(
                f"Expected `min_tokens` of at most {most}, the tokens this answer may have; "
                f"found {params.min_tokens}.",
                param="min_tokens",
            )
        return replace(params, max_tokens=most)
    if params.max_tokens > room:
        raise RequestError(
            f"Expected `{max_tokens_param}` of at most {room}, because the model's window holds "
            f"{max_model_len} tokens and the prompt takes {prompt_tokens} of them; "
            f"found {params.max_tokens}.",
            remedy="Lower it, leave it out, or shorten the prompt.",
            param=max_tokens_param,
            code="context_length_exceeded",
        )
    return params


class Generation(Protocol):
    """Stand for one running answer: a stream of deltas that can be given up."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def has_more(self) -> bool:
        """Say whether the next delta can be had without waiting."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None:
        """Stop the answer and free what it holds. Harmless when it has ended."""
        ...


class Stats(Protocol):
    """Give an engine's counters: those in `_total` only grow while the engine lives."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def steps_total(self) -> int: ...
    @property
    def last_step_age_s(self) -> float: ...
    @property
    def step_in_flight_s(self) -> float: ...
    @property
    def jit_compiles_total(self) -> int: ...
    @property
    def prompt_tokens_total(self) -> int: ...
    @property
    def generation_tokens_total(self) -> int: ...
    @property
    def preemptions_total(self) -> int: ...
    @property
    def host(self) -> HostStats: ...


class Engine(Protocol):
    """Name what a front end may ask of an engine, and nothing else.

    `model_name`, `ready`, `phase`, `failure` and `stats()` answer from construction on;
    `tokenizer`, `max_model_len`, `vocab_size`, `hidden_size` and `pooling` (last, mean, or empty
    where the model declares none) once `start` has returned. `failure` is what
    broke the engine for good.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def pooling(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def phase(self) -> str: ...
    @property
    def failure(self) -> TreadleError | None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self) -> None:
        """Let running answers end, take no new ones, and give the model's memory back."""
        ...

    async def wake(self) -> None:
        """Load the model again. Harmless when awake. Raises: TreadleError: it can't be loaded."""
        ...

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """Give parameters that can be submitted: words as tokens, structure as a grammar.

        Raises: RequestError: something in them can't be done; `param` names the field.
        """
        ...

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Generation:
        """Queue a request. Raises: RequestError, QueueFullError."""
        ...

    def stats(self) -> Stats: ...

    async def drain(self, deadline_s: float) -> None:
        """Refuse new requests, let the running ones end, abort those left after `deadline_s`."""
        ...


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(
            f"Expected `{name}` to be a whole number from {least} to {most}, "
            f"found {show_value(value)}.",
            param=name,
        )


def _check_number(
    name: str, value: object, least: float, most: float, *, above: bool = False
) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good:
        assert isinstance(value, int | float), "tested above"
        good = math.isfinite(value) and least <= value <= most and not (above and value == least)
    if not good:
        edge = "above" if above else "from"
        raise RequestError(
            f"Expected `{name}` to be a number {edge} {least:g} to {most:g}, "
            f"found {show_value(value)}.",
            param=name,
        )


def _check_count(name: str, value: object, most: int) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        found = f"{len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise RequestError(
            f"Expected `{name}` to hold at most {most} entries, found {found}.", param=name
        )


def show_value(value: object) -> str:
    """Print a client's value for a message, at a length that can't flood an answer or a log."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} entries"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    text = repr(value[:64] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else text[:77] + "..."
