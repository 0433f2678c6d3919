"""Tensors in MXFP4 of a safetensors folder, widened to bf16 when they are read.

A tensor `w` is stored as `w_blocks`, two numbers of 4 bits a byte, and `w_scales`, an exponent for
each block of 32. Knows names and bytes of the files, no model. Called by `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.ir.errors import CheckpointError
from treadle.runtime.safetensors_source import SafetensorsSource, TensorEntry

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16  # 32 numbers
EXPONENT_BIAS = 127
NAN_EXPONENT = 255
# What the 16 codes of e2m1 mean: one sign bit, two of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))
_BLOCKS, _SCALES = "_blocks", "_scales"


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json says that some of its weights are stored in MXFP4."""
    quantisation = config.get("quantization_config")
    return isinstance(quantisation, Mapping) and quantisation.get("quant_method") == "mxfp4"


def widen(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the numbers that codes and exponents mean; bf16 holds all but the very largest.

    Formula: e2m1(code) * 2^(scale - 127), the low half of a byte first; a scale of 255 is NaN
    Shapes: blocks u8[.., G, 16], scales u8[.., G] -> bf16[.., 32 G].
    Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0, 2023.
    """
    import torch

    numbers = torch.tensor(NUMBERS, dtype=torch.bfloat16)
    codes = torch.arange(256)
    pairs = torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=-1)  # [256, 2]
    factors = torch.exp2(codes.double() - EXPONENT_BIAS).to(torch.bfloat16)  # [256], all exact
    factors[NAN_EXPONENT] = torch.nan
    # Both numbers of a byte are looked up as one word: of all ways the fastest on a CPU.
    words = pairs.view(torch.int32).flatten().to(blocks.device)  # [256]
    found = words.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    factor = factors.to(scales.device).index_select(0, scales.flatten().int())
    wide = found.view(-1, 2 * BLOCK_BYTES).mul_(factor[:, None])  # [.. G, 32]
    return wide.view(*scales.shape[:-1], -1)


class Mxfp4Source:
    """Give the tensors of a folder by their own names, those in MXFP4 as one of bf16 each.

    Such a tensor u8[.., N, G, 16] is given as transformers keeps it in memory, inputs before
    outputs: bf16[.., 32 G, N]. The config no longer says that anything is quantised.
    Raises: CheckpointError: blocks and scales don't belong together; names them.
    """

    def __init__(self, stored: SafetensorsSource) -> None:
        self._stored = stored
        self.config = {k: v for k, v in stored.config.items() if k != "quantization_config"}
        self.generation_config: dict[str, Any] = stored.generation_config
        names = stored.names()
        self._packed = frozenset(n.removesuffix(_BLOCKS) for n in names if n.endswith(_BLOCKS))
        for name in sorted(self._packed):
            self._check(name)
        parts = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        self._names = (names - parts) | self._packed

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._stored.shape(name)
        *outer, rows, blocks, _ = self._stored.shape(name + _BLOCKS)
        return (*outer, 2 * BLOCK_BYTES * blocks, rows)

    def dtype(self, name: str) -> torch.dtype:
        import torch

        return torch.bfloat16 if name in self._packed else self._stored.dtype(name)

    def is_narrow(self, name: str) -> bool:
        return name in self._packed or self._stored.is_narrow(name)

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        import torch

        device = device or torch.device("cpu")
        if name not in self._packed:
            return self._stored.tensor(name, device)
        blocks, scales = (self._stored.tensor(name + suffix) for suffix in (_BLOCKS, _SCALES))
        shape = (*scales.shape[:-1], 2 * BLOCK_BYTES * scales.shape[-1])
        wide = torch.empty(shape, dtype=torch.bfloat16, device=device)
        # Expert by expert: what is computed on the way takes several times the room.
        by_expert = (each.view(-1, *each.shape[-k:]) for each, k in ((wide, 2), (blocks, 3)))
        for out, own_blocks, own_scales in zip(
            *by_expert, scales.view(-1, *scales.shape[-2:]), strict=True
        ):
            out.copy_(widen(own_blocks.to(device), own_scales.to(device)))
        return wide.mT

    def entry(self, name: str) -> TensorEntry | None:
        return None if name in self._packed else self._stored.entry(name)

    def headers(self) -> Iterator[tuple[str, bytes, int]]:
        return self._stored.headers()

    def spans(self) -> Iterator[tuple[Path, int, int]]:
        return self._stored.spans()

    def _check(self, name: str) -> None:
        stored, blocks, scales = self._stored, name + _BLOCKS, name + _SCALES
        if scales not in stored.names():
            raise CheckpointError(
                f"`{blocks}` should have its exponents in `{scales}`; the checkpoint has none.",
                remedy="The download is incomplete: run it again, it fetches what is missing.",
            )
        shape, found = stored.shape(blocks), stored.shape(scales)
        dtypes = {stored.dtype_name(blocks), stored.dtype_name(scales)}
        if len(shape) < 3 or shape[-1] != BLOCK_BYTES or found != shape[:-1]:
            raise CheckpointError(
                f"`{blocks}` and `{scales}` should have the shapes [.., N, G, {BLOCK_BYTES}] and "
                f"[.., N, G]; found {list(shape)} and {list(found)}.",
                remedy="The file was converted wrongly: download it again.",
            )
        if dtypes != {"uint8"}:
            raise CheckpointError(
                f"`{blocks}` and `{scales}` should hold bytes; found {', '.join(sorted(dtypes))}.",
                remedy="The file was converted wrongly: download it again.",
            )
