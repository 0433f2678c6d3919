"""Builds paged KV caches for tests: ragged lengths, scattered pages, poison everywhere else.

Knows tensors and the layout of the cache only. Tests of kernels that read or write pages import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

POISON = float("nan")


@dataclass(frozen=True)
class PagedInputs:
    """Hold the inputs of one attention call; every value that must not be read is NaN.

    Shapes: q [T, H, D], k_cache, v_cache [P, G, S, D], block_table i32[R, M], seq_rows i32[B],
      query_start i32[B + 1], context_lens i32[B].
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_rows: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    scale: float

    @property
    def num_seqs(self) -> int:
        return self.seq_rows.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def shape(self) -> dict[str, int | float]:
        """Give the SHAPE of the attention templates for these inputs."""
        _, num_heads, head_dim = self.q.shape
        _, num_kv_heads, page_size, _ = self.k_cache.shape
        return {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "SCALE": self.scale,
        }

    def poisoned_out(self) -> torch.Tensor:
        """Make an output [T, H * D] that is NaN until a kernel writes it."""
        return torch.full_like(self.q.flatten(1), POISON)  # [T, H * D]


def build_paged_inputs(
    sequences: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    spare_tokens: int = 0,
) -> PagedInputs:
    """Draw the inputs for `sequences` of (query tokens, context tokens); a context of 0 is padding.

    Rows and pages are scattered over pools larger than needed. Unused slots, unused pages and the
    queries of padding are NaN; unused block table entries point at a page of NaN. `spare_tokens`
    queries after the last sequence belong to nobody.
    """
    generator = torch.Generator().manual_seed(seed)

    def permutation(length: int) -> list[int]:
        return torch.randperm(length, generator=generator).tolist()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pages_of = [-(-context // page_size) for _, context in sequences]
    num_pages = sum(pages_of) + 3
    free_pages = permutation(num_pages)
    poison_page = free_pages.pop()
    free_rows = permutation(len(sequences) + 2)

    cache_shape = (num_pages, num_kv_heads, page_size, head_dim)
    k_cache = torch.full(cache_shape, POISON, dtype=dtype)  # [P, G, S, D]
    v_cache = torch.full(cache_shape, POISON, dtype=dtype)  # [P, G, S, D]
    table_shape = (len(sequences) + 2, max(pages_of) + 1)
    block_table = torch.full(table_shape, poison_page, dtype=torch.int32)  # [R, M]
    num_tokens = sum(num_queries for num_queries, _ in sequences)
    q = normal(num_tokens + spare_tokens, num_heads, head_dim)  # [T, H, D]
    q[num_tokens:] = POISON

    seq_rows, query_start = [], [0]
    for (num_queries, context), seq_pages in zip(sequences, pages_of, strict=True):
        first_token = query_start[-1]
        query_start.append(first_token + num_queries)
        if context == 0:
            q[first_token : query_start[-1]] = POISON
            seq_rows.append(-1)
            continue
        row = free_rows.pop()
        seq_rows.append(row)
        for page_idx in range(seq_pages):
            page = free_pages.pop()
            block_table[row, page_idx] = page
            live = min(page_size, context - page_idx * page_size)
            k_cache[page, :, :live] = normal(num_kv_heads, live, head_dim)
            v_cache[page, :, :live] = normal(num_kv_heads, live, head_dim)

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PagedInputs(
        q=q.to(device),
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        block_table=block_table.to(device),
        seq_rows=int32(seq_rows),
        query_start=int32(query_start),
        context_lens=int32([context for _, context in sequences]),
        scale=head_dim**-0.5,
    )
