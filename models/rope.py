"""Rotary position embedding: its settings, and the angles that they mean.

Knows numbers only: no config keys, no tensors. Called by the config's reader and by the blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from treadle.ir.errors import SpecError

ROPE_KINDS: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Describe rotary position embedding: base, rotated width, and how long contexts are reached.

    Only the parameters of `kind` are set; the others keep their neutral defaults.
    `max_position_embeddings` is the model's window, which `dynamic` scales from.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    max_position_embeddings: int = 0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def rope_inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[float, ...]:
    """Compute the angle per position of each rotated pair, in radians.

    Formula:
        default: f_i = theta^(-2i / rotary_dim), i = 0 … rotary_dim/2 - 1
        linear:  f_i / factor
        llama3:  f_i where the wavelength 2π/f_i is below C/high, f_i / factor where above C/low, in
            between (1-s) f_i/factor + s f_i, s = (C f_i/2π - low) / (high - low); C is the original
            window.
    Numerics: in double precision; round to float32 last.
    Raises:
        SpecError: the kind is not supported yet, or the rotated width does not fit `head_dim`.
    Source: transformers `modeling_rope_utils.py`; llama3 from Meta's Llama 3.1 reference code.
    """
    if rope.rotary_dim > head_dim or rope.rotary_dim % 2 or rope.rotary_dim <= 0:
        raise SpecError(
            f"RoPE must rotate an even number of at most `head_dim` = {head_dim} elements; "
            f"found `rotary_dim` = {rope.rotary_dim}.",
            remedy="Check `head_dim` and `partial_rotary_factor` in the config.",
        )
    plain = tuple(rope.theta ** (-2 * i / rope.rotary_dim) for i in range(rope.rotary_dim // 2))
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return tuple(frequency / rope.factor for frequency in plain)
    if rope.kind == "llama3":
        return tuple(_scale_llama3(frequency, rope) for frequency in plain)
    _rope_not_supported_yet(rope.kind)


def rope_attention_factor(rope: RopeConfig) -> float:
    """Compute the factor that cosines and sines are multiplied by (1 for most kinds).

    Raises:
        SpecError: the kind is not supported yet.
    """
    if rope.kind in ("default", "linear", "llama3"):
        return 1.0
    _rope_not_supported_yet(rope.kind)


def _scale_llama3(frequency: float, rope: RopeConfig) -> float:
    original = rope.original_max_position_embeddings
    assert original is not None, "a llama3 RopeConfig is always built with the original window"
    wavelength = 2 * math.pi / frequency
    if wavelength < original / rope.high_freq_factor:
        return frequency
    if wavelength > original / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _rope_not_supported_yet(kind: str) -> NoReturn:
    raise SpecError(
        f"RoPE scaling must be of type `default`, `linear` or `llama3`; found `{kind}`, which "
        "is not supported yet.",
        remedy="Use a checkpoint with one of these.",
    )
