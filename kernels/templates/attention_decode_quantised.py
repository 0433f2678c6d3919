"""Attend from one query token per sequence to its pages of a quantised KV cache (flash decoding).

Codes become f16 by their bits alone, as 1024 plus the code. Keys are quantised by channel, page by
page: scales and zeros of a page's channels make keys of a tile's codes, one multiply-add each, of
f16 in pairs. Those of values, one per token, stay out of the products: an output is sum(p s_v n) +
sum(p z_v), so scales go into the weights p, and the sum of the weights takes the 1024 out at the
end. Codes are the left operands of both products. Every byte is loaded once. The last page of a
sequence is open until it is full: its keys and values lie in f16 in the row's own page.
Splits and their combination are those of `attention_decode`.

Shapes (H query heads, G KV heads, D head dim, S tokens per page, P pages, R rows, M pages per row,
N = D bytes of codes per token, D / 2 with int4):
  q, out        [T, H, D], [T, H * D]: contiguous, T >= num_seqs
  k_cache       u8[P, G, S * N + 4 * D]: contiguous; codes [S, N], then, in f16, the scale of each
                feature, then what its code 0 means
  v_cache       u8[P, G, S * (N + W)]: contiguous; codes [N, S], then a word for each token: the
                scale in f16 (W = 2); with int4 (W = 4) above it the least value. int8: code + 128;
                e4m3 with fp8, whose scales are those of numbers over 256; int4, of both: feature d
                in the low and d + D / 2 in the high half of a byte
  k_open,       f16[R, S, G, D]: contiguous; the page of each row that is not full
  v_open
  block_table   i32[R, M]: page of tokens m * S .. (m + 1) * S of a row; rows may be strided
  seq_rows      i32[num_seqs]: row of each sequence, -1 for padding, whose output becomes zeros
  context_lens  i32[num_seqs]: tokens in the cache, the query's own included
  partial_out   f32, at least num_seqs * H * MAX_SPLITS * D elements of scratch
  partial_lse   f32, at least num_seqs * H * MAX_SPLITS elements of scratch
  counters      i32, at least num_seqs * G elements, zero before the first launch and after each

Grid: (KV head, sequence, split). A program without a split of its own leaves at once. BLOCK_TOKENS
divides S.
Bound by reading K and V once: context * G * (2 N + W + 4 D / S) bytes per sequence.
"""

import torch
import triton
import triton.language as tl

from treadle.kernels.templates.parts.quantised_tiles import (
    load_codes,
    scale_weights,
    tile_page,
    to_f16,
    to_f16_planes,
    to_key_planes,
    to_keys,
)
from treadle.kernels.templates.parts.splits import combine_splits

SHAPE = dict(
    NUM_HEADS=8,
    NUM_KV_HEADS=2,
    HEAD_DIM=64,
    PAGE_SIZE=64,
    SCALE=0.125,
    KV_FORMAT="int8",
)
SCHEDULE = dict(
    BLOCK_TOKENS=64,
    MAX_SPLITS=8,
    MIN_CHUNK_TOKENS=256,
    LEAST_HEADS=8,
    USE_PTX=False,
    USE_PDL=False,
    TRIGGER_LATE=False,
    num_warps=2,
    num_stages=3,
)


@triton.jit
def FIRST_PAGE(context, block_table_ptr):
    """Leave out whole pages that nobody sees: give the length, and the table, without them."""
    return context, block_table_ptr


@triton.jit
def SCORES(scores, tokens, context):
    """Change the scores of a tile, in units of log2, before they are masked."""
    return scores


@triton.jit
def SINKS(best, total, split, kv_head, heads):
    """Begin the softmax of the first split with each head's sink: a score whose value is zero."""
    return best, total


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_rows_ptr", "context_lens_ptr"],
)
def attention_decode_quantised(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_open_ptr,
    v_open_ptr,
    block_table_ptr,
    seq_rows_ptr,
    context_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counters_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_CHUNK_TOKENS: tl.constexpr,
    LEAST_HEADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    TRIGGER_LATE: tl.constexpr,
):
    # Grid: axis 0 = KV head, axis 1 = sequence, axis 2 = split of the sequence's tokens.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # The query heads of a KV head are the columns of the score tile, tokens its rows: codes become
    # the left operand where they are, and few heads waste less than they would as rows.
    BLOCK_H: tl.constexpr = (
        LEAST_HEADS if GROUP_HEADS < LEAST_HEADS else triton.next_power_of_2(GROUP_HEADS)
    )
    # With int4 a tile of bytes is two planes of features: the first half of a head and the second.
    HAS_PLANES: tl.constexpr = KV_FORMAT == "int4"
    WIDTH: tl.constexpr = HEAD_DIM // 2 if HAS_PLANES else HEAD_DIM
    BLOCK_W: tl.constexpr = 32 if WIDTH < 32 else triton.next_power_of_2(WIDTH)
    # Scores are kept in units of log2: each exponential is then one exp2.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    # Scales of values are often too small for f16: a fixed factor goes in here and out at the end.
    LIFT: tl.constexpr = 1.0 if KV_FORMAT == "fp8" and not USE_PTX else 64.0
    if USE_PDL and not TRIGGER_LATE:
        tl.extra.cuda.gdc_launch_dependents()

    # Rows, lengths and pages are older than the kernel before this one and can be read before the
    # wait for it; the queries and the newest keys and values can't.
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    context, block_table_ptr = FIRST_PAGE(context, block_table_ptr)
    chunk = tl.maximum(tl.cdiv(context, MAX_SPLITS), MIN_CHUNK_TOKENS)
    chunk = tl.cdiv(chunk, BLOCK_TOKENS) * BLOCK_TOKENS
    num_splits = tl.maximum(tl.cdiv(context, chunk), 1)
    if split >= num_splits:
        return
    start = split * chunk
    stop = tl.minimum(start + chunk, context)

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_W)
    mask = (heads < GROUP_HEADS)[None, :] & (dims < WIDTH)[:, None]  # [BLOCK_W, BLOCK_H]
    offsets = heads[None, :] * HEAD_DIM + dims[:, None]  # [BLOCK_W, BLOCK_H]
    q_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    out_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    full_stop = tl.minimum(stop, context // PAGE_SIZE * PAGE_SIZE)
    page = tile_page(pages_ptr, start, full_stop, PAGE_SIZE)
    if USE_PDL:
        # The first split of every sequence comes by here, so this kernel can't end before the
        # kernels it depends on.
        tl.extra.cuda.gdc_wait()

    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * SCALE_LOG2
    q = q.to(tl.float16)  # [BLOCK_W, BLOCK_H]
    second_q = q  # [BLOCK_W, BLOCK_H]
    if HAS_PLANES:
        second_q = tl.load(q_ptr + WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)
        second_q = (second_q * SCALE_LOG2).to(tl.float16)  # [BLOCK_W, BLOCK_H]

    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    best, total = SINKS(best, total, split, kv_head, heads)
    # Sums over tokens stay apart by the token's place in its tile, and are added up at the end:
    # adding across threads in every tile would take longer than multiplying.
    weight_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    scaled_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    least_sums = tl.zeros((BLOCK_TOKENS, BLOCK_H), tl.float32)  # [BLOCK_TOKENS, BLOCK_H]
    acc = tl.zeros((BLOCK_W, BLOCK_H), tl.float32)  # [BLOCK_W, BLOCK_H]
    second_acc = tl.zeros((BLOCK_W, BLOCK_H), tl.float32)  # [BLOCK_W, BLOCK_H]
    for tile_start in range(start, full_stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        keys, scales, zeros, second_scales, second_zeros, values, value_words = load_codes(
            k_cache_ptr, v_cache_ptr, page, tile_start, kv_head,
            NUM_KV_HEADS, HEAD_DIM, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
        )  # fmt: skip
        page = tile_page(pages_ptr, tile_start + BLOCK_TOKENS, full_stop, PAGE_SIZE)
        if HAS_PLANES:
            k, second_k = to_key_planes(
                keys, scales, zeros, second_scales, second_zeros, USE_PTX
            )  # [BLOCK_TOKENS, BLOCK_W] each
            scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
            scores = tl.dot(second_k, second_q, scores)  # [BLOCK_TOKENS, BLOCK_H]
        else:
            k = to_keys(keys, scales, zeros, KV_FORMAT, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
            scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.trans(scores)  # [BLOCK_H, BLOCK_TOKENS]
        scores = SCORES(scores, tokens, context)
        scores = tl.trans(scores)  # [BLOCK_TOKENS, BLOCK_H]
        new_best = tl.maximum(best, tl.max(scores, 0))  # [BLOCK_H]
        rescale = tl.exp2(best - new_best)  # [BLOCK_H]
        weights = tl.exp2(scores - new_best[None, :])  # [BLOCK_TOKENS, BLOCK_H]
        weight_sums = weight_sums * rescale[None, :] + weights  # [BLOCK_TOKENS, BLOCK_H]
        total = total * rescale  # [BLOCK_H]
        best = new_best  # [BLOCK_H]
        scaled, least = scale_weights(weights, value_words, KV_FORMAT, USE_PTX, LIFT)
        acc = acc * rescale[None, :]  # [BLOCK_W, BLOCK_H]
        if HAS_PLANES:
            first, second = to_f16_planes(values, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS] each
            acc = tl.dot(first, scaled, acc)  # [BLOCK_W, BLOCK_H]
            second_acc = tl.dot(second, scaled, second_acc * rescale[None, :])
            least_sums = least_sums * rescale[None, :] + weights * least[:, None]
        else:
            numbers = to_f16(values, KV_FORMAT, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS]
            acc = tl.dot(numbers, scaled, acc)  # [BLOCK_W, BLOCK_H]
        scaled_sums = scaled_sums * rescale[None, :] + scaled.to(tl.float32)
    total += tl.sum(weight_sums, 0)  # [BLOCK_H]
    least_sum = tl.sum(least_sums, 0)  # [BLOCK_H]
    # What the bits add to a code is taken back.
    ADDED: tl.constexpr = 0.0 if KV_FORMAT == "fp8" else 1152.0 if KV_FORMAT == "int8" else 1024.0
    added = ADDED * tl.sum(scaled_sums, 0)[None, :]  # [1, BLOCK_H]
    acc -= added  # [BLOCK_W, BLOCK_H]
    second_acc -= added  # [BLOCK_W, BLOCK_H]

    # What is left of the split lies in the open page.
    open_offset = tl.maximum(table_row, 0).to(tl.int64) * PAGE_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    open_offset += kv_head * HEAD_DIM
    for tile_start in tl.range(tl.maximum(start, full_stop), stop, BLOCK_TOKENS, num_stages=1):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        live = tokens < stop  # [BLOCK_TOKENS]
        rows = (tokens % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)  # [BLOCK_TOKENS]
        loaded = live[:, None] & (dims < WIDTH)[None, :]  # [BLOCK_TOKENS, BLOCK_W]
        open_offsets = open_offset + rows[:, None] + dims[None, :]  # [BLOCK_TOKENS, BLOCK_W]
        k = tl.load(k_open_ptr + open_offsets, mask=loaded, other=0.0)
        v = tl.load(v_open_ptr + open_offsets, mask=loaded, other=0.0)
        scores = tl.dot(k, q)  # [BLOCK_TOKENS, BLOCK_H]
        if HAS_PLANES:
            second_k = tl.load(k_open_ptr + WIDTH + open_offsets, mask=loaded, other=0.0)
            scores = tl.dot(second_k, second_q, scores)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.trans(scores)  # [BLOCK_H, BLOCK_TOKENS]
        scores = SCORES(scores, tokens, context)
        scores = tl.trans(scores)  # [BLOCK_TOKENS, BLOCK_H]
        scores = tl.where(live[:, None], scores, float("-inf"))  # [BLOCK_TOKENS, BLOCK_H]
        new_best = tl.maximum(best, tl.max(scores, 0))  # [BLOCK_H]
        rescale = tl.exp2(best - new_best)  # [BLOCK_H]
        weights = tl.exp2(scores - new_best[None, :])  # [BLOCK_TOKENS, BLOCK_H]
        total = total * rescale + tl.sum(weights, 0)  # [BLOCK_H]
        best = new_best  # [BLOCK_H]
        least_sum = least_sum * rescale  # [BLOCK_H]
        lifted = (weights * LIFT).to(tl.float16)  # [BLOCK_TOKENS, BLOCK_H]
        acc = tl.dot(tl.trans(v), lifted, acc * rescale[None, :])  # [BLOCK_W, BLOCK_H]
        if HAS_PLANES:
            second_v = tl.load(v_open_ptr + WIDTH + open_offsets, mask=loaded, other=0.0)
            lifted = (weights * (16.0 * LIFT)).to(tl.float16)  # as large as the codes
            second_acc = tl.dot(tl.trans(second_v), lifted, second_acc * rescale[None, :])

    if USE_PDL and TRIGGER_LATE:
        # The dependents' weights would have come in the way of this kernel's keys and values.
        tl.extra.cuda.gdc_launch_dependents()
    # A padding sequence read nothing: its zeros are divided by one.
    divisor = tl.where(total > 0.0, total, 1.0)[None, :]  # [1, BLOCK_H]
    UNLIFT: tl.constexpr = 1.0 / LIFT
    acc = (acc * UNLIFT + least_sum[None, :]) / divisor  # [BLOCK_W, BLOCK_H]
    second_acc = (second_acc * (UNLIFT * 0.0625) + least_sum[None, :]) / divisor
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_PLANES:
            second_ptrs = out_ptr + WIDTH + offsets  # [BLOCK_W, BLOCK_H]
            tl.store(second_ptrs, second_acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        group = seq * NUM_KV_HEADS + kv_head
        partial_out_ptr += group.to(tl.int64) * (MAX_SPLITS * GROUP_HEADS * HEAD_DIM)
        partial_lse_ptr += group * (MAX_SPLITS * GROUP_HEADS)
        partial_ptrs = partial_out_ptr + split * (GROUP_HEADS * HEAD_DIM) + offsets
        tl.store(partial_ptrs, acc, mask=mask)
        if HAS_PLANES:
            tl.store(partial_ptrs + WIDTH, second_acc, mask=mask)
        lse = best + tl.log2(total)  # [BLOCK_H]
        tl.store(partial_lse_ptr + split * GROUP_HEADS + heads, lse, mask=heads < GROUP_HEADS)
        # All threads have stored before one of them announces the split; acq_rel then shows the
        # stores of every split to the program that arrives last.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.debug_barrier()
            BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
            combine_splits(
                partial_out_ptr,
                partial_lse_ptr,
                out_ptr,
                num_splits,
                GROUP_HEADS,
                HEAD_DIM,
                BLOCK_D,
                MAX_SPLITS,
            )
            tl.store(counters_ptr + group, 0)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_open: torch.Tensor,
    v_open: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    num_seqs: int,
) -> None:
    """Write the attention output of the first `num_seqs` sequences to `out`."""
    grid = (SHAPE["NUM_KV_HEADS"], num_seqs, SCHEDULE["MAX_SPLITS"])
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    attention_decode_quantised[grid](
        q,
        k_cache,
        v_cache,
        k_open,
        v_open,
        block_table,
        seq_rows,
        context_lens,
        out,
        partial_out,
        partial_lse,
        counters,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
