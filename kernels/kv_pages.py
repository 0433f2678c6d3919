"""Quantised pages of the KV cache in torch: what their bytes mean, and how they are made.

A page is quantised when it is full; until then its row keeps it as it was computed, in f16. Keys
have a scale and a zero per page and channel, values a scale per token. A block is the keys, or the
values, of one full page and head: its codes, those of keys token by token, those of values feature
by feature, as the attention kernels multiply them; then the scales of keys and their zeros, or the
words of values. Called by `reference/`; knows neither graphs nor steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treadle.ir.kv_cache import CHANNEL_WORD_BYTES, KV_FORMATS

FP8_LARGEST = 448.0  # of e4m3 without infinities
FP8_UNIT = 256.0  # scales of fp8 are those of numbers over 256: f16 holds them better
F16_LARGEST = 65504.0
LEVELS = {"int8": 255.0, "int4": 15.0}  # steps from the least to the largest number


@dataclass(frozen=True)
class QuantisedCache:
    """Append to and read the cache of one layer.

    Shapes: `keys` u8[P, G, key block bytes], `values` u8[P, G, value block bytes], `open_keys` and
      `open_values` f16[R, S, G, D]: the last page of each row, while it is not full.
    """

    kv_format: str
    keys: torch.Tensor
    values: torch.Tensor
    open_keys: torch.Tensor
    open_values: torch.Tensor

    @property
    def page_size(self) -> int:
        """The slots of a page."""
        return int(self.open_keys.shape[1])

    def append(
        self, row: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prior: int
    ) -> None:
        """Add keys and values [N, G, D] to the `prior` tokens of a row that owns pages i32[M]."""
        first, num_open = divmod(prior, self.page_size)
        num_full = (num_open + len(k)) // self.page_size
        for is_values, (new, opened, blocks) in enumerate(
            ((k, self.open_keys[row], self.keys), (v, self.open_values[row], self.values))
        ):
            tokens = torch.cat((opened[:num_open].float(), new.float()))  # [tokens, G, D]
            tokens = tokens.clamp(-F16_LARGEST, F16_LARGEST).half()
            newest = tokens[(len(tokens) - 1) // self.page_size * self.page_size :]
            if num_full:
                full = tokens[: num_full * self.page_size].unflatten(0, (-1, self.page_size))
                quantise = quantise_values if is_values else quantise_keys
                made = quantise(full.transpose(1, 2), self.kv_format)  # [pages, G, block bytes]
                blocks[pages[first : first + num_full].long()] = made
            opened[: len(newest)] = newest  # also when it is full: it costs no question

    def read(
        self, row: int, pages: torch.Tensor, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the keys and values of a row's `context` tokens, f32[G, C, D] each."""
        num_full, num_open = divmod(context, self.page_size)
        owned = pages[:num_full].long()
        head_dim = self.open_keys.shape[-1]
        found = []
        for dequantise, blocks, opened in (
            (dequantise_keys, self.keys, self.open_keys),
            (dequantise_values, self.values, self.open_values),
        ):
            full = dequantise(blocks[owned], self.kv_format, head_dim)  # [pages, G, S, D]
            newest = opened[row, :num_open].float().transpose(0, 1)  # [G, tokens, D]
            found.append(torch.cat((full.transpose(0, 1).flatten(1, 2), newest), dim=1))
        return found[0], found[1]


def quantise_keys(keys: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Give the blocks u8[..., block bytes] of the keys f[..., S, D] of full pages.

    Formula, of a channel's S numbers x: int8 and int4: round((x - m) / s) with m = min x and s =
      (max x - m) / 255, or / 15; fp8: e4m3(256 (x - m) / s) with m = (max x + min x) / 2 and s =
      256 / 448 of the largest |x - m|. m and s are f16. A channel that is all one value has s = 0
      and codes of 0. int4: feature d in the low and feature d + D / 2 in the high half of byte d.
    Numerics: halves are rounded up; products with the reciprocal 1 / s in f32, as in the kernels.
    """
    keys = keys.float()  # [..., S, D]
    least, largest = keys.amin(-2, keepdim=True), keys.amax(-2, keepdim=True)  # [..., 1, D]
    if kv_format == "fp8":
        zero = ((largest + least) * 0.5).half()  # [..., 1, D]
        spread = (keys - zero.float()).abs().amax(-2, keepdim=True)  # [..., 1, D]
        scale, codes = _to_fp8(keys - zero.float(), spread)
    else:
        zero = least.half()  # [..., 1, D]
        scale, codes = _to_levels(keys - zero.float(), largest - zero.float(), LEVELS[kv_format])
    words = torch.cat((scale, zero), dim=-1)  # f16[..., 1, 2 D]
    packed = _pack(codes, kv_format)  # [..., S, bytes]
    return torch.cat((packed.flatten(-2), words.flatten(-2).view(torch.uint8)), dim=-1)


def quantise_values(values: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Give the blocks u8[..., block bytes] of the values f[..., S, D] of full pages.

    Formula, of a token's D numbers x: int8: round(x / s) + 128 with s = max |x| / 127; int4 and fp8
      as for a channel of keys, but m = 0 with fp8. m and s are f16.
    """
    values = values.float()  # [..., S, D]
    largest = values.abs().amax(-1, keepdim=True)  # [..., S, 1]
    if kv_format == "fp8":
        words, codes = _to_fp8(values, largest)
    elif kv_format == "int8":
        words = (largest * (1 / 127)).half()  # [..., S, 1]
        steps = torch.floor(values * _reciprocal(words.float()) + 0.5)
        codes = (steps.clamp(-127, 127) + 128).to(torch.uint8)
    else:
        zero = values.amin(-1, keepdim=True).half()  # [..., S, 1]
        spread = values.amax(-1, keepdim=True) - zero.float()  # [..., S, 1]
        scale, codes = _to_levels(values - zero.float(), spread, LEVELS["int4"])
        words = torch.cat((scale, zero), dim=-1)  # [..., S, 2]
    packed = _pack(codes, kv_format).mT.flatten(-2)  # [..., bytes * S]
    return torch.cat((packed, words.contiguous().flatten(-2).view(torch.uint8)), dim=-1)


def dequantise_keys(blocks: torch.Tensor, kv_format: str, head_dim: int) -> torch.Tensor:
    """Give the keys f32[..., S, D] that blocks u8[..., block bytes] mean."""
    row_bytes = KV_FORMATS[kv_format].row_bytes(head_dim)
    page_size = (blocks.shape[-1] - head_dim * CHANNEL_WORD_BYTES) // row_bytes
    codes, words = blocks.split((page_size * row_bytes, head_dim * CHANNEL_WORD_BYTES), dim=-1)
    scale, zero = _floats(words).unflatten(-1, (1, 2 * head_dim)).split(head_dim, dim=-1)
    return _unpack(codes.unflatten(-1, (page_size, row_bytes)), kv_format) * scale + zero


def dequantise_values(blocks: torch.Tensor, kv_format: str, head_dim: int) -> torch.Tensor:
    """Give the values f32[..., S, D] that blocks u8[..., block bytes] mean."""
    form = KV_FORMATS[kv_format]
    row_bytes, word_bytes = form.row_bytes(head_dim), form.value_word_bytes
    page_size = blocks.shape[-1] // (row_bytes + word_bytes)
    codes, words = blocks.split((page_size * row_bytes, page_size * word_bytes), dim=-1)
    numbers = _unpack(codes.unflatten(-1, (row_bytes, page_size)).mT, kv_format)  # [..., S, D]
    found = _floats(words).unflatten(-1, (page_size, -1))  # [..., S, 1 or 2]
    if kv_format == "int8":
        return (numbers - 128.0) * found
    if kv_format == "fp8":
        return numbers * found
    scale, zero = found.split(1, dim=-1)  # [..., S, 1] each
    return numbers * scale + zero


def _floats(words: torch.Tensor) -> torch.Tensor:
    """Read f16 numbers from bytes u8[..., N], f32[..., N / 2]."""
    return words.contiguous().view(torch.float16).float()


def _pack(codes: torch.Tensor, kv_format: str) -> torch.Tensor:
    if kv_format != "int4":
        return codes
    low, high = codes.chunk(2, dim=-1)  # [..., D / 2] each
    return low | (high << 4)


def _unpack(codes: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Give the numbers f32[..., D] of codes u8[..., bytes]; those of fp8 over 256."""
    if kv_format == "int4":
        return torch.cat((codes & 15, codes >> 4), dim=-1).float()
    if kv_format == "int8":
        return codes.float()
    return codes.contiguous().view(torch.float8_e4m3fn).float() * (1 / FP8_UNIT)


def _to_levels(
    offset: torch.Tensor, spread: torch.Tensor, levels: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the scale f16 and the codes of numbers' distances from the least."""
    scale = (spread * (1 / levels)).half()
    steps = torch.floor(offset * _reciprocal(scale.float()) + 0.5)
    return scale, steps.clamp(0.0, levels).to(torch.uint8)


def _to_fp8(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the scale f16 of numbers over 256, and the codes of x."""
    scale = (largest * (FP8_UNIT / FP8_LARGEST)).half()
    return scale, to_e4m3(x * _reciprocal(scale.float()) * FP8_UNIT)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round f32 to e4m3, u8, at most 448 in size: halves away from zero, as the kernels do.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    size = x.abs().clamp(max=FP8_LARGEST)
    exponent = ((size.view(torch.int32) >> 23) - 127).clamp(min=-6)  # of subnormals too
    mantissa = torch.floor(torch.ldexp(size, 3 - exponent) + 0.5).to(torch.int32)  # 0 to 16
    code = (exponent + 6) * 8 + mantissa  # a mantissa of 16 carries into the exponent
    sign = (x < 0).to(torch.int32) << 7
    return (code.clamp(max=0x7E) | sign).to(torch.uint8)
