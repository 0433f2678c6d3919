"""From the hidden states of a text's tokens to one embedding, as the model's folder declares it.

The files are those of sentence-transformers: `modules.json` lists what follows the model, and the
pooling's own `config.json` says how. Must not know how hidden states come about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What is offered, by the names of sentence-transformers.
POOLINGS = {"lasttoken": "last", "mean": "mean"}
_PREFIX = "pooling_mode_"
_FLAGS = {f"{_PREFIX}lasttoken": "lasttoken", f"{_PREFIX}mean_tokens": "mean"}
_OFFERED_MODULES = {"Transformer", "Pooling", "Normalize"}


def read_pooling(folder: Path, warn: Callable[[str], None]) -> str:
    """Give `last` or `mean` where the folder of a model declares it, else an empty text.

    `warn` is told of a declaration that can't be followed; then too the text is empty.
    """
    modules, declared = folder / "modules.json", folder / "1_Pooling" / "config.json"
    try:
        if modules.is_file():
            listed = json.loads(modules.read_text(encoding="utf-8"))
            kinds = {str(each["type"]).rpartition(".")[2]: each["path"] for each in listed}
            others = sorted(set(kinds) - _OFFERED_MODULES)
            if others:
                warn(f"no embeddings: {modules} asks for {', '.join(others)}, which is not offered")
                return ""
            if "Pooling" in kinds:
                declared = folder / kinds["Pooling"] / "config.json"
        if not declared.is_file():
            return ""
        found = _read_modes(json.loads(declared.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(f"no embeddings: {declared} can't be read: {type(error).__name__}: {error}")
        return ""
    if len(found) != 1 or found[0] not in POOLINGS:
        warn(f"no embeddings: {declared} asks for {' and '.join(found) or 'no pooling'}")
        return ""
    return POOLINGS[found[0]]


def _read_modes(config: Any) -> list[str]:
    """Give the modes that a pooling's config names, or switches on by a key each."""
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        return [named] if isinstance(named, str) else list(map(str, named))
    return [
        _FLAGS.get(key, key.removeprefix(_PREFIX))
        for key, is_on in config.items()
        if key.startswith(_PREFIX) and is_on
    ]


def pool(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Give the mean of hidden states f32[D] at length 1, f32[D]; zeros stay zeros."""
    mean = np.mean(rows, axis=0, dtype=np.float64)
    length = float(np.linalg.norm(mean))
    return np.asarray(mean / length if length else mean, np.float32)
