"""Tokens whose experts are nearly tied: rounding may choose others for them than exact arithmetic.

Such a token's result differs by a whole expert though nothing is wrong. Called by `verify`, which
compares with an oracle of another precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from treadle.ir import dims as d
from treadle.ir.graph import Graph, Op
from treadle.runtime.reference_program import reference_call

SAMPLES = 64
CAP_SHARE = 0.05  # of the tokens, the most to be left out of a comparison
CAP_TOKENS = 2  # and of a short prompt


def share_of_other_choices(
    op: Op, graph: Graph, tensors: Mapping[str, torch.Tensor], num_tokens: int, noise: float
) -> torch.Tensor | None:
    """Give for each token how often noise makes it choose other experts.

    None if `op` routes none, or only those rows whose logits are wanted.

    `tensors` has the op's operands, weights with `@`. Noise is normal, relative to the root mean
    square of a token's router logits; it may move the choice of a group as well as of an expert.

    Shapes: → f32[T] from 0 to 1, on the host.
    """
    routes = [inner for inner in op.plain if inner.kind == "route"]
    if not routes or graph.type_of(routes[0].outputs[0]).shape[0] != d.T:
        return None
    known: dict[str, torch.Tensor] = {}
    for inner in op.plain:
        function, options = reference_call(inner, graph)
        operands = [
            known[name] if name in known else _rows(name, tensors[name], num_tokens)
            for name in inner.inputs
        ]
        if inner.kind == "route":
            logits, *rest = operands
            break
        if "out_dtype" in options:
            options["out_dtype"] = options["out_dtype"] or torch.float32
        result = function(*operands, **options)
        known |= zip(inner.outputs, result if isinstance(result, tuple) else (result,), strict=True)
    logits = logits.float()
    size = noise * logits.square().mean(-1, keepdim=True).sqrt()  # [T, 1]
    chosen = function(logits, *rest, **options)[0].sort(-1).values  # [T, k]
    generator = torch.Generator().manual_seed(0)
    flips = torch.zeros(num_tokens)
    for _ in range(SAMPLES):
        moved = torch.randn(logits.shape, generator=generator).to(logits.device) * size
        others = function(logits + moved, *rest, **options)[0].sort(-1).values
        flips += (others != chosen).any(-1).cpu()
    return flips / SAMPLES


def choose_left_out(shares: torch.Tensor) -> torch.Tensor:
    """Give the tokens that are nearest to a tie, and no more than the cap, as bool[T].

    Shapes: shares f32[T], as of `share_of_other_choices`.
    """
    most = max(int(CAP_SHARE * len(shares)), min(CAP_TOKENS, len(shares) - 1))
    left_out = torch.zeros(len(shares), dtype=torch.bool)
    left_out[shares.sort(descending=True, stable=True).indices[:most]] = True
    return left_out & (shares > 0)


def _rows(name: str, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return tensor if name.startswith("@") else tensor[:num_tokens]
