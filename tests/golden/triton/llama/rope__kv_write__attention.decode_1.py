"""`rope__kv_write__attention`: rotate each head's halves by the angle of the token's position; then
Append the step's keys and values to the pages of their rows; then Attend causally from each
token to the tokens of its row, through the pages.

Covers:
  q: bf16[T, 2048], k: bf16[T, 512], v: bf16[T, 512] = split(qkv; sizes=(2048, 512, 512))
  q_rope: bf16[T, 2048] = rope(q, positions, @rope; head_dim=64)
  k_rope: bf16[T, 512] = rope(k, positions, @rope; head_dim=64)
  kv_write(k_rope, v, positions, token_seq, seq_rows, block_table, kv)
  attended: bf16[T, 2048] = attention(q_rope, kv, block_table, seq_rows, query_start,
    context_lens; num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125)

Must move 4 bytes and 12,564 per token; must compute 15,360 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_TOKENS=64, MAX_SPLITS=16, MIN_CHUNK_TOKENS=128, LOAD_EARLY=False, USE_PDL=True,
  TRIGGER_LATE=False, num_warps=4, num_stages=3
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(
    NUM_HEADS=32,
    NUM_KV_HEADS=8,
    HEAD_DIM=64,
    ROTARY_DIM=64,
    PAGE_SIZE=64,
    SCALE=0.125,
    HEAD_NORM=False,
    EPS=0.0,
    OFFSET=0.0,
)
SCHEDULE = dict(
    BLOCK_TOKENS=64,
    MAX_SPLITS=16,
    MIN_CHUNK_TOKENS=128,
    LOAD_EARLY=False,
    USE_PDL=True,
    TRIGGER_LATE=False,
    num_warps=4,
    num_stages=3,
)


@triton.jit
def load_page(pages_ptr, tile_start, stop, PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Give the page id of a tile: one number, or one per token if the tile spans pages."""
    if PAGE_SIZE % BLOCK_TOKENS == 0:
        page = tl.load(pages_ptr + tile_start // PAGE_SIZE, mask=tile_start < stop, other=0)
        return page.to(tl.int64)
    else:
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        page = tl.load(pages_ptr + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
        return page.to(tl.int64)[:, None]  # [BLOCK_TOKENS, 1]


@triton.jit
def add_splits(
    acc,
    best,
    total,
    partial_out_ptr,
    partial_lse_ptr,
    first,
    num_splits,
    GROUP_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the partial results of BLOCK_SPLITS splits into those of the splits before them."""
    splits = first + tl.arange(0, BLOCK_SPLITS)  # [BLOCK_SPLITS]
    heads = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, acc.shape[1])
    live = (splits < num_splits)[:, None]  # [BLOCK_SPLITS, 1]
    mask = (heads < GROUP_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    rows = splits[:, None] * GROUP_HEADS + heads[None, :]  # [BLOCK_SPLITS, BLOCK_H]
    # Other programs wrote these: `.cg` reads from L2, not from this multiprocessor's own cache.
    lse = tl.load(
        partial_lse_ptr + rows,
        mask=live & (heads < GROUP_HEADS)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )  # [BLOCK_SPLITS, BLOCK_H]
    lse = tl.where(live, lse, float("-inf"))  # [BLOCK_SPLITS, BLOCK_H]
    partial = tl.load(
        partial_out_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=live[:, :, None] & mask[None, :, :],
        other=0.0,
        cache_modifier=".cg",
    )  # [BLOCK_SPLITS, BLOCK_H, BLOCK_D]
    new_best = tl.maximum(best, tl.max(lse, 0))  # [BLOCK_H]
    rescale = tl.exp2(best - new_best)  # [BLOCK_H]
    weights = tl.exp2(lse - new_best[None, :])  # [BLOCK_SPLITS, BLOCK_H]
    total = total * rescale + tl.sum(weights, 0)  # [BLOCK_H]
    update = tl.sum(partial * weights[:, :, None], 0)  # [BLOCK_H, BLOCK_D]
    return acc * rescale[:, None] + update, new_best, total


@triton.jit
def combine_splits(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    GROUP_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the partial results of one sequence and KV head, in the order of the splits."""
    BLOCK_H: tl.constexpr = triton.next_power_of_2(GROUP_HEADS)
    # One program merges while the others are done: what counts is latency, not bandwidth. All
    # splits are read at once where registers hold them, else 2048 values at a time, three of these
    # tiles in flight.
    TILE_SIZE: tl.constexpr = BLOCK_H * BLOCK_D
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32)  # [BLOCK_H]
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)  # [BLOCK_H, BLOCK_D]
    if MAX_SPLITS * TILE_SIZE <= 8192:
        acc, best, total = add_splits(
            acc,
            best,
            total,
            partial_out_ptr,
            partial_lse_ptr,
            0,
            num_splits,
            GROUP_HEADS,
            HEAD_DIM,
            triton.next_power_of_2(MAX_SPLITS),
        )
    else:
        BLOCK_SPLITS: tl.constexpr = 2048 // TILE_SIZE if TILE_SIZE < 2048 else 1
        for first in tl.range(0, num_splits, BLOCK_SPLITS, num_stages=4):
            acc, best, total = add_splits(
                acc,
                best,
                total,
                partial_out_ptr,
                partial_lse_ptr,
                first,
                num_splits,
                GROUP_HEADS,
                HEAD_DIM,
                BLOCK_SPLITS,
            )
    acc = acc / total[:, None]  # [BLOCK_H, BLOCK_D]
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < GROUP_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_H, BLOCK_D]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_H, BLOCK_D]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_tile(
    cache_ptr,
    page,
    tokens,
    stop,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load a tile of keys or values, f[BLOCK_TOKENS, BLOCK_D]; zeros from `stop` on."""
    dims = tl.arange(0, BLOCK_D)
    page_offset = (page * NUM_KV_HEADS + kv_head) * (PAGE_SIZE * HEAD_DIM)
    slot_offsets = (tokens % PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :]
    # Slots that hold no token of the sequence are not read: they may hold anything, NaN too.
    mask = (tokens < stop)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_TOKENS, BLOCK_D]
    return tl.load(cache_ptr + page_offset + slot_offsets, mask=mask, other=0.0)


@triton.jit
def _attend_tile(acc, best, total, q, k, v, live, SCALE_LOG2: tl.constexpr):
    """Add a tile of keys and values, of which some tokens are live, to the running softmax."""
    scores = tl.dot(q, tl.trans(k))  # [BLOCK_H, BLOCK_TOKENS]
    scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_H, BLOCK_TOKENS]
    new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_H]
    rescale = tl.exp2(best - new_best)  # [BLOCK_H]
    weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_H, BLOCK_TOKENS]
    total = total * rescale + tl.sum(weights, 1)  # [BLOCK_H]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])  # [BLOCK_H, BLOCK_D]
    return acc, new_best, total


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_rows_ptr", "context_lens_ptr"],
)
def rope__kv_write__attention(
    qkv_ptr,
    cos_sin_ptr,
    block_table_ptr,
    seq_rows_ptr,
    context_lens_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counters_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_CHUNK_TOKENS: tl.constexpr,
    LOAD_EARLY: tl.constexpr,
    USE_PDL: tl.constexpr,
    TRIGGER_LATE: tl.constexpr,
):
    # Grid: axis 0 = KV head, axis 1 = sequence, axis 2 = split of the sequence's older tokens.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = ROTARY_DIM // 2
    # The query heads of a KV head are the rows of the score tile; a dot wants 16 of everything.
    BLOCK_H: tl.constexpr = 16 if GROUP_HEADS < 16 else triton.next_power_of_2(GROUP_HEADS)
    BLOCK_D: tl.constexpr = 16 if HEAD_DIM < 16 else triton.next_power_of_2(HEAD_DIM)
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    if USE_PDL and not TRIGGER_LATE:
        tl.extra.cuda.gdc_launch_dependents()

    # Rows, lengths, pages and older keys and values are older than the kernel before this one,
    # which lets no dependent start before what it depends on has ended.
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    position = tl.maximum(context - 1, 0)  # of the newest token
    older = tl.maximum(context - 1, 0)
    chunk = tl.maximum(tl.cdiv(older, MAX_SPLITS), MIN_CHUNK_TOKENS)
    chunk = tl.cdiv(chunk, BLOCK_TOKENS) * BLOCK_TOKENS
    num_splits = tl.maximum(tl.cdiv(older, chunk), 1)
    if split >= num_splits:
        return
    start = split * chunk
    stop = tl.minimum(start + chunk, older)
    # The last split is the shortest: it takes the newest token. Padding has none.
    has_newest = tl.where(split == num_splits - 1, context, 0) > 0

    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM  # [BLOCK_D]
    mask = (heads < GROUP_HEADS)[:, None] & inside[None, :]  # [BLOCK_H, BLOCK_D]
    pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
    # Feature i is turned with its partner: y = x * cos + partner * (-sin in the first half, else
    # sin). What is beyond ROTARY_DIM is copied: cos 1, sin 0.
    rotates = dims < ROTARY_DIM  # [BLOCK_D]
    partner = tl.where(rotates, (dims + HALF) % ROTARY_DIM, dims)  # [BLOCK_D]
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * ROTARY_DIM
    cos = tl.load(angle_ptr + dims % HALF, mask=rotates, other=1.0)  # [BLOCK_D]
    sin = tl.load(angle_ptr + HALF + dims % HALF, mask=rotates, other=0.0)  # [BLOCK_D]
    sin = tl.where(dims < HALF, -sin, sin)  # [BLOCK_D]
    if HEAD_NORM:
        q_weight, q_weight_other, k_weight, k_weight_other = (
            tl.load(q_weight_ptr + dims, mask=inside, other=0.0),
            tl.load(q_weight_ptr + partner, mask=inside, other=0.0),
            tl.load(k_weight_ptr + dims, mask=inside, other=0.0),
            tl.load(k_weight_ptr + partner, mask=inside, other=0.0),
        )  # [BLOCK_D] each
    newest_page = tl.load(pages_ptr + older // PAGE_SIZE, mask=has_newest, other=0).to(tl.int64)
    # The page id of a tile is loaded one tile ahead: were it loaded for the same tile, the pipeline
    # would need two of its stages to fetch one tile.
    page = load_page(pages_ptr, start, stop, PAGE_SIZE, BLOCK_TOKENS)
    tokens = start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    if LOAD_EARLY:
        first_k = _load_tile(
            k_cache_ptr, page, tokens, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D
        )  # [BLOCK_TOKENS, BLOCK_D]
        first_v = _load_tile(
            v_cache_ptr, page, tokens, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D
        )  # [BLOCK_TOKENS, BLOCK_D]
        page = load_page(pages_ptr, start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)
    if USE_PDL:
        # The first split of every sequence comes by here, so this kernel can't end before the
        # kernels it depends on.
        tl.extra.cuda.gdc_wait()

    dtype = k_cache_ptr.dtype.element_ty
    qkv_ptr += seq.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    q_ptrs = qkv_ptr + (kv_head * GROUP_HEADS + heads)[:, None] * HEAD_DIM  # [BLOCK_H, 1]
    x = tl.load(q_ptrs + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(q_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HEAD_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + EPS)  # [BLOCK_H]
        x = x * scale[:, None] * (q_weight.to(tl.float32) + OFFSET)[None, :]
        other = other * scale[:, None] * (q_weight_other.to(tl.float32) + OFFSET)[None, :]
    q = (x * cos[None, :] + other * sin[None, :]).to(dtype)  # [BLOCK_H, BLOCK_D]
    k_ptr = qkv_ptr + (NUM_HEADS + kv_head) * HEAD_DIM
    newest_mask = dims < tl.where(has_newest, HEAD_DIM, 0)  # [BLOCK_D]
    k_x = tl.load(k_ptr + dims, mask=newest_mask, other=0.0).to(tl.float32)  # [BLOCK_D]
    k_other = tl.load(k_ptr + partner, mask=newest_mask, other=0.0).to(tl.float32)  # [BLOCK_D]
    if HEAD_NORM:
        k_scale = 1.0 / tl.sqrt(tl.sum(k_x * k_x, 0) / HEAD_DIM + EPS)
        k_x = k_x * k_scale * (k_weight.to(tl.float32) + OFFSET)  # [BLOCK_D]
        k_other = k_other * k_scale * (k_weight_other.to(tl.float32) + OFFSET)  # [BLOCK_D]
    k_newest = (k_x * cos + k_other * sin).to(dtype)  # [BLOCK_D]
    v_newest = tl.load(k_ptr + NUM_KV_HEADS * HEAD_DIM + dims, mask=newest_mask, other=0.0)
    v_newest = v_newest.to(dtype)  # [BLOCK_D]
    newest_offset = (newest_page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + older % PAGE_SIZE
    tl.store(k_cache_ptr + newest_offset * HEAD_DIM + dims, k_newest, mask=newest_mask)
    tl.store(v_cache_ptr + newest_offset * HEAD_DIM + dims, v_newest, mask=newest_mask)

    # The softmax begins with the newest token, from registers; in other splits with none.
    products = q.to(tl.float32) * k_newest.to(tl.float32)[None, :]  # [BLOCK_H, BLOCK_D]
    scores = tl.sum(products, 1)  # [BLOCK_H]
    # Without one the best score is lower than any, but finite: a tile may hold no live token.
    best = tl.where(has_newest, scores * SCALE_LOG2, -1e30)  # [BLOCK_H]
    total = tl.zeros((BLOCK_H,), tl.float32) + tl.where(has_newest, 1.0, 0.0)  # [BLOCK_H]
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)  # [BLOCK_H, BLOCK_D]
    acc += v_newest.to(tl.float32)[None, :]  # [BLOCK_H, BLOCK_D]
    if LOAD_EARLY:
        live = tokens < stop  # [BLOCK_TOKENS]
        acc, best, total = _attend_tile(acc, best, total, q, first_k, first_v, live, SCALE_LOG2)
        start += BLOCK_TOKENS
    for tile_start in range(start, stop, BLOCK_TOKENS):
        tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        k = _load_tile(
            k_cache_ptr, page, tokens, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D
        )  # [BLOCK_TOKENS, BLOCK_D]
        v = _load_tile(
            v_cache_ptr, page, tokens, stop, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D
        )  # [BLOCK_TOKENS, BLOCK_D]
        page = load_page(pages_ptr, tile_start + BLOCK_TOKENS, stop, PAGE_SIZE, BLOCK_TOKENS)
        live = tokens < stop  # [BLOCK_TOKENS]
        acc, best, total = _attend_tile(acc, best, total, q, k, v, live, SCALE_LOG2)

    if USE_PDL and TRIGGER_LATE:
        # The dependents' weights would have come in the way of this kernel's keys and values.
        tl.extra.cuda.gdc_launch_dependents()
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_H, BLOCK_D]
    out_ptr += (seq * NUM_HEADS + kv_head * GROUP_HEADS) * HEAD_DIM
    # A padding sequence read nothing: its zeros are divided by one.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_H, BLOCK_D]
    if num_splits == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        group = seq * NUM_KV_HEADS + kv_head
        partial_out_ptr += group.to(tl.int64) * (MAX_SPLITS * GROUP_HEADS * HEAD_DIM)
        partial_lse_ptr += group * (MAX_SPLITS * GROUP_HEADS)
        tl.store(partial_out_ptr + split * (GROUP_HEADS * HEAD_DIM) + offsets, acc, mask=mask)
        lse = best + tl.log2(total)  # [BLOCK_H]
        tl.store(partial_lse_ptr + split * GROUP_HEADS + heads, lse, mask=heads < GROUP_HEADS)
        # All threads have stored before one of them announces the split; acq_rel then shows the
        # stores of every split to the program that arrives last.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + group, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.debug_barrier()
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
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    context_lens: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    counters: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    num_seqs: int,
) -> None:
    """Append the newest token of the first `num_seqs` sequences and write what it attends to."""
    grid = (SHAPE["NUM_KV_HEADS"], num_seqs, SCHEDULE["MAX_SPLITS"])
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    rope__kv_write__attention[grid](
        qkv,
        cos_sin,
        block_table,
        seq_rows,
        context_lens,
        k_cache,
        v_cache,
        out,
        partial_out,
        partial_lse,
        counters,
        q_weight,
        k_weight,
        block_table.stride(0),
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
