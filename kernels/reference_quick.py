"""Quick forms of reference ops, for the steps of a CPU: the same meaning in fewer torch calls.

While weights stream through the caches a small torch call costs 5 to 10 µs, most of a decode step's
time beyond its matmuls; so constants are prepared once and groups of ops share their passes. Each
form gives what its ops in `reference/` give, to fp32 rounding. Knows tensors only. Called by the
programs of the `reference` target.
"""

from __future__ import annotations

import torch

from treadle.kernels.reference import attention as reference_attention
from treadle.kernels.reference.attention import write_slots
from treadle.kernels.reference.linears import Float16Weight, PackedWeight, linear_float16
from treadle.kernels.reference.pointwise import gated
from treadle.kernels.reference.step_plan import StepPlan


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Divide each row by its root mean square and scale it; see `norms.rms_norm`.

    Formula: x / sqrt(|x|^2 / E + eps) * weight; an offset is in the weight already.
    Shapes: x f32[T, E], weight f32[E], eps f32[1] -> f32[T, E].
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [T, 1]
    factor = torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()  # [T, 1]
    return (x * factor).mul_(weight)  # [T, E]


def linear(
    x: torch.Tensor, packed_weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows by a weight from `linears.pack_weight` or `pack_float16`; see `linears.linear`.

    Shapes: x f32[T, K], packed_weight [N, K] in f32 or f16, bias f32[N] -> f32[T, N].
    """
    if isinstance(packed_weight, Float16Weight):
        return linear_float16(x, packed_weight, bias)  # [T, N]
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return multiply(x.contiguous(), packed_weight, bias, "none", [], "")  # [T, N]


def linear_add(
    x: torch.Tensor,
    packed_weight: PackedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Add a residual to a linear's result, in place of it.

    oneDNN can add within the product too; that was no faster (SmolLM2-135M, 2 cores of a Zen 5,
    torch 2.13).
    Shapes: x f32[T, K], packed_weight [N, K], bias f32[N], residual f32[T, N] -> f32[T, N].
    """
    return linear(x, packed_weight, bias).add_(residual)  # [T, N]


def part_gate_up(rows: torch.Tensor, interleave: int) -> torch.Tensor:
    """Reorder a gate-up weight or bias so that all gate rows come first, as `linear_glu` wants it.

    Shapes: rows [2F, ...] -> [2F, ...].
    """
    if not interleave:
        return rows
    return rows.unflatten(0, (-1, 2, interleave)).transpose(0, 1).flatten(0, 2)


def linear_glu(
    x: torch.Tensor,
    packed_weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    act: str,
    limit: float = 0.0,
    sharpness: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Apply a gated activation to a linear's result; see `pointwise.glu`.

    One product and three passes over halves of rows: splitting the product too, so that oneDNN
    applies gate and activation, was slower (SmolLM2-135M, 2 cores of a Zen 5, torch 2.13).
    Shapes: x f32[T, K], packed_weight [2F, K] and bias f32[2F] in the order of `part_gate_up` ->
      f32[T, F].
    """
    gate, up = linear(x, packed_weight, bias).chunk(2, dim=-1)  # [T, F] each
    form = {"limit": limit, "sharpness": sharpness, "up_offset": up_offset}
    return gated(gate, up, act=act, **form)  # [T, F]


def rope_kv_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
    angles: tuple[torch.Tensor, torch.Tensor],
    plan: StepPlan,
) -> torch.Tensor:
    """Rotate q and k together, store k and v in their pages, in place; give the rotated q.

    See `rows.split`, `rope.rope` and `attention.kv_write`; whole heads are rotated.
    Shapes: qkv f32[T, (H + 2 G) * D], k_cache, v_cache f32[P, G, S, D]; `angles` from
      `rope.rope_angles` of a table as wide as a head; `plan` from `step_plan.plan_step` -> q
      f32[T, H * D], a view.
    """
    _, num_kv_heads, _, head_dim = k_cache.shape
    num_rotated = num_heads + num_kv_heads
    pairs = qkv.view(qkv.shape[0], -1, 2, head_dim // 2)[:, :num_rotated]  # [T, H + G, 2, D / 2]
    cos, sin = angles  # [T, 1, 1, D / 2], [T, 1, 2, D / 2]
    rotated = (pairs * cos).addcmul_(pairs.flip(-2), sin).flatten(1)  # [T, (H + G) * D]
    width = num_heads * head_dim
    v = qkv[:, num_rotated * head_dim :]  # [T, G * D]
    write_slots(rotated[:, width:], k_cache, plan.write_slots, plan.live_tokens)
    write_slots(v, v_cache, plan.write_slots, plan.live_tokens)
    return rotated[:, :width]  # [T, H * D]


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    plan: StepPlan,
) -> torch.Tensor:
    """Attend as `attention.attention` does, which also takes the steps with prompts.

    Where each token is the only one of its sequence, scaling the queries is what lays them out.
    Shapes: q f32[T, H * D], k_cache, v_cache f32[P, G, S, D], the others as there; `plan` from
      `step_plan.plan_step` -> f32[T, H * D].
    """
    if plan.num_decode < len(q) or plan.decode_tokens is not None:
        return reference_attention.attention(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_rows,
            query_start,
            context_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            plan=plan,
        )
    shape = (len(q) * num_kv_heads, -1, head_dim)
    keys = k_cache.view(-1, head_dim).index_select(0, plan.decode_slots).view(shape)  # [T*G, C, D]
    values = v_cache.view(-1, head_dim).index_select(0, plan.decode_slots).view(shape)
    scores = torch.bmm((q * scale).view(shape), keys.mT)  # [T * G, H / G, C]
    if plan.decode_mask is not None:
        scores.view(len(q), -1, scores.shape[-1]).add_(plan.decode_mask[:, 0])
    return torch.bmm(scores.softmax(dim=-1), values).view(len(q), -1)  # [T, H * D]
