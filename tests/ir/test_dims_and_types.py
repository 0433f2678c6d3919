"""Dims and types: their arithmetic, their text and what they refuse."""

from __future__ import annotations

import pytest

from treadle.ir.dims import Sym, bind, parse_dim
from treadle.ir.errors import ShapeError
from treadle.ir.types import TensorType, parse_type


@pytest.mark.parametrize("text", ["1", "4096", "T", "B+1", "3T", "2C+7"])
def test_a_dim_reads_back_as_it_prints(text: str) -> None:
    assert str(parse_dim(text)) == text


def test_a_symbol_is_bound_with_its_scale_and_offset() -> None:
    assert bind(Sym("B") * 2 + 1, {"B": 5}) == 11
    assert bind(7, {}) == 7


def test_a_symbol_without_a_value_is_an_error_that_names_it() -> None:
    with pytest.raises(ShapeError, match="`T`"):
        bind(Sym("T"), {"B": 1})


def test_a_symbol_has_no_truth_and_no_number() -> None:
    with pytest.raises(ShapeError):
        bool(Sym("T"))
    with pytest.raises(ShapeError):
        int(Sym("T"))


def test_unknown_symbols_and_odd_arithmetic_are_refused() -> None:
    with pytest.raises(ShapeError, match="Unknown symbolic dim `Q`"):
        Sym("Q")
    with pytest.raises(ShapeError):
        Sym("T") * 1.5  # type: ignore[operator]
    with pytest.raises(ShapeError, match="not a dim"):
        parse_dim("T*2")


@pytest.mark.parametrize(
    "text", ["bf16[T, 4096]", "i32[B+1]", "kv.f16[P, 8, 64, 128]", "f32[C, 64]"]
)
def test_a_type_reads_back_as_it_prints(text: str) -> None:
    assert str(parse_type(text)) == text


def test_a_cache_counts_keys_and_values() -> None:
    cache = parse_type("kv.bf16[P, 8, 64, 128]")
    assert cache.num_bytes({"P": 3}) == 2 * 3 * 8 * 64 * 128 * 2


@pytest.mark.parametrize("text", ["bf17[T]", "bf16", "f32[0]", "zz.f32[T]"])
def test_impossible_types_are_refused(text: str) -> None:
    with pytest.raises(ShapeError):
        parse_type(text)


def test_with_shape_keeps_the_dtype() -> None:
    assert TensorType((4,), "f16").with_shape(Sym("T"), 8) == parse_type("f16[T, 8]")
