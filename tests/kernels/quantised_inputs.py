"""Paged inputs whose caches are quantised: what tests of kernels and of the reference share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels.kv_pages import QuantisedCache
from treadle.kernels.reference.attention import attention

from .paged_inputs import POISON, PagedInputs, build_paged_inputs

Model = tuple[int, int, int, int]  # H, G, D, S


@dataclasses.dataclass(frozen=True)
class QuantisedInputs:
    """Paged inputs with the caches quantised; pages that are not full hold random codes.

    Their words are NaN, and so are the slots of open pages that have no token: they must not be
    read. `cache` has the tensors of a layer.
    """

    plain: PagedInputs
    cache: QuantisedCache

    @property
    def shape(self) -> dict[str, int | float | str]:
        """Give the SHAPE of the attention templates for these inputs."""
        return {**self.plain.shape, "KV_FORMAT": self.cache.kv_format}

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """Give pages and open pages, as templates take them."""
        return tensors_of(self.cache)

    def attend(
        self, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **limits: Any
    ) -> torch.Tensor:
        """Give the reference's output [T, H * D]."""
        plain = self.plain
        num_heads, head_dim = plain.q.shape[1:]
        return attention(
            plain.q.flatten(1),
            self.cache.keys,
            self.cache.values,
            plain.block_table,
            plain.seq_rows,
            plain.query_start,
            plain.context_lens,
            k,
            v,
            num_heads=num_heads,
            num_kv_heads=plain.k_cache.shape[1],
            head_dim=head_dim,
            scale=plain.scale,
            kv_format=self.cache.kv_format,
            open_pages=(self.cache.open_keys, self.cache.open_values),
            **limits,
        )


def tensors_of(cache: QuantisedCache) -> tuple[torch.Tensor, ...]:
    """Give the four tensors of a cache."""
    return cache.keys, cache.values, cache.open_keys, cache.open_values


def empty_cache(
    num_pages: int, num_rows: int, model: Model, kv_format: str, seed: int, device: str = "cpu"
) -> QuantisedCache:
    """Make a cache of random codes, words that are NaN, and open pages of NaN."""
    _, num_kv_heads, head_dim, page_size = model
    form = KV_FORMATS[kv_format]
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for size in (
        form.key_block_bytes(page_size, head_dim),
        form.value_block_bytes(page_size, head_dim),
    ):
        # e4m3 has a NaN among its codes, which the kernels never write.
        shape = (num_pages, num_kv_heads, size)
        made = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
        made[..., page_size * form.row_bytes(head_dim) :] = 0xFF
        blocks.append(made.to(device))
    open_shape = (2, num_rows, page_size, num_kv_heads, head_dim)
    opened = torch.full(open_shape, POISON, dtype=torch.float16, device=device)
    return QuantisedCache(kv_format, *blocks, *opened.unbind())


def quantise_inputs(plain: PagedInputs, kv_format: str, seed: int) -> QuantisedInputs:
    """Quantise the tokens of paged inputs into a fresh cache."""
    num_pages, num_kv_heads, page_size, head_dim = plain.k_cache.shape
    model = (plain.q.shape[1], num_kv_heads, head_dim, page_size)
    num_rows, device = plain.block_table.shape[0], str(plain.k_cache.device)
    cache = empty_cache(num_pages, num_rows, model, kv_format, seed, device)
    for row, context in zip(plain.seq_rows.tolist(), plain.context_lens.tolist(), strict=True):
        if row < 0:
            continue
        pages = plain.block_table[row]
        k, v = (
            each[pages[: -(-context // page_size)].long()].transpose(1, 2).flatten(0, 1)[:context]
            for each in (plain.k_cache, plain.v_cache)
        )  # [C, G, D] each
        cache.append(row, pages, k, v, 0)
    return QuantisedInputs(plain, cache)


def draw_quantised(
    sequences: Sequence[tuple[int, int]],
    model: Model,
    kv_format: str,
    device: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    spare_tokens: int = 0,
) -> QuantisedInputs:
    """Draw inputs for (query tokens, context) sequences of a model (H, G, D, S)."""
    num_heads, num_kv_heads, head_dim, page_size = model
    if device == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16  # a GPU's dot would round fp32 to tf32
    plain = build_paged_inputs(
        sequences,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        device=device,
        spare_tokens=spare_tokens,
    )
    return quantise_inputs(plain, kv_format, seed)
