"""The meaning of ops that pick rows or cut them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from treadle.ir import errors


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Look up one table row per token and multiply it by `scale`.

    Shapes: token_ids i32[T], table [V, E] -> [T, E] in the table's dtype.
    Numerics: the product is formed in fp32 and rounded once.
    """
    rows = F.embedding(token_ids, table)  # [T, E]
    if scale == 1.0:
        return rows
    return (rows.float() * scale).to(table.dtype)  # [T, E]


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick rows; an index of -1 reads row 0, and nobody uses the result.

    Shapes: x [T, E], index i32[B] -> [B, E] in the dtype of x.
    """
    return x.index_select(0, index.clamp(min=0))  # [B, E]


def split(x: torch.Tensor, *, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Cut the last dimension into views of the given sizes.

    Shapes: x [T, sum(sizes)] -> [T, sizes[i]] each, sharing memory with x.
    Raises: ShapeError: the sizes don't add up to the last dimension.
    """
    if sum(sizes) != x.shape[-1]:
        raise errors.ShapeError(
            f"split: expected sizes that add up to {x.shape[-1]}, found {tuple(sizes)}."
        )
    return tuple(x.split_with_sizes(list(sizes), dim=-1))
