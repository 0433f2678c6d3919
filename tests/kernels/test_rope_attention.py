"""One kernel that rotates, appends and attends, against the references of the ops it joins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from treadle.kernels.reference.attention import attention, kv_write
from treadle.kernels.reference.norms import head_norm
from treadle.kernels.reference.rope import rope
from treadle.kernels.reference.rows import split

from .paged_inputs import POISON, PagedInputs, build_paged_inputs
from .private_template import load_template
from .test_attention import OF_LARGE_SCORES, TOLERANCE, assert_same

# (H, G, D, r, S): groups of 1, 3, 7 and 20; r smaller than D, not a power of two; padded heads.
MODELS = [
    pytest.param((8, 2, 64, 64, 16), id="group4-dim64-page16"),
    pytest.param((4, 4, 8, 8, 8), id="group1-dim8-page8"),
    pytest.param((3, 1, 80, 48, 64), id="group3-dim80-rotary48-page64"),
    pytest.param((7, 1, 128, 64, 16), id="group7-dim128-rotary64-page16"),
    pytest.param((18, 2, 24, 24, 24), id="group9-dim24-page24"),
    pytest.param((20, 1, 256, 256, 16), id="group20-dim256-page16"),
]
SMALL_MODEL = (4, 2, 16, 16, 16)
PAGE_EDGES = (1, 15, 16, 17, 31, 32, 33)
Model = tuple[int, int, int, int, int]


@dataclasses.dataclass
class Step:
    """A decode step: paged inputs whose newest slots are empty, and the projection to fill them."""

    inputs: PagedInputs
    qkv: torch.Tensor  # [T, (H + 2G) * D]
    cos_sin: torch.Tensor  # f32[C, r]
    norm_weights: tuple[torch.Tensor, ...] = ()  # of q's and of k's heads, [D]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads of q and of k, and their width."""
        return (*self.inputs.q.shape[1:2], *self.inputs.k_cache.shape[1::2])  # type: ignore[return-value]

    def run(self, **schedule: Any) -> torch.Tensor:
        """Run the template's kernel on these very caches, with poisoned output and scratch."""
        shape = {**self.inputs.shape, "ROTARY_DIM": self.cos_sin.shape[1]}
        shape |= {"HEAD_NORM": bool(self.norm_weights), "EPS": 1e-3, "OFFSET": 0.5}
        return self.launch(load_template("rope_attention_decode", shape=shape, schedule=schedule))

    def launch(self, template: ModuleType, *extra: torch.Tensor) -> torch.Tensor:
        """Run a kernel, which may take extra tensors before its output, as `run` does."""
        inputs = self.inputs
        num_heads, num_kv_heads, head_dim = self.sizes
        num_partials = inputs.num_seqs * num_heads * template.SCHEDULE["MAX_SPLITS"]
        device = self.qkv.device
        counters = torch.zeros(inputs.num_seqs * num_kv_heads, dtype=torch.int32, device=device)
        out = inputs.poisoned_out()
        template.launch(
            self.qkv,
            self.cos_sin,
            inputs.block_table,
            inputs.seq_rows,
            inputs.context_lens,
            inputs.k_cache,
            inputs.v_cache,
            *extra,
            out,
            torch.full((num_partials * head_dim,), POISON, device=device),
            torch.full((num_partials,), POISON, device=device),
            counters,
            *(self.norm_weights or (None, None)),
            inputs.num_seqs,
        )
        assert counters.tolist() == [0] * counters.numel()
        return out

    def reference(self, **limits: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give what attention should give and what the caches should hold, from copies of them."""
        inputs = self.inputs
        num_heads, num_kv_heads, head_dim = self.sizes
        widths = (num_heads * head_dim, *(num_kv_heads * head_dim,) * 2)
        q, k, v = split(self.qkv[: inputs.num_seqs], sizes=widths)
        if self.norm_weights:
            q, k = (
                head_norm(x.float(), weight, eps=1e-3, offset=0.5)
                for x, weight in zip((q, k), self.norm_weights, strict=True)
            )
        positions = (inputs.context_lens - 1).clamp(min=0)
        # Rounded once, after norm and rotation, as the kernel does it.
        q, k = (
            rope(x, positions, self.cos_sin, head_dim=head_dim).to(self.qkv.dtype) for x in (q, k)
        )
        k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
        rows = (inputs.seq_rows, inputs.block_table)
        token_seq = torch.arange(inputs.num_seqs, dtype=torch.int32, device=q.device)
        kv_write(k, v, positions, token_seq, *rows, k_cache, v_cache)
        out = attention(
            q,
            k_cache,
            v_cache,
            inputs.block_table,
            inputs.seq_rows,
            torch.arange(inputs.num_seqs + 1, dtype=torch.int32, device=q.device),
            inputs.context_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=inputs.scale,
            **limits,
        )
        return out, k_cache, v_cache


def draw_step(
    contexts: Sequence[int],
    model: Model,
    device: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    spare_tokens: int = 0,
) -> Step:
    """Draw a step of one token for each context (0: padding); newest slots and padding are NaN."""
    num_heads, num_kv_heads, head_dim, rotary_dim, page_size = model
    if device == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16  # a GPU's dot would round fp32 to tf32
    inputs = build_paged_inputs(
        [(1, context) for context in contexts],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        device=device,
        spare_tokens=spare_tokens,
    )
    generator = torch.Generator().manual_seed(seed)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(len(contexts) + spare_tokens, width, generator=generator).to(dtype)
    qkv[len(contexts) :] = POISON
    for seq, context in enumerate(contexts):
        if context == 0:
            qkv[seq] = POISON
            continue
        page = inputs.block_table[inputs.seq_rows[seq], (context - 1) // page_size]
        for cache in (inputs.k_cache, inputs.v_cache):
            cache[page, :, (context - 1) % page_size] = POISON
    angles = torch.randn(max(contexts), rotary_dim // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    return Step(inputs, qkv.to(device), cos_sin.to(device))


def check(step: Step, *, slack: float = 1.0, **schedule: Any) -> None:
    """Compare the output and both caches with the references; untouched slots stay NaN."""
    expected, *expected_caches = step.reference()
    assert_same(step.run(**schedule), expected, slack=slack)
    for cache, wanted in zip(
        (step.inputs.k_cache, step.inputs.v_cache), expected_caches, strict=True
    ):
        tolerance = slack * TOLERANCE[cache.dtype]
        torch.testing.assert_close(cache, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("model", MODELS)
def test_it_matches_the_references_around_page_edges(
    model: Model, device: str, rng_seed: int
) -> None:
    step = draw_step(PAGE_EDGES, model, device, rng_seed)
    check(step, BLOCK_TOKENS=32, MAX_SPLITS=1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_one_of_several_splits_takes_the_newest_token(
    model: Model, early: bool, device: str, rng_seed: int
) -> None:
    # Chunks are of 16 older tokens: 1, 1, 1, 2 and 6 splits.
    step = draw_step([1, 16, 17, 18, 90], model, device, rng_seed)
    check(step, BLOCK_TOKENS=16, MAX_SPLITS=6, MIN_CHUNK_TOKENS=16, LOAD_EARLY=early)


@pytest.mark.parametrize("page_size", [8, 64])
def test_a_tile_that_is_loaded_early_begins_a_chunk_of_several(
    page_size: int, device: str, rng_seed: int
) -> None:
    step = draw_step([0, 1, 2, 49, 130], (4, 2, 16, 16, page_size), device, rng_seed)
    check(step, BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=48, LOAD_EARLY=True)


@pytest.mark.parametrize(("page_size", "block_tokens"), [(16, 64), (64, 16), (64, 64)])
def test_a_tile_may_be_smaller_or_larger_than_a_page(
    page_size: int, block_tokens: int, device: str, rng_seed: int
) -> None:
    step = draw_step([63, 64, 65, 130], (4, 2, 16, 16, page_size), device, rng_seed)
    check(step, BLOCK_TOKENS=block_tokens, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64)


def test_a_chunk_grows_when_splits_run_out(device: str, rng_seed: int) -> None:
    step = draw_step([200, 98, 97], SMALL_MODEL, device, rng_seed)
    check(step, BLOCK_TOKENS=16, MAX_SPLITS=3, MIN_CHUNK_TOKENS=16)


def test_padding_gives_zeros_and_stores_nothing(device: str, rng_seed: int) -> None:
    step = draw_step([20, 0, 40, 0], SMALL_MODEL, device, rng_seed)
    check(step, BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16)


def test_the_row_of_padding_is_trusted_over_its_length(device: str, rng_seed: int) -> None:
    step = draw_step([20, 0], SMALL_MODEL, device, rng_seed)
    stale = torch.tensor([20, 40], dtype=torch.int32, device=device)
    step.inputs = dataclasses.replace(step.inputs, context_lens=stale)
    step.cos_sin = torch.cat([step.cos_sin, step.cos_sin])
    out = step.run(BLOCK_TOKENS=16, MAX_SPLITS=2, MIN_CHUNK_TOKENS=16)
    assert torch.count_nonzero(out[1]) == 0


def test_nothing_is_written_beyond_the_sequences(device: str, rng_seed: int) -> None:
    step = draw_step([20], SMALL_MODEL, device, rng_seed, spare_tokens=2)
    out = step.run(BLOCK_TOKENS=32, MAX_SPLITS=1)
    assert bool(out[1:].isnan().all())


def test_the_same_bits_come_again_whatever_the_order_of_splits(device: str, rng_seed: int) -> None:
    schedule = {"BLOCK_TOKENS": 16, "MAX_SPLITS": 8, "MIN_CHUNK_TOKENS": 16}
    first, again = (draw_step([90, 40], SMALL_MODEL, device, rng_seed) for _ in range(2))
    assert torch.equal(first.run(**schedule), again.run(**schedule))


@pytest.mark.parametrize("model", [(8, 2, 64, 64, 16), (3, 1, 80, 48, 64)])
def test_heads_may_be_normalised_before_they_are_rotated(
    model: Model, device: str, rng_seed: int
) -> None:
    step = draw_step([0, 1, 17, 90], model, device, rng_seed)
    generator = torch.Generator().manual_seed(rng_seed)
    weights = torch.randn(2, model[2], generator=generator).to(step.qkv)
    step.norm_weights = (weights[0], weights[1])
    check(step, BLOCK_TOKENS=32, MAX_SPLITS=3, MIN_CHUNK_TOKENS=32)


def test_scores_far_beyond_the_range_of_exp_do_no_harm(device: str, rng_seed: int) -> None:
    step = draw_step([90, 7, 1], SMALL_MODEL, device, rng_seed)
    step.qkv[:, : 4 * 16].mul_(200)
    check(step, slack=OF_LARGE_SCORES, BLOCK_TOKENS=16, MAX_SPLITS=4, MIN_CHUNK_TOKENS=16)


def test_half_precision(device: str, rng_seed: int) -> None:
    step = draw_step([130, 17], (8, 2, 64, 64, 64), device, rng_seed, dtype=torch.float16)
    check(step, BLOCK_TOKENS=64, MAX_SPLITS=2, MIN_CHUNK_TOKENS=64)
