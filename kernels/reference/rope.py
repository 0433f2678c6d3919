"""The meaning of rotary position embedding."""

from __future__ import annotations

import torch


def rope_angles(
    positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the cosines and the signed sines of a step's positions, the same in every layer.

    Shapes: positions i32[T], cos_sin f32[C, r] -> cosines f32[T, 1, 1, r / 2], sines f32[T, 1, 2, r
      / 2], the first negated.
    """
    cos, sin = cos_sin.index_select(0, positions)[:, None, None].chunk(
        2, dim=-1
    )  # [T, 1, 1, r / 2]
    return cos, torch.cat((-sin, sin), dim=-2)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    head_dim: int,
    interleaved: bool = False,
    start: int = 0,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rotate each head by its token's position, in the half-split pairing of Hugging Face.

    Formula: (a, b) -> (a cos - b sin, b cos + a sin), a = features [0, r / 2), b = features [r / 2,
      r) of a head, r = rotary_dim; interleaved, a and b are its even and odd features; all counted
      from `start`; other features pass through.
    Shapes: x [T, n * D], positions i32[T], cos_sin f32[C, r] (cos in the first half, sin in the
      second) -> [T, n * D] in the dtype of x. `angles` = rope_angles(positions, cos_sin) saves time
      only.
    Numerics: fp32 inside, rounded once at the end.
    """
    cos, sin = rope_angles(positions, cos_sin) if angles is None else angles
    rotary_dim = cos_sin.shape[-1]
    heads = x.unflatten(-1, (-1, head_dim))  # [T, n, D]
    stop = start + rotary_dim
    pairs = heads[..., start:stop].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs.mT if interleaved else pairs  # [T, n, 2, r / 2]
    rotated = (pairs * cos).add_(pairs.flip(-2) * sin).to(x.dtype)  # [T, n, 2, r / 2]
    rotated = (rotated.mT if interleaved else rotated).flatten(-2)  # [T, n, r]
    if rotary_dim < head_dim:
        rotated = torch.cat((heads[..., :start], rotated, heads[..., stop:]), dim=-1)  # [T, n, D]
    return rotated.flatten(-2)  # [T, n * D]
