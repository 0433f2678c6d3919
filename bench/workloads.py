"""The requests that benchmarks of serving send: lengths by a named mix, prompts of random tokens.

The same seed gives the same requests. Called by `throughput`, `serve` and `baselines`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SEED = 20240  # any number; figures with another one are of other requests
MIX = "mix"
# Lengths as in conversations of ShareGPT: log-normal, by median and sigma, cut at both ends. Means
# are 225 prompt and 195 output tokens, those of the thousand requests that servers are often
# compared with.
MIX_PROMPT = (100, 1.5)
MIX_OUTPUT = (125, 1.0)
MIX_LEAST, MIX_MOST = 4, 1024


@dataclass(frozen=True)
class Lengths:
    """Say how long a request's prompt and its answer are, in tokens."""

    prompt: int
    output: int


def draw_lengths(shape: str, count: int, seed: int = SEED) -> list[Lengths]:
    """Draw the lengths of `count` requests: those of a shape like `1024x128`, or of the mix."""
    if shape != MIX:
        return [_fixed(shape)] * count
    chance = random.Random(seed)

    def draw(median: float, sigma: float) -> int:
        drawn = round(chance.lognormvariate(math.log(median), sigma))
        return min(max(drawn, MIX_LEAST), MIX_MOST)

    return [Lengths(draw(*MIX_PROMPT), draw(*MIX_OUTPUT)) for _ in range(count)]


def longest(shape: str) -> Lengths:
    """Give the longest prompt and answer that a shape may draw."""
    return Lengths(MIX_MOST, MIX_MOST) if shape == MIX else _fixed(shape)


def draw_prompt(length: int, vocab_size: int, number: int, case: str = "") -> list[int]:
    """Draw the tokens of a prompt: of no two requests the same, so that no prefix is shared.

    Cases that one engine plays must differ too: it may still hold what the last one asked for.
    """
    chance = random.Random(f"{SEED} {case} {number} {length}")
    return [chance.randrange(vocab_size) for _ in range(length)]


def title(shape: str) -> str:
    """Write a shape as cases name it: `1024/128`."""
    return shape.replace("x", "/") if shape != MIX else MIX


def _fixed(shape: str) -> Lengths:
    prompt, output = map(int, shape.split("x"))
    return Lengths(prompt, output)
