"""Tensors in MXFP4, with transformers' own conversion as the judge of their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from treadle.ir.errors import CheckpointError
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.mxfp4 import widen


def draw(stop: int, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(stop, shape, generator=generator).to(torch.uint8)


def write(folder: Path, tensors: dict[str, torch.Tensor], method: str = "mxfp4") -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["Any"], "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize("shape", [(3, 5, 2), (1, 1, 1), (2, 2, 8, 3)])
def test_numbers_are_those_that_transformers_computes(
    shape: tuple[int, ...], rng_seed: int
) -> None:
    # 255, which means NaN, is left out: transformers takes it for an exponent.
    blocks, scales = draw(256, *shape, 16, seed=rng_seed), draw(255, *shape, seed=rng_seed + 1)
    expected = convert_moe_packed_tensors(blocks.flatten(0, -4), scales.flatten(0, -3))
    found = widen(blocks, scales)
    assert found.dtype == torch.bfloat16 and found.shape == (*shape[:-1], 32 * shape[-1])
    assert torch.equal(found.flatten(0, -3).mT, expected)


def test_each_code_and_each_exponent_has_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes.flip(0) << 4)).expand(255, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    found = widen(blocks, scales).double()  # [255, 32]
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor([*sizes, *(-size for size in sizes)], dtype=torch.float64)
    expected = torch.stack((numbers, numbers.flip(0)), dim=1).flatten()  # low halves come first
    for exponent, row in enumerate(found):
        exact = expected * 2.0 ** (exponent - 127)
        largest = float(torch.finfo(torch.bfloat16).max)
        rounded = torch.where(exact.abs() > largest, exact.sign() * math.inf, exact)
        assert torch.equal(row, rounded), exponent


def test_an_exponent_of_all_ones_is_not_a_number() -> None:
    blocks, scales = torch.zeros(1, 2, 16, dtype=torch.uint8), torch.tensor([[255, 127]]).byte()
    found = widen(blocks, scales)
    assert found[0, :32].isnan().all() and (found[0, 32:] == 0).all()


def test_a_tensor_has_inputs_before_outputs_as_transformers_keeps_it(
    tmp_path: Path, rng_seed: int
) -> None:
    blocks, scales = draw(256, 3, 6, 2, 16, seed=rng_seed), draw(200, 3, 6, 2, seed=rng_seed)
    other = torch.ones(4)
    checkpoint = write(tmp_path, {"w_blocks": blocks, "w_scales": scales, "other": other})
    assert checkpoint.names() == {"w", "other"}
    assert checkpoint.shape("w") == (3, 64, 6) and checkpoint.dtype("w") == torch.bfloat16
    assert torch.equal(checkpoint.tensor("w"), convert_moe_packed_tensors(blocks, scales))
    assert checkpoint.entry("w") is None and checkpoint.entry("other") is not None
    assert checkpoint.is_narrow("w") and not checkpoint.is_narrow("other")
    assert torch.equal(checkpoint.tensor("other"), other)
    assert "quantization_config" not in checkpoint.config


def test_other_quantisations_stay_what_the_config_says(tmp_path: Path) -> None:
    blocks = torch.zeros(1, 6, 2, 16, dtype=torch.uint8)
    checkpoint = write(tmp_path, {"w_blocks": blocks}, "other")
    assert checkpoint.names() == {"w_blocks"}
    assert checkpoint.config["quantization_config"] == {"quant_method": "other"}


BLOCKS = torch.zeros(3, 6, 2, 16, dtype=torch.uint8)
SCALES = torch.zeros(3, 6, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_blocks": BLOCKS}, "exponents in `w_scales`"),
        ({"w_blocks": BLOCKS, "w_scales": SCALES[:, :5].clone()}, r"\[3, 5, 2\]"),
        ({"w_blocks": BLOCKS[..., :8].clone(), "w_scales": SCALES}, r"\[3, 6, 2, 8\]"),
        ({"w_blocks": BLOCKS, "w_scales": SCALES.float()}, "float32, uint8"),
    ],
)
def test_codes_without_their_exponents_are_refused_by_name(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, tensors)


def test_exponents_without_codes_are_a_tensor_that_nothing_declares(tmp_path: Path) -> None:
    assert write(tmp_path, {"w_scales": SCALES}).names() == {"w_scales"}
