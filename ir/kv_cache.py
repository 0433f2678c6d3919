"""How keys and values are stored: the formats of the cache, and the bytes of a page.

Knows sizes only. Read by types, kernels' lowering and reference, the memory plan and the command
line.
"""

from __future__ import annotations

from dataclasses import dataclass

# The tensors of a layer's pages, by their layout: keys and values, or latents that are both.
PLANES: dict[str, tuple[str, ...]] = {"kv": ("keys", "values"), "latent": ("latents",)}
CHANNEL_WORD_BYTES = 4  # of keys, per page, head and feature: scale f16, what code 0 means f16
HEAD_DIM_MULTIPLE = 16
PAGE_MULTIPLE = 16  # tokens: tiles of a kernel lie within a page
OPEN_DTYPE = "f16"  # of the keys and values of pages that are not full yet


@dataclass(frozen=True)
class KvFormat:
    """Describe a quantised cache: `code_bits` per element, and words that give codes their meaning.

    Keys have a word per page, head and feature, of `CHANNEL_WORD_BYTES`, whose halves lie apart:
    all scales before all zeros, to be read in pairs; values have one per token and head, of
    `value_word_bytes`: `value_word` says what it holds.
    """

    name: str
    code_bits: int
    value_word_bytes: int
    value_word: str

    def row_bytes(self, head_dim: int) -> int:
        """Give the bytes of the codes of one token and head."""
        return head_dim * self.code_bits // 8

    def key_block_bytes(self, page_size: int, head_dim: int) -> int:
        """Give the bytes of K of one full page and head: all codes, then all words."""
        return page_size * self.row_bytes(head_dim) + head_dim * CHANNEL_WORD_BYTES

    def value_block_bytes(self, page_size: int, head_dim: int) -> int:
        """Give the bytes of V of one full page and head: all codes, then all words."""
        return page_size * (self.row_bytes(head_dim) + self.value_word_bytes)


KV_FORMATS: dict[str, KvFormat] = {
    "int8": KvFormat("int8", 8, 2, "scale f16"),
    "int4": KvFormat("int4", 4, 4, "scale f16, least value f16"),
    "fp8": KvFormat("fp8", 8, 2, "scale f16, of numbers over 256"),
}
