"""The meaning of mixtures of experts: the choice, the products, the sum."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from treadle.kernels.reference.linears import linear

# Added to a sum of probabilities that is divided by, which may be 0 where each is a sigmoid.
ROUTE_EPS = 1e-20


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
