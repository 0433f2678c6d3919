"""Structured output: an answer's form as a grammar, compiled once, and as the tokens it allows.

llguidance does the grammars; this module decides what is asked of it, what is refused, and what
beside the grammar decides which tokens come next. Must not know HTTP or devices. The engine
compiles; the scheduler tells tokens; the writer of batches asks for the allowed ones.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from treadle.ir.errors import RequestError
from treadle.ir.ops.sampling import WORD_BITS
from treadle.runtime.request import FinishReason, SamplingParams, Structure
from treadle.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 200_000
CACHED_GRAMMARS = 256
# Between the parts of a JSON text: a model that likes white space can't go on with it for ever.
WHITESPACE = r"[ \n]?"


class Grammar:
    """A compiled structure. Give a new state of it to each answer by `start`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLMatcher:
        """Give a matcher at the beginning of an answer."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compile structures for one tokenizer and keep the latest. Safe to call from several threads.

    Nothing here may run on the event loop: a large vocabulary or schema takes its time.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()

    def compile(self, structure: Structure) -> Grammar:
        """Give the grammar of a structure.

        Raises: RequestError: it can't be enforced, or its library is missing; names what.
        """
        library = _load_library(structure)
        with self._lock:
            if structure in self._kept:
                self._kept.move_to_end(structure)
                return self._kept[structure]
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(library, self._tokenizer, self._vocab_size)
            vocabulary = self._vocabulary
        grammar = Grammar(_compile(library, structure, vocabulary))
        with self._lock:
            self._kept[structure] = grammar
            if len(self._kept) > CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar


def _load_library(structure: Structure) -> ModuleType:
    """Import llguidance, which only answers of a given form need.

    Raises: RequestError: it can't be imported.
    """
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "An answer of a given form needs the package `llguidance`, which can't be imported "
            f"here: {error}.",
            remedy="Ask for no form; whoever runs the engine can `pip install llguidance`.",
            param=structure.param,
            code="unsupported_structure",
        ) from error
    return llguidance


def _read_vocabulary(library: ModuleType, tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Tell llguidance the bytes of every token; a model may have more of them, or fewer."""
    wrapper = library.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    vocabulary: LLTokenizer = library.LLTokenizer(wrapper, n_vocab=vocab_size)
    return vocabulary


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_text(token_id)[1] for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _compile(library: ModuleType, structure: Structure, vocabulary: LLTokenizer) -> LLMatcher:
    if len(structure.text) > MAX_GRAMMAR_CHARS:
        raise _refuse(structure, f"it has more than {MAX_GRAMMAR_CHARS} characters")
    try:
        grammar = _grammar_text(library, structure)
        matcher: LLMatcher = library.LLMatcher(vocabulary, grammar, log_level=0)
        reason = matcher.get_error()
        if not reason:
            # Some mistakes show only here, such as a reference that leads to nothing but itself.
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            reason = probe.get_error()
    except RequestError:
        raise
    # The library refuses by ValueError; a panic of its own is no Exception.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = str(error) or type(error).__name__
    if reason:
        raise _refuse(structure, reason.strip().splitlines()[0][:300].rstrip("."))
    return matcher


def _grammar_text(library: ModuleType, structure: Structure) -> str:
    """Give a structure in the form that llguidance compiles."""
    grammar: str
    if structure.kind == "json_schema":
        schema = json.loads(structure.text)
        if not isinstance(schema, dict):
            raise _refuse(structure, "it is not an object")
        grammar = library.JsonCompiler(whitespace_pattern=WHITESPACE).compile(structure.text)
    elif structure.kind == "regex":
        grammar = library.LLMatcher.grammar_from_regex(structure.text)
    elif structure.kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(structure.text))
        grammar = library.LLMatcher.grammar_from_lark(f"start: {choices}")
    else:
        grammar = library.LLMatcher.grammar_from_lark(structure.text)
    return grammar


def _refuse(structure: Structure, reason: str) -> RequestError:
    return RequestError(
        f"The {structure.kind.replace('_', ' ')} of the structured output can't be enforced: "
        f"{reason}.",
        remedy="Leave out what is named, or ask for another form.",
        param=structure.param,
        code="unsupported_structure",
    )


@dataclass(eq=False)
class TokenConstraint:
    """Follow one answer and say which tokens may come next, by its grammar and its bad words.

    Lives as long as the answer, whatever row it has, and through preemption. With
    `params.structure_after` the grammar begins behind the token that completes that text, such as
    the end of the reasoning; until then every token is allowed.
    """

    params: SamplingParams
    eos_token_ids: frozenset[int]
    matcher: LLMatcher | None = None
    token_bytes: Callable[[int], bytes] = lambda token: b""
    _tail: bytes = b""

    def __post_init__(self) -> None:
        self._after = self.params.structure_after.encode()

    def accept(self, token: int) -> FinishReason | None:
        """Take the answer's next token; say whether it ends the answer."""
        if self.matcher is None:
            return None
        if self._after:
            self._tail += self.token_bytes(token)
            if self._after in self._tail:
                self._after = b""
            else:
                self._tail = self._tail[-len(self._after) :]
            return None
        if token in self.eos_token_ids:
            return FinishReason.STOP
        if not self.matcher.consume_token(token):
            return FinishReason.ERROR
        return FinishReason.STOP if self.matcher.is_stopped() else None

    def write_allowed(self, words: np.ndarray, answer: Sequence[int]) -> None:
        """Write the tokens that the answer may go on with: u32[V / 32], token v at bit v % 32.

        Where an end of sequence is all that is allowed, it is, whatever `min_tokens` says.
        """
        if self.matcher is None or self._after:
            words.fill(2**WORD_BITS - 1)
        else:
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._allow_ends(words, len(answer))
        for sequence in self.params.bad_sequences:
            before = sequence[:-1]
            if len(answer) >= len(before) and tuple(answer[len(answer) - len(before) :]) == before:
                _allow(words, sequence[-1], False)

    def _allow_ends(self, words: np.ndarray, num_generated: int) -> None:
        """Let all ends of sequence stand for the one that the grammar knows."""
        may_end = any(int(words[i // WORD_BITS]) >> i % WORD_BITS & 1 for i in self.eos_token_ids)
        for token in self.eos_token_ids:
            _allow(words, token, False)
        if may_end and (num_generated >= self.params.min_tokens or not words.any()):
            for token in self.eos_token_ids:
                _allow(words, token, True)


def _allow(words: np.ndarray, token: int, allowed: bool) -> None:
    bit = np.uint32(1 << token % WORD_BITS)
    if allowed:
        words[token // WORD_BITS] |= bit
    else:
        words[token // WORD_BITS] &= ~bit
