"""What a script says to the offline pipeline and gets back: settings, sampling, answers.

Fields and defaults are LMDeploy's where they have a meaning here, so that its scripts go on.
Must not know engines. Used by `runtime/pipeline.py`; scripts import it from `treadle`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from treadle.ir.errors import ConfigError, RequestError
from treadle.runtime.request import JSON_OBJECT, SamplingParams, Structure, show_value

if TYPE_CHECKING:
    import torch

# LMDeploy's names of settings -> ours.
ALIASES = {
    "session_len": "max_context_tokens",
    "max_batch_size": "max_rows",
    "block_size": "page_size",
    "cache_block_seq_len": "page_size",
    "max_prefill_token_num": "max_step_tokens",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks": "num_pages",
}
# LMDeploy's settings that are accepted with the one value that describes what happens anyway.
FIXED: dict[str, object] = {
    "tp": 1,
    "dp": 1,
    "ep": 1,
    "adapters": None,
    "eager_mode": False,
    "model_format": None,
    "num_cpu_blocks": 0,
    "download_dir": None,
    "revision": None,
    "hf_overrides": None,
}
REMEDIES = {
    "cache_max_entry_count": "Give the size of the KV cache: `kv_memory_bytes` or `num_pages`.",
}


@dataclass(init=False)
class EngineConfig:
    """Say how a pipeline compiles and serves its model. Empty, 0 or auto: decided for the machine.

    `kv_dtype` is how the KV cache is stored (auto, int8, int4, fp8), `quant_policy` the same as
    LMDeploy's number. `target`, `dtype`, `page_size` (tokens), `max_rows` (answers at once),
    `max_step_tokens` and `max_context_tokens` (the window) shape what is compiled; an artifact has
    them already. `kv_memory_bytes` or `num_pages` fix the KV cache, `max_waiting` the queue;
    `kv_host_memory_bytes` of host memory keep the pages that the cache has no room for any more;
    `model_path` is where an artifact's weights are now; `weight_dtype` is how the target reference
    holds them: auto, float32 or float16. LMDeploy's names are accepted too, see `ALIASES`.
    Raises: ConfigError: an unknown name, one setting under two names, or a value not offered.
    """

    target: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = ""
    quant_policy: int = 0
    page_size: int = 0
    max_rows: int = 0
    max_step_tokens: int = 0
    max_context_tokens: int = 0
    kv_memory_bytes: int = 0
    num_pages: int = 0
    kv_host_memory_bytes: int = 0
    prefix_cache: bool = True
    max_waiting: int = 1024
    model_path: str = ""
    weight_dtype: str = "auto"

    def __init__(self, **settings: Any) -> None:
        known = {own.name: own.default for own in fields(self)}
        values = dict(known)
        given: dict[str, str] = {}
        for name, value in settings.items():
            own = ALIASES.get(name, name)
            if name in FIXED:
                _check_fixed(name, value)
            elif own not in known:
                _refuse_name(name, (*known, *ALIASES, *FIXED))
            elif own in given:
                raise ConfigError(
                    f"EngineConfig got `{given[own]}` and `{name}`, which are the same setting.",
                    remedy="Leave one of them out.",
                )
            else:
                given[own] = name
                # LMDeploy writes None for: decide yourself.
                values[own] = known[own] if value is None else value
        for own, value in values.items():
            _check_type(own, value, known[own])
            setattr(self, own, value)


def _check_fixed(name: str, value: object) -> None:
    if value != FIXED[name]:
        raise ConfigError(
            f"`{name}` is not supported yet: expected {FIXED[name]!r}, found {show_value(value)}.",
            remedy="Leave it out.",
        )


def _refuse_name(name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(known)}."
    raise ConfigError(f"EngineConfig has no `{name}`.", remedy=REMEDIES.get(name, hint))


def _check_type(name: str, value: object, default: object) -> None:
    if type(value) is not type(default) or (isinstance(value, int) and value < 0):
        kind = {str: "a string", bool: "True or False", int: "a whole number from 0"}
        raise ConfigError(
            f"Expected `{name}` to be {kind[type(default)]}, found {show_value(value)}."
        )


# Marks a field of LMDeploy's that only takes its default so far.
NOT_YET = {"not_yet": True}


# How errors of `SamplingParams` are told under the names that a script uses.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "random_seed",
    "stop": "stop_words",
}


@dataclass
class GenerationConfig:
    """Say how an answer is drawn and where it ends.

    `do_sample` False: always the likeliest token; temperature, `top_k`, `top_p` and `min_p` have a
    say only with True. `max_new_tokens`: at most as many, fewer where the window ends before;
    None: as many as it holds. `random_seed` None: another answer each time. `stop_words` are texts
    of any length and end the answer wherever they come up. Before `min_new_tokens` no end is drawn.
    `repetition_penalty` looks at prompt and answer, `presence_penalty` and `frequency_penalty` at
    the answer; `bad_words` and `bad_token_ids` are never written; `response_format` is the answer's
    form, as over HTTP; `logit_bias` maps tokens to what is added to their logits. `logprobs`: tell
    the log probability of each token and of this many likeliest ones, the model's own, before
    temperature and all else. `n`: so many answers to each prompt, with seeds of their own.
    `output_logits`: generation, for the logits that each token of the answer was drawn from, or
    all, for those of the prompt's tokens after the first before them; `logprobs` come with them.
    `output_last_hidden_state`: the same for what the logits are made of, the final norm's output.
    `cache_salt`: prefixes in the cache are shared with requests of the same one only.
    Fields that are marked only take their defaults so far.
    """

    max_new_tokens: int | None = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    random_seed: int | None = None
    ignore_eos: bool = False
    stop_words: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_new_tokens: int | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = None
    bad_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = field(default=True, metadata=NOT_YET)
    response_format: Any = None
    logits_processors: Any = field(default=None, metadata=NOT_YET)
    output_logits: str | None = None
    output_last_hidden_state: str | None = None
    cache_salt: str | None = None
    return_ppl: bool = field(default=False, metadata=NOT_YET)
    repetition_ngram_size: int = field(default=0, metadata=NOT_YET)
    repetition_ngram_threshold: int = field(default=0, metadata=NOT_YET)

    def sampling(self) -> SamplingParams:
        """Give these wishes in the engine's terms. Raises: RequestError: names the field."""
        for own in fields(self):
            value = getattr(self, own.name)
            if own.metadata.get("not_yet") and value != own.default:
                raise RequestError(
                    f"`{own.name}` is not supported yet: expected {own.default!r}, found "
                    f"{show_value(value)}.",
                    remedy="Leave it out.",
                    param=own.name,
                    code="unsupported_field",
                )
        for name in (
            "do_sample",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"Expected `{name}` to be True or False, found "
                    f"{show_value(getattr(self, name))}.",
                    param=name,
                )
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise RequestError(
                f"Expected `n` to be a whole number from 1, found {show_value(self.n)}.", param="n"
            )
        for name in ("output_logits", "output_last_hidden_state"):
            if getattr(self, name) not in (None, "generation", "all"):
                raise RequestError(
                    f"Expected `{name}` to be None, 'generation' or 'all', found "
                    f"{show_value(getattr(self, name))}.",
                    param=name,
                )
        wanted = {self.output_logits, self.output_last_hidden_state} - {None}
        if len(wanted) > 1:
            raise RequestError(
                "Expected `output_logits` and `output_last_hidden_state` of the same tokens, found "
                f"{self.output_logits!r} and {self.output_last_hidden_state!r}.",
                remedy="Ask for `all` of both.",
                param="output_last_hidden_state",
            )
        params = SamplingParams(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.random_seed,
            stop=_as_tuple("stop_words", self.stop_words),
            stop_token_ids=_as_tuple("stop_token_ids", self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=0 if self.min_new_tokens is None else self.min_new_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_as_pairs("logit_bias", self.logit_bias),
            bad_token_ids=_as_tuple("bad_token_ids", self.bad_token_ids),
            bad_words=_as_tuple("bad_words", self.bad_words),
            structure=_read_form(self.response_format),
            logprobs=self.logprobs or 0 if wanted else self.logprobs,
            prompt_logprobs=0 if "all" in wanted else None,
            tells_logits=self.output_logits is not None,
            tells_hidden=self.output_last_hidden_state is not None,
            cache_salt=self.cache_salt,
        )
        try:
            params.validate()
        except RequestError as error:
            raise _rename(error) from None
        if self.do_sample:
            return params
        return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=None)


def _read_form(value: object) -> Structure | None:
    """Read the form of an answer as LMDeploy and OpenAI write it."""
    if value is None or value == {"type": "text"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "json_object":
        return JSON_OBJECT
    if isinstance(value, dict) and kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if isinstance(schema, dict):
            return Structure("json_schema", json.dumps(schema), "response_format")
    if isinstance(value, dict) and kind == "regex_schema":
        pattern = value.get("regex_schema")
        if isinstance(pattern, str):
            return Structure("regex", pattern, "response_format")
    raise RequestError(
        "Expected `response_format` to have a `type` of text, json_object, json_schema (with "
        "`json_schema` and its `schema`) or regex_schema (with `regex_schema`), found "
        f"{show_value(value)}.",
        param="response_format",
    )


def _as_pairs(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise RequestError(
            f"Expected `{name}` to map token ids to numbers, found {show_value(value)}.",
            param=name,
        )
    return tuple(value.items())


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"Expected `{name}` to be a list or None, found {show_value(value)}.", param=name
        )
    return tuple(value)


def _rename(error: RequestError) -> RequestError:
    message = error.message
    for ours, theirs in _NAMES.items():
        message = message.replace(f"`{ours}`", f"`{theirs}`")
    param = _NAMES.get(error.param or "", error.param)
    return RequestError(message, remedy=error.remedy, param=param, code=error.code)


@dataclass
class Response:
    """Hold an answer, or what a stream adds to one.

    `finish_reason`: stop, length, abort, error; None in a stream's chunk with more to follow.
    `stop_reason`: the stop word or stop token that ended it; None for an end of sequence.
    `index`: the prompt's place in the list; `choice`: which of its `n` answers. The numbers of
    tokens count the answer up to here, with the token that ended it. `logprobs`, where asked for,
    has for each token a map of the likeliest tokens and of itself to their log probabilities;
    `logit_rows` a row of numpy per token, f32[V], and `logits` gives all of them; so do
    `hidden_rows`, f32[D], and `last_hidden_state`. With the reason `error`, `error_code` and
    `error_message` say why.
    """

    text: str = ""
    generate_token_len: int = 0
    input_token_len: int = 0
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    index: int = 0
    choice: int = 0
    cached_tokens: int = 0
    stop_reason: str | int | None = None
    error_code: str | None = None
    error_message: str | None = None
    logit_rows: list[Any] = field(default_factory=list, repr=False)
    hidden_rows: list[Any] = field(default_factory=list, repr=False)

    @property
    def logits(self) -> torch.Tensor | None:
        """The rows as one tensor, f32[N, V], or None where they were not asked for."""
        return _stack(self.logit_rows)

    @property
    def last_hidden_state(self) -> torch.Tensor | None:
        """The rows as one tensor, f32[N, D], or None where they were not asked for."""
        return _stack(self.hidden_rows)

    def extend(self, other: Response) -> Response:
        """Add a stream's next chunk to this answer, and give the answer."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logit_rows += other.logit_rows
        self.hidden_rows += other.hidden_rows
        if other.logprobs is not None:
            self.logprobs = (self.logprobs or []) + other.logprobs
        self.generate_token_len = other.generate_token_len
        self.input_token_len = other.input_token_len
        self.cached_tokens = other.cached_tokens
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        self.error_code, self.error_message = other.error_code, other.error_message
        return self


def _stack(rows: Sequence[Any]) -> torch.Tensor | None:
    if not rows:
        return None
    # Scripts import this module for its names alone, which should take no time.
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(rows))
