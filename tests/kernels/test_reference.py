"""The reference ops against independent statements of their meaning, mostly in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from treadle.ir import errors
from treadle.kernels.reference import linears
from treadle.kernels.reference.attention import attention, kv_write
from treadle.kernels.reference.linears import (
    WIDEN_FROM_ROWS,
    can_pack_float16,
    can_pack_weight,
    float16_loss,
    linear,
    pack_float16,
    pack_weight,
)
from treadle.kernels.reference.norms import head_norm, rms_norm
from treadle.kernels.reference.pointwise import add, glu, mul
from treadle.kernels.reference.rope import rope, rope_angles
from treadle.kernels.reference.rows import embed, gather_rows, split
from treadle.kernels.reference.sampling import philox_uniform, sample
from treadle.kernels.reference.step_inputs import advance, resolve_tokens
from treadle.kernels.reference.step_plan import StepPlan, plan_step

from .paged_inputs import POISON, PagedInputs, build_paged_inputs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of a result, relative to it, with room for what comes before.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_rounded(
    actual: torch.Tensor,
    exact: torch.Tensor,
    size: float | None = None,
    slack: float | torch.Tensor = 1e-7,
) -> None:
    """Check that `actual` is the fp64 `exact`, rounded once to its dtype.

    `size` is that of the largest term where sums cancel, `slack` what fp32 inside may be off.
    """
    bound = ROUNDING[actual.dtype] * (exact.abs() if size is None else exact.abs().clamp(min=size))
    error = (actual.double() - exact).abs()
    worst = int((error - bound - slack).argmax())
    assert (error <= bound + slack).all(), (
        f"element {worst}: {actual.flatten()[worst]} should be {exact.flatten()[worst]}"
    )


def sum_slack(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What fp32 sums of `x @ weight.T` may be off, whatever their order: `[rows, columns]`, fp64.

    sqrt(n) u sum |x w|: Higham and Mary, "A new approach to probabilistic rounding error analysis"
    (2019); at a hundred times below a rounding to bf16 it still shows one.
    """
    terms = x.shape[1]
    return terms**0.5 * 2**-24 * (x.double().abs() @ weight.double().abs().T)


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_embed_scales_rows_and_rounds_once(dtype: torch.dtype, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    table = torch.randn(11, 24).to(dtype)
    rows = embed(int32(3, 0, 10, 3), table, scale=7.3)
    assert rows.dtype == dtype
    assert_rounded(rows, table.double()[[3, 0, 10, 3]] * 7.3)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_rounds_once(
    dtype: torch.dtype, weight_dtype: torch.dtype, offset: float, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(5, 576).to(dtype), torch.randn(576).to(weight_dtype)
    y = rms_norm(x, weight, eps=1e-3, offset=offset)
    rows = x.double()
    exact = rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + offset)
    assert y.dtype == dtype
    assert_rounded(y, exact)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_rounds_once(
    dtype: torch.dtype, has_bias: bool, out_dtype: torch.dtype | None, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(3, 576).to(dtype), torch.randn(40, 576).to(dtype)
    bias = torch.randn(40).to(dtype) if has_bias else None
    y = linear(x, weight, bias, out_dtype=out_dtype)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert y.dtype == (out_dtype or dtype)
    assert_rounded(y, exact, size=24.0, slack=sum_slack(x, weight))


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_packed_weight_multiplies_like_the_plain_one(
    weight_dtype: torch.dtype, out_dtype: torch.dtype, num_tokens: int, rng_seed: int
) -> None:
    if not can_pack_weight(weight_dtype):
        pytest.skip(f"oneDNN does not multiply {weight_dtype} on this CPU")
    torch.manual_seed(rng_seed)
    wide = torch.randn(num_tokens, 700).bfloat16()
    x = wide[:, 100:676]  # a view, as `split` gives
    weight, bias = torch.randn(40, 576).to(weight_dtype), torch.randn(40).bfloat16()
    y = linear(x, pack_weight(weight), bias, out_dtype=out_dtype)
    exact = x.double() @ weight.double().T + bias.double()
    assert y.dtype == out_dtype
    assert_rounded(y, exact, size=24.0, slack=sum_slack(x, weight))


def test_packing_a_dtype_that_onednn_does_not_multiply_is_refused() -> None:
    assert not can_pack_weight(torch.float16)
    with pytest.raises(errors.MachineError, match="float16"):
        pack_weight(torch.zeros(4, 4, dtype=torch.float16))


def test_packed_weight_refuses_an_x_that_it_would_have_to_round() -> None:
    if not can_pack_weight(torch.bfloat16):
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    packed = pack_weight(torch.zeros(16, 16, dtype=torch.bfloat16))
    with pytest.raises(errors.ShapeError, match=r"bfloat16, found torch\.float32"):
        linear(torch.zeros(1, 16), packed)


needs_fbgemm = pytest.mark.skipif(not can_pack_float16(), reason="torch has no FBGEMM here")
ODD_SIZES = [(1, 1), (3, 5), (33, 17), (600, 1), (48, 513), (64, 1030)]
# One row, rows around a pass of FBGEMM's, and both sides of where weights are widened.
ROWS_OF_X = [0, 1, 2, 14, 15, 17, WIDEN_FROM_ROWS - 1, WIDEN_FROM_ROWS]


@needs_fbgemm
@pytest.mark.parametrize("num_rows", ROWS_OF_X)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ODD_SIZES)
def test_a_weight_that_float16_represents_multiplies_like_the_plain_one(
    num_outputs: int, num_inputs: int, num_rows: int, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    weight = torch.randn(num_outputs, num_inputs).half().float()
    x = torch.randn(num_rows, 2 * num_inputs)[:, ::2]  # a view with gaps
    bias = torch.randn(num_outputs).half()
    y = linear(x, pack_float16(weight), bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert y.dtype == torch.float32 and y.shape == exact.shape
    sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((y - exact).abs() <= 1e-6 * sizes).all()


@needs_fbgemm
@pytest.mark.parametrize("num_rows", [1, 16, WIDEN_FROM_ROWS])
def test_rounding_a_weight_to_float16_changes_a_product_by_a_2048th_of_its_terms(
    num_rows: int, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(num_rows, 576), torch.randn(40, 576)
    difference = (linear(x, pack_float16(weight)) - linear(x, weight)).abs()
    assert difference.any()  # a float32 weight does lose bits
    assert (difference <= 2.0**-11 * (x.abs() @ weight.abs().T)).all()


@needs_fbgemm
@pytest.mark.parametrize("num_rows", [3, WIDEN_FROM_ROWS])
def test_the_extremes_of_float16_are_multiplied_exactly(num_rows: int) -> None:
    weight = torch.tensor([[2.0**-24, 3 * 2.0**-24, 65504.0, -65504.0]])  # [1, 4]
    x = torch.eye(4).repeat(num_rows, 1)[:num_rows]
    assert torch.equal(linear(x, pack_float16(weight)), x @ weight.mT)


@pytest.mark.parametrize("chunk_elements", [4, 12, 2**22])
def test_the_loss_of_float16_is_that_of_the_whole_weight(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch, rng_seed: int
) -> None:
    monkeypatch.setattr(linears, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(rng_seed)
    weight = torch.randn(8, 4)
    expected = (weight.half().double() - weight).norm() / weight.double().norm()
    assert 0 < expected <= 2.0**-11
    assert float16_loss(weight) == pytest.approx(float(expected))


def test_float16_loses_nothing_of_what_it_represents() -> None:
    for weight in (torch.randn(3, 5).half(), torch.zeros(2, 3), torch.full((1, 1), 65504.0)):
        assert float16_loss(weight) == 0.0


def test_float16_loses_little_of_small_numbers_beside_others_and_all_of_them_alone() -> None:
    assert float16_loss(torch.tensor([[1.0, 1e-9], [0.25, 0.0]])) < 1e-8
    assert float16_loss(torch.full((8, 4), 1e-9)) == 1.0


@pytest.mark.parametrize("row", [0, 7])
def test_the_loss_of_float16_is_infinite_beyond_its_range(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "CHUNK_ELEMENTS", 12)
    weight = torch.randn(8, 4)
    weight[row, 3] = -65520.0
    assert float16_loss(weight) == math.inf


def test_packing_in_float16_without_fbgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "can_pack_float16", lambda: False)
    with pytest.raises(errors.MachineError, match="FBGEMM"):
        pack_float16(torch.zeros(4, 4))


def test_gather_rows_reads_row_0_for_a_sequence_without_one(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x = torch.randn(4, 8)
    assert torch.equal(gather_rows(x, int32(3, -1, 1)), x[[3, 0, 1]])


# --- pointwise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_and_mul_round_once(dtype: torch.dtype, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    a, b = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype)
    assert_rounded(add(a, b), a.double() + b.double())
    assert_rounded(mul(a, b), a.double() * b.double())


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_glu_multiplies_the_activated_first_half_with_the_second(
    dtype: torch.dtype, act: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x = torch.randn(3, 80).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    exact = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))),
        "gelu_tanh": gate
        * 0.5
        * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
        "relu": gate.clamp(min=0),
    }[act] * up
    y = glu(x, act=act)
    assert y.dtype == dtype
    assert_rounded(y, exact, slack=2e-6)


@pytest.mark.parametrize("group", [1, 8, 20])
def test_glu_of_interleaved_groups_is_glu_of_halves(group: int, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    pieces = zip(gate.split(group, dim=-1), up.split(group, dim=-1), strict=True)
    interleaved = torch.cat([half for pair in pieces for half in pair], dim=-1)
    plain = glu(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(glu(interleaved, interleave=group), plain)


def test_glu_refuses_an_unknown_activation() -> None:
    with pytest.raises(errors.SpecError, match=r"'silu'.*found `swish`"):
        glu(torch.zeros(1, 4), act="swish")


@pytest.mark.parametrize(("width", "interleave"), [(5, 0), (12, 4)])
def test_glu_refuses_a_width_it_can_not_cut(width: int, interleave: int) -> None:
    with pytest.raises(errors.ShapeError, match=f"found {width}"):
        glu(torch.zeros(1, width), interleave=interleave)


def test_split_gives_views() -> None:
    x = torch.arange(12.0).view(2, 6)
    a, b = split(x, sizes=(2, 4))
    assert torch.equal(a, x[:, :2]) and torch.equal(b, x[:, 2:])
    assert b.data_ptr() == x[:, 2:].data_ptr()


def test_split_refuses_sizes_that_do_not_add_up() -> None:
    with pytest.raises(errors.ShapeError, match=r"6, found \(2, 3\)"):
        split(torch.zeros(1, 6), sizes=(2, 3))


# --- rope and cache -----------------------------------------------------------------------------


def angle_table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)  # [r / 2]
    angles = torch.arange(num_positions)[:, None] * frequencies  # [C, r / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)  # [C, r]


def test_rope_rotates_like_hugging_face(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, positions, table = torch.randn(5, 3 * 64), int32(0, 7, 3, 99, 7), angle_table(100, 64)
    cos, sin = table[positions].chunk(2, dim=-1)
    heads = x.view(1, 5, 3, 64).transpose(1, 2)  # [1, n, T, D]
    cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]  # [1, T, D]
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    actual = rope(x, positions, table, head_dim=64)
    torch.testing.assert_close(actual, expected.transpose(1, 2).reshape(5, -1))


def test_rope_passes_dims_beyond_the_rotated_ones_through(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, positions, table = torch.randn(4, 3 * 40), int32(1, 2, 3, 4), angle_table(10, 16)
    rotated = rope(x, positions, table, head_dim=40).view(4, 3, 40)
    narrow = x.view(4, 3, 40)[..., :16].reshape(4, -1)
    expected = rope(narrow, positions, table, head_dim=16).view(4, 3, 16)
    assert torch.equal(rotated[..., :16], expected)
    assert torch.equal(rotated[..., 16:], x.view(4, 3, 40)[..., 16:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_rounds_once(dtype: torch.dtype, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, positions, table = torch.randn(4, 64).to(dtype), int32(1, 2, 3, 4), angle_table(10, 64)
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = table.double()[positions].chunk(2, dim=-1)
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert_rounded(rope(x, positions, table, head_dim=64), exact, size=1.0)


def test_rope_with_angles_at_hand_gives_the_same(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, positions, table = torch.randn(4, 128), int32(5, 2, 3, 4), angle_table(10, 64)
    angles = rope_angles(positions, table)
    expected = rope(x, positions, table, head_dim=64)
    assert torch.equal(rope(x, positions, table, head_dim=64, angles=angles), expected)


def kv_write_inputs(seed: int) -> tuple[torch.Tensor, ...]:
    """Draw the arguments of kv_write; sequence 1 is padding."""
    torch.manual_seed(seed)
    k, v = torch.randn(6, 3 * 8), torch.randn(6, 3 * 8)
    caches = torch.full((2, 9, 3, 16, 8), POISON)
    block_table = torch.randperm(9).int().view(3, 3)
    positions, token_seq = int32(17, 0, 15, 16, 31, 32), int32(0, 1, 2, 2, 2, 2)
    return k, v, positions, token_seq, int32(2, -1, 0), block_table, caches[0], caches[1]


@pytest.mark.parametrize("planned", [False, True])
def test_kv_write_fills_the_slots_of_live_tokens_and_no_others(
    planned: bool, rng_seed: int
) -> None:
    inputs = kv_write_inputs(rng_seed)
    k, v, positions, token_seq, seq_rows, block_table, k_cache, v_cache = inputs
    plan = None
    if planned:
        plan = plan_step(
            *inputs[2:6],
            int32(0, 1, 2, 6),
            int32(18, 0, 33),
            num_kv_heads=3,
            page_size=16,
        )
    kv_write(*inputs, plan=plan)
    for new, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.full_like(cache, POISON)
        for token, (position, seq) in enumerate(
            zip(positions.tolist(), token_seq.tolist(), strict=True)
        ):
            if seq != 1:
                page = block_table[seq_rows[seq], position // 16]
                expected[page, :, position % 16] = new[token].view(3, 8)
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_kv_write_of_views_of_one_projection(rng_seed: int) -> None:
    k, v, *step, k_cache, v_cache = kv_write_inputs(rng_seed)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    kv_write(k, v, *step, expected_k, expected_v)
    k_view, v_view = torch.cat((k, v), dim=-1).split(24, dim=-1)
    kv_write(k_view, v_view, *step, k_cache, v_cache)
    torch.testing.assert_close(k_cache, expected_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, expected_v, rtol=0, atol=0, equal_nan=True)


# --- attention ----------------------------------------------------------------------------------

STEPS = {
    "one": [(1, 1)],
    "decode": [(1, 33), (1, 1), (1, 16)],
    "equal contexts": [(1, 20), (1, 20)],
    "decode and padding": [(1, 9), (1, 0), (1, 40)],
    "prefill": [(20, 20)],
    "chunk": [(7, 40)],
    "mixed": [(1, 17), (1, 5), (3, 0), (16, 16), (5, 33), (1, 2)],
    "padding": [(1, 0), (2, 0)],
}


def paged(steps: str, dtype: torch.dtype, seed: int) -> PagedInputs:
    return build_paged_inputs(
        STEPS[steps],
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        page_size=16,
        dtype=dtype,
        seed=seed,
        spare_tokens=2,
    )


def run_attention(inputs: PagedInputs, plan: StepPlan | None = None) -> torch.Tensor:
    return attention(
        inputs.q.flatten(1),
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.seq_rows,
        inputs.query_start,
        inputs.context_lens,
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        scale=inputs.scale,
        plan=plan,
    )


def exact_attention(inputs: PagedInputs) -> torch.Tensor:
    """Attend in fp64, token by token and head by head."""
    out = torch.zeros_like(inputs.q, dtype=torch.float64)  # [T, H, D]
    starts = inputs.query_start.tolist()
    for seq, (row, context) in enumerate(
        zip(inputs.seq_rows.tolist(), inputs.context_lens.tolist(), strict=True)
    ):
        if row < 0:
            continue
        pages = [int(inputs.block_table[row, p // 16]) for p in range(context)]
        k = torch.stack([inputs.k_cache[page, :, p % 16] for p, page in enumerate(pages)]).double()
        v = torch.stack([inputs.v_cache[page, :, p % 16] for p, page in enumerate(pages)]).double()
        for token in range(starts[seq], starts[seq + 1]):
            visible = context - (starts[seq + 1] - 1 - token)
            for head in range(6):
                scores = k[:visible, head // 3] @ inputs.q[token, head].double() * inputs.scale
                out[token, head] = scores.softmax(0) @ v[:visible, head // 3]
    return out.flatten(1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("steps", STEPS)
def test_attention_matches_fp64_and_reads_no_unwritten_slot(
    steps: str, dtype: torch.dtype, rng_seed: int
) -> None:
    inputs = paged(steps, dtype, rng_seed)
    out = run_attention(inputs)
    assert out.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(
        out, exact_attention(inputs).to(dtype), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("steps", STEPS)
def test_attention_with_a_plan_at_hand_gives_the_same(steps: str, rng_seed: int) -> None:
    inputs = paged(steps, torch.float32, rng_seed)
    num_tokens = int(inputs.query_start[-1])
    plan = plan_step(
        torch.zeros(num_tokens, dtype=torch.int32),
        torch.zeros(num_tokens, dtype=torch.int32),
        inputs.seq_rows,
        inputs.block_table,
        inputs.query_start,
        inputs.context_lens,
        num_kv_heads=2,
        page_size=16,
    )
    assert torch.equal(run_attention(inputs, plan), run_attention(inputs))


# --- step inputs --------------------------------------------------------------------------------


def test_advance_gives_each_live_row_its_next_position() -> None:
    last_token, length = int32(70, 71, 72, 73), int32(10, 0, 12, 13)
    token_ids, positions, token_seq, query_start, context_lens, sample_index = advance(
        int32(2, -1, 1), last_token, length
    )
    assert token_ids.tolist() == [72, 0, 71]
    assert positions.tolist() == [12, 0, 0]
    assert token_seq.tolist() == [0, 1, 2]
    assert query_start.tolist() == [0, 1, 2, 3]
    assert context_lens.tolist() == [13, 0, 1]
    assert sample_index.tolist() == [0, -1, 2]
    assert length.tolist() == [10, 1, 13, 13]
    assert last_token.tolist() == [70, 71, 72, 73]
    results = (token_ids, positions, token_seq, query_start, context_lens, sample_index, length)
    assert {tensor.dtype for tensor in results} == {torch.int32}


def test_resolve_tokens_fills_in_unknown_ids_only() -> None:
    resolved = resolve_tokens(
        int32(-1, -1, 5, -1, 6), int32(0, 1, 1, 2, 2), int32(1, -1, 0), int32(7, 8)
    )
    assert resolved.tolist() == [8, 0, 5, 7, 6]
    assert resolved.dtype == torch.int32


# --- sampling -----------------------------------------------------------------------------------


@dataclass
class Rows:
    """Hold the sampling state of R rows; every field is one value for all rows or a list of R."""

    num_rows: int
    temperature: float | list[float] = 1.0
    top_k: int | list[int] = 0
    top_p: float | list[float] = 1.0
    min_p: float | list[float] = 0.0
    seed: int | list[int] = 0
    length: int | list[int] = 0

    def sample(
        self,
        logits: torch.Tensor,
        seq_rows: list[int] | None = None,
        index: list[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Give the tokens and the rows' last tokens, which were -7."""
        tensors = []
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "length"):
            value = getattr(self, name)
            dtype = {"seed": torch.int64, "top_k": torch.int32, "length": torch.int32}.get(name)
            values = value if isinstance(value, list) else [value] * self.num_rows
            tensors.append(torch.tensor(values, dtype=dtype or torch.float32))
        rows = int32(*(range(logits.shape[0]) if seq_rows is None else seq_rows))
        wanted = int32(*(range(logits.shape[0]) if index is None else index))
        last_token = torch.full((self.num_rows,), -7, dtype=torch.int32)
        tokens = sample(logits, rows, wanted, *tensors, last_token)
        assert tokens.dtype == torch.int32
        return tokens.tolist(), last_token.tolist()


def draw_many(row: torch.Tensor, count: int, first_position: int = 0, **settings: Any) -> list[int]:
    """Draw one token of the same logits f32[V] at each of `count` positions."""
    positions = list(range(first_position, first_position + count))
    return Rows(count, length=positions, **settings).sample(row.expand(count, -1))[0]


def allowed(row: torch.Tensor, count: int = 400, **settings: Any) -> set[int]:
    """Give the tokens that are ever drawn."""
    return set(draw_many(row, count, **settings))


def test_philox_gives_the_published_answer_and_24_bits() -> None:
    # kat_vectors of Random123: philox4x32-10 of a zero counter and a zero key starts with 6627e8d5.
    assert philox_uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24


def test_philox_uses_all_bits_of_the_seed_and_of_the_position() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, -1]
    positions = [0, 1, 2**16, 2**31 - 1]
    drawn = [philox_uniform(seed, pos) for seed in seeds for pos in positions]
    assert len(set(drawn)) == len(drawn)
    assert all(0.0 <= number < 1.0 for number in drawn)


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -2.0, -1.0, -1.0]])
    assert Rows(2, temperature=0.0).sample(logits)[0] == [1, 0]


def test_greedy_ignores_the_other_settings(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    logits = torch.randn(4, 100)
    rows = Rows(4, temperature=0.0, top_k=3, top_p=0.2, min_p=0.1, seed=5, length=9)
    assert rows.sample(logits)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row = torch.tensor([1.0, -1.0, 0.5, 2.0, float("-inf"), 0.0])
    count = 6000
    drawn = torch.tensor(draw_many(row, count, temperature=temperature, seed=42))
    observed = drawn.bincount(minlength=6).double()
    expected = (row.double() / temperature).softmax(0) * count
    assert observed[4] == 0
    live = expected > 0
    chi_square = ((observed - expected)[live] ** 2 / expected[live]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded by one seed in a thousand


def test_different_seeds_draw_independently() -> None:
    count = 4000
    row = torch.zeros(4)
    first, second = (torch.tensor(draw_many(row, count, seed=seed)) for seed in (7, 8))
    observed = (first * 4 + second).bincount(minlength=16).double()
    chi_square = ((observed - count / 16) ** 2 / (count / 16)).sum()
    assert chi_square < 37.7  # 15 degrees of freedom: exceeded by one seed in a thousand


def test_a_tiny_temperature_is_greedy() -> None:
    row = torch.tensor([1.0, 1.5, 1.4999])
    assert allowed(row, temperature=1e-30, count=50) == {1}


def test_top_k_keeps_the_k_largest() -> None:
    row = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3])
    assert allowed(row, top_k=1) == {1}
    assert allowed(row, top_k=3) == {1, 3, 4}
    assert allowed(row, top_k=5) == {0, 1, 2, 3, 4}
    assert allowed(row, top_k=99) == {0, 1, 2, 3, 4}


def test_top_k_keeps_all_that_tie_with_the_k_th() -> None:
    row = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    assert allowed(row, top_k=2) == {0, 1, 2, 4}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1]).log()
    assert allowed(row, top_p=0.39) == {1}
    assert allowed(row, top_p=0.41) == {1, 3}
    assert allowed(row, top_p=0.71) == {0, 1, 3}
    assert allowed(row, top_p=0.96) == {0, 1, 2, 3, 4}


def test_top_p_of_zero_keeps_one_token() -> None:
    assert allowed(torch.tensor([0.0, 1.0, 0.5]), top_p=0.0, count=50) == {1}


def test_top_p_keeps_all_that_tie_with_the_smallest_kept() -> None:
    row = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert allowed(row, top_p=0.5) == {0, 1, 2, 3}


def test_top_p_counts_of_what_top_k_has_left() -> None:
    # Of 0.4 and 0.3 alone 0.4 is 0.57: more than a half, although less than half of everything.
    row = torch.tensor([0.3, 0.4, 0.2, 0.1]).log()
    assert allowed(row, top_k=2, top_p=0.5) == {1}
    assert allowed(row, top_p=0.5) == {0, 1}


def test_min_p_is_relative_to_the_largest() -> None:
    row = torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
    assert allowed(row, min_p=0.5) == {0, 1}
    assert allowed(row, min_p=1.0) == {0}


@pytest.mark.parametrize("num_kept", [40, 700, 3900])
def test_top_p_cuts_a_large_vocabulary_where_sorting_does(num_kept: int, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    row = torch.randn(4000)
    weights, order = row.double().softmax(0).sort(descending=True)
    # The target lies halfway into the smallest kept weight: far from rounding.
    top_p = float(weights[:num_kept].sum() - weights[num_kept - 1] / 2)
    kept = set(order[:num_kept].tolist())
    mass = torch.tensor([float(row.exp()[i]) if i in kept else 0.0 for i in range(4000)]).cumsum(0)
    expected = []
    for position in range(100):
        uniform = philox_uniform(3, position)
        expected.append(int(torch.searchsorted(mass, uniform * mass[-1:], right=True)))
    drawn = draw_many(row, 100, top_p=top_p, seed=3)
    # fp32 and fp64 sums may disagree about a draw on a boundary.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_rows_that_want_no_token_store_nothing() -> None:
    tokens, last_token = Rows(3, temperature=0.0).sample(
        torch.eye(4), seq_rows=[1, -1, 0, 2], index=[0, 1, -1, 3]
    )
    assert tokens == [0, -1, -1, 3]
    assert last_token == [-7, 0, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[0.0, math.nan, 1.0], [math.inf, 0.0, 0.0], [-math.inf] * 3, [math.nan] * 3]
)
def test_unusable_logits_are_a_fault_of_their_sequence_only(
    bad: list[float], temperature: float
) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf], bad])
    tokens, last_token = Rows(2, temperature=temperature).sample(logits)
    assert tokens == [1, -2]
    assert last_token == [1, 0]


def test_tokens_do_not_depend_on_neighbours_or_rows(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    logits = torch.randn(3, 200)
    alone = Rows(1, top_p=0.9, seed=11, length=30).sample(logits[2:])[0]
    together = Rows(5, top_p=[1, 0.9, 1, 1, 1], seed=[1, 11, 3, 4, 5], length=[3, 30, 5, 6, 7])
    assert together.sample(logits, seq_rows=[0, 4, 1])[0][2:] == alone


def test_head_norm_normalises_each_head_on_its_own(rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(3, 5 * 8), torch.randn(8)
    y = head_norm(x, weight, eps=1e-3, offset=0.5)
    for head in range(5):
        part = slice(8 * head, 8 * head + 8)
        expected = rms_norm(x[:, part], weight, eps=1e-3, offset=0.5)
        torch.testing.assert_close(y[:, part], expected, rtol=0, atol=1e-6)
