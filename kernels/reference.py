"""The meaning of every op as one torch function: the oracle of kernel tests, the arithmetic of the CPU target.

Knows tensors only; must not know graphs, schedules, models or the engine's objects.
Called by the CPU executor and by the tests of every kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from treadle.ir import errors

# A row whose logits hold no usable number gets this instead of a token; the runtime ends that request.
FAULT_TOKEN = -2
# What `sample` returns for a sequence that asked for no token in this step.
NO_TOKEN = -1
# Below this a temperature would overflow the division by it; sampling is argmax there in all but name.
MIN_TEMPERATURE = 1e-5

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MASK32 = 0xFFFFFFFF

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    rows = x.float()  # [T, E]
    scale = weight.float()  # [E]
    if offset != 0.0:
        scale = scale + offset  # [E]
    return F.rms_norm(rows, (rows.shape[-1],), scale, eps).to(x.dtype)  # [T, E]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight stored output-major and add a bias.

    Formula: x @ weight.T + bias.
    Shapes: x [T, K], weight [N, K], bias [N] -> [T, N] in `out_dtype`, by default the dtype of x.
    Numerics: fp32 accumulation, the bias added before the one rounding.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    same = x.dtype == weight.dtype == out_dtype and (bias is None or bias.dtype == x.dtype)
    if same and x.dtype in (torch.float32, torch.bfloat16):
        return F.linear(x, weight, bias)  # [T, N]
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias).to(out_dtype)  # [T, N]


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick rows; an index of -1 reads row 0 and its result is never used.

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


def glu(x: torch.Tensor, *, act: str = "silu", interleave: int = 0) -> torch.Tensor:
    """Apply a gated activation: act(gate) * up.

    Shapes: x [T, 2F] -> [T, F] in the dtype of x. `interleave` 0: the first F features are the gate, the
      rest up. `interleave` g > 0: groups of g gate features alternate with groups of g up features.
    Numerics: fp32 inside, rounded once at the end.
    Raises: ShapeError: 2F can't be split that way. SpecError: unknown activation.
    """
    activation = _ACTIVATIONS.get(act)
    if activation is None:
        raise errors.SpecError(
            f"glu: expected `act` to be one of {sorted(_ACTIVATIONS)}, found `{act}`."
        )
    width = x.shape[-1]
    if width % 2 != 0 or (interleave and width % (2 * interleave) != 0):
        raise errors.ShapeError(
            f"glu: expected a last dimension divisible by {2 * max(interleave, 1)}, found {width}."
        )
    if interleave:
        groups = x.unflatten(-1, (-1, 2, interleave))  # [T, F / g, 2, g]
        gate = groups[..., 0, :].reshape(*x.shape[:-1], width // 2)  # [T, F]
        up = groups[..., 1, :].reshape(*x.shape[:-1], width // 2)  # [T, F]
    else:
        gate, up = x.chunk(2, dim=-1)  # [T, F] each
    return (activation(gate.float()) * up.float()).to(x.dtype)  # [T, F]


def split(x: torch.Tensor, *, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Cut the last dimension into views of the given sizes.

    Shapes: x [T, sum(sizes)] -> [T, sizes[i]] each, sharing memory with x.
    Raises: ShapeError: the sizes don't add up to the last dimension.
    """
    if sum(sizes) != x.shape[-1]:
        raise errors.ShapeError(
            f"split: expected sizes adding up to {x.shape[-1]}, found {tuple(sizes)} = {sum(sizes)}."
        )
    return torch.split(x, list(sizes), dim=-1)


# --- attention ----------------------------------------------------------------------------------


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, head_dim: int
) -> torch.Tensor:
    """Rotate each head by its token's position, in the half-split pairing of Hugging Face.

    Formula: (a, b) -> (a cos - b sin, b cos + a sin), a = features [0, r/2), b = features [r/2, r) of a
      head, r = rotary_dim; features from r on pass through.
    Shapes: x [T, n * D], positions i32[T], cos_sin f32[C, r] (cos in the first half, sin in the second)
      -> [T, n * D] in the dtype of x.
    Numerics: fp32 inside, rounded once at the end.
    """
    half = cos_sin.shape[-1] // 2
    heads = x.unflatten(-1, (-1, head_dim)).float()  # [T, n, D]
    angles = cos_sin.index_select(0, positions).unsqueeze(1)  # [T, 1, r]
    cos, sin = angles[..., :half], angles[..., half:]  # [T, 1, r / 2] each
    a, b = heads[..., :half], heads[..., half : 2 * half]  # [T, n, r / 2] each
    rotated = (a * cos - b * sin, b * cos + a * sin, heads[..., 2 * half :])
    return torch.cat(rotated, dim=-1).flatten(-2).to(x.dtype)  # [T, n * D]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    block_table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store each token's key and value in the page its row owns for that position; in place.

    Shapes: k, v [T, G * D], positions, token_seq i32[T], seq_rows i32[B], block_table i32[R, M],
      k_cache, v_cache [P, G, S, D]. Tokens of a padding sequence (row -1) write nothing.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    rows = seq_rows.index_select(0, token_seq)  # [T]
    live = rows >= 0  # [T]
    if not bool(live.all()):
        k, v, rows, positions = k[live], v[live], rows[live], positions[live]
    pages = block_table[rows, positions // page_size]  # [T]
    slots = positions % page_size  # [T]
    k_cache[pages, :, slots] = k.reshape(-1, num_kv_heads, head_dim).to(k_cache.dtype)
    v_cache[pages, :, slots] = v.reshape(-1, num_kv_heads, head_dim).to(v_cache.dtype)


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
) -> torch.Tensor:
    """Attend causally over the pages of each token's own sequence.

    Formula: softmax(q k^T * scale) v over the positions up to the token's own; the last query token of a
      sequence stands at position context_len - 1. Query head h reads KV head h // (H / G).
    Shapes: q [T, H * D], k_cache, v_cache [P, G, S, D], block_table i32[R, M], seq_rows i32[B],
      query_start i32[B + 1], context_lens i32[B] -> [T, H * D] in the dtype of q. Tokens of a padding
      sequence (row -1, context 0), and tokens after query_start[B], give 0.
    Numerics: fp32 inside, rounded once at the end.
    """
    page_size = k_cache.shape[2]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(q)  # [T, H * D]
    starts, contexts, rows = query_start.tolist(), context_lens.tolist(), seq_rows.tolist()
    for seq, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        start, stop = starts[seq], starts[seq + 1]
        if row < 0 or context == 0 or start == stop:
            continue
        count = stop - start
        pages = block_table[row, : -(-context // page_size)]  # [M']
        k = k_cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :context]  # [G, C, D]
        v = v_cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :context]  # [G, C, D]
        k = k.float().unsqueeze(1).expand(-1, group, -1, -1)  # [G, H / G, C, D]
        v = v.float().unsqueeze(1).expand(-1, group, -1, -1)  # [G, H / G, C, D]
        query = q[start:stop].reshape(count, num_kv_heads, group, head_dim).float()
        query = query.permute(1, 2, 0, 3)  # [G, H / G, T, D]
        mask = None
        if 1 < count < context:
            mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)  # [T, C]
        rows_out = F.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, is_causal=1 < count == context, scale=scale
        )  # [G, H / G, T, D]
        out[start:stop] = rows_out.permute(2, 0, 1, 3).reshape(count, -1).to(q.dtype)
    return out


# --- sampling -----------------------------------------------------------------------------------


def philox_uniform(seed: int, position: int) -> float:
    """Draw the one uniform number of a (seed, position): Philox4x32-10, 24 bits, in [0, 1).

    The key is the 64-bit seed, the counter (position, 0, 0, 0); the first output word gives the number.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = position & _MASK32, 0, 0, 0
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ key0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ key1,
            product0 & _MASK32,
        )
        key0 = (key0 + _PHILOX_KEY_STEPS[0]) & _MASK32
        key1 = (key1 + _PHILOX_KEY_STEPS[1]) & _MASK32
    return (c0 >> 8) * 2.0**-24


def sample_row(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """Draw one token from one row of logits with a given uniform number; see `sample`.

    Shapes: logits f32[V].
    """
    weights = ((logits - logits.max()) / max(temperature, MIN_TEMPERATURE)).exp()  # [V]
    if 0 < top_k < weights.numel():
        threshold = logits.topk(top_k).values[-1]
        weights = torch.where(logits >= threshold, weights, 0.0)  # [V]
    if top_p < 1.0:
        # Tokens below this bound can't add up to 1 - top_p together, so the cut lies above it; the
        # factor leaves room for rounding. Sorting the few above it beats sorting the vocabulary.
        bound = 0.5 * (1.0 - top_p) * float(weights.sum()) / weights.numel()
        candidates = weights[weights >= bound].double().sort(descending=True).values  # [n]
        target = top_p * float(weights.sum(dtype=torch.float64))
        reached = int((candidates.cumsum(0) < target).sum())
        cut = candidates[min(reached, candidates.numel() - 1)]
        weights = torch.where(weights >= cut, weights, 0.0)  # [V]
    if min_p > 0.0:
        weights = torch.where(weights >= min_p, weights, 0.0)  # [V]
    mass = weights.cumsum(0, dtype=torch.float64)  # [V]
    return int(torch.searchsorted(mass, uniform * mass[-1], right=True))


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
      1. top_k > 0 keeps the k largest (all that tie with the k-th are kept);
      2. top_p < 1 keeps, of these, the smallest set of largest weights whose sum reaches
         top_p * (sum of the weights that top_k kept); ties with the smallest kept are kept, and at
         least one token is kept;
      3. min_p > 0 keeps w >= min_p (the largest weight is 1, so this is p >= min_p * max p);
      the token is the first index whose cumulative kept weight, in index order, exceeds
      u * (sum of the kept weights), u = philox_uniform(seed[row], length[row]).
      `length` counts the tokens in the cache after this step, so it is the position of the new token:
      what a request draws depends on its own seed and positions only, never on its neighbours.
    Shapes: logits f32[B, V]; seq_rows, sample_index i32[B]; temperature, top_p, min_p f32[R]; top_k,
      length, last_token i32[R]; seed i64[R] -> i32[B]: the token; -1 where sample_index or the row is
      negative (nothing is written); -2 where the row's logits hold NaN or +inf, or nothing but -inf: a
      fault, upon which the runtime ends the request. A faulty row's last_token becomes 0, so that a
      step already under way reads a legal token.
    Numerics: weights in fp32; sums in fp64 here, in fp32 in kernels: the two may disagree where u or a
      cut falls within rounding of a boundary.
    """
    largest, choice = logits.max(dim=-1)  # [B] each; NaN counts as the largest, ties give the first
    faulty = ~torch.isfinite(largest)  # [B]
    tokens = choice.tolist()
    for seq, (row, wanted) in enumerate(zip(seq_rows.tolist(), sample_index.tolist(), strict=True)):
        if row < 0 or wanted < 0:
            tokens[seq] = NO_TOKEN
            continue
        if bool(faulty[seq]):
            tokens[seq] = FAULT_TOKEN
        elif float(temperature[row]) > 0.0:
            tokens[seq] = sample_row(
                logits[seq],
                temperature=float(temperature[row]),
                top_k=int(top_k[row]),
                top_p=float(top_p[row]),
                min_p=float(min_p[row]),
                uniform=philox_uniform(int(seed[row]), int(length[row])),
            )
        last_token[row] = max(tokens[seq], 0)
    return torch.tensor(tokens, dtype=torch.int32)  # [B]


# --- step inputs --------------------------------------------------------------------------------


def advance(
    seq_rows: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Prepare a decode step, one token per sequence, from the rows' state; adds 1 to `length` in place.

    Formula: token = last_token[row], position = length[row], length[row] += 1, context = position + 1.
    Shapes: seq_rows i32[B], last_token, length i32[R] -> token_ids i32[B], positions i32[B],
      token_seq i32[B], query_start i32[B + 1], context_lens i32[B], sample_index i32[B]. A padding
      sequence (row -1) gets token 0, position 0, context 0 and sample_index -1.
    """
    batch = seq_rows.numel()
    live = seq_rows >= 0  # [B]
    rows = seq_rows.clamp(min=0)  # [B]
    token_ids = torch.where(live, last_token.index_select(0, rows), 0)  # [B]
    positions = torch.where(live, length.index_select(0, rows), 0)  # [B]
    length.index_add_(0, rows, live.to(length.dtype))
    query_start = torch.arange(batch + 1, dtype=torch.int32, device=seq_rows.device)  # [B + 1]
    token_seq = query_start[:-1].clone()  # [B]
    context_lens = positions + live.to(positions.dtype)  # [B]
    sample_index = torch.where(live, token_seq, -1)  # [B]
    return token_ids, positions, token_seq, query_start, context_lens, sample_index


def resolve_tokens(
    token_ids: torch.Tensor,
    token_seq: torch.Tensor,
    seq_rows: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Replace each id of -1 by the last token of the row it belongs to.

    Shapes: token_ids, token_seq i32[T], seq_rows i32[B], last_token i32[R] -> i32[T]. A token of a
      padding sequence (row -1) with an id of -1 becomes 0.
    """
    rows = seq_rows.index_select(0, token_seq)  # [T]
    latest = torch.where(rows >= 0, last_token.index_select(0, rows.clamp(min=0)), 0)  # [T]
    return torch.where(token_ids == -1, latest, token_ids)  # [T]
