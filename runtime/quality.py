"""What quantised keys and values cost in accuracy: of attention's output, and of a model's text.

A form is a round trip of keys and of values; `FORMS` holds those that the cache stores, through
the very functions that define it, and others that were weighed against them. Called by
`bench/quality.py` and tests; plays a model's graph with reference functions, a sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from treadle.ir.graph import Graph, walk
from treadle.ir.kv_cache import KV_FORMATS
from treadle.kernels.kv_pages import dequantise, quantise
from treadle.runtime.reference_program import reference_call

RoundTrip = Callable[[torch.Tensor], torch.Tensor]  # f32[G, C, D] -> the same, as it comes back
PAGE_TOKENS = 64


@dataclass(frozen=True)
class Form:
    """Describe a way to store keys and values.

    `bits` are those per element at head size 128, scales and zeros included, of K and V together.
    """

    name: str
    keys: RoundTrip
    values: RoundTrip
    bits: float


def _stored(rows: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Take rows f32[G, C, D] through a format of the cache."""
    codes, words = quantise(rows.flatten(0, 1), kv_format)
    return dequantise(codes, words, kv_format).view(rows.shape)


def _as_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().float()


def _even_steps(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Round to 16 even steps from the least to the largest along an axis; both ends in f16."""
    least = rows.amin(dim, keepdim=True).half().float()
    step = ((rows.amax(dim, keepdim=True) - least) / 15).half().float()
    codes = ((rows - least) / step.masked_fill(step == 0, 1.0) + 0.5).floor().clamp(0, 15)
    return codes * step + least


def _grouped(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Store groups of features with a scale and a least value each."""
    size = min(size, rows.shape[-1])
    return _even_steps(rows.unflatten(-1, (-1, size)), -1).flatten(-2)


def _by_channel(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Store each channel of a full page with a scale and a least value; the open page as it is."""
    full = rows.shape[1] // tokens * tokens
    pages = rows[:, :full].unflatten(1, (-1, tokens))  # [G, pages, tokens, D]
    return torch.cat((_even_steps(pages, -2).flatten(1, 2), rows[:, full:]), dim=1)


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
    rotation = hadamard(rows.shape[-1])
    return _even_steps(rows @ rotation, -1) @ rotation.T


def _bits(kv_format: str) -> float:
    return 8 * KV_FORMATS[kv_format].block_bytes(1, 128) / 128


def _form(name: str, keys: RoundTrip, values: RoundTrip, key_bits: float) -> Form:
    return Form(name, keys, values, (key_bits + _bits("int4")) / 2)


_INT4: RoundTrip = partial(_stored, kv_format="int4")
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("bf16", _bf16, _bf16, 16.0),
        *(
            Form(
                name,
                partial(_stored, kv_format=name),
                partial(_stored, kv_format=name),
                _bits(name),
            )
            for name in KV_FORMATS
        ),
        *(
            Form(
                f"int4 groups of {size}",
                partial(_grouped, size=size),
                partial(_grouped, size=size),
                4 + 32 / size,
            )
            for size in (32, 64, 128)
        ),
        _form("int4 rotated keys", _rotated, _INT4, _bits("int4")),
        _form("int4 keys by channel", partial(_by_channel, tokens=PAGE_TOKENS), _INT4, 4.5),
        _form("int4 keys by channel (pages of 16)", partial(_by_channel, tokens=16), _INT4, 6.0),
        _form("int4 keys alone", _INT4, _as_is, 4.25),
        _form("int4 values alone", _as_is, _INT4, 16.0),
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
            caches[op.inputs[-1]] = (form.keys(k), form.values(v)) if form else (k, v)
        elif op.kind == "attention":
            k, v = caches[op.inputs[1]]
            q = env[op.inputs[0]].unflatten(-1, (op.params.num_heads, -1)).transpose(0, 1)
            group = op.params.num_heads // op.params.num_kv_heads
            attended = F.scaled_dot_product_attention(
                q,
                k.repeat_interleave(group, 0).to(q.dtype),
                v.repeat_interleave(group, 0).to(q.dtype),
                is_causal=True,
                scale=op.params.scale,
            )  # [H, T, D]
            env[op.outputs[0]] = attended.transpose(0, 1).flatten(1)
        elif op.kind != "sample":
            function, options = reference_call(op, graph)
            result = function(*(env[name] for name in op.inputs), **options)
            results = result if isinstance(result, tuple) else (result,)
            env.update(zip(op.outputs, results, strict=True))
    return env[graph.outputs[1]]


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
