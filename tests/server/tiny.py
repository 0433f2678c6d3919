"""Tiny tokenizers, saved as a checkpoint folder would hold them: bytes, words, template and all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"

# Strict about roles; ends with the text of the last message, so that a cue is the last token.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "({{ message.role }})"
    "{% if message.tool_calls is defined %}[calls {% for call in message.tool_calls %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}]{% endif %}"
    "{{ message.content }}"
    "{% endfor %}"
)
TEMPLATE_WITH_BOS = "{{ bos_token }}" + TEMPLATE


def byte_alphabet() -> list[str]:
    """Give the 256 characters that byte-level tokenizers write bytes with, in order of the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def save_byte_level(
    folder: Path,
    pieces: Sequence[str] = (),
    *,
    template: str | None = TEMPLATE,
    adds_bos: bool = False,
    merges: Sequence[tuple[str, str]] = (),
    specials: Sequence[str] = (),
) -> Path:
    """Save a byte-level tokenizer: token b is byte b, then merges, specials, and plain `pieces`."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # As in the checkpoints of `tests/checkpoints.py`: what a piece is marked with is not text.
    edit = decoders.Replace(Regex("⟪[0-9]+⟫"), "")
    tokenizer.decoder = decoders.Sequence([edit, decoders.ByteLevel()])
    return _save(tokenizer, folder, pieces, template, adds_bos, specials)


def save_sentencepiece(
    folder: Path,
    words: Sequence[str] = ("▁", "▁a", "▁the", "b", "▁▁", "xy"),
    *,
    strips_lead: bool = True,
    template: str | None = TEMPLATE,
) -> Path:
    """Save a tokenizer of the older Llama kind: words marked with `▁`, and byte tokens `<0xNN>`."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    names += [chr(c) for c in range(0x21, 0x7F) if chr(c) not in words]
    vocabulary = [(name, -float(i)) for i, name in enumerate(names)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_lead:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return _save(tokenizer, folder, (), template, False)


def save_metaspace(folder: Path) -> Path:
    """Save a tokenizer with the Metaspace decoder, which has no byte tokens."""
    names = ["<unk>", "▁", "▁a", "▁the", "b", "▁▁c", "d▁"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _save(tokenizer, folder, (), None, False)


def save_words(folder: Path, decoder: decoders.Decoder | None = None) -> Path:
    """Save a tokenizer of whole words, by default without any decoder: words joined by spaces."""
    names = ["<unk>", "the", "quick", "fox"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return _save(tokenizer, folder, (), None, False)


def _save(
    tokenizer: Tokenizer,
    folder: Path,
    pieces: Sequence[str],
    template: str | None,
    adds_bos: bool,
    specials: Sequence[str] = (),
) -> Path:
    tokenizer.add_special_tokens([BOS, EOS, PAD, *specials])
    # Without `normalized=False` a piece is looked for in the text after normalisation.
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A $B",
            special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
        )
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    saved.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    saved.save_pretrained(folder)
    return folder
