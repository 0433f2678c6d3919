"""The requests of the endpoints that are no other vendor's: text or token ids in, and figures out.

Must not know engines or HTTP; `server/native.py` answers them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.ir.errors import RequestError
from treadle.runtime.request import INT32_MAX, MAX_LOGPROBS, SamplingParams
from treadle.server.conversation import MAX_PROMPTS
from treadle.server.fields import boolean, declare, list_of, one_of, one_or_many, string, whole
from treadle.server.schema import MAX_TOKEN_IDS, GenerateRequest, Request

_IDS = list_of(whole(0, INT32_MAX), MAX_TOKEN_IDS, 1)
DEFAULT_GENERATE_TOKENS = 128
MAX_ROWS_BYTES = 64 * 2**20  # of an answer's logits or hidden states


@dataclass(frozen=True, kw_only=True)
class GenerateTextRequest(GenerateRequest):
    """Hold the body of /generate."""

    prompt: str | None = declare(string(), None, doc="A text; either this or `input_ids`.")
    input_ids: tuple[int, ...] | None = declare(_IDS, None, doc="Token ids, used as they are.")
    add_special_tokens: bool = declare(
        boolean(), True, doc="With `prompt`: add what the tokenizer puts around a raw text."
    )
    return_logprob: bool = declare(
        boolean(), False, doc="Tell the log probability of each token of the answer."
    )
    top_logprobs_num: int = declare(
        whole(0, MAX_LOGPROBS), 0, doc="With `return_logprob`: of this many likeliest tokens too."
    )

    output_logits: str | None = declare(
        one_of("generation", "all"),
        None,
        doc="Give the logits that each token of the answer was drawn from, or before them those of "
        f"the prompt's tokens after the first; at most {MAX_ROWS_BYTES >> 20} MiB of them.",
    )
    output_last_hidden_state: str | None = declare(
        one_of("generation", "all"),
        None,
        doc="Give what those logits are made of, the final norm's output, of the same tokens.",
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if (self.prompt is None) == (self.input_ids is None):
            found = "neither" if self.prompt is None else "both"
            raise RequestError(
                f"Expected either `prompt` or `input_ids`, found {found}.",
                param="prompt",
                code="invalid_value",
            )
        if self.n != 1:
            raise RequestError(
                f"Expected `n` to be 1 here, found {self.n}.",
                remedy="Send several requests, or use /v1/completions.",
                param="n",
                code="invalid_value",
            )
        if len(self._told) > 1:
            raise RequestError(
                "Expected `output_logits` and `output_last_hidden_state` of the same tokens, found "
                f"{self.output_logits} and {self.output_last_hidden_state}.",
                remedy="Ask for `all` of both.",
                param="output_last_hidden_state",
                code="invalid_value",
            )
        super().check()

    @property
    def _told(self) -> set[str]:
        """The tokens whose logits or hidden states are told."""
        asked = (self.output_logits, self.output_last_hidden_state)
        return {tokens for tokens in asked if tokens is not None}

    def sampling(self) -> SamplingParams:
        """Give the engine's parameters."""
        params = super().sampling()
        if self.return_logprob:
            params = replace(params, logprobs=self.top_logprobs_num)
        if not self._told:
            return params
        return replace(
            params,
            logprobs=params.logprobs or 0,
            prompt_logprobs=0 if "all" in self._told else None,
            tells_logits=self.output_logits is not None,
            tells_hidden=self.output_last_hidden_state is not None,
        )


@dataclass(frozen=True, kw_only=True)
class PerplexityRequest(Request):
    """Hold the body of /get_ppl."""

    input: str | None = declare(string(), None, doc="A text; either this or `input_ids`.")
    input_ids: tuple[int, ...] | None = declare(_IDS, None, doc="Token ids, used as they are.")
    add_special_tokens: bool = declare(
        boolean(), True, doc="With `input`: add what the tokenizer puts around a raw text."
    )

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if (self.input is None) == (self.input_ids is None):
            found = "neither" if self.input is None else "both"
            raise RequestError(
                f"Expected either `input` or `input_ids`, found {found}.",
                param="input",
                code="invalid_value",
            )


@dataclass(frozen=True, kw_only=True)
class EncodeRequest(Request):
    """Hold the body of /v1/encode."""

    input: tuple[str, ...] = declare(
        one_or_many(string(), MAX_PROMPTS), doc="A text, or a list of texts."
    )
    do_preprocess: bool = declare(
        boolean(), False, doc="Write each text as a user's message by the chat template first."
    )
    add_bos: bool = declare(
        boolean(), True, doc="Add what the tokenizer puts around a raw text, such as BOS."
    )


@dataclass(frozen=True, kw_only=True)
class AbortRequest(Request):
    """Hold the body of /abort_request."""

    request_id: str | None = declare(
        string(256, 1), None, doc="An answer's `id`, or the `X-Request-Id` it was asked for with."
    )
    abort_all: bool = declare(boolean(), False, doc="End all answers.")

    def check(self) -> None:
        """Compare the fields with each other. Raises: RequestError."""
        if (self.request_id is None) != self.abort_all:
            raise RequestError(
                "Expected either `request_id` or `abort_all` true.",
                param="request_id",
                code="invalid_value",
            )
