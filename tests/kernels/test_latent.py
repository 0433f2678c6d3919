"""Latent attention: its templates against the references, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from treadle.kernels.reference.latent_attention import (
    latent_attention,
    latent_write,
    prompt_attention,
)
from treadle.kernels.reference.linears import head_linear
from treadle.kernels.reference.norms import rms_norm
from treadle.kernels.reference.rope import rope

from .paged_inputs import POISON, PagedInputs
from .private_template import load_template
from .test_attention import OF_LARGE_SCORES, assert_same, draw_inputs

# (H, R, r, S): heads that fill no block, or two; latents and rotated parts of no power of two; a
# page of 24 splits tiles.
MODELS = [
    pytest.param((16, 64, 16, 16), id="heads16-latent64-rope16-page16"),
    pytest.param((4, 24, 8, 8), id="heads4-latent24-rope8-page8"),
    pytest.param((20, 80, 24, 24), id="heads20-latent80-rope24-page24"),
    pytest.param((1, 128, 64, 64), id="heads1-latent128-rope64-page64"),
]
SMALL_MODEL = (4, 24, 8, 16)
PAGE_EDGES = (1, 15, 16, 17, 31, 32, 33)
NOPE_DIM = 3  # features before the rotated ones of a query's head: they must not be read
Model = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class LatentInputs:
    """Paged latents, as keys of one KV head, and the queries for them in two parts."""

    paged: PagedInputs
    q: torch.Tensor  # [T, H * R]
    q_rope: torch.Tensor  # [T, H * (NOPE_DIM + r)]
    value_dim: int
    whole_from: int = 0

    @property
    def shape(self) -> dict[str, int | float]:
        """Give the SHAPE of the templates for these inputs."""
        _, num_heads, width = self.paged.q.shape
        return {
            "NUM_HEADS": num_heads,
            "VALUE_DIM": self.value_dim,
            "ROPE_DIM": width - self.value_dim,
            "Q_DIM": NOPE_DIM + width - self.value_dim,
            "PAGE_SIZE": self.paged.k_cache.shape[2],
            "SCALE": self.paged.scale,
        }

    def decode(self, launches: int = 1, **schedule: Any) -> torch.Tensor:
        """Launch the decode template on poisoned scratch; its counters end at zero."""
        paged = self.paged
        template = load_template("latent_attention_decode", shape=self.shape, schedule=schedule)
        block_heads = template.SCHEDULE["BLOCK_HEADS"]
        groups = paged.num_seqs * -(-paged.q.shape[1] // block_heads)
        partials = groups * block_heads * template.SCHEDULE["MAX_SPLITS"]
        device = self.q.device
        scratch = (
            torch.full((partials * self.value_dim,), POISON, device=device),
            torch.full((partials,), POISON, device=device),
        )
        counters = torch.zeros(groups, dtype=torch.int32, device=device)
        out = torch.full_like(self.q, POISON)
        rows = (paged.block_table, paged.seq_rows, paged.context_lens)
        for _ in range(launches):
            template.launch(
                self.q, self.q_rope, paged.k_cache, *rows, out, *scratch, counters, paged.num_seqs
            )
            assert counters.tolist() == [0] * groups
        return out

    def prefill(self, num_tokens: int | None = None, **schedule: Any) -> torch.Tensor:
        """Launch the prefill template; `num_tokens` may exceed the real number."""
        paged = self.paged
        shape = {**self.shape, "WHOLE_FROM": self.whole_from}
        template = load_template("latent_attention_prefill", shape=shape, schedule=schedule)
        out = torch.full_like(self.q, POISON)
        num_tokens = paged.num_tokens if num_tokens is None else num_tokens
        rows = (paged.block_table, paged.seq_rows, paged.query_start, paged.context_lens)
        template.launch(self.q, self.q_rope, paged.k_cache, *rows, out, num_tokens, paged.num_seqs)
        return out

    def reference(self) -> torch.Tensor:
        paged = self.paged
        return latent_attention(
            self.q,
            self.q_rope,
            paged.k_cache,
            paged.block_table,
            paged.seq_rows,
            paged.query_start,
            paged.context_lens,
            num_heads=paged.q.shape[1],
            value_dim=self.value_dim,
            scale=paged.scale,
            whole_from=self.whole_from,
        )


def draw(
    sequences: Sequence[tuple[int, int]], model: Model, device: str, seed: int, **options: Any
) -> LatentInputs:
    """Build inputs for (query tokens, context) sequences of a model (H, R, r, S)."""
    num_heads, value_dim, rope_dim, page_size = model
    sizes = (num_heads, 1, value_dim + rope_dim, page_size)
    paged = draw_inputs(sequences, sizes, device, seed, **options)
    unread = torch.full((*paged.q.shape[:2], NOPE_DIM), POISON, dtype=paged.q.dtype, device=device)
    q_rope = torch.cat((unread, paged.q[..., value_dim:]), dim=-1)
    q = paged.q[..., :value_dim].flatten(1).contiguous()
    return LatentInputs(paged, q, q_rope.flatten(1), value_dim)


def attend_plainly(inputs: LatentInputs, seq: int) -> torch.Tensor:
    """Attend for one sequence as the formula says, head by head: [T', H * R]."""
    paged = inputs.paged
    start, stop = paged.query_start[seq : seq + 2].tolist()
    context, row = int(paged.context_lens[seq]), int(paged.seq_rows[seq])
    pages = paged.block_table[row].long()
    rows = paged.k_cache[pages, 0].flatten(0, 1)[:context].double()  # [C, R + r]
    results = []
    for token in range(start, stop):
        seen = rows[: context - (stop - 1 - token)]
        scores = paged.q[token].double() @ seen.T * paged.scale  # [H, C']
        results.append((scores.softmax(-1) @ seen[:, : inputs.value_dim]).flatten())
    return torch.stack(results).to(inputs.q.dtype)


# --- reference ------------------------------------------------------------------------------------


def test_the_reference_attends_as_the_formula_says(rng_seed: int) -> None:
    inputs = draw([(1, 20), (5, 33), (2, 2), (1, 1)], SMALL_MODEL, "cpu", rng_seed)
    out = inputs.reference()
    expected = torch.cat([attend_plainly(inputs, seq) for seq in range(4)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_reference_of_decode_attends_as_the_formula_says(rng_seed: int) -> None:
    inputs = draw([(1, 20), (1, 33), (1, 2)], SMALL_MODEL, "cpu", rng_seed)
    expected = torch.cat([attend_plainly(inputs, seq) for seq in range(3)])
    torch.testing.assert_close(inputs.reference(), expected, atol=1e-5, rtol=1e-5)


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_decode_matches_the_reference_around_page_edges(
    model: Model, device: str, rng_seed: int
) -> None:
    inputs = draw([(1, context) for context in PAGE_EDGES], model, device, rng_seed)
    assert_same(inputs.decode(BLOCK_TOKENS=32, MAX_SPLITS=1), inputs.reference())


@pytest.mark.parametrize("model", MODELS)
def test_decode_combines_splits_of_long_sequences_only(
    model: Model, device: str, rng_seed: int
) -> None:
    # Chunks are of 16 tokens: 1, 1, 2 and 6 splits.
    inputs = draw([(1, 3), (1, 16), (1, 17), (1, 90)], model, device, rng_seed)
    out = inputs.decode(BLOCK_TOKENS=16, MAX_SPLITS=6, MIN_CHUNK_TOKENS=16)
    assert_same(out, inputs.reference())


def test_decode_of_more_heads_than_a_block(device: str, rng_seed: int) -> None:
    inputs = draw([(1, 40), (1, 7)], (40, 24, 8, 16), device, rng_seed)
    schedule = {"BLOCK_TOKENS": 16, "MAX_SPLITS": 3, "MIN_CHUNK_TOKENS": 16}
    for block_heads in (16, 32):
        out = inputs.decode(BLOCK_HEADS=block_heads, **schedule)
        assert_same(out, inputs.reference())


def test_decode_gives_the_same_bits_again_on_used_scratch(device: str, rng_seed: int) -> None:
    inputs = draw([(1, 90), (1, 40)], SMALL_MODEL, device, rng_seed)
    schedule = {"BLOCK_TOKENS": 16, "MAX_SPLITS": 8, "MIN_CHUNK_TOKENS": 16}
    assert torch.equal(inputs.decode(**schedule), inputs.decode(launches=2, **schedule))


def test_decode_writes_zeros_for_padding_sequences(device: str, rng_seed: int) -> None:
    inputs = draw([(1, 20), (1, 0), (1, 40), (1, 0)], SMALL_MODEL, device, rng_seed)
    out = inputs.decode(BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16)
    assert torch.count_nonzero(out[[1, 3]]) == 0
    assert_same(out, inputs.reference())


def test_decode_writes_nothing_beyond_its_sequences(device: str, rng_seed: int) -> None:
    inputs = draw([(1, 20)], SMALL_MODEL, device, rng_seed, spare_tokens=2)
    out = inputs.decode(BLOCK_TOKENS=32, MAX_SPLITS=1)
    assert bool(out[1:].isnan().all())


def test_decode_survives_scores_far_beyond_the_range_of_exp(device: str, rng_seed: int) -> None:
    inputs = draw([(1, 90), (1, 7)], SMALL_MODEL, device, rng_seed)
    inputs.q.mul_(200)
    out = inputs.decode(BLOCK_TOKENS=16, MAX_SPLITS=4, MIN_CHUNK_TOKENS=16)
    assert_same(out, inputs.reference(), slack=OF_LARGE_SCORES)


def test_decode_in_half_precision(device: str, rng_seed: int) -> None:
    options = {"dtype": torch.float16}
    inputs = draw([(1, 130), (1, 17)], (8, 64, 16, 64), device, rng_seed, **options)
    out = inputs.decode(BLOCK_TOKENS=64, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64)
    assert_same(out, inputs.reference())


# --- prefill --------------------------------------------------------------------------------------

# New prompts, chunks behind a prior context and single tokens, ending around page edges.
RAGGED = [(1, 1), (33, 33), (16, 31), (2, 17), (15, 64)]


@pytest.mark.parametrize("model", MODELS)
def test_prefill_matches_the_reference_on_ragged_sequences(
    model: Model, device: str, rng_seed: int
) -> None:
    inputs = draw(RAGGED, model, device, rng_seed)
    assert_same(inputs.prefill(BLOCK_ROWS=64, BLOCK_TOKENS=32), inputs.reference())


def test_prefill_whose_blocks_hold_fewer_rows_than_a_token_has_heads(
    device: str, rng_seed: int
) -> None:
    inputs = draw([(3, 9), (1, 20), (2, 2)], (40, 24, 8, 16), device, rng_seed)
    assert_same(inputs.prefill(BLOCK_ROWS=16, BLOCK_TOKENS=16), inputs.reference())


@pytest.mark.parametrize(("page_size", "block_tokens"), [(16, 64), (64, 16)])
def test_prefill_tile_may_be_smaller_or_larger_than_a_page(
    page_size: int, block_tokens: int, device: str, rng_seed: int
) -> None:
    inputs = draw([(21, 100), (40, 40)], (4, 24, 8, page_size), device, rng_seed)
    assert_same(inputs.prefill(BLOCK_ROWS=64, BLOCK_TOKENS=block_tokens), inputs.reference())


def test_prefill_writes_zeros_for_padding_sequences(device: str, rng_seed: int) -> None:
    inputs = draw([(5, 20), (0, 0), (3, 0), (1, 7)], SMALL_MODEL, device, rng_seed)
    out = inputs.prefill(BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert torch.count_nonzero(out[5:8]) == 0
    assert_same(out, inputs.reference())


def test_prefill_ignores_tokens_of_no_sequence(device: str, rng_seed: int) -> None:
    inputs = draw([(5, 20), (7, 7)], SMALL_MODEL, device, rng_seed, spare_tokens=20)
    out = inputs.prefill(num_tokens=32, BLOCK_ROWS=16, BLOCK_TOKENS=32)
    assert bool(out[12:].isnan().all())
    assert_same(out[:12], inputs.reference()[:12])


def test_prefill_finds_its_sequence_among_hundreds(device: str, rng_seed: int) -> None:
    sequences = [(0, 0)] * 100 + [(3, 9)] + [(0, 0)] * 160 + [(10, 10), (0, 0), (1, 4)]
    inputs = draw(sequences, (1, 16, 8, 16), device, rng_seed)
    assert_same(inputs.prefill(BLOCK_ROWS=16, BLOCK_TOKENS=16), inputs.reference())


def test_prefill_of_random_batches(device: str, rng_seed: int) -> None:
    chosen = random.Random(rng_seed)
    for _ in range(3):
        lengths = [chosen.randint(1, 70) for _ in range(chosen.randint(1, 6))]
        sequences = [(chosen.randint(1, length), length) for length in lengths]
        ranges = ((1, 20), (2, 10), (1, 4), (1, 4))
        heads, *eighths = (chosen.randint(*both) for both in ranges)
        model = (heads, *(8 * size for size in eighths))
        print(f"model {model}, sequences {sequences}")
        inputs = draw(sequences, model, device, rng_seed)  # type: ignore[arg-type]
        assert_same(inputs.prefill(BLOCK_ROWS=32, BLOCK_TOKENS=32), inputs.reference())


@pytest.mark.parametrize("block_rows", [16, 64])
def test_prefill_leaves_out_whole_prompts_that_are_long_enough(
    block_rows: int, device: str, rng_seed: int
) -> None:
    # Whole and long, whole and short, behind a context, padding, a first token alone.
    inputs = draw([(20, 20), (7, 7), (20, 33), (9, 0), (1, 1)], SMALL_MODEL, device, rng_seed)
    inputs = dataclasses.replace(inputs, whole_from=8)
    out = inputs.prefill(BLOCK_ROWS=block_rows, BLOCK_TOKENS=32)
    assert torch.count_nonzero(out[:20]) == 0
    assert torch.count_nonzero(out[20:27]) == out[20:27].numel()
    assert_same(out, inputs.reference())


# --- prompts --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptInputs:
    """Paged latents whose last features are keys' rotated part; each head's own keys and values."""

    paged: PagedInputs  # its queries are those of heads of nope_dim + r features
    kv: torch.Tensor  # [T, H * (nope_dim + v)]
    nope_dim: int
    value_dim: int
    whole_from: int

    def attend(self, **schedule: Any) -> torch.Tensor:
        """Launch the template on an output of sevens."""
        _, num_heads, key_dim = self.paged.q.shape
        rope_dim = key_dim - self.nope_dim
        shape = {
            "NUM_HEADS": num_heads,
            "NOPE_DIM": self.nope_dim,
            "ROPE_DIM": rope_dim,
            "VALUE_DIM": self.value_dim,
            "LATENT_DIM": self.paged.k_cache.shape[-1] - rope_dim,
            "WHOLE_FROM": self.whole_from,
            "PAGE_SIZE": self.paged.k_cache.shape[2],
            "SCALE": self.paged.scale,
        }
        template = load_template("latent_attention_prompts", shape=shape, schedule=schedule)
        out = self.sevens()
        template.launch(*self.operands(), out, self.paged.num_tokens, self.paged.num_seqs)
        return out

    def reference(self) -> torch.Tensor:
        out = self.sevens()
        prompt_attention(
            *self.operands(),
            out,
            num_heads=self.paged.q.shape[1],
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            scale=self.paged.scale,
            whole_from=self.whole_from,
        )
        return out

    def operands(self) -> tuple[torch.Tensor, ...]:
        paged = self.paged
        rows = (paged.block_table, paged.seq_rows, paged.query_start, paged.context_lens)
        return paged.q.flatten(1), self.kv, paged.k_cache, *rows

    def sevens(self) -> torch.Tensor:
        num_tokens, num_heads, _ = self.paged.q.shape
        return self.kv.new_full((num_tokens, num_heads * self.value_dim), 7.0)


def draw_prompts(
    sequences: Sequence[tuple[int, int]],
    sizes: tuple[int, int, int, int, int],
    device: str,
    seed: int,
    **options: Any,
) -> PromptInputs:
    """Build inputs of (query tokens, context) sequences of a model (H, nope_dim, r, v, S)."""
    num_heads, nope_dim, rope_dim, value_dim, page_size = sizes
    model = (num_heads, 1, nope_dim + rope_dim, page_size)
    paged = draw_inputs(sequences, model, device, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    width = num_heads * (nope_dim + value_dim)
    kv = torch.randn(len(paged.q), width, generator=generator).to(paged.q.dtype).to(device)
    return PromptInputs(paged, kv, nope_dim, value_dim, whole_from=4)


def test_the_reference_of_prompts_attends_as_the_formula_says(rng_seed: int) -> None:
    inputs = draw_prompts([(5, 5), (3, 3), (6, 9)], (2, 6, 4, 10, 4), "cpu", rng_seed)
    out, paged = inputs.reference(), inputs.paged
    assert bool((out[5:] == 7.0).all())
    pages = paged.block_table[int(paged.seq_rows[0])].long()
    rotated = paged.k_cache[pages, 0].flatten(0, 1)[:5, -4:].double()  # [C, r]
    kv = inputs.kv[:5].double().unflatten(-1, (2, 16))
    for head in range(2):
        keys = torch.cat((kv[:, head, :6], rotated), dim=-1)
        scores = paged.q[:5, head].double() @ keys.T * paged.scale
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected = (scores.softmax(-1) @ kv[:, head, 6:]).to(out.dtype)
        found = out[:5].unflatten(-1, (2, 10))[:, head]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [(2, 16, 16, 16, 16), (3, 24, 8, 40, 8), (1, 12, 24, 20, 24), (4, 64, 32, 64, 64)],
)
def test_whole_prompts_attend_to_their_own_keys_and_values(
    sizes: tuple[int, int, int, int, int], device: str, rng_seed: int
) -> None:
    # Whole, around tiles; too short; behind a context; padding; single tokens.
    sequences = [(33, 33), (3, 3), (4, 4), (16, 31), (5, 0), (1, 1), (65, 65), (1, 20)]
    inputs = draw_prompts(sequences, sizes, device, rng_seed)
    assert_same(inputs.attend(BLOCK_QUERIES=32, BLOCK_TOKENS=32), inputs.reference())


def test_whole_prompts_in_half_precision(device: str, rng_seed: int) -> None:
    options = {"dtype": torch.float16}
    inputs = draw_prompts([(70, 70), (1, 9)], (2, 32, 16, 32, 64), device, rng_seed, **options)
    assert_same(inputs.attend(BLOCK_QUERIES=64, BLOCK_TOKENS=64), inputs.reference())


# --- products of each head ------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("sizes", [(3, 12, 20, 40, 12), (2, 32, 16, 64, 48), (1, 5, 7, 24, 9)])
def test_head_linear_multiplies_each_head_by_its_own_rows(
    sizes: tuple[int, ...], transposed: bool, device: str, rng_seed: int
) -> None:
    heads, first_rows, last_rows, columns, tokens = sizes
    generator = torch.Generator().manual_seed(rng_seed)
    weight = torch.randn(heads * (first_rows + last_rows), columns, generator=generator)
    first, rows = (0, first_rows) if transposed else (first_rows, last_rows)
    taken, made = (rows, columns) if transposed else (columns, rows)
    x = torch.randn(tokens + 2, heads, taken + 3, generator=generator)
    x[..., taken:] = POISON  # a head may be wider than what is multiplied
    expected = torch.full((tokens + 2, heads, made), POISON)
    for head in range(heads):
        own = weight.unflatten(0, (heads, -1))[head, first : first + rows]
        expected[:tokens, head] = x[:tokens, head, :taken] @ (own if transposed else own.T)
    x, weight = x.flatten(1).to(device), weight.to(device)
    params = {"num_heads": heads, "first": first, "rows": rows, "transposed": transposed}
    found = head_linear(x[:tokens], weight, **params)
    torch.testing.assert_close(found, expected[:tokens].flatten(1).to(device), atol=1e-4, rtol=1e-4)
    shape = {
        "NUM_HEADS": heads,
        "X_DIM": taken + 3,
        "WEIGHT_ROWS": first_rows + last_rows,
        "FIRST": first,
        "ROWS": rows,
        "K": columns,
        "TRANSPOSED": transposed,
    }
    schedule = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    template = load_template("head_linear", shape=shape, schedule=schedule)
    y = torch.full((tokens + 2, heads * made), POISON, device=device)
    template.launch(x, weight, y, tokens)
    slack = 1.0 if device == "cpu" else 200.0  # a GPU's dot rounds fp32 to tf32
    torch.testing.assert_close(
        y, expected.flatten(1).to(device), atol=slack * 1e-4, rtol=slack * 1e-4, equal_nan=True
    )


# --- the append -----------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_latent_write_normalises_rotates_and_appends(
    joined: bool, interleaved: bool, device: str, rng_seed: int
) -> None:
    heads, start, rotary, behind, latent_dim, page_size = 5, 6, 8, 2, 24, 4
    head_dim = start + rotary + behind
    generator = torch.Generator().manual_seed(rng_seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions, token_seq, seq_rows = int32(6, 0, 1, 5, 9), int32(0, 1, 1, 2, 3), int32(2, 0, -1, 1)
    block_table = int32(3, 0, 0, 5, 1, 4, 0, 2, 0).view(3, 3)
    q_width, kv_width = heads * head_dim, latent_dim + rotary
    q_in, kv = normal(5, q_width), normal(5, kv_width)
    weight, cos_sin = normal(latent_dim), normal(16, rotary)
    latents = torch.full((7, 1, page_size, kv_width), POISON, device=device)
    expected = latents.clone()
    rotation = {"positions": positions, "cos_sin": cos_sin, "interleaved": interleaved}
    expected_q = rope(q_in, head_dim=head_dim, start=start, **rotation)  # type: ignore[arg-type]
    normed = rms_norm(kv[:, :latent_dim], weight, eps=1e-3, offset=0.5)
    latent_write(
        normed,
        rope(kv[:, latent_dim:], head_dim=rotary, **rotation),  # type: ignore[arg-type]
        positions,
        token_seq,
        seq_rows,
        block_table,
        expected,
    )
    shape = {
        "NUM_HEADS": heads,
        "HEAD_DIM": head_dim,
        "Q_START": start,
        "Q_STRIDE": q_width,
        "KV_STRIDE": kv_width,
        "KV_OFFSET": 0,
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": rotary,
        "INTERLEAVED": interleaved,
        "STORE_LATENT": True,
        "PAGE_SIZE": page_size,
        "EPS": 1e-3,
        "OFFSET": 0.5,
    }
    if joined:
        q_in = kv = torch.cat((normal(5, 3), q_in, kv), dim=-1)
        width = q_in.shape[1]
        shape |= {"Q_STRIDE": width, "Q_OFFSET": 3, "KV_STRIDE": width, "KV_OFFSET": 3 + q_width}
    template = load_template("latent_write", shape=shape, schedule={"BLOCK_HEADS": 2})
    q = torch.full((5, q_width), POISON, device=device)
    rows = (token_seq, seq_rows, block_table)
    latent = torch.full((5, latent_dim), POISON, device=device)
    template.launch(q_in, kv, weight, positions, cos_sin, *rows, latents, q, latent, 5)
    torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(latent, normed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert int((~latents.isnan()).all(-1).sum()) == 4  # the token of padding wrote nothing
