"""The quick forms against the reference ops that they stand for."""

from __future__ import annotations

import pytest
import torch

from treadle.kernels import reference_quick
from treadle.kernels.reference.attention import attention, kv_write
from treadle.kernels.reference.linears import (
    PackedWeight,
    can_pack_float16,
    can_pack_weight,
    linear,
    pack_float16,
    pack_weight,
)
from treadle.kernels.reference.norms import rms_norm
from treadle.kernels.reference.pointwise import ACTIVATIONS, add, glu
from treadle.kernels.reference.rope import rope, rope_angles
from treadle.kernels.reference.rows import split
from treadle.kernels.reference.step_plan import plan_step

from .paged_inputs import POISON
from .test_reference import angle_table, int32

NUM_TOKENS = [1, 2, 33]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within the rounding of fp32 sums of a few hundred terms.

    What cancels in a sum or is gated leaves the rounding of its largest terms, so the scale is that
    of the largest results and not of each one.
    """
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6 * scale)


def packed(weight: torch.Tensor, held: str) -> PackedWeight:
    """Pack a weight of numbers that float16 represents."""
    if held == "float16":
        if not can_pack_float16():
            pytest.skip("needs FBGEMM")
        return pack_float16(weight)
    if not can_pack_weight(weight.dtype):
        pytest.skip("needs oneDNN")
    return pack_weight(weight)


held_in_both = pytest.mark.parametrize("held", ["float32", "float16"])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_norm_is_that_of_the_reference(size: float, num_tokens: int, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, weight = size * torch.randn(num_tokens, 72), torch.randn(72)
    expected = rms_norm(x.double(), weight.double(), eps=1e-5)
    actual = reference_quick.rms_norm(x, weight, torch.full((1,), 1e-5))
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-7)


def test_norm_of_zeros_is_zero() -> None:
    zeros = torch.zeros(2, 8)
    norm = reference_quick.rms_norm(zeros, torch.ones(8), torch.full((1,), 1e-5))
    assert torch.equal(norm, zeros)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_bias", [False, True])
@held_in_both
def test_linear_and_its_sum_with_a_residual_are_those_of_the_reference(
    held: str, has_bias: bool, num_tokens: int, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x = torch.randn(num_tokens, 200)[:, 50:122]  # a view, as `split` gives
    weight, residual = torch.randn(40, 72).half().float(), torch.randn(num_tokens, 40)
    bias = torch.randn(40) if has_bias else None
    expected = linear(x, weight, bias)
    before = residual.clone()
    assert_same(reference_quick.linear(x, packed(weight, held), bias), expected)
    total = reference_quick.linear_add(x, packed(weight, held), bias, residual)
    assert_same(total, add(expected, residual))
    assert torch.equal(residual, before)  # others may read it still


@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
@pytest.mark.parametrize("interleave", [0, 1, 8])
@pytest.mark.parametrize("has_bias", [False, True])
@held_in_both
def test_linear_and_glu_are_those_of_the_reference(
    held: str, has_bias: bool, interleave: int, act: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(3, 72), torch.randn(96, 72).half().float()
    bias = torch.randn(96) if has_bias else None
    product = linear(x, weight, bias)
    expected = glu(product, act=act, interleave=interleave)
    parted_bias = None if bias is None else reference_quick.part_gate_up(bias, interleave)
    parted = packed(reference_quick.part_gate_up(weight, interleave), held)
    assert_same(reference_quick.linear_glu(x, parted, parted_bias, act=act), expected)


@pytest.mark.parametrize("live", [True, False])
def test_rope_and_kv_write_are_those_of_the_reference(live: bool, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    num_heads, num_kv_heads, head_dim = 6, 3, 8
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim)
    table = angle_table(64, head_dim)
    positions, token_seq = int32(17, 0, 15, 16, 31, 32), int32(0, 1, 2, 2, 2, 2)
    seq_rows = int32(2, 1 if live else -1, 0)
    block_table = torch.randperm(9).int().view(3, 3)
    caches = torch.full((2, 9, num_kv_heads, 16, head_dim), POISON)
    expected_caches = caches.clone()

    q, k, v = split(qkv, sizes=(48, 24, 24))
    expected = rope(q, positions, table, head_dim=head_dim)
    k = rope(k, positions, table, head_dim=head_dim)
    step = (positions, token_seq, seq_rows, block_table)
    kv_write(k, v, *step, expected_caches[0], expected_caches[1])

    lengths = int32(18, 1 if live else 0, 33)
    plan = plan_step(*step, int32(0, 1, 2, 6), lengths, num_kv_heads=num_kv_heads, page_size=16)
    angles = rope_angles(positions, table)
    before = qkv.clone()
    actual = reference_quick.rope_kv_write(
        qkv, caches[0], caches[1], num_heads=num_heads, angles=angles, plan=plan
    )
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(caches, expected_caches, equal_nan=True)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "seq_rows"),
    [
        ((1,), (17,), (0,)),
        ((1, 1, 1), (16, 16, 16), (2, 0, 1)),
        ((1, 1, 1), (3, 40, 17), (2, 0, 1)),
        ((1, 3, 1), (8, 20, 33), (0, 1, 2)),  # a prompt among them
        ((1, 1, 1), (8, 20, 33), (0, -1, 2)),  # padding among them
    ],
)
def test_attention_is_that_of_the_reference(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    seq_rows: tuple[int, ...],
    rng_seed: int,
) -> None:
    torch.manual_seed(rng_seed)
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    starts = [sum(query_lens[:count]) for count in range(len(query_lens) + 1)]
    q = torch.randn(starts[-1], 72)[:, :48]  # a view, as `rope_kv_write` gives
    block_table = torch.randperm(9).int().view(3, 3)
    caches = torch.full((2, 9, 3, 16, 8), POISON)
    for row, context in zip(seq_rows, context_lens, strict=True):
        for position in range(context if row >= 0 else 0):
            page = int(block_table[row, position // 16])
            caches[:, page, :, position % 16] = torch.randn(2, 3, 8)
    step = (block_table, int32(*seq_rows), int32(*starts), int32(*context_lens))
    token_seq = torch.repeat_interleave(torch.arange(len(query_lens)), int32(*query_lens)).int()
    positions = torch.zeros_like(token_seq)
    plan = plan_step(
        positions, token_seq, step[1], step[0], *step[2:], num_kv_heads=3, page_size=16
    )
    expected = attention(q, caches[0], caches[1], *step, scale=0.3, **sizes)
    actual = reference_quick.attention(
        q, caches[0], caches[1], *step, scale=0.3, plan=plan, **sizes
    )
    assert_same(actual, expected)
