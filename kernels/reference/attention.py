"""The meaning of attention and of its paged cache of keys and values, quantised or not."""

from __future__ import annotations

import torch

from treadle.kernels.kv_pages import QuantisedCache
from treadle.kernels.reference.dot_product_attention import dot_product_attention
from treadle.kernels.reference.pointwise import soft_cap
from treadle.kernels.reference.step_plan import (
    StepPlan,
    check_plan,
    live_sequences,
    plan_step,
    plan_write,
)

OpenPages = tuple[torch.Tensor, torch.Tensor]  # keys and values f16[R, S, G, D]


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
        for row, start, stop, context in live_sequences(seq_rows, query_start, context_lens):
            own = slice(start, stop)
            cache.append(row, block_table[row], keys[own], values[own], context - (stop - start))
        return
    num_kv_heads, page_size = k_cache.shape[1:3]
    if plan is None:
        slots, live_tokens = plan_write(
            positions, token_seq, seq_rows, block_table, num_kv_heads, page_size
        )
    else:
        check_plan(plan, num_kv_heads, page_size)
        slots, live_tokens = plan.write_slots, plan.live_tokens
    write_slots(k, k_cache, slots, live_tokens)
    write_slots(v, v_cache, slots, live_tokens)


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
    check_plan(plan, num_kv_heads, page_size)
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
        attended = dot_product_attention(
            query,
            keys.expand(group),
            values.expand(group),
            mask=mask,
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
    for row, start, stop, context in live_sequences(seq_rows, query_start, context_lens):
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
        return dot_product_attention(
            query, k.view(shape), v.view(shape), mask=mask, scale=scale
        )  # [B', G, H / G, D]
    # For so few queries SDPA gains nothing by a second core, batched products do (torch 2.13).
    query = query.reshape(-1, group, head_dim)  # [B' * G, H / G, D]
    k, v = (rows.view(len(query), -1, head_dim) for rows in (k, v))  # [B' * G, C, D] each
    scores = torch.baddbmm(query[:1, :1, :1], query, k.mT, beta=0.0, alpha=scale)  # [B'*G, H/G, C]
    if mask is not None:
        scores.view(num_seqs, -1, scores.shape[-1]).add_(mask[:, 0])
    return torch.bmm(scores.softmax(dim=-1), v).view(num_seqs, num_kv_heads, group, head_dim)
