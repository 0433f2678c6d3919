"""What the bytes of a quantised cache mean: round trips, layout, sizes, and rows that are odd."""

from __future__ import annotations

import pytest
import torch

from treadle.ir.errors import ShapeError
from treadle.ir.kv_cache import KV_FORMATS
from treadle.ir.types import TensorType, parse_type
from treadle.kernels.kv_pages import (
    dequantise_keys,
    dequantise_values,
    quantise_keys,
    quantise_values,
    to_e4m3,
)

from .quantised_inputs import empty_cache

FORMATS = sorted(KV_FORMATS)
# Relative error of Gaussian pages; int4's is near the least that 16 even steps allow.
GAUSSIAN_ERROR = {"int8": 0.008, "fp8": 0.03, "int4": 0.12}
PLANES = ("keys", "values")


def round_trip(rows: torch.Tensor, kv_format: str, plane: str) -> torch.Tensor:
    """Take pages f32[..., S, D] of keys or of values through a format."""
    if plane == "keys":
        return dequantise_keys(quantise_keys(rows, kv_format), kv_format, rows.shape[-1])
    return dequantise_values(quantise_values(rows, kv_format), kv_format, rows.shape[-1])


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_gaussian_pages_come_back_within_the_format_s_error(
    kv_format: str, plane: str, head_dim: int, rng_seed: int
) -> None:
    pages = draw(rng_seed, 3, 64, head_dim)
    error = (round_trip(pages, kv_format, plane) - pages).norm() / pages.norm()
    assert 0 < error < GAUSSIAN_ERROR[kv_format]


@pytest.mark.parametrize("value", [0.0, 0.01, -3.5, 60.0])
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_pages_of_one_value_come_back_as_that_value(
    kv_format: str, plane: str, value: float
) -> None:
    pages = torch.full((2, 16, 64), value)
    torch.testing.assert_close(round_trip(pages, kv_format, plane), pages, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_an_outlier_channel_of_keys_leaves_the_others_alone(
    kv_format: str, rng_seed: int
) -> None:
    keys = draw(rng_seed, 2, 64, 128)
    keys[..., 5] += 60.0
    error = round_trip(keys, kv_format, "keys") - keys
    share = error.norm(dim=(0, 1)) / draw(rng_seed, 2, 64, 128).norm(dim=(0, 1))  # by channel
    assert float(share.max()) < 1.5 * GAUSSIAN_ERROR[kv_format]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_huge_token_leaves_the_values_of_others_alone(kv_format: str, rng_seed: int) -> None:
    values = draw(rng_seed, 16, 64)
    alone = round_trip(values, kv_format, "values")
    values[0] *= 1e3
    found = round_trip(values, kv_format, "values")
    assert torch.equal(found[1:], alone[1:])
    assert bool(torch.isfinite(found).all())


def test_e4m3_codes_are_torch_s_but_for_ties(rng_seed: int) -> None:
    numbers = 100 * draw(rng_seed, 30000)
    codes = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(to_e4m3(numbers), codes)


@pytest.mark.parametrize("steps", [(40,), (1,) * 40, (7, 9, 3, 21), (16, 16, 8), (15, 2, 23)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_a_cache_is_the_same_however_tokens_arrive(
    kv_format: str, steps: tuple[int, ...], rng_seed: int
) -> None:
    """Whole prompts, chunks and decode steps: full pages are rounded once and alike."""
    k, v = draw(rng_seed, 2, 40, 3, 32).half().float()
    pages = torch.tensor([4, 0, 2], dtype=torch.int32)
    cache = empty_cache(5, 2, (3, 3, 32, 16), kv_format, rng_seed)
    prior = 0
    for count in steps:
        own = slice(prior, prior + count)
        cache.append(1, pages, k[own], v[own], prior)
        prior += count
    keys, values = cache.read(1, pages, 40)  # [G, C, D] each
    for found, given, plane in ((keys, k, "keys"), (values, v, "values")):
        given = given.transpose(0, 1)
        full = round_trip(given[:, :32].unflatten(1, (2, 16)), kv_format, plane).flatten(1, 2)
        assert torch.equal(found, torch.cat((full, given[:, 32:]), dim=1))


def test_codes_of_keys_lie_by_token_and_codes_of_values_by_feature() -> None:
    rows = torch.arange(16.0)[:, None].repeat(1, 32)  # [S, D]: a token's number
    keys = quantise_keys(rows, "int4")[: 16 * 16].view(16, 16)
    assert torch.equal(keys[:, 0], torch.arange(16, dtype=torch.uint8) * 17)
    values = quantise_values(rows.T.repeat(1, 2)[:16], "int8")[: 32 * 16].view(32, 16)
    assert torch.equal(values[15], torch.full((16,), 255, dtype=torch.uint8))


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


def test_a_page_that_is_no_multiple_of_16_is_refused() -> None:
    with pytest.raises(ShapeError, match="pages of whole 16 tokens; found 24"):
        TensorType((1, 2, 24, 32), "int8", "kv")
