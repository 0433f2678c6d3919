"""Scaled dot product attention as torch computes it; on a GPU by its plain formula alone."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def dot_product_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> torch.Tensor:
    """Attend; see `torch.nn.functional.scaled_dot_product_attention`.

    A reference has to be right before it is fast: torch 2.11's memory-efficient kernel gives a
    wrong last row on an H200, under a mask, for 64 n + 1 queries (n > 0) and keys expanded over
    heads. On CPUs torch is free to choose.
    Shapes: query [..., T, D], keys [..., C, D], values [..., C, V], mask [..., T, C] -> [..., T,
      V].
    """
    attend = partial(
        F.scaled_dot_product_attention,
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
    )
    if not query.is_cuda:
        return attend()
    with sdpa_kernel(SDPBackend.MATH):
        return attend()
