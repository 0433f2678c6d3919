"""Paged inputs whose caches are quantised: what tests of kernels and of the reference share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels import reference
from treadle.kernels.kv_pages import Plane

from .paged_inputs import PagedInputs, build_paged_inputs

Model = tuple[int, int, int, int]  # H, G, D, S


@dataclasses.dataclass(frozen=True)
class QuantisedInputs:
    """Paged inputs with the caches quantised; slots without a token hold random codes.

    `k_blocks`, `v_blocks` u8[P, G, block bytes]. Words of unused slots are NaN: they must not be
    read.
    """

    plain: PagedInputs
    kv_format: str
    k_blocks: torch.Tensor
    v_blocks: torch.Tensor

    @property
    def shape(self) -> dict[str, int | float | str]:
        """Give the SHAPE of the attention templates for these inputs."""
        return {**self.plain.shape, "KV_FORMAT": self.kv_format}

    def attend(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """Give the reference's output [T, H * D]."""
        plain = self.plain
        num_heads, head_dim = plain.q.shape[1:]
        return reference.attention(
            plain.q.flatten(1),
            self.k_blocks,
            self.v_blocks,
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
            kv_format=self.kv_format,
        )


def empty_blocks(
    num_pages: int, model: Model, kv_format: str, seed: int, device: str = "cpu"
) -> torch.Tensor:
    """Make blocks u8[P, G, block bytes] of random codes and words that are NaN."""
    _, num_kv_heads, head_dim, page_size = model
    form = KV_FORMATS[kv_format]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_pages, num_kv_heads, form.block_bytes(page_size, head_dim))
    # e4m3 has a NaN among its codes, which the kernels never write.
    blocks = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
    blocks[..., page_size * form.row_bytes(head_dim) :] = 0xFF
    return blocks.to(device)


def quantise_inputs(plain: PagedInputs, kv_format: str, seed: int) -> QuantisedInputs:
    """Quantise the tokens of paged inputs into fresh blocks."""
    num_pages, num_kv_heads, page_size, head_dim = plain.k_cache.shape
    model = (plain.q.shape[1], num_kv_heads, head_dim, page_size)
    blocks = []
    for is_values, cache in enumerate((plain.k_cache, plain.v_cache)):
        own = empty_blocks(num_pages, model, kv_format, seed, str(cache.device))
        rows = cache.reshape(-1, head_dim)
        live = (~rows.isnan().any(-1)).nonzero().flatten()
        Plane(own, kv_format, head_dim, bool(is_values)).write(live, rows[live])
        blocks.append(own)
    return QuantisedInputs(plain, kv_format, *blocks)


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
