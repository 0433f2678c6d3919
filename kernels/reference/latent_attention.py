"""The meaning of latent attention and of its paged cache."""

from __future__ import annotations

import torch

from treadle.kernels.reference.attention import write_slots
from treadle.kernels.reference.dot_product_attention import dot_product_attention
from treadle.kernels.reference.step_plan import StepPlan, check_plan, plan_step, plan_write


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
        slots, live_tokens = plan_write(positions, token_seq, seq_rows, block_table, 1, page_size)
    else:
        check_plan(plan, 1, page_size)
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
    check_plan(plan, 1, page_size)
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
        attended = dot_product_attention(
            queries[chosen][:, None], keys, keys[..., :value_dim], mask=mask, scale=scale
        )  # [B', 1, H, R]
        out[chosen] = attended.flatten(1).to(q.dtype)
    for start, stop, context, slots in plan.prefill:
        if whole_from and stop - start == context >= whole_from:
            continue
        keys = rows_of(slots).expand(num_heads, -1, -1)  # [H, C, W]
        seen = torch.ones(stop - start, context, dtype=torch.bool, device=q.device)  # [T', C]
        attended = dot_product_attention(
            queries[start:stop].transpose(0, 1),
            keys,
            keys[..., :value_dim],
            mask=seen.tril(context - (stop - start)),
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
    check_plan(plan, 1, page_size)
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
        attended = dot_product_attention(
            queries[start:stop].transpose(0, 1),
            keys.transpose(0, 1),
            own[start:stop, :, nope_dim:].transpose(0, 1),
            is_causal=True,
            scale=scale,
        )  # [H, C, v]
        y[start:stop] = attended.transpose(0, 1).flatten(1).to(y.dtype)
