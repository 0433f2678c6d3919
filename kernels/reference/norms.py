"""The meaning of norms: of rows, of their heads, of their sections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it per feature.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset).
    Shapes: x [T, E], weight [E] -> [T, E] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    if offset != 0.0:
        weight = weight.float() + offset  # [E]
    if weight.dtype == x.dtype:  # torch computes this in fp32 as well, with fewer passes
        return F.rms_norm(x, weight.shape, weight, eps)  # [T, E]
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)  # [T, E]


def head_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Divide each head by its root mean square and scale it per feature of a head.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset), the mean over a head.
    Shapes: x [T, n * D], weight [D] -> [T, n * D] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    heads = x.unflatten(-1, (-1, weight.shape[0]))  # [T, n, D]
    return rms_norm(heads, weight, eps=eps, offset=offset).flatten(-2)  # [T, n * D]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    """Shift and scale each row to mean 0 and variance 1, then scale and shift it per feature.

    Formula: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
    Shapes: x [T, E], weight, bias [E] -> [T, E] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    bias = None if bias is None else bias.float()  # [E]
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias, eps).to(x.dtype)  # [T, E]


def section_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    sizes: Sequence[int],
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Divide the first sections of each row by their root mean squares and scale them per feature.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset), the mean over a section; what lies
      beyond the sections passes through.
    Shapes: x [T, W], weight [sum(sizes)] -> [T, W] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    width = sum(sizes)
    sections = x[..., :width].split_with_sizes(list(sizes), dim=-1)
    weights = weight.split_with_sizes(list(sizes))
    normed = [
        rms_norm(section, part, eps=eps, offset=offset)
        for section, part in zip(sections, weights, strict=True)
    ]
    return torch.cat((*normed, x[..., width:]), dim=-1)  # [T, W]
