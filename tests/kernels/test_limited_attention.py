"""Attention with a window, a soft cap or sinks, as emitted, against plain torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from treadle.ir import fuse
from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph
from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels.load import load_module, write_module
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Situation
from treadle.kernels.reference.attention import attention

from .paged_inputs import PagedInputs
from .quantised_inputs import QuantisedInputs, draw_quantised
from .test_attention import assert_same, draw_inputs
from .test_quantised_attention import assert_same as assert_same_quantised
from .test_rope_attention import draw_step

MODEL = (6, 2, 24, 16)  # H, G, D, S
PAGE = 16


class Limits(NamedTuple):
    """A window in tokens, a cap of scores, and whether heads have sinks."""

    window: int
    cap: float
    has_sinks: bool = False


# Windows: within a page, a page, over pages, one token, none.
LIMITS = [
    Limits(5, 0.0),
    Limits(16, 0.0),
    Limits(37, 0.0, has_sinks=True),
    Limits(1, 0.0),
    Limits(0, 2.0),
    Limits(0, 0.0, has_sinks=True),
    Limits(20, 1.5, has_sinks=True),
]
DECODES = [(1, 17), (1, 90), (0, 0)]
PROMPTS = [(33, 33), (0, 0), (5, 70)]


def sinks_of(inputs: PagedInputs, limits: Limits) -> torch.Tensor | None:
    """Give the sinks of the heads, from ones that hardly count to ones that count most."""
    num_heads = inputs.q.shape[1]
    return torch.linspace(-3.0, 5.0, num_heads).to(inputs.q) if limits.has_sinks else None


def attending(
    inputs: PagedInputs, limits: Limits, step: str, rotary_dim: int, kv_format: str
) -> Graph:
    """Write a graph that attends; with a `rotary_dim` q and k are rotated before."""
    num_heads, head_dim = inputs.q.shape[1:]
    num_kv_heads, page_size = inputs.k_cache.shape[1:3]
    b = GraphBuilder("limited", step=step, dtype="f32", page_size=page_size, kv_format=kv_format)
    widths = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    x = b.embed(b.weight("embed", "embed", 8, sum(widths)))
    q, k, v = b.split(x, *widths, name="q k v")
    if rotary_dim:
        table = b.rope_table("rope", (1.0,) * (rotary_dim // 2))
        q, k = (b.rope(part, table, head_dim=head_dim) for part in (q, k))
    attended = b.attention(
        q,
        k,
        v,
        b.weight("sinks", "sinks", num_heads) if limits.has_sinks else None,
        cache="kv.0",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=inputs.scale,
        window=limits.window,
        soft_cap=limits.cap,
    )
    head = b.weight("h", "h", 8, widths[0])
    return b.finish(b.linear(b.last_rows(attended), head, out_dtype="f32"))


def emit(
    inputs: PagedInputs,
    template: str,
    limits: Limits,
    folder: Path,
    *,
    rotary_dim: int = 0,
    kv_format: str = "",
    **schedule: Any,
) -> ModuleType:
    """Emit a template with limits, with its first schedule, changed."""
    step = "decode" if "decode" in template else "mixed"
    graph = attending(inputs, limits, step, rotary_dim, kv_format)
    if rotary_dim:
        for rule in (fuse.fuse_rope_kv_write, fuse.fuse_rope_attention):
            graph, _ = rule(graph)
    op = next(op for op in graph.ops if op.plain[-1].kind == "attention")
    where = Situation({"T": 256, "B": 8, "C": 256}, step, "cuda", "sm_90")
    candidate = next(each for each in lower(op, graph, where) if each.template == template)
    suffixes = {"_window": limits.window, "_cap": limits.cap, "_sinks": limits.has_sinks}
    assert candidate.name.endswith("".join(name for name, is_on in suffixes.items() if is_on))
    known = {"USE_PDL": False, "USE_PTX": False, "num_warps": 4, "num_stages": 1, **schedule}
    changed = {key: known.get(key, value) for key, value in candidate.schedule.items()}
    candidate.schedule.update(changed)
    return load_module(write_module(candidate.emit(), "kernel", folder), "kernel")


def expected_out(inputs: PagedInputs, limits: Limits) -> torch.Tensor:
    """Attend token by token, from the definition."""
    num_heads, head_dim = inputs.q.shape[1:]
    num_kv_heads, page_size = inputs.k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.zeros(inputs.q.shape[0], num_heads, head_dim, dtype=torch.float64)
    window, cap, _ = limits
    sinks = sinks_of(inputs, limits)
    for seq, row in enumerate(inputs.seq_rows.tolist()):
        start, stop = inputs.query_start[seq : seq + 2].tolist()
        context = int(inputs.context_lens[seq])
        if row < 0 or context == 0:
            continue
        for token in range(start, stop):
            position = context - (stop - token)
            first = max(position - window + 1, 0) if window else 0
            seen = torch.arange(first, position + 1)
            pages = inputs.block_table[row].cpu()[seen // page_size]
            k = inputs.k_cache.cpu()[pages, :, seen % page_size].double()  # [C, G, D]
            v = inputs.v_cache.cpu()[pages, :, seen % page_size].double()
            for head in range(num_heads):
                scores = k[:, head // group] @ inputs.q[token, head].cpu().double() * inputs.scale
                scores = cap * torch.tanh(scores / cap) if cap else scores
                weights = scores.exp()
                sink = sinks[head].cpu().double().exp() if sinks is not None else 0.0
                out[token, head] = weights @ v[:, head // group] / (weights.sum() + sink)
    return out.flatten(1).to(inputs.q.dtype).to(inputs.q.device)


def hide_old_pages(inputs: PagedInputs, window: int) -> None:
    """Poison the pages that lie before the window of a sequence's first token of the step."""
    for seq, row in enumerate(inputs.seq_rows.tolist()):
        start, stop = inputs.query_start[seq : seq + 2].tolist()
        prior = int(inputs.context_lens[seq]) - (stop - start)
        for page in inputs.block_table[row, : max(prior - window + 1, 0) // PAGE].tolist():
            inputs.k_cache[page] = inputs.v_cache[page] = float("nan")


def run_decode(inputs: PagedInputs, module: ModuleType, limits: Limits) -> torch.Tensor:
    num_heads, head_dim = inputs.q.shape[1:]
    partials = inputs.num_seqs * num_heads * module.SCHEDULE["MAX_SPLITS"]
    scratch = torch.full((partials * (head_dim + 1),), float("nan"), device=inputs.q.device)
    counters = torch.zeros(inputs.num_seqs * inputs.k_cache.shape[1], dtype=torch.int32)
    out = inputs.poisoned_out()
    cache = (inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_rows)
    parts = (scratch[partials:], scratch[:partials], counters.to(inputs.q.device))
    sinks = [sinks_of(inputs, limits)] if limits.has_sinks else []
    module.launch(inputs.q, *cache, inputs.context_lens, *sinks, out, *parts, inputs.num_seqs)
    return out


def run_prefill(inputs: PagedInputs, module: ModuleType, limits: Limits) -> torch.Tensor:
    out = inputs.poisoned_out()
    cache = (inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_rows)
    lengths = (inputs.query_start, inputs.context_lens)
    sinks = [sinks_of(inputs, limits)] if limits.has_sinks else []
    module.launch(inputs.q, *cache, *lengths, *sinks, out, inputs.num_tokens, inputs.num_seqs)
    return out


def decodes(model: tuple[int, int, int, int], device: str, seed: int) -> PagedInputs:
    sequences = [(max(queries, 1), context) for queries, context in DECODES]
    return draw_inputs(sequences, model, device, seed)


def prompts(model: tuple[int, int, int, int], device: str, seed: int) -> PagedInputs:
    return draw_inputs(PROMPTS, model, device, seed)


@pytest.mark.parametrize(("limits", "splits"), [*((each, 4) for each in LIMITS), (LIMITS[-1], 1)])
def test_decode_sees_its_window_and_bends_its_scores(
    limits: Limits, splits: int, device: str, rng_seed: int, tmp_path: Path
) -> None:
    inputs = decodes(MODEL, device, rng_seed)
    expected = expected_out(inputs, limits)
    if limits.window:
        hide_old_pages(inputs, limits.window)
    tiles = {"BLOCK_TOKENS": 16, "MAX_SPLITS": splits, "MIN_CHUNK_TOKENS": 16}
    module = emit(inputs, "attention_decode", limits, tmp_path, **tiles)
    assert_same(run_decode(inputs, module, limits), expected)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("limits", "splits"), [*((each, 4) for each in LIMITS), (LIMITS[-1], 1)])
def test_the_joined_kernel_sees_its_window_and_bends_its_scores(
    limits: Limits, splits: int, early: bool, device: str, rng_seed: int, tmp_path: Path
) -> None:
    step = draw_step([17, 90, 0, 1, 40], (6, 2, 24, 16, PAGE), device, rng_seed)
    inputs = step.inputs
    if limits.window:
        hide_old_pages(inputs, limits.window)
    sinks = {"sinks": sinks_of(inputs, limits)}
    expected, *caches = step.reference(window=limits.window, soft_cap=limits.cap, **sinks)
    tiles = {"BLOCK_TOKENS": 16, "MAX_SPLITS": splits, "MIN_CHUNK_TOKENS": 16, "LOAD_EARLY": early}
    template = "rope_attention_decode"
    module = emit(inputs, template, limits, tmp_path, rotary_dim=16, **tiles)
    given = [sinks["sinks"]] if limits.has_sinks else []
    assert_same(step.launch(module, *given), expected)
    for cache, wanted in zip((inputs.k_cache, inputs.v_cache), caches, strict=True):
        torch.testing.assert_close(cache, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("limits", "pack_heads"), [*((each, True) for each in LIMITS), (LIMITS[-1], False)]
)
def test_prefill_sees_its_window_and_bends_its_scores(
    limits: Limits, pack_heads: bool, device: str, rng_seed: int, tmp_path: Path
) -> None:
    inputs = prompts(MODEL, device, rng_seed)
    expected = expected_out(inputs, limits)
    if limits.window:
        hide_old_pages(inputs, limits.window)
    tiles = {"BLOCK_ROWS": 16, "BLOCK_TOKENS": 16, "PACK_HEADS": pack_heads}
    module = emit(inputs, "attention_prefill", limits, tmp_path, **tiles)
    assert_same(run_prefill(inputs, module, limits), expected)


@pytest.mark.parametrize("limits", [LIMITS[0], LIMITS[-1]])
def test_prefill_by_tma_sees_its_window_and_bends_its_scores(
    limits: Limits, device: str, rng_seed: int, tmp_path: Path
) -> None:
    inputs = prompts((6, 2, 32, 64), device, rng_seed)
    expected = expected_out(inputs, limits)
    tiles = {"BLOCK_ROWS": 16, "BLOCK_TOKENS": 16, "PACK_HEADS": True}
    module = emit(inputs, "attention_prefill_tma", limits, tmp_path, **tiles)
    assert_same(run_prefill(inputs, module, limits), expected)


QUANTISED = [LIMITS[0], LIMITS[2], LIMITS[4], LIMITS[-1]]
QUANTISED_MODEL = (6, 2, 32, 16)


def hide_old_blocks(inputs: QuantisedInputs, window: int) -> None:
    """Poison the full pages that lie before the window of a sequence's first token of the step."""
    plain = inputs.plain
    for seq, row in enumerate(plain.seq_rows.tolist()):
        start, stop = plain.query_start[seq : seq + 2].tolist()
        prior = int(plain.context_lens[seq]) - (stop - start)
        for page in plain.block_table[row, : max(prior - window + 1, 0) // PAGE].tolist():
            inputs.cache.keys[page] = inputs.cache.values[page] = 0xFF


def limits_of(inputs: PagedInputs, limits: Limits) -> dict[str, Any]:
    sinks = sinks_of(inputs, limits)
    return {"window": limits.window, "soft_cap": limits.cap, "sinks": sinks}


@pytest.mark.parametrize("limits", QUANTISED)
@pytest.mark.parametrize("kv_format", sorted(KV_FORMATS))
def test_decode_with_a_quantised_cache_keeps_its_limits(
    kv_format: str, limits: Limits, device: str, rng_seed: int, tmp_path: Path
) -> None:
    sequences = [(1, 17), (1, 90), (1, 0), (1, 48), (1, 3)]
    inputs = draw_quantised(sequences, QUANTISED_MODEL, kv_format, device, rng_seed)
    plain = inputs.plain
    expected = inputs.attend(**limits_of(plain, limits))
    if limits.window:
        hide_old_blocks(inputs, limits.window)
    tiles = {"BLOCK_TOKENS": 16, "MAX_SPLITS": 4, "MIN_CHUNK_TOKENS": 16}
    template = "attention_decode_quantised"
    module = emit(plain, template, limits, tmp_path, kv_format=kv_format, **tiles)
    num_heads, head_dim = plain.q.shape[1:]
    partials = plain.num_seqs * num_heads * 4
    out, counters = plain.poisoned_out(), torch.zeros(plain.num_seqs * 2, dtype=torch.int32)
    module.launch(
        plain.q,
        *inputs.caches,
        plain.block_table,
        plain.seq_rows,
        plain.context_lens,
        *([sinks_of(plain, limits)] if limits.has_sinks else []),
        out,
        torch.full((partials * head_dim,), float("nan"), device=device),
        torch.full((partials,), float("nan"), device=device),
        counters.to(device),
        plain.num_seqs,
    )
    assert_same_quantised(out, expected)


@pytest.mark.parametrize("limits", QUANTISED)
@pytest.mark.parametrize("kv_format", sorted(KV_FORMATS))
def test_prefill_with_a_quantised_cache_keeps_its_limits(
    kv_format: str, limits: Limits, device: str, rng_seed: int, tmp_path: Path
) -> None:
    sequences = [(45, 45), (2, 0), (5, 70), (50, 60), (1, 40)]
    inputs = draw_quantised(sequences, QUANTISED_MODEL, kv_format, device, rng_seed)
    plain = inputs.plain
    own = torch.Generator().manual_seed(rng_seed)
    k, v = torch.randn(2, plain.num_tokens, 2 * 32, generator=own).to(plain.q)
    expected = inputs.attend(k, v, **limits_of(plain, limits))
    if limits.window:
        hide_old_blocks(inputs, limits.window)
    tiles = {"BLOCK_ROWS": 32, "BLOCK_TOKENS": 16, "PACK_HEADS": limits.cap > 0}
    template = "attention_prefill_quantised"
    module = emit(plain, template, limits, tmp_path, kv_format=kv_format, **tiles)
    out = plain.poisoned_out()
    module.launch(
        plain.q,
        k,
        v,
        *inputs.caches,
        plain.block_table,
        plain.seq_rows,
        plain.query_start,
        plain.context_lens,
        *([sinks_of(plain, limits)] if limits.has_sinks else []),
        out,
        plain.num_tokens,
        plain.num_seqs,
    )
    assert_same_quantised(out, expected)


@pytest.mark.parametrize("limits", LIMITS)
def test_the_reference_is_the_definition(limits: Limits, rng_seed: int) -> None:
    for inputs in (decodes(MODEL, "cpu", rng_seed), prompts(MODEL, "cpu", rng_seed)):
        expected = expected_out(inputs, limits)
        if limits.window:
            hide_old_pages(inputs, limits.window)
        found = attention(
            inputs.q.flatten(1),
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_table,
            inputs.seq_rows,
            inputs.query_start,
            inputs.context_lens,
            num_heads=MODEL[0],
            num_kv_heads=MODEL[1],
            head_dim=MODEL[2],
            scale=inputs.scale,
            window=limits.window,
            soft_cap=limits.cap,
            sinks=sinks_of(inputs, limits),
        )
        assert_same(found, expected)
