"""Tiny checkpoints that tests write into a folder, and the library that judges them.

S, script: the last token alone decides the next one, so any answer can be forced.
D, dice: the same with chosen probabilities. R, random: attention matters. All Llama-like, all CPU.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging

from treadle.ir import knobs
from treadle.runtime import demo_model
from treadle.runtime.progress import Progress

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("system", "user", "assistant", "tool")
SPECIALS = (BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES))
NUM_BYTES = 256
BOS_ID, EOS_ID, PAD_ID = NUM_BYTES, NUM_BYTES + 1, NUM_BYTES + 2

# The prompt ends with the last message's content, so that a cue in it is the last prompt token.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role not in ["system", "user", "assistant", "tool"] %}
{{- raise_exception("Unknown role: " + message.role) }}
{%- endif %}
{%- if message.role == "system" and not loop.first %}
{{- raise_exception("The system message must come first") }}
{%- endif %}
{{- "<|" + message.role + "|>" }}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content %}{{ part.text }}{% endfor %}
{%- endif %}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- if message.role == "assistant" %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|assistant|>" }}
{%- set last = messages[-1].content %}
{%- if last is string %}{{ last }}
{%- elif last %}
{%- for part in last %}{{ part.text }}{% endfor %}
{%- endif %}
{%- endif %}"""


@dataclass(frozen=True)
class ScriptedModel:
    """Describe fixture S: by cue, the cue's token, the answer's tokens and its text."""

    path: Path
    vocab_size: int
    cue_ids: dict[str, int]
    answer_ids: dict[str, tuple[int, ...]]
    answer_texts: dict[str, str]


@dataclass(frozen=True)
class DiceModel:
    """Describe fixture D: the cue's token, and every face's token."""

    path: Path
    vocab_size: int
    cue_id: int
    face_ids: dict[str, int]


def make_script(
    path: Path,
    scripts: Mapping[str, Sequence[str | bytes]],
    *,
    window: int = 128,
    dtype: str = "float32",
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: Mapping[str, object] | None = None,
) -> ScriptedModel:
    """Write fixture S: after a cue (`[[S1]]`) greedy decoding gives its items, in any dtype.

    An item is a piece of text (one token), bytes (one token per byte), or, as the last one, `EOS`
    or a cue. A script that ends otherwise repeats its last token for ever. A token that is not part
    of a script is followed by `EOS`. The logit of the right token is √V, all others are 0. An item
    that occurs again gets a token of its own that reads the same.
    """
    vocabulary = _Vocabulary()
    cue_ids = {cue: vocabulary.piece(cue) for cue in scripts}
    successor: dict[int, int] = {}
    answer_ids: dict[str, tuple[int, ...]] = {}
    for cue, items in scripts.items():
        token = cue_ids[cue]
        answer: list[int] = []
        for item in _single_tokens(items):
            assert token != EOS_ID and (not answer or token not in cue_ids.values()), (
                f"{cue}: an end or a cue must be the last item, the next token hangs on it alone"
            )
            following = vocabulary.item(item)
            if following in successor and following not in cue_ids.values():
                following = vocabulary.alias(following)
            successor[token] = following
            answer.append(following)
            token = following
            if token != EOS_ID and token not in cue_ids.values():
                # Taken, so that this item's next occurrence gets a token of its own.
                successor.setdefault(token, token)
        answer_ids[cue] = tuple(answer)
    columns = {token: {following: 1.0} for token, following in successor.items()}
    vocab_size = _write_last_token_model(
        path, vocabulary, columns, default=0.0, otherwise=1.0, window=window, dtype=dtype
    )
    tokenizer = _write_tokenizer(path, vocabulary.texts(vocab_size), chat_template)
    _write_generation_config(path, generation_config)
    texts = {cue: str(tokenizer.decode(list(ids))) for cue, ids in answer_ids.items()}
    return ScriptedModel(path, vocab_size, cue_ids, answer_ids, texts)


def make_dice(
    path: Path,
    faces: Mapping[str, float] | None = None,
    *,
    cue: str = "[[S1]]",
    then: Literal["cue", "face", "end"] = "cue",
    window: int = 128,
    dtype: str = "float32",
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: Mapping[str, object] | None = None,
) -> DiceModel:
    """Write fixture D: after the cue, a face comes with its probability (A .4, B .3, C .2, D .1).

    A face is followed by the cue, another face, or the end. Logits are ln p, or -30 for p = 0.
    """
    faces = faces or {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}
    vocabulary = _Vocabulary()
    cue_id = vocabulary.piece(cue)
    face_ids = {face: vocabulary.piece(face) for face in faces}
    throw = {face_ids[face]: math.log(probability) for face, probability in faces.items()}
    after = {"cue": {cue_id: 0.0}, "face": throw, "end": {EOS_ID: 0.0}}[then]
    columns = {cue_id: throw} | dict.fromkeys(face_ids.values(), after)
    root = math.sqrt(vocabulary.padded_size())
    vocab_size = _write_last_token_model(
        path,
        vocabulary,
        {token: {to: logit / root for to, logit in row.items()} for token, row in columns.items()},
        default=-30.0 / root,
        otherwise=0.0,
        window=window,
        dtype=dtype,
    )
    _write_tokenizer(path, vocabulary.texts(vocab_size), chat_template)
    _write_generation_config(path, generation_config)
    return DiceModel(path, vocab_size, cue_id, face_ids)


def make_random(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write fixture R: 2 layers, hidden 64, 4 heads over 2, head 16, MLP 128, vocabulary 320."""
    return make_llama(path, seed=seed, **changes)


def make_llama(
    path: Path,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    vocab_size: int = 320,
    window: int = 128,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, object] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    architecture: Literal["llama", "mistral"] = "llama",
    std: float = 0.3,
    with_tokenizer: bool = True,
) -> Path:
    """Write a checkpoint with weights N(0, std) and norms around 1; the seed decides every bit.

    The tokenizer has the vocabulary's size; leave it out where bytes and specials don't fit.
    """
    settings: dict[str, Any] = dict(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=window,
        tie_word_embeddings=tie,
        rope_theta=rope_theta,
        **_token_ids(vocab_size),
    )
    if rope_scaling is not None:
        settings["rope_scaling"] = dict(rope_scaling)
    if architecture == "llama":
        settings |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        assert not attention_bias and not mlp_bias, "Mistral has no biases"
        model = MistralForCausalLM(MistralConfig(**settings, sliding_window=None))
    _randomise(model, seed, std)
    _save(model, path, dtype)
    if shards > 1:
        split_into_shards(path, shards)
    if with_tokenizer:
        _write_tokenizer(path, _Vocabulary().texts(vocab_size), CHAT_TEMPLATE)
        _write_generation_config(path, None)
    return path


def make_family(
    path: Path, model_type: str, *, seed: int = 0, std: float = 0.3, **changes: Any
) -> Path:
    """Write a checkpoint of any architecture of transformers, sized and filled as by `make_llama`.

    `changes` are keys of its config; its own defaults hold for what is not a size.
    """
    settings: dict[str, Any] = dict(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=320,
        max_position_embeddings=128,
        **_token_ids(320),
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(settings | changes))
    )
    _randomise(model, seed, std)
    _save(model, path, "float32")
    _write_tokenizer(path, _Vocabulary().texts(320), CHAT_TEMPLATE)
    _write_generation_config(path, None)
    return path


def _randomise(model: Any, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1 + 0.1 * values if is_norm else std * values)
        for name, buffer in sorted(model.named_buffers()):
            if name in model.state_dict():  # one that is saved: a correction, for example
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def split_into_shards(path: Path, shards: int) -> None:
    """Turn a folder's model.safetensors into shards and an index, as of a large model."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name].clone() for name in part}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_json(file: Path, changes: Mapping[str, object], drop: Iterable[str] = ()) -> None:
    """Set and remove keys of a JSON file, such as a config's."""
    content = json.loads(file.read_text()) | dict(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in drop}))


def write_gguf(
    source: Path,
    file: Path,
    tensor_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    metadata: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    replacements: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    architecture: Literal["llama", "qwen2"] = "llama",
) -> Path:
    """Convert a folder that `make_llama` wrote to GGUF, as llama.cpp's converter does.

    Matrices get `tensor_type`, vectors float32; for llama, rows of q and k are interleaved.
    `metadata` sets keys, such as `llama.rope.scaling.type`; a value of None leaves a key out.
    `replacements` gives codes and type of a weight by its short name, such as `blk.0.ffn_up`.
    """
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    values: dict[str, object] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": float(rope.get("rope_theta") or config["rope_theta"]),
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (values | dict(metadata or {})).items():
        _add_metadata(writer, key.replace("llama.", f"{architecture}.", 1), value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if architecture != "llama":
        heads = {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        short = _gguf_name(name)
        array = tensor.float().numpy()
        if (part := short.split(".")[-2]) in heads:
            halves = array.reshape(heads[part], 2, -1, *array.shape[1:])  # [H, 2, D/2, ...]
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        kind = tensor_type if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        codes = gguf.quantize(array, kind)
        if replacements and short.removesuffix(".weight") in replacements:
            codes, kind = replacements[short.removesuffix(".weight")]
        writer.add_tensor(short, codes, raw_dtype=kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load_oracle(path: Path, gguf_file: str | None = None) -> Any:
    """Load a checkpoint in transformers: eager attention, float32, on the CPU."""
    transformers_logging.disable_progress_bar()
    extra: dict[str, Any] = {}
    if gguf_file is not None:
        extra["gguf_file"] = gguf_file
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **extra
    ).eval()


def oracle_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute the logits after each token of one sequence.

    Shapes: f32[T, V]
    """
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].float()  # [T, V]


def oracle_hidden(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute the final norm's output after each token of one sequence.

    Shapes: f32[T, D]
    """
    with torch.no_grad():
        return model.model(torch.tensor([list(token_ids)])).last_hidden_state[0].float()  # [T, D]


def oracle_greedy(model: Any, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Generate greedily; give the new tokens, the end included."""
    prompt = torch.tensor([list(token_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_tokens,
    )
    return output[0, prompt.shape[1] :].tolist()


TIE = 2e-5  # between logits of about 5 in f32: some ten times what rounding makes of a sum
MOST_DRAWS = 20


def oracle_answers(
    model: Any, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Give the prompts and their greedy answers, but other prompts for those with a tie.

    Where two tokens are equally good, rounding chooses, the oracle's as ours: there is no answer to
    compare with. Such a prompt is drawn again, as long as it was.
    """
    pairs = [_beyond_doubt(model, prompt, max_tokens) for prompt in prompts]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def _beyond_doubt(model: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    generator = random.Random(str(prompt))
    for _ in range(MOST_DRAWS):
        answer = oracle_greedy(model, prompt, max_tokens)
        logits = oracle_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]  # [N, V]
        best, second = logits.topk(2).values.T  # [N] each
        if float((best - second).min()) > TIE:
            return prompt, answer
        prompt = [generator.randrange(320) for _ in prompt]
    raise AssertionError(f"{MOST_DRAWS} prompts of {len(prompt)} tokens had ties in their answers")


def find_demo_model() -> Path:
    """Give the demo model's GGUF file where it is at hand; skip the test where it isn't."""
    folder = knobs.cache_dir() / "demo" / f"{demo_model.PACKAGE}-{demo_model.VERSION}"
    if not (folder / Path(demo_model.MEMBER).name).is_file() and knobs.demo_wheel() is None:
        pytest.skip("needs the demo model: run `demo` once, or set TREADLE_DEMO_WHEEL")
    return demo_model.fetch(Progress("none"))


class _Vocabulary:
    """Number the tokens: 256 bytes (id = byte), the specials, then pieces, aliases and padding."""

    def __init__(self) -> None:
        self._texts = [_BYTE_TO_CHAR[byte] for byte in range(NUM_BYTES)] + list(SPECIALS)
        self._ids = {text: token for token, text in enumerate(self._texts)}
        self._pieces: set[int] = set()

    def piece(self, text: str) -> int:
        """Give the token of a piece of text, a cue or a special; a new one at first sight."""
        if text in SPECIALS:
            return self._ids[text]
        if not text.isascii():
            # The decoder reads a non-ASCII character of a token as one byte: spell it in bytes.
            return self._add("".join(_BYTE_TO_CHAR[byte] for byte in text.encode()))
        known = self._ids.get(text)
        if known is not None and known < NUM_BYTES:
            return known  # a single character is its byte's token
        token = self._add(text)
        self._pieces.add(token)
        return token

    def item(self, item: str | bytes) -> int:
        return item[0] if isinstance(item, bytes) else self.piece(item)

    def alias(self, token: int) -> int:
        """Add another token that reads the same; the tokenizer's decoder drops the mark."""
        return self._add(f"{self._texts[token]}⟪{len(self._texts)}⟫")

    def padded_size(self) -> int:
        return -(-len(self._texts) // 16) * 16

    def texts(self, size: int) -> tuple[list[str], list[str]]:
        """Give all tokens in order, padded to `size`, and those that are matched in prompts."""
        assert size >= len(self._texts), f"{size} tokens can't hold {len(self._texts)}"
        padding = [f"<|reserved_{token}|>" for token in range(len(self._texts), size)]
        return self._texts + padding, [self._texts[token] for token in sorted(self._pieces)]

    def _add(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]


def _bytes_to_chars() -> dict[int, str]:
    """Map bytes to printable characters as byte-level tokenizers do."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + position) for position, byte in enumerate(others)
    }


_BYTE_TO_CHAR = _bytes_to_chars()


def _single_tokens(items: Iterable[str | bytes]) -> Iterable[str | bytes]:
    for item in items:
        if isinstance(item, bytes):
            yield from (bytes([byte]) for byte in item)
        else:
            yield item


def _token_ids(vocab_size: int) -> dict[str, int | None]:
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {key: token if token < vocab_size else None for key, token in ids.items()}


def _write_last_token_model(
    path: Path,
    vocabulary: _Vocabulary,
    columns: Mapping[int, Mapping[int, float]],
    *,
    default: float,
    otherwise: float,
    window: int,
    dtype: str,
) -> int:
    """Write a model whose logits after token i are √V times column i of `lm_head`.

    Attention and MLP add nothing, the embedding is the identity, so the last norm sees a unit
    vector and scales it by √V. A column without entries leads to `EOS` with the value `otherwise`.
    """
    vocab_size = vocabulary.padded_size()
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=vocab_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        vocab_size=vocab_size,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        **_token_ids(vocab_size),  # type: ignore[arg-type]
    )
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        head = model.lm_head.weight.fill_(default)
        for token in range(vocab_size):
            for following, value in columns.get(token, {EOS_ID: otherwise}).items():
                head[following, token] = value
    _save(model, path, dtype)
    return vocab_size


def _save(model: Any, path: Path, dtype: str) -> None:
    transformers_logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(path)


def _write_tokenizer(
    path: Path, texts: tuple[list[str], list[str]], chat_template: str | None
) -> PreTrainedTokenizerFast:
    all_texts, pieces = texts
    tokenizer = Tokenizer(
        models.BPE(vocab={text: token for token, text in enumerate(all_texts)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex("⟪[0-9]+⟫"), ""), decoders.ByteLevel()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in pieces])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(path)
    return wrapped


def _write_generation_config(path: Path, changes: Mapping[str, object] | None) -> None:
    content = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    file = path / "generation_config.json"
    file.write_text(json.dumps(content | dict(changes or {}), indent=2))


_GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 16)


def _gguf_name(name: str) -> str:
    short = _GGUF_NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
    assert short is not None, f"{name} has no name in GGUF"
    return short


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, list(value))  # type: ignore[call-overload]
