"""How keys and values are stored: the formats of the cache, and the bytes of a page.

Knows sizes only. Read by types, kernels' lowering and reference, the memory plan and the command
line.
"""

from __future__ import annotations

from dataclasses import dataclass

# The tensors of a layer's pages, by their layout: keys and values, or latents that are both.
PLANES: dict[str, int] = {"kv": 2, "latent": 1}
WORD_BYTES = 4  # what turns a token's codes of one head back into numbers, for K and for V each
HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True)
class KvFormat:
    """Describe a quantised cache: `code_bits` per element, and a word per token and head.

    `word` says what that word holds.
    """

    name: str
    code_bits: int
    word: str

    def row_bytes(self, head_dim: int) -> int:
        """Give the bytes of the codes of one token and head."""
        return head_dim * self.code_bits // 8

    def block_bytes(self, page_size: int, head_dim: int) -> int:
        """Give the bytes of K, or of V, of one page and head: all codes, then all words."""
        return page_size * (self.row_bytes(head_dim) + WORD_BYTES)


KV_FORMATS: dict[str, KvFormat] = {
    "int8": KvFormat("int8", 8, "scale f32"),
    "int4": KvFormat("int4", 4, "scale f16, least value f16"),
    "fp8": KvFormat("fp8", 8, "scale f32"),
}
