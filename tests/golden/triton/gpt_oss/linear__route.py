"""`linear__route`: multiply each row by the transposed weight and add the bias; then Choose the
experts of each token, and what their results are scaled by.

Covers:
  router: f32[T, 32] = linear(post_attention_layernorm, @router, @router_bias; out_dtype='f32')
  experts: i32[T, 4], scales: f32[T, 4] = route(router; top_k=4, score='softmax', normalise=True,
    scaling=1.0, num_groups=1, kept_groups=1, group_top=1)

Must move 184,384 bytes and 5,792 per token; must compute 184,320 operations per token.

Schedule: BLOCK_M=1, BLOCK_K=128, SPLIT_K=16, USE_PDL=True, num_warps=4, num_stages=1
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_EXPERTS=32,
    K=2880,
    TOP_K=4,
    SCORE="softmax",
    NORMALISE=True,
    SCALING=1.0,
    NUM_GROUPS=1,
    KEPT_GROUPS=1,
    GROUP_TOP=1,
    BIAS=True,
    CORRECTION=False,
)
SCHEDULE = dict(BLOCK_M=1, BLOCK_K=128, SPLIT_K=16, USE_PDL=True, num_warps=4, num_stages=1)


@triton.jit
def take_best(values, index, SIZE: tl.constexpr):
    """Give the largest value of each row of f32[BLOCK_M, ..] and its index, the lowest of equals.

    Both come out of one maximum: of the values' bits, turned so that they order as the values do,
    with the index below them. It is below SIZE whatever the values are: it will be an address.
    """
    bits = values.to(tl.int32, bitcast=True)  # [BLOCK_M, ..]
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # [BLOCK_M, ..]
    keys = (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index).to(tl.int64)  # [BLOCK_M, ..]
    best = tl.max(keys, axis=1)  # [BLOCK_M]
    where = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)  # [BLOCK_M]
    bits = (best >> 32).to(tl.int32)  # [BLOCK_M]
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)  # [BLOCK_M]
    return value, tl.minimum(where, SIZE - 1)


@triton.jit
def keep_groups(
    choice,
    lane,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Put experts outside of the KEPT_GROUPS best groups out of the choice, f32[BLOCK_M, X]."""
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    BLOCK_G: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    group = tl.arange(0, BLOCK_G)[None, :]  # [1, BLOCK_G]
    group_scores = tl.full((BLOCK_M, BLOCK_G), float("-inf"), tl.float32)  # [BLOCK_M, BLOCK_G]
    for g in range(NUM_GROUPS):
        mine = tl.where(lane // GROUP_SIZE == g, choice, float("-inf"))  # [BLOCK_M, BLOCK_X]
        total = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
        for _ in range(GROUP_TOP):
            best, where = take_best(mine, lane, BLOCK_X)
            total += best
            mine = tl.where(lane == where[:, None], float("-inf"), mine)
        group_scores = tl.where(group == g, total[:, None], group_scores)
    kept = tl.zeros((BLOCK_M, BLOCK_X), tl.int32)  # [BLOCK_M, BLOCK_X]
    for _ in range(KEPT_GROUPS):
        best, where = take_best(group_scores, group, NUM_GROUPS)
        kept = tl.where(lane // GROUP_SIZE == where[:, None], 1, kept)
        group_scores = tl.where(group == where[:, None], float("-inf"), group_scores)
    return tl.where(kept != 0, choice, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def linear__route(
    x_ptr,
    w_ptr,
    bias_ptr,
    correction_ptr,
    experts_ptr,
    scales_ptr,
    partials_ptr,
    counters_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALING: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute a part of the logits of BLOCK_M tokens; the last to do so chooses their experts."""
    # Grid: axis 0 blocks of tokens, axis 1 parts of K.
    tl.static_assert((SCORE == "softmax") or (SCORE == "sigmoid"))
    BLOCK_X: tl.constexpr = max(triton.next_power_of_2(NUM_EXPERTS), 16)
    BLOCK_C: tl.constexpr = triton.next_power_of_2(TOP_K)
    PART_K: tl.constexpr = triton.cdiv(triton.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    block = tl.program_id(0)
    part = tl.program_id(1)
    token = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    lane = tl.arange(0, BLOCK_X)[None, :]  # [1, BLOCK_X]
    k = part * PART_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    w_ptrs = w_ptr + lane * K + k[:, None]  # [BLOCK_K, BLOCK_X]
    # The first tile of w depends on nothing: fetch it before waiting for the producer of x.
    w = tl.load(w_ptrs, mask=(lane < NUM_EXPERTS) & (k < K)[:, None], other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_row = tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * K  # [BLOCK_M, 1]
    logits = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)  # [BLOCK_M, BLOCK_X]
    for start in range(0, PART_K, BLOCK_K):
        inside = k + start < K  # [BLOCK_K]
        x = tl.load(x_ptr + x_row + (k + start)[None, :], mask=inside[None, :], other=0.0)
        if BLOCK_M == 1:
            product = w.to(tl.float32) * tl.trans(x).to(tl.float32)  # [BLOCK_K, BLOCK_X]
            logits += tl.sum(product, axis=0)[None, :]
        else:
            logits = tl.dot(x, w, logits, input_precision="ieee")  # [BLOCK_M, BLOCK_X]
        # Past the end of this part nothing is read.
        later = (k + (start + BLOCK_K) < K) & (start + BLOCK_K < PART_K)  # [BLOCK_K]
        w_mask = (lane < NUM_EXPERTS) & later[:, None]  # [BLOCK_K, BLOCK_X]
        w = tl.load(w_ptrs + (start + BLOCK_K), mask=w_mask, other=0.0)

    arrived = SPLIT_K - 1
    if SPLIT_K > 1:
        cell = token.to(tl.int64)[:, None] * BLOCK_X + lane  # [BLOCK_M, BLOCK_X]
        in_step = (token < num_tokens)[:, None] & (lane < BLOCK_X)  # [BLOCK_M, BLOCK_X]
        part_size = num_tokens.to(tl.int64) * BLOCK_X
        tl.store(partials_ptr + part * part_size + cell, logits, mask=in_step)
        # All threads' stores come before the count that announces them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + block, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT_K - 1:
        if SPLIT_K > 1:
            tl.debug_barrier()
            logits = tl.zeros((BLOCK_M, BLOCK_X), tl.float32)  # [BLOCK_M, BLOCK_X]
            for other in range(SPLIT_K):
                # Other programs wrote these: `.cg` reads L2, not this multiprocessor's own cache.
                other_ptrs = partials_ptr + other * part_size + cell  # [BLOCK_M, BLOCK_X]
                logits += tl.load(other_ptrs, mask=in_step, other=0.0, cache_modifier=".cg")
            tl.store(counters_ptr + block, 0)
        if BIAS:
            bias = tl.load(bias_ptr + lane, mask=lane < NUM_EXPERTS, other=0.0)  # [1, BLOCK_X]
            logits += bias.to(tl.float32)
        if SCORE == "softmax":
            logits = tl.where(lane < NUM_EXPERTS, logits, float("-inf"))
            exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])  # [BLOCK_M, BLOCK_X]
            scores = exps / tl.sum(exps, axis=1)[:, None]  # [BLOCK_M, BLOCK_X]
        else:
            scores = 1.0 / (1.0 + tl.exp(-logits))  # [BLOCK_M, BLOCK_X]
        choice = scores  # [BLOCK_M, BLOCK_X]
        if CORRECTION:
            choice += tl.load(correction_ptr + lane, mask=lane < NUM_EXPERTS, other=0.0)
        choice = tl.where(lane < NUM_EXPERTS, choice, float("-inf"))
        if KEPT_GROUPS < NUM_GROUPS:
            choice = keep_groups(
                choice, lane, NUM_EXPERTS, NUM_GROUPS, KEPT_GROUPS, GROUP_TOP, BLOCK_M, BLOCK_X
            )

        column = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
        experts = tl.zeros((BLOCK_M, BLOCK_C), tl.int32)  # [BLOCK_M, BLOCK_C]
        scales = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)  # [BLOCK_M, BLOCK_C]
        for j in range(TOP_K):
            score, expert = take_best(choice, lane, NUM_EXPERTS)  # [BLOCK_M]
            chosen = lane == expert[:, None]  # [BLOCK_M, BLOCK_X]
            if CORRECTION:
                score = tl.sum(tl.where(chosen, scores, 0.0), axis=1)  # [BLOCK_M]
            experts = tl.where(column == j, expert[:, None], experts)
            scales = tl.where(column == j, score[:, None], scales)
            choice = tl.where(chosen, float("-inf"), choice)
        if NORMALISE:
            scales = scales / (tl.sum(scales, axis=1)[:, None] + 1e-20)
        mask = (token < num_tokens)[:, None] & (column < TOP_K)  # [BLOCK_M, BLOCK_C]
        places = token.to(tl.int64)[:, None] * TOP_K + column  # [BLOCK_M, BLOCK_C]
        tl.store(experts_ptr + places, experts, mask=mask)
        tl.store(scales_ptr + places, scales * SCALING, mask=mask)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    experts: torch.Tensor,
    scales: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
) -> None:
    """Choose the experts of `num_tokens` tokens."""
    grid = (triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"]), SCHEDULE["SPLIT_K"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    linear__route[grid](
        x,
        w,
        bias,
        correction,
        experts,
        scales,
        partials,
        counters,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
