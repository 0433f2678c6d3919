"""The meaning of every op as one torch function: the oracle of the kernels, the CPU's arithmetic.

Knows tensors only; must not know graphs, schedules, models or the engine's objects.
Called by the CPU executor and by the tests of every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from treadle.ir import errors
from treadle.ir.ops import ADJUST_ALLOWED, ADJUST_BIASES, ADJUST_COUNTS, WORD_BITS
from treadle.kernels.kv_pages import QuantisedCache

# What `sample` gives a sequence that wants no token in this step.
NO_TOKEN = -1
# What `sample` gives a sequence whose logits are unusable; the runtime ends that request.
FAULT_TOKEN = -2
# A count of tokens from here on stays as it is: i16 holds twice the number, plus 1.
MOST_COUNTED = 2**15 - 2
# Added to a sum of probabilities that is divided by, which may be 0 where each is a sigmoid.
ROUTE_EPS = 1e-20
# Dividing by less than this could overflow; sampling is argmax there in all but name.
MIN_TEMPERATURE = 1e-5

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MASK32 = 0xFFFFFFFF

OpenPages = tuple[torch.Tensor, torch.Tensor]  # keys and values f16[R, S, G, D]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# --- rows ---------------------------------------------------------------------------------------


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Look up one table row per token and multiply it by `scale`.

    Shapes: token_ids i32[T], table [V, E] -> [T, E] in the table's dtype.
    Numerics: the product is formed in fp32 and rounded once.
    """
    rows = F.embedding(token_ids, table)  # [T, E]
    if scale == 1.0:
        return rows
    return (rows.float() * scale).to(table.dtype)  # [T, E]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it per feature.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset).
    Shapes: x [T, E], weight [E] -> [T, E] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    if offset != 0.0:
        weight = weight.float() + offset  # [E]
    if weight.dtype == x.dtype:  # torch computes this in fp32 as well, with fewer passes
        return F.rms_norm(x, weight.shape, weight, eps)  # [T, E]
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)  # [T, E]


def head_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Divide each head by its root mean square and scale it per feature of a head.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset), the mean over a head.
    Shapes: x [T, n * D], weight [D] -> [T, n * D] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    heads = x.unflatten(-1, (-1, weight.shape[0]))  # [T, n, D]
    return rms_norm(heads, weight, eps=eps, offset=offset).flatten(-2)  # [T, n * D]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    """Shift and scale each row to mean 0 and variance 1, then scale and shift it per feature.

    Formula: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
    Shapes: x [T, E], weight, bias [E] -> [T, E] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    bias = None if bias is None else bias.float()  # [E]
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias, eps).to(x.dtype)  # [T, E]


def section_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    sizes: Sequence[int],
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Divide the first sections of each row by their root mean squares and scale them per feature.

    Formula: x / sqrt(mean(x^2) + eps) * (weight + offset), the mean over a section; what lies
      beyond the sections passes through.
    Shapes: x [T, W], weight [sum(sizes)] -> [T, W] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    width = sum(sizes)
    sections = x[..., :width].split_with_sizes(list(sizes), dim=-1)
    weights = weight.split_with_sizes(list(sizes))
    normed = [
        rms_norm(section, part, eps=eps, offset=offset)
        for section, part in zip(sections, weights, strict=True)
    ]
    return torch.cat((*normed, x[..., width:]), dim=-1)  # [T, W]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight stored output-major and add a bias.

    Formula: x @ weight.T + bias.
    Shapes: x [T, K], weight [N, K] (plain or from `pack_weight`), bias [N] -> [T, N] in
      `out_dtype`, by default the dtype of x.
    Numerics: fp32 accumulation, the bias added before the one rounding. A packed bf16 weight with
      fp32 results takes two passes, and is good to about 17 bits.
    Raises: ShapeError: a packed weight of another dtype than x (fp32 takes any x).
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if weight.is_mkldnn:
        return _linear_packed(x, weight, bias, out_dtype)  # [T, N]
    uniform = x.dtype == weight.dtype == out_dtype and (bias is None or bias.dtype == x.dtype)
    if uniform and x.dtype != torch.float16:  # torch rounds fp16 sums in between
        return F.linear(x, weight, bias)  # [T, N]
    bias = None if bias is None else bias.float()  # [N]
    return F.linear(x.float(), weight.float(), bias).to(out_dtype)  # [T, N]


def can_pack_weight(dtype: torch.dtype) -> bool:
    """Tell whether `pack_weight` works for weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight into the blocked layout that oneDNN multiplies fastest, for `linear` only.

    The result is opaque; the original is not needed any more. A decode step's products run 1.6 to 3
    times faster than with the plain layout (SmolLM2-135M, 2 cores of a Zen 5, torch 2.13).
    Shapes: weight [N, K] in fp32 or bf16, contiguous.
    Raises: MachineError: `can_pack_weight` says no.
    """
    if not can_pack_weight(weight.dtype):
        raise errors.MachineError(
            f"pack_weight: expected a dtype oneDNN multiplies on this CPU, found {weight.dtype}.",
            remedy="Keep the plain layout, or convert the weight to torch.float32 first.",
        )
    # Left to itself (no batch size as a hint) the layout suits every number of rows; the hint 1
    # gives one that is reordered at each call with more.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def _linear_packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if weight.dtype == torch.float32:
        x = x.float()  # [T, K]
    elif x.dtype != weight.dtype:
        raise errors.ShapeError(
            f"linear: expected x in the packed weight's {weight.dtype}, found {x.dtype}."
        )
    bias = None if bias is None else bias.to(weight.dtype)  # [N]
    x = x.contiguous()  # [T, K]
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # [T, N]
    if out_dtype == torch.float32 and weight.dtype == torch.bfloat16:
        # oneDNN adds -y before its one rounding, so the second pass gives what y has lost.
        lost = torch.ops.mkldnn._linear_pointwise.binary(x, -y, weight, bias, "add")  # [T, N]
        return y.float() + lost.float()  # [T, N]
    return y.to(out_dtype)  # [T, N]


def head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_heads: int,
    first: int,
    rows: int,
    transposed: bool = False,
) -> torch.Tensor:
    """Multiply each head of each row by its own rows of a weight, or by their columns.

    Formula: y[t, h] = x[t, h, :K] @ w.T, w the rows `first` to `first + rows` of the head's share
      of the weight; transposed, y[t, h] = x[t, h, :rows] @ w.
    Shapes: x [T, H * D], weight [N, K] -> [T, H * rows], or [T, H * K] if transposed, in the dtype
      of x.
    Numerics: fp32 accumulation, rounded once at the end.
    """
    by_head = weight.unflatten(0, (num_heads, -1))[:, first : first + rows]  # [H, rows, K]
    factors = by_head if transposed else by_head.mT  # [H, features in, features out]
    heads = x.unflatten(-1, (num_heads, -1))[..., : factors.shape[1]].transpose(0, 1)  # [H, T, in]
    if x.dtype != weight.dtype or x.dtype == torch.float16:  # torch rounds fp16 sums in between
        heads, factors = heads.float(), factors.float()
    return (heads @ factors).transpose(0, 1).flatten(1).to(x.dtype)  # [T, H * out]


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick rows; an index of -1 reads row 0, and nobody uses the result.

    Shapes: x [T, E], index i32[B] -> [B, E] in the dtype of x.
    """
    return x.index_select(0, index.clamp(min=0))  # [B, E]


# --- pointwise ----------------------------------------------------------------------------------


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add two tensors of one shape and dtype; fp32 inside, rounded once."""
    return a + b


def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two tensors of one shape and dtype; fp32 inside, rounded once."""
    return a * b


def scale(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Multiply by a constant; fp32 inside, rounded once."""
    return (x.float() * factor).to(x.dtype)


def soft_cap(x: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Bend what is large, so that nothing exceeds the cap: cap * tanh(x / cap).

    Numerics: fp32 inside, rounded once.
    """
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


def activate(x: torch.Tensor, *, act: str) -> torch.Tensor:
    """Apply an activation to every element; fp32 inside, rounded once.

    Raises: SpecError: unknown activation.
    """
    if act not in ACTIVATIONS:
        raise errors.SpecError(f"activate: expected `act` in {sorted(ACTIVATIONS)}, found `{act}`.")
    return ACTIVATIONS[act](x.float()).to(x.dtype)


def glu(
    x: torch.Tensor,
    *,
    act: str = "silu",
    interleave: int = 0,
    limit: float = 0.0,
    sharpness: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Apply a gated activation: act(s gate) / s * (up + up_offset), both within the limit if any.

    Shapes: x [T, 2F] -> [T, F] in the dtype of x. `interleave` 0: the first F features are the
      gate, the rest up. `interleave` g > 0: groups of g gate features alternate with groups of g up
      features.
    Numerics: fp32 inside, rounded once at the end.
    Raises: ShapeError: 2F can't be cut that way. SpecError: unknown activation.
    """
    if act not in ACTIVATIONS:
        raise errors.SpecError(f"glu: expected `act` in {sorted(ACTIVATIONS)}, found `{act}`.")
    group = interleave or x.shape[-1] // 2
    if x.shape[-1] % (2 * group) != 0:
        raise errors.ShapeError(
            f"glu: expected a last dimension divisible by {2 * group}, found {x.shape[-1]}."
        )
    gate, up = x.float().unflatten(-1, (-1, 2, group)).unbind(-2)  # [T, F / g, g] each
    form = {"limit": limit, "sharpness": sharpness, "up_offset": up_offset}
    return gated(gate, up, act=act, **form).flatten(-2).to(x.dtype)  # [T, F]


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    act: str,
    limit: float = 0.0,
    sharpness: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Gate `up` in fp32, as `glu` says; `gate` and `up` stay as they are."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if sharpness != 1.0:
        activated = ACTIVATIONS[act](gate * sharpness).div_(sharpness)
    else:
        activated = ACTIVATIONS[act](gate)
    return activated.mul_(up + up_offset if up_offset else up)


def split(x: torch.Tensor, *, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Cut the last dimension into views of the given sizes.

    Shapes: x [T, sum(sizes)] -> [T, sizes[i]] each, sharing memory with x.
    Raises: ShapeError: the sizes don't add up to the last dimension.
    """
    if sum(sizes) != x.shape[-1]:
        raise errors.ShapeError(
            f"split: expected sizes that add up to {x.shape[-1]}, found {tuple(sizes)}."
        )
    return tuple(x.split_with_sizes(list(sizes), dim=-1))


# --- mixtures of experts ------------------------------------------------------------------------


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    normalise: bool = False,
    scaling: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
    group_top: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token and what their results are scaled by.

    Of equal probabilities the expert with the lower number comes first.
    Shapes: logits f32[T, X], correction f32[X] -> experts i32[T, k], scales f32[T, k].
    Numerics: fp32 throughout.
    """
    logits = logits.float()
    probabilities = logits.softmax(-1) if score == "softmax" else logits.sigmoid()  # [T, X]
    choice = probabilities if correction is None else probabilities + correction  # [T, X]
    if kept_groups < num_groups:
        by_group = choice.unflatten(-1, (num_groups, -1))  # [T, n, X / n]
        group_scores = by_group.topk(group_top, dim=-1).values.sum(-1)  # [T, n]
        kept = _best(group_scores, kept_groups)  # [T, kept]
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
        choice = by_group.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)  # [T, X]
    experts = _best(choice, top_k)  # [T, k]
    scales = probabilities.gather(1, experts)  # [T, k]
    if normalise:
        scales = scales / (scales.sum(-1, keepdim=True) + ROUTE_EPS)
    return experts.to(torch.int32), scales * scaling


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Give the columns of the largest values of each row, the largest first: i64[T, count]."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def sort_by_expert(experts: torch.Tensor, *, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the choices of all tokens by expert, stably, and say where each expert's begin.

    Shapes: experts i32[T, k] -> order i32[kT], starts i32[X + 1].
    """
    order = experts.flatten().sort(stable=True).indices  # [kT]
    counts = torch.bincount(experts.flatten(), minlength=num_experts)  # [X]
    starts = F.pad(counts.cumsum(0), (1, 0))  # [X + 1]
    return order.to(torch.int32), starts.to(torch.int32)


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by the weights of the experts chosen for their token.

    Shapes: x [T, K] or [kT, K], weight [X, N, K], experts i32[T, k], bias [X, N] -> [kT, N] in the
      dtype of x.
    Numerics: fp32 accumulation, rounded once at the end.
    """
    order, starts = sort_by_expert(experts, num_experts=weight.shape[0])
    return grouped_linear(x, weight, order, starts, bias)  # [kT, N]


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows by the weights of the experts chosen for their token, expert by expert.

    Shapes: x [T, K] or [kT, K], weight [X, N, K], order i32[kT], starts i32[X + 1], bias [X, N] ->
      [kT, N] in the dtype of x.
    Numerics: fp32 accumulation, rounded once at the end.
    """
    y = x.new_empty(order.shape[0], weight.shape[1])  # [kT, N]
    choices = order.shape[0] // x.shape[0]  # of each row of x
    bounds = starts.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            chosen = order[start:stop].long()  # [n]
            expert_bias = None if bias is None else bias[expert]  # [N]
            y[chosen] = linear(x[chosen // choices], weight[expert], expert_bias)  # [n, N]
    return y


def combine(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Add up the results of each token's experts, scaled.

    Shapes: rows [kT, E], scales f32[T, k] -> [T, E] in the dtype of rows.
    Numerics: fp32 throughout, rounded once at the end.
    """
    by_token = rows.float().unflatten(0, scales.shape)  # [T, k, E]
    return (by_token * scales[..., None]).sum(1).to(rows.dtype)  # [T, E]


def row_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Scale each row by the sigmoid of its gate.

    Shapes: x [T, E], gate [T, 1] -> [T, E] in the dtype of x.
    Numerics: fp32 throughout, rounded once at the end.
    """
    return (x.float() * gate.float().sigmoid()).to(x.dtype)  # [T, E]


# --- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """Hold what `kv_write` and `attention` derive from a step's inputs, the same in every layer.

    Passing one saves time only. Make it with `plan_step` in each step: it holds for its inputs and
    for caches of its `num_kv_heads` and `page_size`. Sequences with one query token are attended to
    as one batch (`decode_...`), the others one by one (`prefill`).
    Shapes (slots are indices of [D] rows of a cache seen as [P * G * S, D]): write_slots i64[N *
      G], one for each live token and head; live_tokens i64[N], or None where all T are live;
      decode_tokens i64[B'], or None where they are the first B'; decode_slots i32[B' * G * C];
      decode_mask f32[B', 1, 1, C], 0 up to each context's end and -inf beyond, or None where all
      contexts are equally long; prefill: start, stop, context, slots i32[G * context] each.
    """

    num_kv_heads: int
    page_size: int
    write_slots: torch.Tensor
    live_tokens: torch.Tensor | None
    num_decode: int
    decode_tokens: torch.Tensor | None
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor | None
    prefill: tuple[tuple[int, int, int, torch.Tensor], ...]


def plan_step(
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    page_size: int,
) -> StepPlan:
    """Derive a `StepPlan`; the shapes are those of `kv_write` and `attention`."""
    write_slots, live_tokens = _plan_write(
        positions, token_seq, seq_rows, block_table, num_kv_heads, page_size
    )
    starts, contexts, rows = query_start.tolist(), context_lens.tolist(), seq_rows.tolist()
    decode: list[tuple[int, int, int]] = []  # (token, row, context)
    prefill: list[tuple[int, int, int, torch.Tensor]] = []
    for seq, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        start, stop = starts[seq], starts[seq + 1]
        if row < 0 or context == 0 or start == stop:
            continue
        if stop - start == 1:
            decode.append((start, row, context))
        else:
            pages_and_slots = _context_slots(block_table[row : row + 1], (context,), page_size)
            slots = _head_slots(pages_and_slots, num_kv_heads, page_size).flatten()  # [G * C]
            prefill.append((start, stop, context, slots))
    decode_tokens = decode_mask = None
    decode_slots = write_slots[:0]  # [0]
    if decode:
        tokens, decode_rows, lengths = zip(*decode, strict=True)
        if tokens != tuple(range(len(tokens))):
            decode_tokens = torch.tensor(tokens, device=block_table.device)  # [B']
        table = block_table[list(decode_rows)]  # [B', M]
        pages_and_slots = _context_slots(table, lengths, page_size)  # [B', C] each
        decode_slots = _head_slots(pages_and_slots, num_kv_heads, page_size).flatten()
        if min(lengths) < max(lengths):
            length = torch.tensor(lengths, device=block_table.device)[:, None]  # [B', 1]
            beyond = torch.arange(max(lengths), device=block_table.device) >= length  # [B', C]
            decode_mask = torch.zeros_like(beyond, dtype=torch.float32)  # [B', C]
            decode_mask = decode_mask.masked_fill_(beyond, -torch.inf)[
                :, None, None
            ]  # [B', 1, 1, C]
    return StepPlan(
        num_kv_heads,
        page_size,
        write_slots,
        live_tokens,
        len(decode),
        decode_tokens,
        decode_slots,
        decode_mask,
        tuple(prefill),
    )


def _plan_write(
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = seq_rows.index_select(0, token_seq)  # [T]
    live_tokens = None
    if bool((rows < 0).any()):
        live_tokens = (rows >= 0).nonzero().flatten()  # [N]
        rows, positions = rows[live_tokens], positions[live_tokens]  # [N] each
    pages = block_table[rows, positions // page_size]  # [N]
    slots = pages * (num_kv_heads * page_size) + positions % page_size  # [N]
    heads = torch.arange(num_kv_heads, dtype=slots.dtype, device=slots.device) * page_size  # [G]
    return (slots[:, None] + heads).flatten().long(), live_tokens  # [N * G]


def _context_slots(
    table: torch.Tensor, lengths: Sequence[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pages and slots of each sequence's positions, [B', C] each.

    Beyond the sequence's end its last position is repeated: what lies in slots that nobody wrote
    must not be touched, not even to be masked (NaN times 0 is NaN).
    """
    position = torch.arange(max(lengths), dtype=torch.int32, device=table.device)  # [C]
    if min(lengths) < max(lengths):
        last = torch.tensor(lengths, dtype=torch.int32, device=table.device) - 1  # [B']
        position = torch.minimum(position, last[:, None])  # [B', C]
    position = position.expand(table.shape[0], -1)  # [B', C]
    pages = table.gather(1, (position // page_size).long())  # [B', C]
    return pages, position % page_size


def _head_slots(
    context_slots: tuple[torch.Tensor, torch.Tensor], num_kv_heads: int, page_size: int
) -> torch.Tensor:
    pages, slots = context_slots  # [B', C] each
    first = pages * (num_kv_heads * page_size) + slots  # [B', C]
    heads = torch.arange(num_kv_heads, dtype=first.dtype, device=first.device) * page_size  # [G]
    return first[:, None] + heads[:, None]  # [B', G, C]


def _check_plan(plan: StepPlan, num_kv_heads: int, page_size: int) -> None:
    expected, found = (plan.num_kv_heads, plan.page_size), (num_kv_heads, page_size)
    assert expected == found, f"plan for (G, S) = {expected} used with a cache of {found}"


def rope_angles(
    positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the cosines and the signed sines of a step's positions, the same in every layer.

    Shapes: positions i32[T], cos_sin f32[C, r] -> cosines f32[T, 1, 1, r / 2], sines f32[T, 1, 2, r
      / 2], the first negated.
    """
    cos, sin = cos_sin.index_select(0, positions)[:, None, None].chunk(
        2, dim=-1
    )  # [T, 1, 1, r / 2]
    return cos, torch.cat((-sin, sin), dim=-2)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    head_dim: int,
    interleaved: bool = False,
    start: int = 0,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rotate each head by its token's position, in the half-split pairing of Hugging Face.

    Formula: (a, b) -> (a cos - b sin, b cos + a sin), a = features [0, r / 2), b = features [r / 2,
      r) of a head, r = rotary_dim; interleaved, a and b are its even and odd features; all counted
      from `start`; other features pass through.
    Shapes: x [T, n * D], positions i32[T], cos_sin f32[C, r] (cos in the first half, sin in the
      second) -> [T, n * D] in the dtype of x. `angles` = rope_angles(positions, cos_sin) saves time
      only.
    Numerics: fp32 inside, rounded once at the end.
    """
    cos, sin = rope_angles(positions, cos_sin) if angles is None else angles
    rotary_dim = cos_sin.shape[-1]
    heads = x.unflatten(-1, (-1, head_dim))  # [T, n, D]
    stop = start + rotary_dim
    pairs = heads[..., start:stop].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs.mT if interleaved else pairs  # [T, n, 2, r / 2]
    rotated = (pairs * cos).add_(pairs.flip(-2) * sin).to(x.dtype)  # [T, n, 2, r / 2]
    rotated = (rotated.mT if interleaved else rotated).flatten(-2)  # [T, n, r]
    if rotary_dim < head_dim:
        rotated = torch.cat((heads[..., :start], rotated, heads[..., stop:]), dim=-1)  # [T, n, D]
    return rotated.flatten(-2)  # [T, n * D]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    *,
    kv_format: str = "",
    open_pages: OpenPages | None = None,
    plan: StepPlan | None = None,
) -> None:
    """Store each token's key and value in the page that its row owns for that position; in place.

    Shapes: k, v [T, G * D], positions, token_seq i32[T], seq_rows i32[B], block_table i32[R, M],
      k_cache, v_cache [P, G, S, D]; in a `kv_format` u8[P, G, block bytes], with the rows' open
      pages f16[R, S, G, D], query_start i32[B + 1] and context_lens i32[B] (see `kv_pages`).
      Tokens of a padding sequence (row -1) write nothing. `plan` saves time only.
    """
    if kv_format:
        assert open_pages is not None and query_start is not None and context_lens is not None
        cache = QuantisedCache(kv_format, k_cache, v_cache, *open_pages)
        head_dim = open_pages[0].shape[-1]
        keys, values = (x.unflatten(-1, (-1, head_dim)) for x in (k, v))  # [T, G, D] each
        for row, start, stop, context in _sequences(seq_rows, query_start, context_lens):
            own = slice(start, stop)
            cache.append(row, block_table[row], keys[own], values[own], context - (stop - start))
        return
    num_kv_heads, page_size = k_cache.shape[1:3]
    if plan is None:
        slots, live_tokens = _plan_write(
            positions, token_seq, seq_rows, block_table, num_kv_heads, page_size
        )
    else:
        _check_plan(plan, num_kv_heads, page_size)
        slots, live_tokens = plan.write_slots, plan.live_tokens
    write_slots(k, k_cache, slots, live_tokens)
    write_slots(v, v_cache, slots, live_tokens)


def _sequences(
    seq_rows: torch.Tensor, query_start: torch.Tensor, context_lens: torch.Tensor
) -> Iterator[tuple[int, int, int, int]]:
    """Yield row, first token, the token after the last, and context of a step's live sequences."""
    starts = query_start.tolist()
    for seq, (row, context) in enumerate(
        zip(seq_rows.tolist(), context_lens.tolist(), strict=True)
    ):
        if row >= 0 and context > 0 and starts[seq] < starts[seq + 1]:
            yield row, starts[seq], starts[seq + 1], context


def write_slots(
    new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, live_tokens: torch.Tensor | None
) -> None:
    """Store the heads of live tokens in slots of one cache, in place.

    Shapes: new [T, G * D], cache [P, G, S, D], slots and live_tokens as in `StepPlan`.
    """
    head_dim = cache.shape[-1]
    live = new if live_tokens is None else new.index_select(0, live_tokens)  # [N, G * D]
    rows = live.reshape(-1, head_dim).to(cache.dtype)  # [N * G, D]
    # `view`, not `reshape`: a copy would lose the write, and raises instead.
    cache.view(-1, head_dim).index_copy_(0, slots, rows)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    kv_format: str = "",
    open_pages: OpenPages | None = None,
    plan: StepPlan | None = None,
) -> torch.Tensor:
    """Attend causally over the pages of each token's own sequence.

    Formula: softmax(q k^T * scale) v over the positions up to the token's own; the last query token
      of a sequence stands at position context_len - 1. Query head h reads KV head h // (H / G).
      With a window W > 0 positions W and more before the token's own are left out; with a soft cap
      c > 0 a score s counts as c tanh(s / c). With sinks the softmax of head h has one more score,
      sinks[h], whose value is zero.
    Shapes: q [T, H * D], k_cache, v_cache [P, G, S, D], block_table i32[R, M], seq_rows i32[B],
      query_start i32[B + 1], context_lens i32[B], sinks [H] -> [T, H * D] in the dtype of q. In a
      `kv_format` the caches are u8[P, G, block bytes] and the rows' open pages f16[R, S, G, D] (see
      `kv_pages`); with k and v [T, G * D] the step's own tokens are taken from there. Tokens of a
      padding sequence (row -1 or context 0), and those after query_start[B], give 0. `plan` saves
      time only.
    Numerics: sums and softmax in fp32, rounded once at the end; bf16 inputs also round the softmax
      weights before they multiply v, like the kernels.
    """
    step = (block_table, seq_rows, query_start, context_lens)
    is_limited = bool(window or soft_cap) or sinks is not None
    if kv_format:
        assert open_pages is not None, "a quantised cache has open pages"
        cache = QuantisedCache(kv_format, k_cache, v_cache, *open_pages)
        return _attend_quantised(q, cache, k, v, *step, sinks, scale, window, soft_cap)
    if is_limited:
        return _attend_limited(q, k_cache, v_cache, *step, sinks, scale, window, soft_cap)
    page_size = k_cache.shape[2]
    if plan is None:
        no_tokens = query_start[:0]  # [0]: nothing is written here
        plan = plan_step(
            no_tokens,
            no_tokens,
            seq_rows,
            block_table,
            query_start,
            context_lens,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
        )
    _check_plan(plan, num_kv_heads, page_size)
    dtype = q.dtype if q.dtype == k_cache.dtype == torch.bfloat16 else torch.float32

    def rows_of(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Give the keys or values in these slots, [N, D]."""
        return cache.view(-1, head_dim).index_select(0, slots).to(dtype)

    grouped = q.unflatten(-1, (num_kv_heads, num_heads // num_kv_heads, head_dim))  # [T, G, H/G, D]
    grouped = grouped.to(dtype)  # [T, G, H / G, D]

    decoded: torch.Tensor | None = None
    chosen: slice | torch.Tensor = slice(plan.num_decode)
    if plan.num_decode:
        if plan.decode_tokens is not None:
            chosen = plan.decode_tokens
        keys = rows_of(k_cache, plan.decode_slots)  # [B' * G * C, D]
        values = rows_of(v_cache, plan.decode_slots)  # [B' * G * C, D]
        attended = _attend_decode(grouped[chosen], keys, values, plan.decode_mask, scale)
        decoded = attended.reshape(plan.num_decode, -1).to(q.dtype)  # [B', H * D]
        if plan.num_decode == q.shape[0]:
            return decoded  # [T, H * D]: every token is the only one of its sequence, in order
    out = torch.zeros_like(q)  # [T, H * D]
    if decoded is not None:
        out[chosen] = decoded
    for start, stop, context, slots in plan.prefill:
        count = stop - start
        keys = rows_of(k_cache, slots).view(num_kv_heads, 1, context, head_dim)
        values = rows_of(v_cache, slots).view(num_kv_heads, 1, context, head_dim)
        query = grouped[start:stop].permute(1, 2, 0, 3)  # [G, H / G, T', D]
        group = (-1, query.shape[1], -1, -1)
        mask = None
        if count < context:
            mask = torch.ones(count, context, dtype=torch.bool, device=q.device)  # [T', C]
            mask = mask.tril(context - count)  # [T', C]
        attended = F.scaled_dot_product_attention(
            query,
            keys.expand(group),
            values.expand(group),
            attn_mask=mask,
            is_causal=count == context,
            scale=scale,
        )  # [G, H / G, T', D]
        out[start:stop] = attended.permute(2, 0, 1, 3).reshape(count, -1).to(q.dtype)
    return out


def _attend_quantised(
    q: torch.Tensor,
    cache: QuantisedCache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    soft_cap_: float,
) -> torch.Tensor:
    """Attend to a quantised cache, sequence by sequence; see `attention`."""
    num_kv_heads, head_dim = cache.open_keys.shape[2:]
    out = torch.zeros_like(q)  # [T, H * D]
    for row, start, stop, context in _sequences(seq_rows, query_start, context_lens):
        count = stop - start
        both = cache.read(row, block_table[row], context)  # [G, C, D] each
        for own, cached in zip((k, v), both, strict=True):
            if own is not None:
                heads = own[start:stop].float().unflatten(-1, (num_kv_heads, head_dim))
                cached[:, context - count :] = heads.transpose(0, 1)
        query = q[start:stop].float().unflatten(-1, (num_kv_heads, -1, head_dim))
        query = query.permute(1, 2, 0, 3)  # [G, H / G, T', D]
        first = _first_seen(context - count, window)
        seen = torch.arange(first, context, device=q.device)  # [C']
        keys, values = (cached[:, first:] for cached in both)  # [G, C', D] each
        attended = _within_limits(query, keys, values, seen, sinks, scale, window, soft_cap_)
        out[start:stop] = attended.permute(2, 0, 1, 3).reshape(count, -1).to(q.dtype)
    return out


def latent_write(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    latents: torch.Tensor,
    *,
    plan: StepPlan | None = None,
) -> None:
    """Store each token's latent and rotated key in the page that its row owns for it; in place.

    Shapes: latent [T, R], k_rope [T, r], positions, token_seq i32[T], seq_rows i32[B], block_table
      i32[R, M], latents [P, 1, S, R + r]. Tokens of a padding sequence (row -1) write nothing.
      `plan` saves time only.
    """
    page_size = latents.shape[2]
    if plan is None:
        slots, live_tokens = _plan_write(positions, token_seq, seq_rows, block_table, 1, page_size)
    else:
        _check_plan(plan, 1, page_size)
        slots, live_tokens = plan.write_slots, plan.live_tokens
    write_slots(torch.cat((latent, k_rope), dim=-1), latents, slots, live_tokens)


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_heads: int,
    value_dim: int,
    scale: float,
    whole_from: int = 0,
    plan: StepPlan | None = None,
) -> torch.Tensor:
    """Attend causally to the latents of each token's own sequence, which all heads share.

    Formula: softmax((q, q_rope) latents^T * scale) latents[:, :R] over the positions up to the
      token's own; the last query token of a sequence stands at position context_len - 1.
    Shapes: q [T, H * R], q_rope [T, H * D], of whose heads the last r features count, latents
      [P, 1, S, R + r], block_table i32[R, M], seq_rows i32[B], query_start i32[B + 1], context_lens
      i32[B] -> [T, H * R] in the dtype of q, R = `value_dim`. Tokens of a padding sequence (row -1
      or context 0), and those after query_start[B], give 0; so do, with `whole_from` n > 0, those
      of sequences whose tokens, n or more, are all of this step. `plan` saves time only.
    Numerics: as `attention`.
    """
    page_size, width = latents.shape[2:]
    if plan is None:
        no_tokens = query_start[:0]  # [0]: nothing is written here
        step = (no_tokens, no_tokens, seq_rows, block_table, query_start, context_lens)
        plan = plan_step(*step, num_kv_heads=1, page_size=page_size)
    _check_plan(plan, 1, page_size)
    dtype = q.dtype if q.dtype == latents.dtype == torch.bfloat16 else torch.float32
    rope_dim = width - value_dim
    rotated = q_rope.unflatten(-1, (num_heads, -1))[..., -rope_dim:]  # [T, H, r]
    queries = torch.cat((q.unflatten(-1, (num_heads, -1)), rotated), dim=-1).to(dtype)  # [T, H, W]
    out = torch.zeros_like(q)  # [T, H * R]

    def rows_of(slots: torch.Tensor) -> torch.Tensor:
        return latents.view(-1, width).index_select(0, slots).to(dtype)  # [N, W]

    if plan.num_decode:
        chosen = slice(plan.num_decode) if plan.decode_tokens is None else plan.decode_tokens
        keys = rows_of(plan.decode_slots).view(plan.num_decode, 1, -1, width)  # [B', 1, C, W]
        mask = None if plan.decode_mask is None else plan.decode_mask.to(dtype)
        # The heads stand where SDPA expects query tokens: no key is repeated.
        attended = F.scaled_dot_product_attention(
            queries[chosen][:, None], keys, keys[..., :value_dim], attn_mask=mask, scale=scale
        )  # [B', 1, H, R]
        out[chosen] = attended.flatten(1).to(q.dtype)
    for start, stop, context, slots in plan.prefill:
        if whole_from and stop - start == context >= whole_from:
            continue
        keys = rows_of(slots).expand(num_heads, -1, -1)  # [H, C, W]
        seen = torch.ones(stop - start, context, dtype=torch.bool, device=q.device)  # [T', C]
        attended = F.scaled_dot_product_attention(
            queries[start:stop].transpose(0, 1),
            keys,
            keys[..., :value_dim],
            attn_mask=seen.tril(context - (stop - start)),
            scale=scale,
        )  # [H, T', R]
        out[start:stop] = attended.transpose(0, 1).flatten(1).to(q.dtype)
    return out


def prompt_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    y: torch.Tensor,
    *,
    num_heads: int,
    nope_dim: int,
    value_dim: int,
    scale: float,
    whole_from: int,
    plan: StepPlan | None = None,
) -> None:
    """Attend causally within prompts that begin in this step, to the step's own keys and values.

    Formula: softmax(q k^T * scale) v over the positions up to the token's own, k = (kv[:n], the
      rotated part of the latent), v = kv[n:], for sequences whose tokens, `whole_from` or more, are
      all of this step.
    Shapes: q [T, H * (n + r)], kv [T, H * (n + v)], latents [P, 1, S, R + r], block_table
      i32[R, M], seq_rows i32[B], query_start i32[B + 1], context_lens i32[B]; y [T, H * v] is
      changed in place, in the rows of those sequences. `plan` saves time only.
    Numerics: as `attention`.
    """
    page_size, width = latents.shape[2:]
    if plan is None:
        no_tokens = query_start[:0]  # [0]: nothing is written here
        step = (no_tokens, no_tokens, seq_rows, block_table, query_start, context_lens)
        plan = plan_step(*step, num_kv_heads=1, page_size=page_size)
    _check_plan(plan, 1, page_size)
    dtype = q.dtype if q.dtype == latents.dtype == torch.bfloat16 else torch.float32
    queries = q.unflatten(-1, (num_heads, -1)).to(dtype)  # [T, H, n + r]
    own = kv.unflatten(-1, (num_heads, -1)).to(dtype)  # [T, H, n + v]
    rope_dim = queries.shape[-1] - nope_dim
    for start, stop, context, slots in plan.prefill:
        if not stop - start == context >= whole_from:
            continue
        rotated = latents.view(-1, width).index_select(0, slots)[:, -rope_dim:].to(dtype)  # [C, r]
        rotated = rotated[:, None].expand(-1, num_heads, -1)  # [C, H, r]
        keys = torch.cat((own[start:stop, :, :nope_dim], rotated), dim=-1)  # [C, H, n + r]
        attended = F.scaled_dot_product_attention(
            queries[start:stop].transpose(0, 1),
            keys.transpose(0, 1),
            own[start:stop, :, nope_dim:].transpose(0, 1),
            is_causal=True,
            scale=scale,
        )  # [H, C, v]
        y[start:stop] = attended.transpose(0, 1).flatten(1).to(y.dtype)


def _attend_limited(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    soft_cap_: float,
) -> torch.Tensor:
    """Attend with a window, a soft cap or sinks, sequence by sequence; see `attention`.

    Nothing before the window of a sequence's first query is read.
    """
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    dtype = q.dtype if q.dtype == k_cache.dtype == torch.bfloat16 else torch.float32
    out = torch.zeros_like(q)  # [T, H * D]
    starts, contexts, rows = query_start.tolist(), context_lens.tolist(), seq_rows.tolist()
    for seq, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        start, stop = starts[seq], starts[seq + 1]
        if row < 0 or context == 0 or start == stop:
            continue
        first = _first_seen(context - (stop - start), window)
        seen = torch.arange(first, context, device=q.device)  # [C']
        pages = block_table[row, seen // page_size].long()  # [C']
        k = k_cache[pages, :, seen % page_size].transpose(0, 1).to(dtype)  # [G, C', D]
        v = v_cache[pages, :, seen % page_size].transpose(0, 1).to(dtype)  # [G, C', D]
        query = q[start:stop].view(stop - start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        attended = _within_limits(query, k, v, seen, sinks, scale, window, soft_cap_)
        out[start:stop] = attended.permute(2, 0, 1, 3).reshape(stop - start, -1).to(q.dtype)
    return out


def _first_seen(prior: int, window: int) -> int:
    """Give the first position that a token at position `prior` sees."""
    return max(prior - window + 1, 0) if window else 0


def _within_limits(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    soft_cap_: float,
) -> torch.Tensor:
    """Attend from the last tokens of a sequence to the positions `seen`, with limits.

    Shapes: query [G, H / G, T', D], k, v [G, C', D], seen i64[C'] -> f32[G, H / G, T', D].
    """
    scores = query.float() @ k[:, None].float().mT * scale  # [G, H / G, T', C']
    if soft_cap_:
        scores = soft_cap(scores, cap=soft_cap_)
    position = seen[len(seen) - query.shape[2] :, None]  # [T', 1]
    hidden = seen > position  # [T', C']
    if window:
        hidden |= seen <= position - window
    scores = scores.masked_fill(hidden, -torch.inf)  # [G, H / G, T', C']
    if sinks is not None:
        sink = sinks.float().view(len(query), -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)  # [G, H / G, T', C' + 1]
    weights = scores.softmax(dim=-1)[..., : len(seen)].to(v.dtype)  # [G, H / G, T', C']
    return weights.float() @ v[:, None].float()  # [G, H / G, T', D]


def _attend_decode(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend from one token per sequence; the query heads of a KV head share its keys unrepeated.

    Shapes: query [B', G, H / G, D], k, v [B' * G * C, D], mask f32[B', 1, 1, C] or None -> [B', G,
      H / G, D].
    """
    num_seqs, num_kv_heads, group, head_dim = query.shape
    if query.dtype == torch.bfloat16:
        # The query heads of a KV head stand where SDPA expects query tokens: no head is repeated.
        shape = (num_seqs, num_kv_heads, -1, head_dim)
        mask = None if mask is None else mask.to(query.dtype)
        return F.scaled_dot_product_attention(
            query, k.view(shape), v.view(shape), attn_mask=mask, scale=scale
        )  # [B', G, H / G, D]
    # For so few queries SDPA gains nothing by a second core, batched products do (torch 2.13).
    query = query.reshape(-1, group, head_dim)  # [B' * G, H / G, D]
    k, v = (rows.view(len(query), -1, head_dim) for rows in (k, v))  # [B' * G, C, D] each
    scores = torch.baddbmm(query[:1, :1, :1], query, k.mT, beta=0.0, alpha=scale)  # [B'*G, H/G, C]
    if mask is not None:
        scores.view(num_seqs, -1, scores.shape[-1]).add_(mask[:, 0])
    return torch.bmm(scores.softmax(dim=-1), v).view(num_seqs, num_kv_heads, group, head_dim)


# --- sampling -----------------------------------------------------------------------------------


def philox_uniform(seed: int, position: int) -> float:
    """Draw the one uniform number of a (seed, position): Philox4x32-10, 24 bits, in [0, 1).

    The key is the seed's 64 bits, the counter (position, 0, 0, 0), the result the first word's high
      bits.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = position & _MASK32, 0, 0, 0
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ key0, product1 & _MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ key1, product0 & _MASK32
        key0 = (key0 + _PHILOX_KEY_STEPS[0]) & _MASK32
        key1 = (key1 + _PHILOX_KEY_STEPS[1]) & _MASK32
    return (c0 >> 8) * 2.0**-24


def sample(
    logits: torch.Tensor,
    seq_rows: torch.Tensor,
    sample_index: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    length: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Choose the next token of each sequence and store it as its row's last token.

    Formula: temperature 0: the largest logit, the lowest index on ties. Otherwise, with
      w = exp((logits - max) / max(temperature, 1e-5)):
      1. top_k > 0 keeps the k largest logits (all that tie with the k-th are kept);
      2. top_p < 1 keeps, of these, the smallest set of largest ones whose weights reach
         top_p * (sum of the weights that step 1 kept); ties with the smallest kept are kept, and at
         least one token is;
      3. min_p > 0 keeps w >= min(min_p, 1) (the largest weight is 1: p >= min_p * max p);
      the token is the first index whose cumulative kept weight, in index order, exceeds
      u * (sum of the kept weights), u = philox_uniform(seed[row], length[row]).
      `length` counts the tokens scheduled so far, this step's included: it is the position of the
      new token: a request's tokens depend on its own logits, seed and positions only.
    Shapes: logits f32[B, V]; seq_rows, sample_index i32[B]; temperature, top_p, min_p f32[R];
      top_k, length, last_token i32[R]; seed i64[R] -> i32[B]: the token; -1 where sample_index or
      the row is negative (nothing is stored); -2 where the logits hold NaN or +inf, or nothing but
      -inf: a fault, upon which the runtime ends the request. The last token of a faulty row becomes
      0, so that a step already under way reads a legal token.
    Numerics: weights in fp32; sums in fp64 here, in fp32 in the kernel: the two may differ where u
      or a cut falls within rounding of a boundary.
    """
    largest, choice = _largest(logits)  # [B] each
    tokens = choice.tolist()
    faulty = [not math.isfinite(value) for value in largest.tolist()]
    temperatures = temperature.tolist()
    last_tokens: dict[int, int] = {}
    for seq, (row, index) in enumerate(zip(seq_rows.tolist(), sample_index.tolist(), strict=True)):
        if row < 0 or index < 0:
            tokens[seq] = NO_TOKEN
            continue
        row_temperature = temperatures[row]
        if faulty[seq]:
            tokens[seq] = FAULT_TOKEN
        elif row_temperature > 0.0:
            tokens[seq] = _draw(
                logits[seq],
                largest[seq],
                temperature=max(row_temperature, MIN_TEMPERATURE),
                top_k=int(top_k[row]),
                top_p=float(top_p[row]),
                min_p=float(min_p[row]),
                uniform=philox_uniform(int(seed[row]), int(length[row])),
            )
        last_tokens[row] = max(tokens[seq], 0)
    rows = torch.tensor(list(last_tokens), dtype=torch.int64, device=logits.device)  # [N]
    stored = torch.tensor(list(last_tokens.values()), dtype=torch.int32, device=logits.device)
    last_token.index_copy_(0, rows, stored)
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)  # [B]


def adjust_logits(
    logits: torch.Tensor,
    seq_rows: torch.Tensor,
    sample_index: torch.Tensor,
    length: torch.Tensor,
    adjusted: torch.Tensor,
    num_biases: torch.Tensor,
    bias_tokens: torch.Tensor,
    bias_values: torch.Tensor,
    bias_stops: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    token_counts: torch.Tensor,
    allowed: torch.Tensor,
) -> None:
    """Change the logits in place as their rows ask: biases, then penalties, then allowed tokens.

    Formula: x += value of each of the row's first num_biases entries whose token this is, while
      length < stop. Where the prompt or the answer has the token: x / repetition if x > 0, else
      x * repetition. x -= frequency * (times generated) + presence * (generated at all). -inf for
      tokens that are not allowed.
    Shapes: logits f32[B, V]; seq_rows, sample_index i32[B]: a sequence with a negative one is left
      as it is; length, adjusted, num_biases i32[R]; bias_tokens, bias_stops i32[R, K], bias_values
      f32[R, K]; the penalties f32[R]; token_counts i16[R, V]: twice the times generated, plus 1 if
      the prompt has it; allowed i32[R, ceil(V / 32)], token v at bit v % 32 of word v // 32.
    """
    wanted = ((seq_rows >= 0) & (sample_index >= 0)).tolist()
    for seq, row in enumerate(seq_rows.tolist()):
        flags = int(adjusted[row]) if wanted[seq] else 0
        x = logits[seq]  # [V], a view
        if flags & ADJUST_BIASES:
            live = slice(0, int(num_biases[row]))
            holds = length[row] < bias_stops[row, live]  # [n]
            x.index_add_(0, bias_tokens[row, live][holds].long(), bias_values[row, live][holds])
        if flags & ADJUST_COUNTS:
            codes = token_counts[row].int()  # [V]
            repetition = repetition_penalty[row]
            repeated = torch.where(x > 0, x / repetition, x * repetition)  # [V]
            x.copy_(torch.where(codes > 0, repeated, x))
            x -= frequency_penalty[row] * (codes >> 1) + presence_penalty[row] * (codes > 1)
        if flags & ADJUST_ALLOWED:
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=x.device)  # [32]
            is_allowed = (allowed[row][:, None] >> bits) & 1  # [V / 32, 32]
            x.masked_fill_(is_allowed.flatten()[: x.numel()] == 0, -math.inf)


def count_tokens(
    tokens: torch.Tensor, seq_rows: torch.Tensor, adjusted: torch.Tensor, token_counts: torch.Tensor
) -> None:
    """Count the tokens that were drawn, in the rows whose penalties need the counts.

    Formula: token_counts[row, token] += 2, up to the most that i16 holds.
    Shapes: tokens, seq_rows i32[B], no row twice; adjusted i32[R]; token_counts i16[R, V]. Nothing
      is counted for a negative token or row.
    """
    rows = seq_rows.clamp(min=0).long()  # [B]
    counted = (tokens >= 0) & (seq_rows >= 0) & ((adjusted[rows] & ADJUST_COUNTS) > 0)  # [B]
    place = (rows[counted], tokens[counted].long())
    codes = token_counts[place].int()  # [N]
    token_counts[place] = torch.where(codes < MOST_COUNTED, codes + 2, codes).to(torch.int16)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each row's largest logit and its index; NaN counts as largest, ties give the first.

    Torch finds maxima of whole chunks several times faster than it finds an index, on a CPU.
    Shapes: logits f32[B, V] -> f32[B], i64[B].
    """
    num_rows, vocab_size = logits.shape
    chunk = math.gcd(vocab_size, 256)
    chunks = logits.view(num_rows, -1, chunk)  # [B, V / chunk, chunk]
    largest, place = chunks.amax(dim=-1).max(dim=-1)  # [B] each
    within = chunks.gather(1, place[:, None, None].expand(-1, 1, chunk))  # [B, 1, chunk]
    return largest, place * chunk + within.squeeze(1).argmax(dim=-1)


def _draw(
    logits: torch.Tensor,
    largest: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """Draw one token from one row of logits f32[V]; see `sample`."""
    weights = ((logits - largest) / temperature).exp_()  # [V]
    if 0 < top_k < logits.numel():
        cut = logits.topk(top_k).values[-1]
        weights.masked_fill_(logits < cut, 0.0)
    if top_p < 1.0:
        target = top_p * float(weights.sum(dtype=torch.float64))
        cut = logits[_smallest_of_nucleus(weights, target)]
        weights.masked_fill_(logits < cut, 0.0)
    if min_p > 0.0:
        weights.masked_fill_(weights < min(min_p, 1.0), 0.0)
    mass = weights.cumsum(0, dtype=torch.float64)  # [V]
    return int(torch.searchsorted(mass, uniform * mass[-1:], right=True))


def _smallest_of_nucleus(weights: torch.Tensor, target: float) -> int:
    """Give the index of the last of the fewest largest weights that add up to `target`."""
    # Few tokens hold most of the mass, as a rule: finding them spares sorting the vocabulary.
    count = min(256, weights.numel())
    while True:
        values, indices = weights.topk(count)  # [count] each, the largest first
        mass = values.cumsum(0, dtype=torch.float64)  # [count]
        if float(mass[-1]) >= target or count == weights.numel():
            return int(indices[min(int((mass < target).sum()), count - 1)])
        count = min(16 * count, weights.numel())


# --- step inputs --------------------------------------------------------------------------------


def advance(
    seq_rows: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Prepare a decode step, one token per sequence, from the rows' state; lengthen them in place.

    Formula: token = last_token[row], position = length[row], length[row] += 1, context = position +
      1.
    Shapes: seq_rows i32[B], last_token, length i32[R] -> token_ids i32[B], positions i32[B],
      token_seq i32[B], query_start i32[B + 1], context_lens i32[B], sample_index i32[B]. A padding
      sequence (row -1) gets token 0, position 0, context 0 and sample index -1.
    """
    live = seq_rows >= 0  # [B]
    rows = seq_rows.clamp(min=0)  # [B]
    one = live.to(torch.int32)  # [B]
    token_ids = last_token.index_select(0, rows) * one  # [B]
    positions = length.index_select(0, rows) * one  # [B]
    length.index_add_(0, rows, one)
    query_start = torch.arange(
        seq_rows.numel() + 1, dtype=torch.int32, device=seq_rows.device
    )  # [B + 1]
    token_seq = query_start[:-1].clone()  # [B]
    sample_index = torch.where(live, token_seq, -1)  # [B]
    return token_ids, positions, token_seq, query_start, positions + one, sample_index


def resolve_tokens(
    token_ids: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Replace each id of -1 by the last token of the row that it belongs to.

    Shapes: token_ids, token_seq i32[T], seq_rows i32[B], last_token i32[R] -> i32[T]. An id of -1
      in a padding sequence (row -1) becomes 0.
    """
    rows = seq_rows.index_select(0, token_seq)  # [T]
    latest = last_token.index_select(0, rows.clamp(min=0)) * (rows >= 0)  # [T]
    return torch.where(token_ids == -1, latest, token_ids)  # [T]
