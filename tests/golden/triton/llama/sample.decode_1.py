"""`sample`: choose the next token of each sequence and note it as its row's last token.

Covers:
  tokens: i32[B] = sample(logits, seq_rows, sample_index, temperature, top_k, top_p, min_p, seed,
    length, last_token)

Must move 0 bytes and 513,036 per token; must compute 0 operations per token.

Schedule: BLOCK_V=8192, USE_PDL=True, num_warps=16, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(VOCAB=128256)
SCHEDULE = dict(BLOCK_V=8192, USE_PDL=True, num_warps=16, num_stages=1)


@triton.jit
def order_key(x):
    """Map floats to integers of the same order: neighbouring floats are 1 apart."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Undo `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tally(row_ptr, cut, largest, sharpness, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    """Count the logits that are at least `cut`, and add up their weights."""
    count = tl.zeros((BLOCK_V,), tl.int32)  # [BLOCK_V]
    mass = tl.zeros((BLOCK_V,), tl.float32)  # [BLOCK_V]
    for start in range(0, VOCAB, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)  # [BLOCK_V]
        logit = tl.load(row_ptr + index, mask=index < VOCAB, other=float("-inf"))  # [BLOCK_V]
        kept = (logit >= cut) & (index < VOCAB)  # [BLOCK_V]
        count += kept.to(tl.int32)  # [BLOCK_V]
        mass += tl.where(kept, tl.exp((logit - largest) * sharpness), 0.0)  # [BLOCK_V]
    return tl.sum(count), tl.sum(mass)


@triton.jit
def find_cut(
    row_ptr,
    guess,
    floor,
    wanted,
    largest,
    sharpness,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Find a cut above which lie the fewest largest logits whose count (or mass) reaches `wanted`.

    At `floor` it must be reached. `guess` only saves steps: it should lie close below the cut.
    """
    low = order_key(guess)
    high = order_key(largest) + 1
    low_count, low_mass = tally(row_ptr, guess, largest, sharpness, VOCAB, BLOCK_V)
    high_count = 0
    reached = low_mass if BY_MASS else low_count
    if reached < wanted:
        high = low
        high_count = low_count
        low = order_key(floor)
        low_count = VOCAB
    step = 0
    smallest_count = 1 if BY_MASS else wanted
    while (low_count - high_count > 1) & (low_count > smallest_count) & (low < high - 1):
        # Halving the interval of values gets close fastest; halving that of the floats themselves
        # is certain to end after 32 steps.
        middle = (low & high) + ((low ^ high) >> 1)
        mean = order_key(0.5 * key_value(low) + 0.5 * key_value(high))
        by_value = (step < 16) & (mean > low) & (mean < high)
        middle = tl.where(by_value, mean, middle)
        count, mass = tally(row_ptr, key_value(middle), largest, sharpness, VOCAB, BLOCK_V)
        enough = (mass if BY_MASS else count) >= wanted
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        step += 1
    return key_value(low)


@triton.jit
def kept_weights(
    row_ptr,
    start,
    cut,
    min_p,
    largest,
    sharpness,
    VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Weigh the logits from `start` on that may be drawn; the others weigh nothing."""
    index = start + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    logit = tl.load(row_ptr + index, mask=index < VOCAB, other=float("-inf"))  # [BLOCK_V]
    weight = tl.exp((logit - largest) * sharpness)  # [BLOCK_V]
    return tl.where((logit >= cut) & (weight >= min_p), weight, 0.0)  # [BLOCK_V]


@triton.jit
def draw(
    row_ptr,
    uniform,
    cut,
    min_p,
    largest,
    sharpness,
    VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Give the first index whose cumulative kept weight exceeds `uniform` times all of it."""
    total = 0.0
    for start in range(0, VOCAB, BLOCK_V):
        weight = kept_weights(row_ptr, start, cut, min_p, largest, sharpness, VOCAB, BLOCK_V)
        total += tl.sum(weight)
    # Just below the total at most: the search then ends at an index that has weight.
    below_total = (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    target = tl.minimum(uniform * total, below_total)
    start = 0
    before = 0.0
    weight = kept_weights(row_ptr, start, cut, min_p, largest, sharpness, VOCAB, BLOCK_V)
    block_mass = tl.sum(weight)
    # The bound on `start` matters to nobody but a kernel that is fed nonsense: it must not hang.
    while (before + block_mass <= target) & (start + BLOCK_V < VOCAB):
        before += block_mass
        start += BLOCK_V
        weight = kept_weights(row_ptr, start, cut, min_p, largest, sharpness, VOCAB, BLOCK_V)
        block_mass = tl.sum(weight)
    index = start + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    exceeds = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)  # [BLOCK_V]
    first = tl.min(tl.where(exceeds, index, VOCAB))
    # A prefix sum rounds in another order than the sum: at the block's end it may stay below.
    last = tl.max(tl.where(weight > 0.0, index, -1))
    return tl.minimum(first, last)


# The step's inputs may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "seq_rows_ptr",
        "sample_index_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seed_ptr",
        "length_ptr",
        "last_token_ptr",
        "tokens_ptr",
    ],
)
def sample(
    logits_ptr,
    seq_rows_ptr,
    sample_index_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    length_ptr,
    last_token_ptr,
    tokens_ptr,
    VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = sequence.
    seq = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(seq_rows_ptr + seq)
    if (row < 0) | (tl.load(sample_index_ptr + seq) < 0):
        tl.store(tokens_ptr + seq, -1)
        return

    row_ptr = logits_ptr + seq.to(tl.int64) * VOCAB
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)  # [BLOCK_V]
    best_index = tl.zeros((BLOCK_V,), tl.int32)  # [BLOCK_V]
    has_nan = tl.zeros((BLOCK_V,), tl.int32)  # [BLOCK_V]
    for start in range(0, VOCAB, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)  # [BLOCK_V]
        logit = tl.load(row_ptr + index, mask=index < VOCAB, other=float("-inf"))  # [BLOCK_V]
        has_nan |= (logit != logit).to(tl.int32)  # [BLOCK_V]
        better = logit > best  # [BLOCK_V]
        best_index = tl.where(better, index, best_index)  # [BLOCK_V]
        best = tl.where(better, logit, best)  # [BLOCK_V]
    largest = tl.max(best)
    token = tl.min(tl.where(best == largest, best_index, VOCAB))
    faulty = (tl.max(has_nan) > 0) | (largest == float("inf")) | (largest == float("-inf"))

    temperature = tl.load(temperature_ptr + row)
    if faulty:
        token = -2
    elif temperature > 0.0:
        sharpness = 1.0 / tl.maximum(temperature, 1e-5)
        cut = float("-inf")
        kept_count = VOCAB
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < VOCAB):
            # The k-th largest of the lanes' maxima is a guess that is never above the k-th largest.
            guess = tl.min(tl.where(best == float("-inf"), largest, best))
            above = largest
            for _ in range(12):
                middle = 0.5 * guess + 0.5 * above
                enough = tl.sum((best >= middle).to(tl.int32)) >= top_k
                guess = tl.where(enough, middle, guess)
                above = tl.where(enough, above, middle)
            cut = find_cut(row_ptr, guess, cut, top_k, largest, sharpness, False, VOCAB, BLOCK_V)
            kept_count = top_k
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            kept_count, total = tally(row_ptr, cut, largest, sharpness, VOCAB, BLOCK_V)
            # Logits whose weight is below this bound can't add up to 1 - top_p together.
            bound = 0.5 * (1.0 - top_p) * total / kept_count
            guess = tl.maximum(cut, largest + tl.log(bound) / sharpness)
            cut = find_cut(
                row_ptr, guess, cut, top_p * total, largest, sharpness, True, VOCAB, BLOCK_V
            )
        min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
        position = tl.load(length_ptr + row)
        word, _, _, _ = tl.philox(tl.load(seed_ptr + row), position, 0, 0, 0)
        uniform = (word >> 8).to(tl.float32) * (1.0 / (1 << 24))
        token = draw(row_ptr, uniform, cut, min_p, largest, sharpness, VOCAB, BLOCK_V)
    tl.store(tokens_ptr + seq, token)
    tl.store(last_token_ptr + row, tl.maximum(token, 0))


def launch(
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
    tokens: torch.Tensor,
    num_seqs: int,
) -> None:
    """Choose the tokens of the first `num_seqs` sequences."""
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    sample[(num_seqs,)](
        logits,
        seq_rows,
        sample_index,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        length,
        last_token,
        tokens,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
