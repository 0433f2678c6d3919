"""What quantised keys and values cost in accuracy: of attention's output, and of a model's text.

A form is a round trip of keys and of values; `FORMS` holds those that the cache stores, through
the very functions that define it, and others that were weighed against them. Called by
`bench/quality.py` and tests; plays a model's graph with reference functions, a sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from treadle.ir.graph import Graph, walk
from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels.kv_pages import (
    dequantise_keys,
    dequantise_values,
    quantise_keys,
    quantise_values,
)
from treadle.runtime.reference_program import reference_call

RoundTrip = Callable[[torch.Tensor], torch.Tensor]  # f32[G, C, D] -> the same, as it comes back
PAGE_TOKENS = 64


@dataclass(frozen=True)
class Form:
    """Describe a way to store keys and values.

    `bits` are those per element at head size 128, scales and zeros included, of K and V together.
    Tokens see the others of their own page as they were computed where pages of `page_tokens` are
    stored when they are full; and so they always see the first `sink_tokens`.
    """

    name: str
    keys: RoundTrip
    values: RoundTrip
    bits: float
    page_tokens: int = 0
    sink_tokens: int = 0


def _by_page(rows: torch.Tensor, kv_format: str, *, are_keys: bool, tokens: int) -> torch.Tensor:
    """Take the full pages of rows f32[G, C, D] through a format of the cache; others are open."""
    full = rows.shape[1] // tokens * tokens
    if not full:
        return rows
    pages = rows[:, :full].unflatten(1, (-1, tokens))  # [G, pages, tokens, D]
    if are_keys:
        found = dequantise_keys(quantise_keys(pages, kv_format), kv_format, rows.shape[-1])
    else:
        found = dequantise_values(quantise_values(pages, kv_format), kv_format, rows.shape[-1])
    return torch.cat((found.flatten(1, 2), rows[:, full:]), dim=1)


def _as_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().float()


def _by_token(rows: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Store each token with a scale of its own, int4 with a least value too, in f16."""
    return dequantise_values(quantise_values(rows, kv_format), kv_format, rows.shape[-1])


def _grouped(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Store groups of a token's features in int4, with a scale and a least value each."""
    size = min(size, rows.shape[-1])
    return _by_token(rows.unflatten(-1, (-1, size)).flatten(1, 2), "int4").view(rows.shape)


def hadamard(size: int) -> torch.Tensor:
    """Give the orthogonal Hadamard matrix f32[size, size], in blocks where size is no power of two.

    Source: Ashkboos et al., QuaRot, 2024 (rotations that spread outliers before quantising).
    """
    block = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix / math.sqrt(block)] * (size // block))


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    """Store each token in int4 after a rotation that spreads outliers over its features."""
    rotation = hadamard(rows.shape[-1])
    return _by_token(rows @ rotation, "int4") @ rotation.T


def _page_bits(kv_format: str, tokens: int) -> float:
    """Give the bits per element of a page at head size 128, of K and V together."""
    form = KV_FORMATS[kv_format]
    both = form.key_block_bytes(tokens, 128) + form.value_block_bytes(tokens, 128)
    return 8 * both / (2 * tokens * 128)


def _paged(kv_format: str, tokens: int = PAGE_TOKENS) -> Form:
    """Give the form in which the cache stores pages of so many tokens."""
    return Form(
        kv_format if tokens == PAGE_TOKENS else f"{kv_format} with pages of {tokens}",
        partial(_by_page, kv_format=kv_format, are_keys=True, tokens=tokens),
        partial(_by_page, kv_format=kv_format, are_keys=False, tokens=tokens),
        _page_bits(kv_format, tokens),
        tokens,
    )


def _token_bits(kv_format: str) -> float:
    form = KV_FORMATS[kv_format]
    return form.code_bits + 8 * form.value_word_bytes / 128


_INT4 = _paged("int4")
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("bf16", _bf16, _bf16, 16.0),
        *map(_paged, KV_FORMATS),
        *(_paged("int4", tokens) for tokens in (16, 32)),
        replace(_INT4, name="int4 with first 8 tokens as they are", sink_tokens=8),
        replace(_INT4, name="int4 with first page as it is", sink_tokens=PAGE_TOKENS),
        replace(_INT4, name="int4 with values rotated", values=_rotated),
        replace(
            _INT4,
            name="int4 with values in groups of 32",
            values=partial(_grouped, size=32),
            bits=(4 + 32 / PAGE_TOKENS + 4 + 32 / 32) / 2,
        ),
        replace(_INT4, name="int4 of keys alone", values=_as_is),
        replace(_INT4, name="int4 of values alone", keys=_as_is),
        *(
            Form(
                f"{name} by token",
                partial(_by_token, kv_format=name),
                partial(_by_token, kv_format=name),
                _token_bits(name),
            )
            for name in KV_FORMATS
        ),
        Form(
            "int4 by token with keys rotated",
            _rotated,
            partial(_by_token, kv_format="int4"),
            _token_bits("int4"),
        ),
    )
}


# --- synthetic keys and values ------------------------------------------------------------------


def synthetic(
    kind: str, *, tokens: int, head_dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw queries f32[1, T', D], keys and values f32[1, C, D] of a kind; values are Gaussian.

    Kinds: `gaussian`; `outliers N`, four channels of the keys N times as large as the others, by an
    offset, as a bias of the projection makes them; `constant rows`, all elements of a key alike;
    `growing norms`, keys from 0.2 to 5 times as long. Queries are Gaussian.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, count, head_dim, generator=generator) for count in (64, tokens, tokens)
    )
    name, _, number = kind.partition(" ")
    if name == "outliers":
        channels = torch.randperm(head_dim, generator=generator)[:4]
        k[..., channels] += float(number) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    elif kind == "constant rows":
        k = k[..., :1].expand_as(k).contiguous()
    elif kind == "growing norms":
        k *= torch.linspace(0.2, 5.0, tokens)[:, None]
    else:
        assert kind == "gaussian", kind
    return q, k, v


KINDS = ("gaussian", "outliers 20", "outliers 50", "outliers 100", "constant rows", "growing norms")


def attention_error(
    form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, quantises_values: bool = True
) -> float:
    """Give the norm of the error of attention's output relative to that of the output."""
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    values = form.values(v) if quantises_values else v
    found = F.scaled_dot_product_attention(q.double(), form.keys(k).double(), values.double())
    return float((found - expected).norm() / expected.norm())


# --- a model's text -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TextQuality:
    """Compare a model with quantised keys and values to the same model without, token by token.

    `perplexity` over all tokens but each window's first; `kl_divergence` of the plain distribution
    of the next token from the other, in nats; `same_choice` the share of positions with the same
    likeliest token; `agreement_tokens` how many tokens from a window's begin on that is so.
    """

    perplexity: float
    plain_perplexity: float
    kl_divergence: float
    same_choice: float
    agreement_tokens: float

    @property
    def perplexity_change(self) -> float:
        """The relative change of the perplexity."""
        return self.perplexity / self.plain_perplexity - 1.0


def play_text(
    graph: Graph,
    weights: Mapping[str, torch.Tensor],
    token_ids: Sequence[int],
    form: Form | None = None,
) -> torch.Tensor:
    """Play the authored graph of a mixed step on one text; give every token's logits f32[T, V].

    Every key and value, the token's own included, goes through the form first: what a decode step
    reads from its pages.
    """
    env = {f"@{name}": tensor for name, tensor in weights.items()}
    env["token_ids"] = torch.tensor(token_ids, dtype=torch.int32)
    env["positions"] = torch.arange(len(token_ids), dtype=torch.int32)
    caches: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for op in walk(graph.ops):
        if op.kind in ("resolve_tokens", "gather_rows"):
            env[op.outputs[0]] = env[op.inputs[0]]  # all tokens are known, all rows are wanted
        elif op.kind == "kv_write":
            num_kv_heads = graph.type_of(op.inputs[-1]).size(1)
            k, v = (
                env[name].float().unflatten(-1, (num_kv_heads, -1)).transpose(0, 1)
                for name in op.inputs[:2]
            )  # [G, T, D] each
            caches[op.inputs[-1]] = k, v
        elif op.kind == "attention":
            k, v = caches[op.inputs[1]]
            q = env[op.inputs[0]].unflatten(-1, (op.params.num_heads, -1)).transpose(0, 1)
            attended = _attend(q, k, v, form, op.params.scale)  # [H, T, D]
            env[op.outputs[0]] = attended.transpose(0, 1).flatten(1)
        elif op.kind != "sample":
            function, options = reference_call(op, graph)
            result = function(*(env[name] for name in op.inputs), **options)
            results = result if isinstance(result, tuple) else (result,)
            env.update(zip(op.outputs, results, strict=True))
    return env[graph.outputs[1]]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form | None, scale: float
) -> torch.Tensor:
    """Attend causally from q [H, T, D] to k and v [G, T, D] as a form keeps them, [H, T, D]."""
    group = q.shape[0] // k.shape[0]
    k, v, stored_k, stored_v = (
        x.repeat_interleave(group, 0).to(q.dtype)
        for x in (k, v, *((form.keys(k), form.values(v)) if form else (k, v)))
    )  # [H, T, D] each
    if form is None or not form.page_tokens:
        return F.scaled_dot_product_attention(q, stored_k, stored_v, is_causal=True, scale=scale)
    tokens = torch.arange(q.shape[1])  # [T]
    pages = tokens // form.page_tokens  # [T]
    is_exact = (pages[:, None] == pages) | (tokens < form.sink_tokens)  # [T, T]
    scores = torch.where(is_exact, q @ k.mT, q @ stored_k.mT) * scale  # [H, T, T]
    weights = scores.masked_fill(tokens[:, None] < tokens, float("-inf")).softmax(-1)
    return (weights * is_exact) @ v + (weights * ~is_exact) @ stored_v


def compare_text(
    graph: Graph,
    weights: Mapping[str, torch.Tensor],
    windows: Sequence[Sequence[int]],
    forms: Sequence[Form],
) -> Iterator[tuple[Form, TextQuality]]:
    """Play windows of tokens with each form and without, and yield the comparison of each form."""
    sums = {form.name: torch.zeros(4, dtype=torch.float64) for form in forms}
    plain_nll, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            target = torch.tensor(window[1:])
            plain = play_text(graph, weights, window)[:-1].log_softmax(-1)
            plain_nll += float(F.nll_loss(plain, target, reduction="sum"))
            count += len(target)
            for form in forms:
                found = play_text(graph, weights, window, form)[:-1].log_softmax(-1)
                same = plain.argmax(-1) == found.argmax(-1)
                agreement = int(same.long().cumprod(0).sum())
                sums[form.name] += torch.tensor(
                    [
                        float(F.nll_loss(found, target, reduction="sum")),
                        float((plain.exp() * (plain - found)).sum()),
                        float(same.sum()),
                        float(agreement),
                    ],
                    dtype=torch.float64,
                )
    for form in forms:
        nll, divergence, same_count, agreement_sum = sums[form.name].tolist()
        yield (
            form,
            TextQuality(
                math.exp(nll / count),
                math.exp(plain_nll / count),
                divergence / count,
                same_count / count,
                agreement_sum / len(windows),
            ),
        )
