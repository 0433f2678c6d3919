"""Text to token ids and back, and chats to text, all through the checkpoint's own tokenizer.

Must not know requests, engines or HTTP. Called by the engine, the server, the offline pipeline and
`runtime/text.py`, which needs to know what one token adds to a text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jinja2 import TemplateError
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as Backend

from treadle.ir.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What rendering a template may raise: its own `raise_exception`, and what expressions raise when a
# message lacks what the template expects.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

# See `Tokenizer.surely_exceeds`. English has about four characters per token, code fewer.
_PROBE_CHARS_PER_TOKEN = 8
_PROBE_MIN_CHARS = 32_768
_PROBE_MARGIN_TOKENS = 1_024


_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenizerSource(Protocol):
    """Name what a checkpoint must offer for its tokenizer to be loaded."""

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...


class Tokenizer:
    """Wrap a checkpoint's tokenizer. Safe to use from several threads at once.

    `decode` is the reference of every text that leaves the engine: special tokens are left out,
    spaces are never tidied up, bytes that form no character come out as U+FFFD.
    Raises: CheckpointError: a tokenizer without a fast backend, or with a decoder whose text can't
    be streamed.
    """

    def __init__(
        self, hf_tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Iterable[int] = ()
    ) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise CheckpointError(
                "Expected a tokenizer that the `tokenizers` library can run, found "
                f"{type(hf_tokenizer).__name__}, which it can't.",
                remedy="Save the tokenizer as tokenizer.json (a fast tokenizer).",
            )
        # A tokenizer.json may carry the limits of its training; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._hf: Any = hf_tokenizer
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        ends = {int(token_id) for token_id in eos_token_ids}
        if hf_tokenizer.eos_token_id is not None:
            ends.add(int(hf_tokenizer.eos_token_id))
        self.eos_token_ids: frozenset[int] = frozenset(ends)
        self.has_chat_template: bool = bool(hf_tokenizer.chat_template)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        kind = _classify_decoder(backend)
        self.is_byte_level, self.has_byte_fallback = kind.is_byte_level, kind.has_byte_fallback
        self._edits = kind.edits
        render = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        self._template_names = {*render, "messages", *hf_tokenizer.special_tokens_map}
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_source(cls, source: TokenizerSource) -> Tokenizer:
        """Load the tokenizer that belongs to a checkpoint.

        Raises: CheckpointError: it has none, or one that can't be used.
        """
        return cls.from_path(
            source.path,
            source.kind,
            config=source.config,
            generation_config=source.generation_config,
        )

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        kind: str = "safetensors",
        *,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Load from a Hugging Face folder (`kind` safetensors) or a file (`kind` gguf).

        Ends of sequence: those of the generation config, or else of the config, and the
        tokenizer's own. Nothing is fetched and no code of the checkpoint is run.
        Raises: CheckpointError: no tokenizer there, or one that can't be used.
        """
        path = Path(path)
        folder, options = path, {}
        if kind == "gguf":
            folder, options = path.parent, {"gguf_file": path.name}
        elif kind != "safetensors":
            raise CheckpointError(
                f"Expected a checkpoint of kind safetensors or gguf, found `{kind}`."
            )
        if not path.exists():
            raise CheckpointError(
                f"Expected a tokenizer at {path}, found nothing there.", remedy="Check the path."
            )
        # Either takes seconds to import, which serving spends while weights load in other threads.
        # The plain class is what the other one would find, and takes half the time.
        loader: Any
        if _is_of_plain_class(folder):
            from transformers import TokenizersBackend as loader
        else:
            from transformers import AutoTokenizer as loader

        try:
            hf_tokenizer = loader.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **options
            )
        # The libraries report missing, damaged and unknown tokenizers through errors of all kinds,
        # the backend through a bare Exception; some of the texts have several lines.
        except Exception as error:
            raise CheckpointError(
                f"Expected a tokenizer that transformers can load from {path}: "
                f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}.",
                remedy="A folder needs tokenizer.json and tokenizer_config.json.",
            ) from error
        if kind == "gguf":
            _simplify_decoder(hf_tokenizer)
        ends = _token_ids((generation_config or {}).get("eos_token_id"))
        ends = ends or _token_ids((config or {}).get("eos_token_id"))
        return cls(hf_tokenizer, eos_token_ids=ends)

    def save(self, folder: Path) -> None:
        """Write the tokenizer as a Hugging Face folder, which loads in a moment.

        Raises: OSError: it can't be written.
        """
        try:
            self._hf.save_pretrained(str(folder))
        except Exception as error:
            # The backend's errors of the system have no class of their own, only this in the text.
            number = re.search(r"\(os error (\d+)\)", str(error))
            if isinstance(error, OSError) or number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids. Special tokens written out in the text become those tokens.

        `add_special_tokens`: also add what the tokenizer puts around a raw text, such as BOS. Text
        from a chat template has its own already.
        Raises: RequestError: text with half of a surrogate pair, which no encoding can hold.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            position = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if position is None:
                raise
            raise RequestError(
                f"Expected Unicode text, found half of a surrogate pair at character {position}.",
                remedy="Send whole characters.",
                code="invalid_text",
            ) from error

    def surely_exceeds(self, text: str, max_tokens: int) -> bool:
        """Say, from its beginning alone, whether a long text has more than `max_tokens` tokens.

        False says nothing. Spares a server from tokenising megabytes that can't fit. The cut
        changes the tokens next to it only, hence the margin.
        """
        num_characters = max(_PROBE_CHARS_PER_TOKEN * max_tokens, _PROBE_MIN_CHARS)
        if len(text) < 2 * num_characters:
            return False
        begin = self._backend.encode(text[:num_characters], add_special_tokens=False)
        return len(begin) > max_tokens + _PROBE_MARGIN_TOKENS

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        continues_text: bool = False,
        keeps_special: bool = False,
    ) -> str:
        """Turn token ids into text in one go. `keeps_special`: special tokens are written out.

        `continues_text`: the ids follow another text, so the space that begins their first word is
        kept. It only matters to tokenizers that mark words with a leading `▁`.
        """
        assert not (continues_text and keeps_special), "nothing asks for both"
        if not continues_text or self.is_byte_level:
            return self._backend.decode(list(token_ids), skip_special_tokens=not keeps_special)
        pieces = [piece for i in token_ids if (piece := self.piece(i)) is not None]
        return self.join_pieces(pieces, first=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Write a conversation as the prompt text of the checkpoint's chat template.

        `continue_final_message`: the text ends with the last message, which is to be gone on with.
        `kwargs` are the template's own switches, such as `enable_thinking`.
        Raises: RequestError: there is no template, it refuses the messages, or a switch has the
        name of something the template is given anyway.
        """
        if not self.has_chat_template:
            raise RequestError(
                "Expected a chat template in the checkpoint, found none: this model has no rule "
                "for writing a conversation as text.",
                remedy="Use /v1/completions with a prompt of your own.",
                param="messages",
                code="no_chat_template",
            )
        for name in kwargs:
            if name in self._template_names:
                raise RequestError(
                    f"Expected names of the template's own in `chat_template_kwargs`, found "
                    f"`{name[:64]}`, which is not a request's to set.",
                    param="chat_template_kwargs",
                    code="reserved_name",
                )
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {str(error)[:1000]}",
                remedy="Send the roles and fields that this model was trained on.",
                param="messages",
                code="chat_template_error",
            ) from error
        assert isinstance(text, str), "tokenize=False gives text"
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Render a conversation and tokenise it; the template owns all special tokens.

        Raises: RequestError: as `render_chat` and `encode`.
        """
        text = self.render_chat(messages, tools, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def spelling(self, token_id: int) -> str:
        """Give a token as the vocabulary spells it; nothing for an id without an entry."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def chat_template(self) -> str:
        """The text of the chat template, of all of them where there are several; may be empty."""
        template = self._hf.chat_template
        if isinstance(template, Mapping):
            return "\n".join(str(one) for one in template.values())
        return template or ""

    def special_ids(self, spellings: Iterable[str]) -> frozenset[int]:
        """Give the ids of those of these texts that are special tokens."""
        found = (self._backend.token_to_id(spelling) for spelling in spellings)
        return self.special_token_ids.intersection(found)

    def describe(self) -> dict[str, Any]:
        """Give what a client needs to do without the tokenizer's files: tokens and template."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        found = {name: getattr(self._hf, name) for name in names}
        return {
            "tokenizer_class": type(self._hf).__name__,
            **{name: None if token is None else str(token) for name, token in found.items()},
            "eos_token_ids": sorted(self.eos_token_ids),
            "vocab_size": self.vocab_size,
            "chat_template": self._hf.chat_template,
        }

    def piece(self, token_id: int) -> str | None:
        """Give a token as the vocabulary spells it; None if it adds nothing to a text."""
        if token_id in self.special_token_ids:
            return None
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes that a token of a byte-level tokenizer adds to a text."""
        found = self._token_bytes.get(token_id)
        if found is None:
            piece = self.piece(token_id)
            for edit in self._edits:
                piece = piece and edit.decode([piece])
            found = _piece_bytes(piece) if piece else b""
            self._token_bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Give one token as a text of its own and as bytes; special tokens as they are spelt.

        A token that holds part of a character has U+FFFD in its text.
        """
        piece = self.piece(token_id)
        if piece is None:
            text = self.spelling(token_id)
            return text, text.encode()
        if self.is_byte_level:
            data = self.token_bytes(token_id)
        elif self.has_byte_fallback and _BYTE_PIECE.fullmatch(piece):
            data = bytes([int(piece[3:5], 16)])
        else:
            data = self.join_pieces([piece], first=False).encode()
        return data.decode("utf-8", "replace"), data

    def join_pieces(self, pieces: list[str], *, first: bool) -> str:
        """Turn pieces that stand side by side into text; `first`: they begin it."""
        decoder = self._backend.decoder
        if first:
            return " ".join(pieces) if decoder is None else decoder.decode(pieces)
        # The decoder treats what begins a text in its own way; let a plain letter begin it.
        lead = ["a", *pieces]
        return (" ".join(lead) if decoder is None else decoder.decode(lead))[1:]


def _is_of_plain_class(folder: Path) -> bool:
    """Say whether a folder's tokenizer is all in tokenizer.json, as most are that `save` wrote.

    Beside a config.json the model's type has a say in the class.
    """
    file = folder / "tokenizer_config.json"
    if (folder / "config.json").exists() or not file.is_file():
        return False
    try:
        found = json.loads(file.read_bytes())
    except ValueError:
        return False  # let the library tell
    is_plain = isinstance(found, dict) and found.get("tokenizer_class") == "TokenizersBackend"
    return is_plain and "auto_map" not in found and (folder / "tokenizer.json").is_file()


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Read the one id, list of ids or nothing that a config gives."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _build_byte_alphabet() -> dict[str, int]:
    """Give the byte of each character that byte-level vocabularies write bytes with.

    Source: GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the others follow from
    U+0100 on in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _build_byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    # A piece with any character from outside the alphabet, such as a space, is plain text.
    values = [_BYTE_OF_CHARACTER.get(character, -1) for character in piece]
    return piece.encode() if -1 in values else bytes(values)


class _DecoderKind(NamedTuple):
    """Say how a decoder makes text: of bytes, or of pieces some of which stand for single bytes.

    `edits` are what is done to each piece before it is read as bytes.
    """

    is_byte_level: bool
    has_byte_fallback: bool = False
    edits: tuple[decoders.Replace, ...] = ()


def _simplify_decoder(hf_tokenizer: PreTrainedTokenizerBase) -> None:
    """Leave a byte-level vocabulary its byte-level decoder only.

    transformers 5.17 puts the decoder of sentencepiece vocabularies before it when it reads a GGUF
    file. That one changes nothing: no byte-level piece holds `<0x..>` or U+2581.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend) or backend.decoder is None:
        return
    tree = json.loads(backend.decoder.__getstate__())
    if [step["type"] for step in tree.get("decoders", ())][-1:] == ["ByteLevel"]:
        backend.decoder = decoders.ByteLevel()


def _classify_decoder(backend: Backend) -> _DecoderKind:
    """Look at a decoder's steps.

    Accepts the decoders whose text grows token by token: those that map each piece by itself, but
    for the beginning of the text and for runs of byte tokens.
    Raises: CheckpointError: any other decoder.
    """
    if backend.decoder is None:
        return _DecoderKind(is_byte_level=False)
    tree = json.loads(backend.decoder.__getstate__())
    steps = tree["decoders"] if tree["type"] == "Sequence" else [tree]
    kinds = [step["type"] for step in steps]
    if kinds[-1] == "ByteLevel" and set(kinds[:-1]) <= {"Replace"}:
        edits = tuple(_build_replace(step) for step in steps[:-1])
        return _DecoderKind(is_byte_level=True, edits=edits)
    is_fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "Replace":
            pattern = step["pattern"].get("String", "")
            # On fused text a longer pattern could match across two tokens.
            if is_fused and len(pattern) != 1:
                _refuse_decoder(kinds, f"it replaces {pattern or 'a regular expression'!r}")
        elif kind == "Strip":
            if step["stop"] or step["start"] > 1:
                _refuse_decoder(kinds, "it strips more than one leading character")
        elif kind not in ("ByteFallback", "Metaspace"):
            _refuse_decoder(kinds, f"`{kind}` looks at more than one token")
    return _DecoderKind(is_byte_level=False, has_byte_fallback="ByteFallback" in kinds)


def _build_replace(step: dict[str, Any]) -> decoders.Replace:
    pattern = step["pattern"]
    found = Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"]
    return decoders.Replace(found, step["content"])


def _refuse_decoder(kinds: list[str], reason: str) -> None:
    raise CheckpointError(
        f"Expected a tokenizer whose text can be streamed token by token, found the decoder "
        f"{' + '.join(kinds)}: {reason}.",
        remedy="Byte-level, Metaspace and byte-fallback decoders are supported.",
    )
