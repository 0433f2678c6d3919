"""Templates of quantised caches against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels import reference
from treadle.kernels.kv_pages import Plane

from .paged_inputs import POISON
from .private_template import load_template
from .quantised_inputs import Model, QuantisedInputs, draw_quantised, empty_blocks

FORMATS = sorted(KV_FORMATS)
# Weights times scales are f16 in the kernels: a rounding of 1 in 2048 for each.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
# (H, G, D, S): groups of 1, 3, 4, 7 and 20; padded heads; pages smaller and larger than a tile.
MODELS: list[Model] = [
    (8, 2, 64, 16),
    (4, 4, 32, 8),
    (3, 1, 80, 64),
    (7, 1, 128, 16),
    (20, 1, 256, 24),
]
RAGGED = [(1, 1), (33, 33), (2, 17), (15, 64), (3, 0), (1, 40)]


def decode(inputs: QuantisedInputs, **schedule: Any) -> torch.Tensor:
    plain, name = inputs.plain, "attention_decode_quantised"
    template = load_template(name, shape=inputs.shape, schedule=schedule)
    num_heads, head_dim = plain.q.shape[1:]
    num_partials = plain.num_seqs * num_heads * template.SCHEDULE["MAX_SPLITS"]
    device = plain.q.device
    num_groups = plain.num_seqs * plain.k_cache.shape[1]
    counters = torch.zeros(num_groups, dtype=torch.int32, device=device)
    out = plain.poisoned_out()
    template.launch(
        plain.q,
        inputs.k_blocks,
        inputs.v_blocks,
        plain.block_table,
        plain.seq_rows,
        plain.context_lens,
        out,
        torch.full((num_partials * head_dim,), POISON, device=device),
        torch.full((num_partials,), POISON, device=device),
        counters,
        plain.num_seqs,
    )
    assert counters.tolist() == [0] * counters.numel()
    return out


def draw_own(inputs: QuantisedInputs, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a step's own keys and values [T, G * D]."""
    plain = inputs.plain
    width = plain.k_cache.shape[1] * plain.k_cache.shape[3]
    own = torch.randn(2, plain.q.shape[0], width, generator=torch.Generator().manual_seed(seed))
    k, v = own.to(plain.q.dtype).to(plain.q.device)
    return k, v


def prefill(
    inputs: QuantisedInputs, k: torch.Tensor, v: torch.Tensor, **schedule: Any
) -> torch.Tensor:
    plain, name = inputs.plain, "attention_prefill_quantised"
    template = load_template(name, shape=inputs.shape, schedule=schedule)
    out = plain.poisoned_out()
    template.launch(
        plain.q,
        k,
        v,
        inputs.k_blocks,
        inputs.v_blocks,
        plain.block_table,
        plain.seq_rows,
        plain.query_start,
        plain.context_lens,
        out,
        plain.num_tokens,
        plain.num_seqs,
    )
    return out


def assert_same(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_matches_the_reference(
    kv_format: str, model: Model, device: str, rng_seed: int
) -> None:
    # Chunks of 32 tokens: 1 to 3 splits, ends on and around page edges, and padding.
    contexts = (1, 17, 32, 0, 90)
    inputs = draw_quantised([(1, c) for c in contexts], model, kv_format, device, rng_seed)
    out = decode(inputs, BLOCK_TOKENS=32, MAX_SPLITS=3, MIN_CHUNK_TOKENS=32)
    assert torch.count_nonzero(out[3]) == 0
    assert_same(out, inputs.attend())


@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_decode_serves_every_head_size(head_dim: int, device: str, rng_seed: int) -> None:
    kv_format = FORMATS[head_dim // 16 % 3]
    model = (6, 2, head_dim, 16)
    inputs = draw_quantised([(1, 40), (1, 7)], model, kv_format, device, rng_seed)
    assert_same(decode(inputs, BLOCK_TOKENS=64, MAX_SPLITS=1), inputs.attend())


@pytest.mark.parametrize(("page_size", "block_tokens"), [(8, 64), (64, 16), (64, 64), (48, 32)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_tile_may_be_smaller_or_larger_than_a_page(
    kv_format: str, page_size: int, block_tokens: int, device: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 63), (1, 130)], (4, 2, 32, page_size), kv_format, device, rng_seed)
    out = decode(inputs, BLOCK_TOKENS=block_tokens, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64)
    assert_same(out, inputs.attend())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_outlier_channel_of_the_keys_does_no_harm_to_the_kernel(
    kv_format: str, device: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 60)], (4, 2, 64, 16), kv_format, device, rng_seed)
    plain = inputs.plain
    plain.k_cache[..., 5] += 60.0
    rows = plain.k_cache.reshape(-1, 64)
    live = (~rows.isnan().any(-1)).nonzero().flatten()
    Plane(inputs.k_blocks, kv_format, 64, False).write(live, rows[live])
    expected = inputs.attend()
    assert bool(torch.isfinite(expected).all())
    assert_same(decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16), expected)


@pytest.mark.parametrize("model", MODELS[1:4])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_prefill_matches_the_reference_on_ragged_sequences(
    kv_format: str, model: Model, device: str, rng_seed: int
) -> None:
    inputs = draw_quantised(RAGGED, model, kv_format, device, rng_seed)
    k, v = draw_own(inputs, rng_seed)
    out = prefill(inputs, k, v, BLOCK_ROWS=64, BLOCK_TOKENS=32)
    assert_same(out, inputs.attend(k, v))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_prefill_of_one_query_head_at_a_time(kv_format: str, device: str, rng_seed: int) -> None:
    inputs = draw_quantised([(20, 55), (9, 9)], (6, 2, 32, 16), kv_format, device, rng_seed)
    k, v = draw_own(inputs, rng_seed)
    out = prefill(inputs, k, v, BLOCK_ROWS=16, BLOCK_TOKENS=16, PACK_HEADS=False)
    assert_same(out, inputs.attend(k, v))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_whole_prompt_attends_as_if_nothing_was_quantised(
    kv_format: str, device: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(40, 40)], (4, 2, 32, 16), kv_format, device, rng_seed)
    k, v = draw_own(inputs, rng_seed)
    out = prefill(inputs, k, v, BLOCK_ROWS=32, BLOCK_TOKENS=16)
    heads = [x.float().unflatten(-1, (-1, 32)).transpose(0, 1) for x in (k, v)]
    q = inputs.plain.q.float().transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.repeat_interleave(2, 0) for x in heads), is_causal=True
    )
    tolerance = 1e-4 if out.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        out.float(), expected.transpose(0, 1).flatten(1), atol=tolerance, rtol=tolerance
    )


# --- append ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "has_norms"),
    [((4, 2, 64, 64, 16), False), ((3, 1, 80, 48, 24), True), ((1, 1, 32, 32, 8), False)],
)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_append_matches_the_reference(
    kv_format: str, has_norms: bool, model: tuple[int, ...], device: str, rng_seed: int
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = model
    generator = torch.Generator().manual_seed(rng_seed)
    # Two sequences, the second across a page's end, and padding; a row of zeros, one of one value.
    num_tokens = 9
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = 2 * torch.randn(num_tokens, width, generator=generator)
    qkv[2], qkv[3] = 0.0, 0.01
    positions = torch.cat((torch.arange(4), torch.arange(4) + page_size - 2, torch.arange(1)))
    token_seq = torch.tensor([0] * 4 + [1] * 4 + [2], dtype=torch.int32)
    seq_rows = torch.tensor([1, 0, -1], dtype=torch.int32)
    table = torch.tensor([[1, 3, 5], [2, 0, 6]], dtype=torch.int32)
    angles = torch.randn(page_size + 8, rotary_dim // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.randn(2, head_dim, generator=generator)
    # No token that was to stay is written: every byte that nobody owns is as before.
    blocks = empty_blocks(8, (num_heads, num_kv_heads, head_dim, page_size), kv_format, rng_seed)
    caches = [blocks.clone(), blocks.clone()]
    inputs = [x.to(device) for x in (qkv, positions.int(), cos_sin, token_seq, seq_rows, table)]
    on_device = [cache.to(device) for cache in caches]
    q = torch.full((num_tokens, num_heads * head_dim), POISON, device=device)
    k, v = torch.full((2, num_tokens, num_kv_heads * head_dim), POISON, device=device)
    template = load_template(
        "rope_kv_write_quantised",
        shape={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "PAGE_SIZE": page_size,
            "HEAD_NORM": has_norms,
            "EPS": 1e-3,
            "OFFSET": 0.5,
            "KV_FORMAT": kv_format,
            "STORE_OWN": True,
        },
        schedule={"BLOCK_HEADS": 8},
    )
    norms = weights.to(device).unbind() if has_norms else (None, None)
    template.launch(*inputs, *norms, *on_device, q, k, v, num_tokens)

    parts = reference.split(qkv, sizes=(num_heads * head_dim, *(num_kv_heads * head_dim,) * 2))
    roped = [
        reference.rope(
            reference.head_norm(x, weight, eps=1e-3, offset=0.5) if has_norms else x,
            positions.int(),
            cos_sin,
            head_dim=head_dim,
        )
        for x, weight in zip(parts[:2], weights, strict=True)
    ]
    for found, expected in zip((q, k, v), (*roped, parts[2]), strict=True):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    reference.kv_write(
        roped[1], parts[2], positions.int(), token_seq, seq_rows, table, *caches,
        kv_format=kv_format,
    )  # fmt: skip
    slots = torch.arange(8 * num_kv_heads * page_size)
    for is_values, (found, expected) in enumerate(zip(on_device, caches, strict=True)):
        # A number on the edge between two codes may round to either, of which one in hundreds is.
        assert int((found.cpu() != expected).sum()) <= 8
        numbers = [
            Plane(each.cpu(), kv_format, head_dim, bool(is_values)).read(slots)
            for each in (found, expected)
        ]
        live = ~numbers[1].isnan().any(-1)
        assert int(live.sum()) == 8 * num_kv_heads
        assert torch.equal(numbers[0].isnan(), numbers[1].isnan())
        step = 0.5 if kv_format == "int4" else 0.07
        torch.testing.assert_close(
            numbers[0][live], numbers[1][live], rtol=0.13, atol=step * float(qkv.abs().max()) / 4
        )


# --- reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_reference_gives_what_plain_attention_gives_on_the_numbers_that_codes_mean(
    kv_format: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 33), (12, 40), (1, 5)], (4, 2, 32, 16), kv_format, "cpu", rng_seed)
    plain = inputs.plain
    slots = torch.arange(plain.k_cache[..., 0].numel())
    caches = []
    for is_values, blocks in enumerate((inputs.k_blocks, inputs.v_blocks)):
        numbers = Plane(blocks, kv_format, 32, bool(is_values)).read(slots)
        caches.append(numbers.view(plain.k_cache.shape))
    expected = reference.attention(
        plain.q.flatten(1),
        *caches,
        plain.block_table,
        plain.seq_rows,
        plain.query_start,
        plain.context_lens,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        scale=plain.scale,
    )
    torch.testing.assert_close(inputs.attend(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_reference_takes_a_step_s_own_tokens_as_they_were_computed(
    kv_format: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 33), (12, 40), (1, 5)], (4, 2, 32, 16), kv_format, "cpu", rng_seed)
    plain = inputs.plain
    k, v = draw_own(inputs, rng_seed)
    slots = torch.arange(plain.k_cache[..., 0].numel())
    caches = []
    for is_values, blocks in enumerate((inputs.k_blocks, inputs.v_blocks)):
        numbers = Plane(blocks, kv_format, 32, bool(is_values)).read(slots)
        caches.append(numbers.view(plain.k_cache.shape))
    token_seq = torch.repeat_interleave(torch.arange(3), plain.query_start.diff())
    prior = plain.context_lens - plain.query_start.diff()
    positions = torch.arange(14) - plain.query_start[token_seq] + prior[token_seq]
    steps = (positions.int(), token_seq.int(), plain.seq_rows, plain.block_table)
    reference.kv_write(k, v, *steps, *caches)
    expected = reference.attention(
        plain.q.flatten(1),
        *caches,
        plain.block_table,
        plain.seq_rows,
        plain.query_start,
        plain.context_lens,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        scale=plain.scale,
    )
    torch.testing.assert_close(inputs.attend(k, v), expected, atol=1e-5, rtol=1e-5)
