"""Rotary position embedding: its settings, and the angles that they mean.

Knows numbers only: no config keys, no tensors. Called by the config's reader and by the blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def rope_inverse_frequencies(rope: RopeConfig, *, is_long: bool = False) -> tuple[float, ...]:
    """Compute the angle per position of each rotated pair, in radians.

    Formula:
        default: f_i = theta^(-2i / rotary_dim), i = 0 … rotary_dim/2 - 1
        linear:  f_i / factor
        dynamic: f_i: the base grows beyond the model's window only, and no window is longer
        llama3:  f_i where the wavelength 2π/f_i is below C/high, f_i / factor where above C/low, in
            between (1-s) f_i/factor + s f_i, s = (C f_i/2π - low) / (high - low); C is the original
            window.
        yarn:    (1-r_i) f_i + r_i f_i/factor; r_i is 0 for pairs that turn `beta_fast` times or
            more within the original window, 1 for those that turn `beta_slow` times or less, and
            linear in i in between
        longrope: f_i / short_i, or f_i / long_i if `is_long`
    Numerics: in double precision; round to float32 last.
    Source: transformers `modeling_rope_utils.py`; llama3 from Meta's Llama 3.1 reference code; Peng
    et al., YaRN, 2023; Ding et al., LongRoPE, 2024.
    """
    pairs = range(rope.rotary_dim // 2)
    plain = tuple(rope.theta ** (-2 * i / rope.rotary_dim) for i in pairs)
    if rope.kind == "linear":
        return tuple(frequency / rope.factor for frequency in plain)
    if rope.kind == "llama3":
        return tuple(_scale_llama3(frequency, rope) for frequency in plain)
    if rope.kind == "yarn":
        ramp = [_yarn_ramp(i, rope) for i in pairs]
        return tuple(f * (1 - r) + f / rope.factor * r for f, r in zip(plain, ramp, strict=True))
    if rope.kind == "longrope":
        factors = rope.long_factor if is_long else rope.short_factor
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    return plain


def rope_attention_factor(rope: RopeConfig) -> float:
    """Compute the factor that cosines and sines are multiplied by (1 for most kinds).

    Formula:
        yarn:     0.1 m ln(factor) + 1 with m = 1; with both, the one of `mscale` over that of
            `mscale_all_dim`
        longrope: sqrt(1 + ln(factor) / ln(original window))
        either is 1 for factors up to 1, and `attention_factor` where the config has one.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        original = rope.original_max_position_embeddings
        assert original is not None, "a longrope RopeConfig is always built with the window"
        return math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def rope_score_factor(rope: RopeConfig) -> float:
    """Compute the factor on attention's scores that stands for one on the whole of q and k.

    Formula: yarn with `mscale_all_dim` a: (0.1 a ln(factor) + 1)²; else, and for factors up to 1, 1
    Source: DeepSeek-AI, DeepSeek-V2, 2024: there only a part of each head is rotated.
    """
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1.0:
        return 1.0
    return _yarn_scale(rope.factor, rope.mscale_all_dim) ** 2


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(pair: int, rope: RopeConfig) -> float:
    """Say how much of the factor a pair gets, from 0 to 1."""
    original = rope.original_max_position_embeddings
    assert original is not None, "a yarn RopeConfig is always built with the original window"

    def pair_turning(times: float) -> float:
        turns = math.log(original / (times * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001  # as transformers does, lest it divide by zero
    return min(max((pair - first) / (last - first), 0.0), 1.0)


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
