"""What the bytes of a quantised cache mean: round trips, layout, sizes, and rows that are odd."""

from __future__ import annotations

import pytest
import torch

from treadle.ir.errors import ShapeError
from treadle.ir.kv_cache import KV_FORMATS
from treadle.ir.types import TensorType, parse_type
from treadle.kernels.kv_pages import Plane, dequantise, quantise

from .quantised_inputs import empty_blocks

FORMATS = sorted(KV_FORMATS)
# Relative error of Gaussian rows; int4's is near the least that 16 even steps allow.
GAUSSIAN_ERROR = {"int8": 0.008, "fp8": 0.03, "int4": 0.12}
Rows = torch.Tensor


def round_trip(rows: Rows, kv_format: str) -> Rows:
    return dequantise(*quantise(rows, kv_format), kv_format)


@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_gaussian_rows_come_back_within_the_format_s_error(
    kv_format: str, head_dim: int, rng_seed: int
) -> None:
    rows = torch.randn(200, head_dim, generator=torch.Generator().manual_seed(rng_seed))
    error = (round_trip(rows, kv_format) - rows).norm() / rows.norm()
    assert 0 < error < GAUSSIAN_ERROR[kv_format]


@pytest.mark.parametrize("value", [0.0, 0.01, -3.5, 60.0])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_row_of_one_value_comes_back_as_that_value(kv_format: str, value: float) -> None:
    rows = torch.full((3, 64), value)
    torch.testing.assert_close(round_trip(rows, kv_format), rows, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_largest_and_the_least_of_a_row_are_kept(kv_format: str, rng_seed: int) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(rng_seed))
    found = round_trip(rows, kv_format)
    largest = rows.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(
        found.gather(1, largest), rows.gather(1, largest), rtol=3e-3, atol=0.0
    )


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_huge_token_leaves_the_others_alone(kv_format: str, rng_seed: int) -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(rng_seed))
    alone = round_trip(rows[1:], kv_format)
    rows[0] *= 1e4
    assert torch.equal(round_trip(rows, kv_format)[1:], alone)
    assert bool(torch.isfinite(round_trip(rows, kv_format)).all())


def test_e4m3_codes_are_torch_s_but_for_ties(rng_seed: int) -> None:
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(rng_seed))
    codes, words = quantise(rows, "fp8")
    scaled = rows / words.view(torch.float32)
    assert (codes == scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)).all()


@pytest.mark.parametrize("is_values", [False, True])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_plane_gives_back_what_was_written_to_its_slots(
    kv_format: str, is_values: bool, rng_seed: int
) -> None:
    blocks = empty_blocks(5, (4, 2, 48, 24), kv_format, rng_seed)
    plane = Plane(blocks, kv_format, 48, is_values)
    generator = torch.Generator().manual_seed(rng_seed)
    slots = torch.randperm(5 * 2 * 24, generator=generator)[:60]
    rows = torch.randn(60, 48, generator=generator)
    plane.write(slots, rows)
    assert plane.page_size == 24
    assert torch.equal(plane.read(slots), round_trip(rows, kv_format))


def test_codes_of_keys_lie_by_token_and_codes_of_values_by_feature() -> None:
    rows = torch.arange(1.0, 33.0)[None].repeat(2, 1)  # of 32 features, two tokens
    codes, _ = quantise(rows, "int8")
    for is_values in (False, True):
        blocks = torch.zeros(1, 1, KV_FORMATS["int8"].block_bytes(8, 32), dtype=torch.uint8)
        Plane(blocks, "int8", 32, is_values).write(torch.tensor([0, 3]), rows)
        stored = blocks[0, 0, : 8 * 32]
        by_token = stored.view(32, 8).T if is_values else stored.view(8, 32) ^ 0x80
        assert torch.equal(by_token[3], codes[0])


@pytest.mark.parametrize(("kv_format", "share"), [("int8", 0.52), ("fp8", 0.52), ("int4", 0.28)])
def test_bytes_per_token_at_head_size_128(kv_format: str, share: float) -> None:
    plain = TensorType((1, 8, 64, 128), "bf16", "kv").num_bytes({})
    assert TensorType((1, 8, 64, 128), kv_format, "kv").num_bytes({}) <= share * plain


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_quantised_cache_s_type_prints_and_parses(kv_format: str) -> None:
    text = f"kv.{kv_format}[P, 8, 64, 128]"
    assert str(parse_type(text)) == text
    assert parse_type(text).kv_format == kv_format


def test_only_a_cache_has_such_a_dtype() -> None:
    with pytest.raises(ShapeError, match="Unknown dtype `int8`"):
        TensorType((8, 8), "int8")


def test_a_head_that_is_no_multiple_of_16_is_refused() -> None:
    with pytest.raises(ShapeError, match="whole 16 elements; found 24"):
        TensorType((1, 2, 16, 24), "int4", "kv")
