"""Paged attention templates against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from treadle.kernels.emit import TEMPLATE_DIR
from treadle.kernels.reference.attention import attention

from .gluon_machine import Machine
from .paged_inputs import PagedInputs, build_paged_inputs
from .private_template import load_template

# Attention averages values of size one, so errors are in units of the inputs.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OF_LARGE_SCORES = 20.0  # scores 200 times as large have errors as much larger
# (H, G, D, S): group sizes 1, 3, 4, 7, 9, 20; D 8, 24 and 80 are padded; a page of 24 splits tiles.
MODELS = [
    pytest.param((8, 2, 64, 16), id="group4-dim64-page16"),
    pytest.param((4, 4, 8, 8), id="group1-dim8-page8"),
    pytest.param((3, 1, 80, 64), id="group3-dim80-page64"),
    pytest.param((7, 1, 128, 16), id="group7-dim128-page16"),
    pytest.param((18, 2, 24, 24), id="group9-dim24-page24"),
    pytest.param((20, 1, 256, 16), id="group20-dim256-page16"),
]
SMALL_MODEL = (4, 2, 16, 16)
PAGE_EDGES = (1, 15, 16, 17, 31, 32, 33)
Model = tuple[int, int, int, int]


def draw_inputs(
    sequences: Sequence[tuple[int, int]],
    model: Model,
    device: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    spare_tokens: int = 0,
) -> PagedInputs:
    """Build inputs for (query tokens, context) sequences of a model (H, G, D, S)."""
    num_heads, num_kv_heads, head_dim, page_size = model
    if device == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16  # a GPU's dot would round fp32 to tf32
    return build_paged_inputs(
        sequences,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        device=device,
        spare_tokens=spare_tokens,
    )


class Decode:
    """Hold a decode template and its scratch memory, poisoned, for repeated launches."""

    def __init__(self, inputs: PagedInputs, **schedule: Any) -> None:
        self.inputs = inputs
        self.template = load_template("attention_decode", shape=inputs.shape, schedule=schedule)
        num_heads, head_dim = inputs.q.shape[1:]
        num_partials = inputs.num_seqs * num_heads * self.template.SCHEDULE["MAX_SPLITS"]
        num_groups = inputs.num_seqs * inputs.k_cache.shape[1]
        device = inputs.q.device
        self.partial_out = torch.full((num_partials * head_dim,), float("nan"), device=device)
        self.partial_lse = torch.full((num_partials,), float("nan"), device=device)
        self.counters = torch.zeros(num_groups, dtype=torch.int32, device=device)

    def launch(self) -> torch.Tensor:
        inputs, out = self.inputs, self.inputs.poisoned_out()
        self.template.launch(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            inputs.seq_rows,
            inputs.context_lens,
            out,
            self.partial_out,
            self.partial_lse,
            self.counters,
            inputs.num_seqs,
        )
        return out


def run_prefill(
    inputs: PagedInputs, *, num_tokens: int | None = None, by_tma: bool = False, **schedule: Any
) -> torch.Tensor:
    """Launch a prefill template into a poisoned output; `num_tokens` may exceed the real number."""
    name = "attention_prefill_tma" if by_tma else "attention_prefill"
    template = load_template(name, shape=inputs.shape, schedule=schedule)
    out = inputs.poisoned_out()
    template.launch(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.seq_rows,
        inputs.query_start,
        inputs.context_lens,
        out,
        inputs.num_tokens if num_tokens is None else num_tokens,
        inputs.num_seqs,
    )
    return out


def reference_out(inputs: PagedInputs) -> torch.Tensor:
    num_heads, head_dim = inputs.q.shape[1:]
    return attention(
        inputs.q.flatten(1),
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.seq_rows,
        inputs.query_start,
        inputs.context_lens,
        num_heads=num_heads,
        num_kv_heads=inputs.k_cache.shape[1],
        head_dim=head_dim,
        scale=inputs.scale,
    )  # [T, H * D]


def assert_same(out: torch.Tensor, expected: torch.Tensor, *, slack: float = 1.0) -> None:
    """Check two outputs within the tolerance of their dtype; a NaN on either side fails."""
    tolerance = slack * TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


# --- decode -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_decode_matches_the_reference_around_page_edges(
    model: Model, device: str, rng_seed: int
) -> None:
    sequences = [(1, context) for context in PAGE_EDGES]
    inputs = draw_inputs(sequences, model, device, rng_seed)
    out = Decode(inputs, BLOCK_TOKENS=32, MAX_SPLITS=1).launch()
    assert_same(out, reference_out(inputs))


@pytest.mark.parametrize(
    ("page_size", "block_tokens"), [(16, 16), (16, 64), (64, 16), (64, 32), (64, 64)]
)
def test_decode_tile_may_be_smaller_or_larger_than_a_page(
    block_tokens: int, page_size: int, device: str, rng_seed: int
) -> None:
    inputs = draw_inputs([(1, 63), (1, 130)], (4, 2, 16, page_size), device, rng_seed)
    out = Decode(inputs, BLOCK_TOKENS=block_tokens, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64).launch()
    assert_same(out, reference_out(inputs))


@pytest.mark.parametrize("model", MODELS)
def test_decode_combines_splits_of_long_sequences_only(
    model: Model, device: str, rng_seed: int
) -> None:
    # Chunks are of 16 tokens: 1, 1, 2 and 6 splits, the last more than one round of the combine.
    inputs = draw_inputs([(1, 3), (1, 16), (1, 17), (1, 90)], model, device, rng_seed)
    out = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=6, MIN_CHUNK_TOKENS=16).launch()
    assert_same(out, reference_out(inputs))


def test_decode_chunk_grows_when_splits_run_out(device: str, rng_seed: int) -> None:
    # 97 tokens: rounding the third of them down to whole tiles would need a fourth split.
    inputs = draw_inputs([(1, 200), (1, 97)], SMALL_MODEL, device, rng_seed)
    out = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=3, MIN_CHUNK_TOKENS=16).launch()
    assert_same(out, reference_out(inputs))


def test_decode_leaves_its_counters_at_zero(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 70), (1, 5), (1, 33)], SMALL_MODEL, device, rng_seed)
    decode = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=4, MIN_CHUNK_TOKENS=16)
    decode.launch()
    assert decode.counters.tolist() == [0] * decode.counters.numel()


def test_decode_gives_the_same_bits_again_on_used_scratch(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 90), (1, 40)], SMALL_MODEL, device, rng_seed)
    decode = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=8, MIN_CHUNK_TOKENS=16)
    assert torch.equal(decode.launch(), decode.launch())


def test_decode_writes_zeros_for_padding_sequences(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 20), (1, 0), (1, 40), (1, 0)], SMALL_MODEL, device, rng_seed)
    out = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16).launch()
    assert torch.count_nonzero(out[[1, 3]]) == 0
    assert_same(out, reference_out(inputs))


def test_decode_trusts_the_row_of_padding_over_its_length(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 20), (1, 0)], SMALL_MODEL, device, rng_seed)
    stale_lens = torch.tensor([20, 40], dtype=torch.int32, device=device)
    stale = dataclasses.replace(inputs, context_lens=stale_lens)
    out = Decode(stale, BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16).launch()
    assert torch.count_nonzero(out[1]) == 0


def test_decode_writes_nothing_beyond_its_sequences(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 20)], SMALL_MODEL, device, rng_seed, spare_tokens=2)
    out = Decode(inputs, BLOCK_TOKENS=32, MAX_SPLITS=1).launch()
    assert bool(out[1:].isnan().all())


def test_decode_survives_scores_far_beyond_the_range_of_exp(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 90), (1, 7)], SMALL_MODEL, device, rng_seed)
    inputs.q.mul_(200)
    out = Decode(inputs, BLOCK_TOKENS=16, MAX_SPLITS=4, MIN_CHUNK_TOKENS=16).launch()
    assert_same(out, reference_out(inputs), slack=OF_LARGE_SCORES)


def test_decode_in_half_precision(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(1, 130), (1, 17)], (8, 2, 64, 64), device, rng_seed, dtype=torch.float16)
    out = Decode(inputs, BLOCK_TOKENS=64, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64).launch()
    assert_same(out, reference_out(inputs))


# --- prefill ------------------------------------------------------------------------------------


# New prompts, chunks behind a prior context and single tokens, ending around page edges.
RAGGED = [(1, 1), (33, 33), (16, 31), (2, 17), (15, 64)]


@pytest.mark.parametrize("model", MODELS)
def test_prefill_matches_the_reference_on_ragged_sequences(
    model: Model, device: str, rng_seed: int
) -> None:
    inputs = draw_inputs(RAGGED, model, device, rng_seed)
    out = run_prefill(inputs, BLOCK_ROWS=64, BLOCK_TOKENS=32)
    assert_same(out, reference_out(inputs))


@pytest.mark.parametrize("model", [(6, 2, 64, 16), (3, 1, 80, 64)])
def test_prefill_of_one_query_head_at_a_time(model: Model, device: str, rng_seed: int) -> None:
    inputs = draw_inputs(RAGGED, model, device, rng_seed)
    out = run_prefill(inputs, BLOCK_ROWS=32, BLOCK_TOKENS=32, PACK_HEADS=False)
    assert_same(out, reference_out(inputs))


@pytest.mark.parametrize(
    ("page_size", "block_tokens", "block_rows"),
    [(16, 16, 64), (16, 64, 64), (64, 16, 64), (64, 32, 16), (64, 64, 16)],
)
def test_prefill_tile_may_be_smaller_or_larger_than_a_page(
    page_size: int, block_tokens: int, block_rows: int, device: str, rng_seed: int
) -> None:
    inputs = draw_inputs([(21, 100), (40, 40)], (4, 2, 16, page_size), device, rng_seed)
    out = run_prefill(inputs, BLOCK_ROWS=block_rows, BLOCK_TOKENS=block_tokens)
    assert_same(out, reference_out(inputs))


def test_prefill_of_single_tokens_agrees_with_decode(device: str, rng_seed: int) -> None:
    sequences = [(1, context) for context in PAGE_EDGES]
    inputs = draw_inputs(sequences, SMALL_MODEL, device, rng_seed)
    decoded = Decode(inputs, BLOCK_TOKENS=32, MAX_SPLITS=1).launch()
    assert_same(run_prefill(inputs, BLOCK_ROWS=16, BLOCK_TOKENS=32), decoded)


def test_prefill_serves_the_tail_of_a_batch_through_slices(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(13, 30), (1, 18), (9, 25), (20, 20)], SMALL_MODEL, device, rng_seed)
    tail = dataclasses.replace(
        inputs,
        seq_rows=inputs.seq_rows[1:],
        query_start=inputs.query_start[1:],
        context_lens=inputs.context_lens[1:],
    )
    out = run_prefill(tail, num_tokens=30, BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert bool(out[:13].isnan().all())
    assert_same(out[13:], reference_out(inputs)[13:])


def test_prefill_writes_zeros_for_padding_sequences(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(5, 20), (0, 0), (3, 0), (1, 7)], SMALL_MODEL, device, rng_seed)
    out = run_prefill(inputs, BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert torch.count_nonzero(out[5:8]) == 0
    assert_same(out, reference_out(inputs))


def test_prefill_trusts_the_row_of_padding_over_its_length(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(5, 20), (3, 0)], SMALL_MODEL, device, rng_seed)
    stale_lens = torch.tensor([20, 40], dtype=torch.int32, device=device)
    stale = dataclasses.replace(inputs, context_lens=stale_lens)
    out = run_prefill(stale, BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert torch.count_nonzero(out[5:]) == 0


@pytest.mark.parametrize("pack_heads", [True, False])
@pytest.mark.parametrize(
    "model", [(8, 2, 64, 16), (7, 1, 128, 16), (20, 1, 32, 64), (4, 4, 16, 32)]
)
def test_prefill_by_tma_matches_the_reference_on_ragged_sequences(
    model: Model, pack_heads: bool, device: str, rng_seed: int
) -> None:
    # What a page holds beyond the sequence's end is NaN, and comes with the tile.
    inputs = draw_inputs([*RAGGED, (0, 0), (3, 0)], model, device, rng_seed, spare_tokens=4)
    schedule = {"BLOCK_ROWS": 64, "BLOCK_TOKENS": 16, "PACK_HEADS": pack_heads}
    out = run_prefill(inputs, num_tokens=inputs.num_tokens + 4, by_tma=True, **schedule)
    assert bool(out[inputs.num_tokens :].isnan().all())
    live = slice(inputs.num_tokens)
    assert_same(out[live], reference_out(inputs)[live])


def test_prefill_ignores_tokens_of_no_sequence(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(5, 20), (7, 7)], SMALL_MODEL, device, rng_seed, spare_tokens=20)
    out = run_prefill(inputs, num_tokens=32, BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert bool(out[12:].isnan().all())
    assert_same(out[:12], reference_out(inputs)[:12])


def test_prefill_finds_its_sequence_among_hundreds(device: str, rng_seed: int) -> None:
    sequences = [(0, 0)] * 100 + [(3, 9)] + [(0, 0)] * 160 + [(10, 10), (0, 0), (1, 4)]
    inputs = draw_inputs(sequences, (1, 1, 16, 16), device, rng_seed)
    out = run_prefill(inputs, BLOCK_ROWS=16, BLOCK_TOKENS=16)
    assert_same(out, reference_out(inputs))


def test_prefill_of_random_batches(device: str, rng_seed: int) -> None:
    draw = random.Random(rng_seed)
    for _ in range(3):
        lengths = [draw.randint(1, 70) for _ in range(draw.randint(1, 6))]
        sequences = [(draw.randint(1, length), length) for length in lengths]
        num_kv_heads = draw.randint(1, 2)
        num_heads = num_kv_heads * draw.randint(1, 5)
        model = (num_heads, num_kv_heads, 8 * draw.randint(1, 8), 8 * draw.randint(1, 4))
        print(f"model {model}, sequences {sequences}")
        inputs = draw_inputs(sequences, model, device, rng_seed)
        assert_same(run_prefill(inputs, BLOCK_ROWS=32, BLOCK_TOKENS=32), reference_out(inputs))


def test_prefill_survives_scores_far_beyond_the_range_of_exp(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(20, 70), (7, 7)], SMALL_MODEL, device, rng_seed)
    inputs.q.mul_(200)
    out = run_prefill(inputs, BLOCK_ROWS=32, BLOCK_TOKENS=32)
    assert_same(out, reference_out(inputs), slack=OF_LARGE_SCORES)


def test_prefill_in_half_precision(device: str, rng_seed: int) -> None:
    inputs = draw_inputs(
        [(40, 100), (1, 65)], (8, 2, 64, 64), device, rng_seed, dtype=torch.float16
    )
    out = run_prefill(inputs, BLOCK_ROWS=64, BLOCK_TOKENS=64)
    assert_same(out, reference_out(inputs))


# --- prefill by specialised warps ---------------------------------------------------------------


def run_specialised(
    inputs: PagedInputs, *, num_tokens: int | None = None, launches: int = 1, **schedule: Any
) -> torch.Tensor:
    """Launch the Gluon template, on threads unless the inputs are on a GPU; no counter may stay."""
    name = "attention_prefill_gluon"
    if inputs.q.is_cuda:
        template = vars(load_template(name, shape=inputs.shape, schedule=schedule))
    else:
        template = Machine().load(TEMPLATE_DIR / f"{name}.py")
        template["SHAPE"].update(inputs.shape)
        template["SCHEDULE"].update(schedule)
    out = inputs.poisoned_out()
    counters = torch.zeros(2, dtype=torch.int32, device=out.device)
    for _ in range(launches):
        template["launch"](
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            inputs.seq_rows,
            inputs.query_start,
            inputs.context_lens,
            out,
            counters,
            inputs.num_tokens if num_tokens is None else num_tokens,
            inputs.num_seqs,
        )
        assert counters.tolist() == [0, 0]
    return out


# Tiles of a part of a page, a page and two pages; groups of 1, 2, 4, 7 and 8 heads.
SPECIALISED = [
    pytest.param((4, 2, 64, 64), {"BLOCK_TOKENS": 32}, id="part-of-a-page"),
    pytest.param((8, 2, 64, 64), {"BLOCK_TOKENS": 64, "PING_PONG": True}, id="ping-pong"),
    pytest.param((8, 1, 128, 64), {"BLOCK_TOKENS": 128, "PING_PONG": True}, id="two-pages"),
    pytest.param((2, 2, 64, 16), {"BLOCK_TOKENS": 32, "STAGES": 3}, id="pages-of-16"),
    pytest.param((7, 1, 64, 32), {"BLOCK_TOKENS": 64, "PACK_HEADS": False}, id="head-by-head"),
    pytest.param((4, 1, 128, 64), {"QUERY_STAGES": 1}, id="queries-once"),
]


@pytest.mark.parametrize("num_programs", [3, 132])
@pytest.mark.parametrize(("model", "schedule"), SPECIALISED)
def test_specialised_warps_match_the_reference_on_ragged_sequences(
    model: Model, schedule: dict[str, Any], num_programs: int, device: str, rng_seed: int
) -> None:
    # Blocks of some tiles and of several sequences, prior context, padding, tokens of nobody.
    sequences = [*RAGGED, (0, 0), (3, 0), (70, 300), (64, 64)]
    inputs = draw_inputs(sequences, model, device, rng_seed, torch.float16, spare_tokens=4)
    out = run_specialised(
        inputs, num_tokens=inputs.num_tokens + 4, NUM_PROGRAMS=num_programs, **schedule
    )
    assert bool(out[inputs.num_tokens :].isnan().all())
    live = slice(inputs.num_tokens)
    assert_same(out[live], reference_out(inputs)[live])


def test_specialised_warps_serve_long_prompts(device: str, rng_seed: int) -> None:
    inputs = draw_inputs([(300, 300), (129, 450)], (4, 1, 64, 64), device, rng_seed, torch.float16)
    out = run_specialised(inputs, BLOCK_TOKENS=64, NUM_PROGRAMS=2, PING_PONG=True)
    assert_same(out, reference_out(inputs))


def test_specialised_warps_can_be_launched_again_with_the_same_counters(
    device: str, rng_seed: int
) -> None:
    inputs = draw_inputs([(40, 100), (9, 9)], (4, 2, 64, 64), device, rng_seed, torch.float16)
    once = run_specialised(inputs, NUM_PROGRAMS=3)
    assert torch.equal(once, run_specialised(inputs, NUM_PROGRAMS=3, launches=3))


def test_specialised_warps_serve_the_tail_of_a_batch_through_slices(
    device: str, rng_seed: int
) -> None:
    sequences = [(13, 30), (1, 18), (9, 25), (20, 20)]
    inputs = draw_inputs(sequences, (4, 2, 64, 32), device, rng_seed, torch.float16)
    tail = dataclasses.replace(
        inputs,
        seq_rows=inputs.seq_rows[1:],
        query_start=inputs.query_start[1:],
        context_lens=inputs.context_lens[1:],
    )
    out = run_specialised(tail, num_tokens=30, BLOCK_TOKENS=32)
    assert bool(out[:13].isnan().all())
    assert_same(out[13:], reference_out(inputs)[13:])


def test_specialised_warps_trust_the_row_of_padding_over_its_length(
    device: str, rng_seed: int
) -> None:
    inputs = draw_inputs([(5, 20), (3, 0)], (4, 2, 64, 64), device, rng_seed, torch.float16)
    stale_lens = torch.tensor([20, 40], dtype=torch.int32, device=device)
    out = run_specialised(dataclasses.replace(inputs, context_lens=stale_lens))
    assert torch.count_nonzero(out[5:]) == 0


def test_specialised_warps_find_their_sequence_among_hundreds(device: str, rng_seed: int) -> None:
    sequences = [(0, 0)] * 100 + [(3, 9)] + [(0, 0)] * 160 + [(10, 10), (0, 0), (1, 4)]
    inputs = draw_inputs(sequences, (1, 1, 64, 64), device, rng_seed, torch.float16)
    assert_same(run_specialised(inputs, NUM_PROGRAMS=4), reference_out(inputs))


def test_specialised_warps_survive_scores_far_beyond_the_range_of_exp(
    device: str, rng_seed: int
) -> None:
    inputs = draw_inputs([(20, 70), (7, 7)], (4, 2, 64, 64), device, rng_seed, torch.float16)
    inputs.q.mul_(200)
    out = run_specialised(inputs)
    assert_same(out, reference_out(inputs), slack=OF_LARGE_SCORES)
