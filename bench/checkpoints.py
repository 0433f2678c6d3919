"""Checkpoints of the benchmark models with random weights and a plain tokenizer, written to disk.

Called by the benchmarks that start the real engine; nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.bench.random_models import CONFIGS
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.models.config import from_hf
from treadle.models.registry import build_graph
from treadle.runtime.config import DTYPES
from treadle.runtime.weights import tensors_of

SHARD_BYTES = 4 * 2**30


def write_checkpoint(name: str, folder: Path, num_layers: int = 0) -> Path:
    """Write a model's checkpoint below `folder`, unless it is there; give its path.

    `num_layers` cuts it, 0 leaves it whole. The matrices are N(0, 0.02).
    """
    values = dict(CONFIGS[name])
    if num_layers:
        values["num_hidden_layers"] = num_layers
    path = folder / f"{name}-{values['num_hidden_layers']}-layers"
    if (path / "complete").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = replace(from_hf(values), num_layers=int(str(values["num_hidden_layers"])))
    dtype = TORCH_DTYPES[DTYPES[config.dtype]]
    graph = build_graph(config, step="decode", dtype=DTYPES[config.dtype], page_size=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    number = total_bytes = 0

    def flush() -> None:
        nonlocal number, total_bytes
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        file = f"model-{number:05}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()
        number += 1

    for weight in graph.weights:
        if weight.fallback == "model.embed_tokens.weight" and values.get("tie_word_embeddings"):
            continue  # the head is the embedding
        for part, shape in tensors_of(weight).items():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            shard[part] = tensor.normal_(0.0 if len(shape) > 1 else 1.0, 0.02).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
    flush()
    about = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(about))
    (path / "config.json").write_text(json.dumps(values, indent=1))
    _write_tokenizer(path, config.vocab_size)
    (path / "complete").write_text("")
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer of words: `t17` is token 17. No token ends an answer."""
    vocab = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
