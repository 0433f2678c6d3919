"""Templates of quantised caches against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels.emit import TEMPLATE_DIR
from treadle.kernels.interpreter import repair_interpreter
from treadle.kernels.kv_pages import QuantisedCache, dequantise_keys, dequantise_values
from treadle.kernels.reference.attention import attention, kv_write
from treadle.kernels.reference.norms import head_norm
from treadle.kernels.reference.rope import rope
from treadle.kernels.reference.rows import split

from .gluon_machine import Machine
from .paged_inputs import POISON, PagedInputs
from .private_template import load_template
from .quantised_inputs import (
    Model,
    QuantisedInputs,
    draw_quantised,
    empty_cache,
    quantise_inputs,
    tensors_of,
)

FORMATS = sorted(KV_FORMATS)
# Weights times scales are f16 in the kernels: a rounding of 1 in 2048 for each.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
# (H, G, D, S): groups of 1, 3, 4, 7 and 20; padded heads; pages of one tile and of several.
MODELS: list[Model] = [
    (8, 2, 64, 16),
    (4, 4, 32, 16),
    (3, 1, 80, 64),
    (7, 1, 128, 16),
    (20, 1, 256, 48),
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
        *inputs.caches,
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
        *inputs.caches,
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
    contexts = (1, 17, 48, 0, 90, 63, 64)
    inputs = draw_quantised([(1, c) for c in contexts], model, kv_format, device, rng_seed)
    out = decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=3, MIN_CHUNK_TOKENS=32)
    assert torch.count_nonzero(out[3]) == 0
    assert_same(out, inputs.attend())


@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_decode_serves_every_head_size(head_dim: int, device: str, rng_seed: int) -> None:
    kv_format = FORMATS[head_dim // 16 % 3]
    model = (6, 2, head_dim, 16)
    inputs = draw_quantised([(1, 40), (1, 7)], model, kv_format, device, rng_seed)
    assert_same(decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=1), inputs.attend())


@pytest.mark.parametrize(("page_size", "block_tokens"), [(64, 16), (64, 64), (96, 32)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_page_may_be_several_tiles(
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
    inputs.plain.k_cache[..., 5] += 60.0
    inputs = quantise_inputs(inputs.plain, kv_format, rng_seed)
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
    out = prefill(inputs, k, v, BLOCK_ROWS=64, BLOCK_TOKENS=16)
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


# --- whole prompts by specialised warps -----------------------------------------------------------


def prefill_by_warps(
    inputs: QuantisedInputs, k: torch.Tensor, v: torch.Tensor, num_tokens: int, **schedule: Any
) -> torch.Tensor:
    """Launch both kernels, Gluon's on threads unless the inputs are on a GPU."""
    plain, name = inputs.plain, "attention_prefill_quantised_gluon"
    if plain.q.is_cuda:
        template = vars(load_template(name, shape=inputs.shape, schedule=schedule))
    else:
        repair_interpreter()
        template = Machine().load(TEMPLATE_DIR / f"{name}.py")
        template["SHAPE"].update(inputs.shape)
        template["SCHEDULE"].update(schedule)
    out = plain.poisoned_out()
    counters = torch.zeros(2, dtype=torch.int32, device=out.device)
    for _ in range(2):
        template["launch"](
            plain.q,
            k,
            v,
            *inputs.caches,
            plain.block_table,
            plain.seq_rows,
            plain.query_start,
            plain.context_lens,
            out,
            counters,
            num_tokens,
            plain.num_seqs,
        )
        assert counters.tolist() == [0, 0]
    return out


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param((8, 2, 64, 64), {"OWN_TOKENS": 64, "PING_PONG": True}, id="ping-pong"),
        pytest.param((4, 1, 128, 16), {"OWN_TOKENS": 128, "BLOCK_TOKENS": 16}, id="wide-tiles"),
        pytest.param((7, 1, 64, 32), {"PACK_HEADS": False, "BLOCK_TOKENS": 32}, id="by-head"),
    ],
)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_whole_prompts_by_warps_and_all_others_match_the_reference(
    kv_format: str, model: Model, schedule: dict[str, Any], device: str, rng_seed: int
) -> None:
    # Prompts that begin in the step, later chunks, decoding sequences, padding, tokens of nobody.
    sequences = [*RAGGED, (150, 150), (0, 0), (40, 90), (64, 64)]
    inputs = draw_quantised(sequences, model, kv_format, device, rng_seed, torch.float16, 4)
    k, v = draw_own(inputs, rng_seed)
    num_tokens = inputs.plain.num_tokens
    out = prefill_by_warps(inputs, k, v, num_tokens + 4, NUM_PROGRAMS=3, **schedule)
    assert bool(out[num_tokens:].isnan().all())
    expected = inputs.attend(k, v)[:num_tokens].float()
    torch.testing.assert_close(out[:num_tokens].float(), expected, atol=5e-3, rtol=5e-3)


def test_tokens_of_other_sequences_are_never_used(device: str, rng_seed: int) -> None:
    """A tile reaches into the next sequence's keys and values, which may not even be numbers."""
    inputs = draw_quantised(
        [(70, 70), (33, 33)], (4, 1, 64, 64), "int8", device, rng_seed, torch.float16
    )
    k, v = draw_own(inputs, rng_seed)
    alone = prefill_by_warps(inputs, k, v, 103, OWN_TOKENS=128)[:70]
    for each in (k, v):
        each[70:] = torch.nan
    assert torch.equal(prefill_by_warps(inputs, k, v, 103, OWN_TOKENS=128)[:70], alone)


# --- append ---------------------------------------------------------------------------------------

# (tokens of the step, context after it) of each sequence, in pages of 16: within a page, up to its
# end, over one end and over several, from the start and from within; and padding.
APPENDS = [(3, 3), (16, 16), (5, 9), (4, 16), (7, 20), (40, 45), (33, 64), (2, 0), (1, 32)]
STEPS = [(1, 1), (1, 16), (1, 17), (1, 0), (1, 31), (1, 48)]


@dataclasses.dataclass(frozen=True)
class Append:
    """Hold what a step appends, and the cache before it."""

    qkv: torch.Tensor
    inputs: tuple[torch.Tensor, ...]  # positions, token_seq, seq_rows, table, starts, contexts
    cos_sin: torch.Tensor
    weights: torch.Tensor
    cache: QuantisedCache


def draw_append(
    sequences: list[tuple[int, int]], model: Model, rotary_dim: int, kv_format: str, seed: int
) -> Append:
    """Draw a step of (new tokens, context) sequences after earlier tokens that are in the cache."""
    num_heads, num_kv_heads, head_dim, page_size = model
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(count for count, _ in sequences)
    qkv = 2 * torch.randn(
        num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator
    )
    num_rows, width = len(sequences) + 1, 1 + max(-(-c // page_size) for _, c in sequences)
    rows = torch.randperm(num_rows, generator=generator)[: len(sequences)].tolist()
    pages = torch.randperm(num_rows * width + 1, generator=generator)[: num_rows * width]
    table = pages.view(num_rows, width).int()
    cache = empty_cache(num_rows * width + 1, num_rows, model, kv_format, seed)
    positions, token_seq, starts = [], [], [0]
    for seq, (count, context) in enumerate(sequences):
        starts.append(starts[-1] + count)
        token_seq += [seq] * count
        prior = max(context - count, 0)
        positions += range(prior, prior + count)
        if context == 0:
            rows[seq] = -1
        elif prior:
            earlier = torch.randn(2, prior, num_kv_heads, head_dim, generator=generator)
            cache.append(rows[seq], table[rows[seq]], *earlier, 0)
    ints = [
        torch.tensor(values, dtype=torch.int32)
        for values in (positions, token_seq, rows, starts, [c for _, c in sequences])
    ]
    angles = torch.randn(128, rotary_dim // 2, generator=generator)
    return Append(
        qkv,
        (*ints[:3], table, *ints[3:]),
        torch.cat([angles.cos(), angles.sin()], dim=1),
        torch.randn(2, head_dim, generator=generator),
        cache,
    )


def copy_cache(cache: QuantisedCache, device: str) -> QuantisedCache:
    return QuantisedCache(cache.kv_format, *(x.clone().to(device) for x in tensors_of(cache)))


@pytest.mark.parametrize("sequences", [APPENDS, STEPS], ids=["prompts", "decode"])
@pytest.mark.parametrize(
    ("model", "rotary_dim", "has_norms"),
    [((4, 2, 64, 16), 64, False), ((3, 1, 80, 16), 48, True), ((2, 1, 32, 48), 32, False)],
)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_append_matches_the_reference(
    kv_format: str,
    model: Model,
    rotary_dim: int,
    has_norms: bool,
    sequences: list[tuple[int, int]],
    device: str,
    rng_seed: int,
) -> None:
    num_heads, num_kv_heads, head_dim, page_size = model
    drawn = draw_append(sequences, model, rotary_dim, kv_format, rng_seed)
    is_decode = sequences is STEPS
    num_tokens = len(drawn.qkv)
    on_device = copy_cache(drawn.cache, device)
    q = torch.full((num_tokens, num_heads * head_dim), POISON, device=device)
    own = torch.full((2, num_tokens, num_kv_heads * head_dim), POISON, device=device).unbind()
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
            "STORE_OWN": not is_decode,
        },
        schedule={"BLOCK_HEADS": 8},
    )
    positions, *rest = (x.to(device) for x in drawn.inputs)
    norms = drawn.weights.to(device).unbind() if has_norms else (None, None)
    template.launch(
        drawn.qkv.to(device), positions, drawn.cos_sin.to(device), *rest, *norms,
        *tensors_of(on_device), q, *((None, None) if is_decode else own),
        num_tokens, len(sequences),
    )  # fmt: skip

    parts = split(drawn.qkv, sizes=(num_heads * head_dim, *(num_kv_heads * head_dim,) * 2))
    roped = [
        rope(
            head_norm(x, weight, eps=1e-3, offset=0.5) if has_norms else x,
            drawn.inputs[0],
            drawn.cos_sin,
            head_dim=head_dim,
        )
        for x, weight in zip(parts[:2], drawn.weights, strict=True)
    ]
    torch.testing.assert_close(q.cpu(), roped[0], atol=1e-5, rtol=1e-5)
    if not is_decode:
        for found, expected in zip(own, (roped[1], parts[2]), strict=True):
            torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    expected_cache = copy_cache(drawn.cache, "cpu")
    kv_write(
        roped[1], parts[2], *drawn.inputs[:4], expected_cache.keys, expected_cache.values,
        *drawn.inputs[4:], kv_format=kv_format,
        open_pages=(expected_cache.open_keys, expected_cache.open_values),
    )  # fmt: skip
    assert_same_cache(on_device, expected_cache, drawn.cache)


def assert_same_cache(
    found: QuantisedCache, expected: QuantisedCache, before: QuantisedCache
) -> None:
    """Compare caches: no byte is written that was to stay, and what is written is the same."""
    for mine, theirs, old in zip(*map(tensors_of, (found, expected, before)), strict=True):
        mine = mine.cpu()
        if mine.dtype == torch.float16:
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3, equal_nan=True)
            continue
        stays = (theirs == old).flatten(1).all(-1)
        assert torch.equal(mine[stays], old[stays])
        # A number on the edge between two codes may round to either, of which one in hundreds is.
        assert int((mine != theirs).sum()) <= max(8, int((theirs != old).sum()) // 200)
    head_dim = expected.open_keys.shape[-1]
    for dequantise, mine, theirs in (
        (dequantise_keys, found.keys, expected.keys),
        (dequantise_values, found.values, expected.values),
    ):
        numbers = [dequantise(x.cpu(), expected.kv_format, head_dim) for x in (mine, theirs)]
        live = ~numbers[1].isnan()
        error = (numbers[0][live] - numbers[1][live]).norm() / numbers[1][live].norm()
        assert float(error) < 0.01


@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_pages_of_one_value_and_a_huge_token(
    kv_format: str, device: str, rng_seed: int
) -> None:
    """A channel of one value has no spread; one token is a thousand times as large as the rest."""
    model = (2, 1, 32, 16)
    drawn = draw_append([(16, 16), (16, 16), (16, 16)], model, 32, kv_format, rng_seed)
    drawn.qkv[:16], drawn.qkv[16:32] = 0.0, 0.01
    drawn.qkv[35] *= 1000.0
    on_device = copy_cache(drawn.cache, device)
    template = load_template(
        "rope_kv_write_quantised",
        shape={
            "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "HEAD_DIM": 32, "ROTARY_DIM": 32, "PAGE_SIZE": 16,
            "KV_FORMAT": kv_format, "STORE_OWN": True,
        },
        schedule={"BLOCK_HEADS": 4},
    )  # fmt: skip
    positions, *rest = (x.to(device) for x in drawn.inputs)
    q, k, v = (torch.empty(48, width, device=device) for width in (64, 32, 32))
    template.launch(
        drawn.qkv.to(device), positions, drawn.cos_sin.to(device), *rest, None, None,
        *tensors_of(on_device), q, k, v, 48, 3,
    )  # fmt: skip
    for seq, row in enumerate(drawn.inputs[2].tolist()):
        keys, values = on_device.read(row, rest[2][row], 16)
        assert bool(torch.isfinite(keys).all() and torch.isfinite(values).all())
        own = v[16 * seq : 16 * seq + 16]
        if seq < 2:
            torch.testing.assert_close(values[0], own, rtol=1e-2, atol=0.0)
        else:  # the huge token's scale is its own
            others = torch.arange(16, device=device) != 3
            error = (values[0] - own)[others].norm() / own[others].norm()
            assert float(error) < 0.12


# --- reference ------------------------------------------------------------------------------------


def numbers_of(inputs: QuantisedInputs) -> list[torch.Tensor]:
    """Give plain caches [P, G, S, D] of the numbers that a quantised cache holds."""
    plain = inputs.plain
    caches = [plain.k_cache.clone(), plain.v_cache.clone()]
    page_size = plain.k_cache.shape[2]
    for row, context in zip(plain.seq_rows.tolist(), plain.context_lens.tolist(), strict=True):
        pages = plain.block_table[row].long()
        for cache, numbers in zip(
            caches, inputs.cache.read(row, pages, context), strict=True
        ):  # [G, C, D]
            for position in range(context):
                page = pages[position // page_size]
                cache[page, :, position % page_size] = numbers[:, position]
    return caches


def attend_plainly(plain: PagedInputs, caches: list[torch.Tensor]) -> torch.Tensor:
    return attention(
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


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_reference_gives_what_plain_attention_gives_on_the_numbers_that_codes_mean(
    kv_format: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 33), (12, 40), (1, 5)], (4, 2, 32, 16), kv_format, "cpu", rng_seed)
    expected = attend_plainly(inputs.plain, numbers_of(inputs))
    torch.testing.assert_close(inputs.attend(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_reference_takes_a_step_s_own_tokens_as_they_were_computed(
    kv_format: str, rng_seed: int
) -> None:
    inputs = draw_quantised([(1, 33), (12, 40), (1, 5)], (4, 2, 32, 16), kv_format, "cpu", rng_seed)
    plain = inputs.plain
    k, v = draw_own(inputs, rng_seed)
    caches = numbers_of(inputs)
    token_seq = torch.repeat_interleave(torch.arange(3), plain.query_start.diff())
    prior = plain.context_lens - plain.query_start.diff()
    positions = torch.arange(14) - plain.query_start[token_seq] + prior[token_seq]
    steps = (positions.int(), token_seq.int(), plain.seq_rows, plain.block_table)
    kv_write(k, v, *steps, *caches)
    expected = attend_plainly(plain, caches)
    torch.testing.assert_close(inputs.attend(k, v), expected, atol=1e-5, rtol=1e-5)
