"""Quantised pages of the KV cache in torch: what their bytes mean, and how they are made.

A block is the keys, or the values, of one page and one head: the codes of its S tokens, then a word
per token. Codes of keys lie token by token, those of values feature by feature, as the attention
kernels multiply them; and bit 7 of the keys' integer codes is flipped, which makes of them what
integer tensor cores take for signed. Called by `reference.py`; knows neither graphs nor steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treadle.ir.kv_cache import KV_FORMATS, WORD_BYTES

FP8_LARGEST = 448.0  # of e4m3 without infinities
INT8_LARGEST = 127.0
INT4_LEVELS = 15.0
SIGN_BIT = 0x80


@dataclass(frozen=True)
class Plane:
    """Read and write the keys, or the values, of a quantised cache u8[P, G, block bytes].

    `slots` index its rows of [D] as in `reference.StepPlan`: page, then head, then slot.
    """

    blocks: torch.Tensor
    kv_format: str
    head_dim: int
    is_values: bool

    @property
    def row_bytes(self) -> int:
        """The bytes of the codes of one token and head."""
        return KV_FORMATS[self.kv_format].row_bytes(self.head_dim)

    @property
    def page_size(self) -> int:
        """The slots of a page."""
        return int(self.blocks.shape[-1]) // (self.row_bytes + WORD_BYTES)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Quantise rows f[N, D] into slots i64[N], in place."""
        codes, words = quantise(rows, self.kv_format)
        block, code_bytes, word_bytes = self._addresses(slots)
        flat = self.blocks.view(-1, self.blocks.shape[-1])  # [P * G, block bytes]
        flat[block, code_bytes] = codes ^ self._flipped
        flat[block, word_bytes] = words

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Give the rows in slots i[N] as numbers, f32[N, D]."""
        block, code_bytes, word_bytes = self._addresses(slots.long())
        flat = self.blocks.view(-1, self.blocks.shape[-1])  # [P * G, block bytes]
        codes = flat[block, code_bytes] ^ self._flipped  # [N, bytes]
        return dequantise(codes, flat[block, word_bytes], self.kv_format)

    @property
    def _flipped(self) -> int:
        return 0 if self.is_values or self.kv_format == "fp8" else SIGN_BIT

    def _addresses(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give the block of each slot [N, 1], and the bytes of codes [N, bytes] and word [N, 4]."""
        block, slot = slots[:, None] // self.page_size, slots[:, None] % self.page_size  # [N, 1]
        code = torch.arange(self.row_bytes, device=slots.device)  # [bytes]
        word = torch.arange(WORD_BYTES, device=slots.device)  # [4]
        if self.is_values:
            code_bytes = code * self.page_size + slot  # [N, bytes]
        else:
            code_bytes = slot * self.row_bytes + code  # [N, bytes]
        return block, code_bytes, self.row_bytes * self.page_size + slot * WORD_BYTES + word


def quantise(rows: torch.Tensor, kv_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Give codes u8[N, bytes] and words u8[N, 4] of rows f[N, D], one token and head each.

    Formula: int8: round(x / s), s = max |x| / 127. fp8: e4m3(x / s), s = max |x| / 448. int4:
      round((x - m) / s), m = min x, s = (max x - m) / 15, m and s in f16; feature d in the low and
      feature d + D / 2 in the high half of byte d. A row that is all one value has s = 0 and codes
      0.
    Numerics: halves are rounded up; products with the reciprocal 1 / s in f32, as in the kernels.
    """
    rows = rows.float()  # [N, D]
    if kv_format == "int4":
        least = rows.amin(-1, keepdim=True).half()  # [N, 1]
        scale = ((rows.amax(-1, keepdim=True) - least.float()) * (1 / INT4_LEVELS)).half()  # [N, 1]
        steps = (rows - least.float()) * _reciprocal(scale.float())  # [N, D]
        codes = torch.floor(steps + 0.5).clamp(0.0, INT4_LEVELS).to(torch.uint8)  # [N, D]
        low, high = codes.chunk(2, dim=-1)  # [N, D / 2] each
        words = torch.cat((scale, least), dim=-1)  # f16[N, 2]
        return low | (high << 4), words.view(torch.uint8)
    largest = rows.abs().amax(-1, keepdim=True)  # [N, 1]
    if kv_format == "int8":
        scale = largest * (1 / INT8_LARGEST)  # [N, 1]
        codes = torch.floor(rows * _reciprocal(scale) + 0.5).clamp(-INT8_LARGEST, INT8_LARGEST)
        return (codes + 128).to(torch.uint8), scale.view(torch.uint8)
    scale = largest * (1 / FP8_LARGEST)  # [N, 1]
    return _to_e4m3(rows * _reciprocal(scale)), scale.view(torch.uint8)


def dequantise(codes: torch.Tensor, words: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Give the numbers f32[N, D] that codes u8[N, bytes] and words u8[N, 4] mean."""
    words = words.contiguous()
    if kv_format == "int4":
        scale, least = words.view(torch.float16).float().split(1, dim=-1)  # [N, 1] each
        levels = torch.cat((codes & 15, codes >> 4), dim=-1).float()  # [N, D]
        return levels * scale + least
    scale = words.view(torch.float32)  # [N, 1]
    if kv_format == "int8":
        return (codes.float() - 128.0) * scale
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scale


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round f32 of at most 448 in size to e4m3, u8: halves away from zero, as the kernels do.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    size = x.abs().clamp(max=FP8_LARGEST)
    exponent = ((size.view(torch.int32) >> 23) - 127).clamp(min=-6)  # of subnormals too
    mantissa = torch.floor(torch.ldexp(size, 3 - exponent) + 0.5).to(torch.int32)  # 0 to 16
    code = (exponent + 6) * 8 + mantissa  # a mantissa of 16 carries into the exponent
    sign = (x < 0).to(torch.int32) << 7
    return (code.clamp(max=0x7E) | sign).to(torch.uint8)
