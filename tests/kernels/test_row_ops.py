"""The templates of row ops, rope with cache append and step inputs, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import gelu

from treadle.kernels import cross_compile, emit
from treadle.kernels.reference.attention import kv_write
from treadle.kernels.reference.norms import head_norm, layer_norm, rms_norm, section_norm
from treadle.kernels.reference.pointwise import add, glu, mul
from treadle.kernels.reference.rope import rope
from treadle.kernels.reference.rows import embed, gather_rows, split
from treadle.kernels.reference.step_inputs import advance, resolve_tokens

from .private_template import load_template

POISON = float("nan")
DTYPES = [torch.float32, torch.float16]
# Both round once from fp32 sums; the order of the sums differs.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def launch(template: ModuleType, *arguments: torch.Tensor | int | None, device: str) -> None:
    """Launch on the device; results come back to the tensors given."""
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    template.launch(*moved)
    for given, used in zip(arguments, moved, strict=True):
        if isinstance(given, torch.Tensor):
            given.copy_(used)  # type: ignore[arg-type]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if actual.dtype == torch.float16:
        # Rounded once from fp32 on both sides: all but a few are the same. One more rounding on the
        # way would stay within the tolerance, but change many.
        different = (actual != expected) & ~expected.isnan()
        assert different.float().mean() < 0.02


# --- embed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 7.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 576), (3, 320), (2, 1000)])
def test_embed_copies_scaled_rows(
    num_tokens: int, hidden: int, dtype: torch.dtype, scale: float, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    table, y = torch.randn(50, hidden).to(dtype), poisoned(num_tokens + 1, hidden, dtype=dtype)
    token_ids = int32(49, 0, 17)[: num_tokens + 1]
    template = load_template(
        "embed", shape={"HIDDEN": hidden, "SCALE": scale}, schedule={"BLOCK_E": 512}
    )
    launch(template, token_ids, table, y, num_tokens, device=device)
    expected = embed(token_ids[:num_tokens], table, scale=scale)
    assert torch.equal(y[:num_tokens], expected)
    assert y[num_tokens:].isnan().all()


# --- gather rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 1000), (4, 64)])
def test_gather_copies_the_rows_that_are_wanted(
    num_rows: int, width: int, dtype: torch.dtype, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, y = torch.randn(9, width).to(dtype), poisoned(num_rows + 1, width, dtype=dtype)
    index = int32(8, -1, 0, 5, 7)[: num_rows + 1]
    template = load_template("gather_rows", shape={"WIDTH": width}, schedule={"BLOCK_F": 512})
    launch(template, x, index, y, num_rows, device=device)
    assert torch.equal(y[:num_rows], gather_rows(x, index[:num_rows]))
    assert y[num_rows:].isnan().all()


# --- norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "block_t"), [(1, 576, 1), (3, 576, 2), (2, 1000, 1), (5, 64, 8)]
)
def test_norm_of_rows(
    num_rows: int, hidden: int, block_t: int, dtype: torch.dtype, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = torch.randn(num_rows + 1, hidden).to(dtype), torch.randn(hidden).to(dtype)
    y = poisoned(num_rows + 1, hidden, dtype=dtype)
    template = load_template(
        "norm", shape={"HIDDEN": hidden, "EPS": 1e-3}, schedule={"BLOCK_T": block_t}
    )
    launch(template, x, weight, None, None, y, None, num_rows, device=device)
    assert_same(y[:num_rows], rms_norm(x[:num_rows], weight, eps=1e-3))
    assert y[num_rows:].isnan().all()


def test_norm_adds_an_offset_to_the_weight(device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, weight, y = torch.randn(2, 96), torch.randn(96), poisoned(2, 96, dtype=torch.float32)
    template = load_template("norm", shape={"HIDDEN": 96, "EPS": 1e-6, "OFFSET": 1.0})
    launch(template, x, weight, None, None, y, None, 2, device=device)
    assert_same(y, rms_norm(x, weight, eps=1e-6, offset=1.0))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum_stores_the_rounded_sum(
    dtype: torch.dtype, in_place: bool, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    x, residual = torch.randn(3, 320).to(dtype), torch.randn(3, 320).to(dtype)
    weight, y = torch.randn(320).to(dtype), poisoned(3, 320, dtype=dtype)
    summed = add(x, residual)
    template = load_template(
        "norm",
        shape={"HIDDEN": 320, "EPS": 1e-5, "ADD_RESIDUAL": True},
        schedule={"BLOCK_T": 2},
    )
    if in_place:
        x, residual, weight, y = (tensor.to(device) for tensor in (x, residual, weight, y))
        template.launch(x, weight, residual, None, y, residual, 3)
        stream = residual
    else:
        stream = poisoned(3, 320, dtype=dtype)
        launch(template, x, weight, residual, None, y, stream, 3, device=device)
    assert torch.equal(stream.cpu(), summed)
    assert_same(y.cpu(), rms_norm(summed, weight.cpu(), eps=1e-5))


@pytest.mark.parametrize("add_residual", [False, True])
def test_norm_of_gathered_rows(add_residual: bool, device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, residual, weight = torch.randn(7, 320), torch.randn(7, 320), torch.randn(320)
    index, y, stream = int32(6, -1, 2), poisoned(4, 320, dtype=torch.float32), torch.zeros(4, 320)
    template = load_template(
        "norm",
        shape={"HIDDEN": 320, "EPS": 1e-5, "GATHER": True, "ADD_RESIDUAL": add_residual},
        schedule={"BLOCK_T": 2},
    )
    launch(template, x, weight, residual, index, y, stream, 3, device=device)
    rows = gather_rows(add(x, residual) if add_residual else x, index)
    assert_same(y[:3], rms_norm(rows, weight, eps=1e-5))
    assert y[3].isnan().all()
    assert torch.equal(stream[:3], rows if add_residual else torch.zeros(3, 320))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "block_t", "has_bias"),
    [(1, 576, 1, True), (3, 320, 2, False), (5, 1000, 8, True)],
)
def test_layer_norm_of_rows(
    num_rows: int,
    hidden: int,
    block_t: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str,
    rng_seed: int,
) -> None:
    torch.manual_seed(rng_seed)
    # A mean far from zero: sums of squares alone would lose the variance.
    x = (torch.randn(num_rows + 1, hidden) + 30.0).to(dtype)
    weight, bias = torch.randn(2, hidden).to(dtype)
    y = poisoned(num_rows + 1, hidden, dtype=dtype)
    template = load_template(
        "layer_norm",
        shape={"HIDDEN": hidden, "EPS": 1e-3, "HAS_BIAS": has_bias},
        schedule={"BLOCK_T": block_t},
    )
    given = bias if has_bias else None
    launch(template, x, weight, given, None, y, num_rows, device=device)
    expected = layer_norm(x[:num_rows], weight, given, eps=1e-3)
    tolerance = 3e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    torch.testing.assert_close(y[:num_rows], expected, rtol=tolerance, atol=tolerance)
    assert y[num_rows:].isnan().all()


def test_layer_norm_of_gathered_rows(device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    x, weight, bias = torch.randn(7, 320), torch.randn(320), torch.randn(320)
    index, y = int32(6, -1, 2), poisoned(4, 320, dtype=torch.float32)
    template = load_template(
        "layer_norm",
        shape={"HIDDEN": 320, "EPS": 1e-5, "HAS_BIAS": True, "GATHER": True},
        schedule={"BLOCK_T": 2},
    )
    launch(template, x, weight, bias, index, y, 3, device=device)
    rows = gather_rows(x, index)
    assert_same(y[:3], layer_norm(rows, weight, bias, eps=1e-5))
    assert y[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "width", "offset"), [((576, 192), 960, 0.0), ((72, 24), 96, 1.0), ((40,), 40, 0.0)]
)
def test_sections_of_rows_are_normalised_and_the_rest_is_copied(
    sizes: tuple[int, ...],
    width: int,
    offset: float,
    dtype: torch.dtype,
    device: str,
    rng_seed: int,
) -> None:
    torch.manual_seed(rng_seed)
    x, weight = 3 * torch.randn(4, width).to(dtype), torch.randn(sum(sizes)).to(dtype)
    y = poisoned(4, width, dtype=dtype)
    first, second = (*sizes, 0)[:2]
    template = load_template(
        "section_norm",
        shape={"FIRST": first, "SECOND": second, "WIDTH": width, "EPS": 1e-3, "OFFSET": offset},
        schedule={"BLOCK_T": 2},
    )
    launch(template, x, weight, y, 3, device=device)
    expected = section_norm(x[:3], weight, sizes=sizes, eps=1e-3, offset=offset)
    assert_same(y[:3], expected)
    assert torch.equal(y[:3, sum(sizes) :], x[:3, sum(sizes) :])
    assert y[3].isnan().all()


# --- pointwise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [add, mul])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise_combines_rows(
    dtype: torch.dtype, op: Callable[..., torch.Tensor], device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    a, b = torch.randn(2, 1000).to(dtype), torch.randn(2, 1000).to(dtype)
    y = poisoned(3, 1000, dtype=dtype)
    template = load_template("pointwise", shape={"WIDTH": 1000, "OP": op.__name__})
    launch(template, a, b, y, 2, device=device)
    assert torch.equal(y[:2], op(a, b))
    assert y[2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("act", "interleave"),
    [("silu", 0), ("silu", 8), ("gelu", 0), ("gelu_tanh", 1), ("relu", 160)],
)
def test_glu_gates_rows(
    act: str, interleave: int, dtype: torch.dtype, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    gate_up, y = torch.randn(2, 640).to(dtype) * 2, poisoned(3, 320, dtype=dtype)
    template = load_template(
        "glu",
        shape={"WIDTH": 320, "ACT": act, "INTERLEAVE": interleave},
        schedule={"BLOCK_F": 256},
    )
    launch(template, gate_up, y, 2, device=device)
    # 1 + erf cancels for a negative gate: fp32 leaves an absolute error.
    expected = glu(gate_up, act=act, interleave=interleave)
    torch.testing.assert_close(y[:2], expected, rtol=TOLERANCE[dtype], atol=1e-5)
    assert y[2].isnan().all()


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_glu_clamps_sharpens_and_shifts(act: str, device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    gate_up, y = torch.randn(2, 640) * 2, poisoned(2, 320, dtype=torch.float32)
    form = {"limit": 1.5, "sharpness": 1.702, "up_offset": 1.0}
    template = load_template(
        "glu",
        shape={"WIDTH": 320, "ACT": act, **{name.upper(): value for name, value in form.items()}},
        schedule={"BLOCK_F": 256},
    )
    launch(template, gate_up, y, 2, device=device)
    gate, up = gate_up.double().clamp(max=1.5).chunk(2, dim=-1)
    up = up.clamp(min=-1.5) + 1.0
    gate = gate * torch.sigmoid(1.702 * gate) if act == "silu" else gelu(1.702 * gate) / 1.702
    for found in (y, glu(gate_up, act=act, **form)):
        torch.testing.assert_close(found, (gate * up).float(), rtol=1e-5, atol=1e-5)


# --- rope and cache append ----------------------------------------------------------------------

# (H, G, D, rotary dim, page size, heads per program)
MODELS = [
    pytest.param((9, 3, 64, 64, 16, 16), id="smollm2"),
    pytest.param((1, 1, 8, 8, 8, 1), id="one-head"),
    pytest.param((7, 1, 80, 24, 64, 4), id="dim80-partial24"),
    pytest.param((4, 2, 40, 40, 24, 8), id="dim40-page24"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_rope_kv_write_rotates_and_appends(
    model: tuple[int, ...], dtype: torch.dtype, device: str, rng_seed: int
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size, block_heads = model
    torch.manual_seed(rng_seed)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    qkv = torch.randn(5, sum(sizes)).to(dtype)
    # A decode token, a padding token, three tokens over the edge of a page, and one left out.
    positions = int32(page_size, 0, page_size - 1, page_size, page_size + 1, 0)
    token_seq, seq_rows = int32(0, 1, 2, 2, 2, 0), int32(3, -1, 1)
    cos_sin = torch.randn(page_size + 2, rotary_dim)
    table = torch.randperm(12).int().view(4, 3)
    cache = poisoned(2, 12, num_kv_heads, page_size, head_dim, dtype=dtype)
    q = poisoned(6, num_heads * head_dim, dtype=dtype)
    expected_cache = cache.clone()

    template = load_template(
        "rope_kv_write",
        shape={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "PAGE_SIZE": page_size,
        },
        schedule={"BLOCK_HEADS": block_heads},
    )
    step = (token_seq, seq_rows, table)
    outputs = (cache[0], cache[1], q)
    launch(template, qkv, positions, cos_sin, *step, None, None, *outputs, 5, device=device)

    positions, token_seq = positions[:5], token_seq[:5]
    expected_q, k, v = split(qkv, sizes=sizes)
    expected_q = rope(expected_q, positions, cos_sin, head_dim=head_dim)
    k = rope(k, positions, cos_sin, head_dim=head_dim)
    kv_write(k, v, positions, token_seq, seq_rows, table, *expected_cache)
    assert_same(q[:5], expected_q)
    assert q[5].isnan().all()
    assert_same(cache, expected_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_rope_kv_write_normalises_the_heads_of_queries_and_keys(
    model: tuple[int, ...], offset: float, dtype: torch.dtype, device: str, rng_seed: int
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size, block_heads = model
    torch.manual_seed(rng_seed)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    qkv = 3 * torch.randn(3, sum(sizes)).to(dtype)
    q_weight, k_weight = torch.randn(2, head_dim).to(dtype)
    positions, token_seq, seq_rows = int32(0, 0, 1), int32(0, 1, 1), int32(1, 0)
    cos_sin, table = torch.randn(2, rotary_dim), int32(1, 0).view(2, 1)
    cache = poisoned(2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)
    q, expected_cache = poisoned(3, sizes[0], dtype=dtype), cache.clone()
    facts = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim}
    norm = {"HEAD_NORM": True, "EPS": 1e-3, "OFFSET": offset}
    template = load_template(
        "rope_kv_write",
        shape={**facts, **norm, "ROTARY_DIM": rotary_dim, "PAGE_SIZE": page_size},
        schedule={"BLOCK_HEADS": block_heads},
    )
    launch(
        template,
        *(qkv, positions, cos_sin, token_seq, seq_rows, table, q_weight, k_weight),
        *(cache[0], cache[1], q, 3),
        device=device,
    )

    # In fp32 up to the end, as the kernel: it rounds once, the ops alone round in between.
    expected_q, k, v = split(qkv.float(), sizes=sizes)
    expected_q = head_norm(expected_q, q_weight, eps=1e-3, offset=offset)
    k = head_norm(k, k_weight, eps=1e-3, offset=offset)
    expected_q = rope(expected_q, positions, cos_sin, head_dim=head_dim)
    k = rope(k, positions, cos_sin, head_dim=head_dim)
    step = (positions, token_seq, seq_rows, table)
    kv_write(k.to(dtype), v.to(dtype), *step, *expected_cache)
    assert_same(q, expected_q.to(dtype))
    assert_same(cache, expected_cache)


def test_rope_kv_write_copies_values_that_no_rotation_may_touch(device: str) -> None:
    qkv = torch.full((1, 3 * 8), float("inf"))
    cache = torch.zeros(2, 1, 1, 8, 8)
    q = torch.zeros(1, 8)
    template = load_template(
        "rope_kv_write",
        shape={
            "NUM_HEADS": 1,
            "NUM_KV_HEADS": 1,
            "HEAD_DIM": 8,
            "ROTARY_DIM": 8,
            "PAGE_SIZE": 8,
        },
    )
    zero = int32(0)
    launch(
        template,
        *(qkv, zero, torch.zeros(1, 8), zero, zero, zero.view(1, 1)),
        *(None, None, cache[0], cache[1], q, 1),
        device=device,
    )
    assert (cache[1, 0, 0, 0] == float("inf")).all()


# --- step inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows", [[0], [-1], [2, -1, 1], list(range(9, 0, -1)), [5, 3, -1, 0, 1, 2, -1, 4]]
)
def test_step_inputs_are_those_of_advance(rows: list[int], device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    seq_rows, batch = int32(*rows), len(rows)
    # What lies before the first row would be hit by row -1.
    last_token = torch.randint(50000, (11,), dtype=torch.int32)[1:]
    guarded_length = torch.randint(5000, (11,), dtype=torch.int32)
    guard, length = int(guarded_length[0]), guarded_length[1:]
    expected_length = length.clone()
    expected = advance(seq_rows, last_token, expected_length)
    results = [torch.full((tensor.numel() + 1,), -99, dtype=torch.int32) for tensor in expected]
    template = load_template("step_inputs", schedule={"BLOCK_B": 8})
    launch(template, seq_rows, last_token, length, *results, batch, device=device)
    assert torch.equal(length, expected_length)
    assert int(guarded_length[0]) == guard
    for result, wanted in zip(results, expected, strict=True):
        assert result.tolist() == [*wanted.tolist(), -99]


@pytest.mark.parametrize("in_place", [False, True])
def test_resolve_tokens_fills_in_unknown_ids(in_place: bool, device: str) -> None:
    token_ids = int32(-1, -1, 5, -1, 6, 0, -1, -1, 9, -1)
    token_seq = int32(0, 1, 1, 2, 2, 2, 3, 4, 4, 0)
    seq_rows, last_token = int32(1, -1, 0, 3, 2), int32(-5, 7, 8, 9, 10)[1:]
    expected = resolve_tokens(token_ids[:9], token_seq[:9], seq_rows, last_token)
    template = load_template("resolve_tokens", schedule={"BLOCK_T": 4})
    if in_place:
        tensors = [t.to(device) for t in (token_ids, token_seq, seq_rows, last_token)]
        template.launch(*tensors, tensors[0], 9)
        y = tensors[0].cpu()
    else:
        y = torch.full((10,), -1, dtype=torch.int32)
        launch(template, token_ids, token_seq, seq_rows, last_token, y, 9, device=device)
    assert y.tolist() == [*expected.tolist(), -1]


# --- compilation --------------------------------------------------------------------------------

LAUNCHES: dict[str, tuple[cross_compile.Argument, ...]] = {
    "embed": ("i32[8]", "bf16[50, 576]", "bf16[8, 576]", 8),
    "gather_rows": ("bf16[50, 576]", "i32[8]", "bf16[8, 576]", 8),
    "layer_norm": ("bf16[8, 576]", "bf16[576]", "bf16[576]", None, "bf16[8, 576]", 8),
    "section_norm": ("bf16[8, 960]", "bf16[768]", "bf16[8, 960]", 8),
    "norm": ("bf16[8, 576]", "bf16[576]", None, None, "bf16[8, 576]", None, 8),
    "pointwise": ("bf16[8, 576]", "bf16[8, 576]", "bf16[8, 576]", 8),
    "glu": ("bf16[8, 3072]", "bf16[8, 1536]", 8),
    "rope_kv_write": (
        *("bf16[8, 960]", "i32[8]", "f32[99, 64]", "i32[8]", "i32[8]", "i32[8, 4]"),
        *(None, None, "bf16[9, 3, 64, 64]", "bf16[9, 3, 64, 64]", "bf16[8, 576]", 8),
    ),
    "step_inputs": (*["i32[8]"] * 6, "i32[9]", *["i32[8]"] * 2, 8),
    "resolve_tokens": (*["i32[8]"] * 5, 8),
}


def test_templates_compile_for_every_target_without_spills(tmp_path: Path) -> None:
    jobs = [
        cross_compile.Job(str(emit.TEMPLATE_DIR / f"{name}.py"), target, arguments)
        for name, arguments in LAUNCHES.items()
        for target in ("sm_80", "sm_90", "gfx942")
    ]
    outcomes = list(cross_compile.compile_many(jobs, triton_cache=tmp_path))
    assert len(outcomes) == len(jobs)
    for outcome in outcomes:
        where = f"{Path(outcome.job.path).stem} for {outcome.job.target}"
        assert not outcome.error, f"{where}: {outcome.error}"
        (kernel,) = outcome.kernels
        print(f"{where}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        assert kernel.spill_bytes == 0, where
