"""The meaning of what follows the logits: adjustments, the draw of a token, its count."""

from __future__ import annotations

import math

import torch

from treadle.ir.ops.sampling import ADJUST_ALLOWED, ADJUST_BIASES, ADJUST_COUNTS, WORD_BITS

# What `sample` gives a sequence that wants no token in this step.
NO_TOKEN = -1
# What `sample` gives a sequence whose logits are unusable; the runtime ends that request.
FAULT_TOKEN = -2
# A count of tokens from here on stays as it is: i16 holds twice the number, plus 1.
MOST_COUNTED = 2**15 - 2
# Dividing by less than this could overflow; sampling is argmax there in all but name.
MIN_TEMPERATURE = 1e-5

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


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
