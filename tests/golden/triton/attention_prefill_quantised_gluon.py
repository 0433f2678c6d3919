"""`attention_prefill`: attend causally from each token to the tokens of its row, through the pages.

Covers:
  attention: bf16[T, 4096] = attention(q, kv, block_table, seq_rows, query_start, context_lens,
    k, v; num_heads=32, num_kv_heads=8, head_dim=128, scale=0.0625)

Must move 0 bytes and 16,384 per token; must compute 0 operations per token.
Keys and values come on top: their bytes and operations per context token.

Schedule: BLOCK_ROWS=64, BLOCK_TOKENS=64, USE_PTX=True, OWN_TOKENS=128, STAGES=2, QUERY_STAGES=2,
  PACK_HEADS=True, PING_PONG=True, NUM_PROGRAMS=132, num_warps=4, num_stages=3
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHAPE = dict(
    NUM_HEADS=32,
    NUM_KV_HEADS=8,
    HEAD_DIM=128,
    PAGE_SIZE=64,
    SCALE=0.0625,
    KV_FORMAT="int8",
)
SCHEDULE = dict(
    BLOCK_ROWS=64,
    BLOCK_TOKENS=64,
    USE_PTX=True,
    OWN_TOKENS=128,
    STAGES=2,
    QUERY_STAGES=2,
    PACK_HEADS=True,
    PING_PONG=True,
    NUM_PROGRAMS=132,
    num_warps=4,
    num_stages=3,
)


# Two names that changed between Triton 3.6 and 3.9.
fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
sync_group = getattr(gl, "barrier", None) or gl.thread_barrier
CONSUMERS = gl.constexpr(2)  # groups of four warps that attend
ROWS = gl.constexpr(64)  # of a consumer: what one product takes
FIELDS = gl.constexpr(8)  # numbers that describe a block of queries


@gluon.jit
def write_field(board, place, FIELD: gl.constexpr, value):
    """Write one number of the description of a block of queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    board.index(place * FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def read_field(board, place, FIELD: gl.constexpr):
    """Read one number of the description of a block of queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(board.index(place * FIELDS + FIELD).load(layout), 0)


@gluon.jit
def announce(
    board,
    posted,
    taken,
    number,
    num_tiles,
    first_token,
    num_queries,
    first_position,
    context,
    head,
    table_row,
):
    """Post block of queries `number` of this program; -1 tiles: there are no more."""
    PLACES: gl.constexpr = board.shape[0] // FIELDS
    place = number % PLACES
    mbarrier.wait(taken.index(place), ((number // PLACES) & 1) ^ 1)
    write_field(board, place, 0, num_tiles)
    write_field(board, place, 1, first_token)
    write_field(board, place, 2, num_queries)
    write_field(board, place, 3, first_position)
    write_field(board, place, 4, context)
    write_field(board, place, 5, head)
    write_field(board, place, 6, table_row)
    sync_group()
    mbarrier.arrive(posted.index(place), count=1)


@gluon.jit
def plan(
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    counters_ptr,
    board,
    posted,
    taken,
    num_seqs,
    num_blocks,
    HEADS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    FROM_ROWS: gl.constexpr,
):
    """Take a first block of queries, others off the shared counter; say where each of them lies."""
    SEARCH_WIDTH: gl.constexpr = 256
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    launch_start = gl.load(query_start_ptr)
    number = 0
    item = gl.program_id(0)
    while item < num_blocks * HEADS:
        block = num_blocks - 1 - item // HEADS
        # Sequence i owns the query blocks from first_blocks[i] on, which grow strictly with i: the
        # last one at or below `block` is ours. Counting takes one load where bisecting takes many.
        num_starts = 0
        for first in range(0, num_seqs, SEARCH_WIDTH):
            seqs = first + gl.arange(0, SEARCH_WIDTH, layout=layout)  # [SEARCH_WIDTH]
            starts = gl.load(query_start_ptr + seqs, mask=seqs < num_seqs, other=0)
            first_blocks = (starts - launch_start) // BLOCK_Q + seqs  # [SEARCH_WIDTH]
            is_start = (first_blocks <= block) & (seqs < num_seqs)  # [SEARCH_WIDTH]
            num_starts += gl.sum(is_start.to(gl.int32), 0)
        seq = num_starts - 1
        start = gl.load(query_start_ptr + seq)
        num_queries = gl.load(query_start_ptr + seq + 1) - start
        first_query = (block - (start - launch_start) // BLOCK_Q - seq) * BLOCK_Q
        table_row = gl.load(seq_rows_ptr + seq)
        context = gl.load(context_lens_ptr + seq)
        is_ours = first_query < num_queries
        if FROM_ROWS:
            is_ours = is_ours & (table_row >= 0) & (context == num_queries)
        if is_ours:
            # Query j stands at position prior + j and sees the keys up to and including its own.
            prior = context - num_queries
            stop = prior + gl.minimum(first_query + BLOCK_Q, num_queries)
            num_tiles = (gl.maximum(stop, 0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
            if table_row < 0:
                num_tiles = 0
            announce(
                board,
                posted,
                taken,
                number,
                num_tiles,
                start + first_query,
                num_queries - first_query,
                prior + first_query,
                context,
                item % HEADS,
                table_row,
            )
            number += 1
        item = gl.num_programs(0) + gl.atomic_add(counters_ptr, 1)
    announce(board, posted, taken, number, -1, 0, 0, 0, 0, 0, 0)
    # Who is the last to leave has seen all others take their last number.
    if gl.atomic_add(counters_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def fetch_tokens(
    desc, page, next_page, row, ready, tile, slot_in_page, kv_head,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, FROM_ROWS: gl.constexpr,
):  # fmt: skip
    """Fetch a tile of keys or values: rows of a step, or a part of a page, a page, or two pages."""
    BLOCK_TOKENS: gl.constexpr = tile.shape[0]
    if FROM_ROWS:
        fetch_tile(desc, [row, kv_head * tile.shape[1]], ready, tile)
    elif BLOCK_TOKENS <= PAGE_SIZE:
        fetch_tile(
            desc, [(page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + slot_in_page, 0], ready, tile
        )
    else:
        first, second = tile.slice(0, PAGE_SIZE), tile.slice(PAGE_SIZE, PAGE_SIZE)
        fetch_tile(desc, [(page * NUM_KV_HEADS + kv_head) * PAGE_SIZE, 0], ready, first)
        fetch_tile(desc, [(next_page * NUM_KV_HEADS + kv_head) * PAGE_SIZE, 0], ready, second)


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    block_table_ptr,
    table_stride,
    board,
    posted,
    taken,
    q_ring,
    k_ring,
    v_ring,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    GROUP_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    FROM_ROWS: gl.constexpr,
):
    """Fetch the queries of each block, and its tiles of keys and values, last tile first."""
    PLACES: gl.constexpr = board.shape[0] // FIELDS
    STAGES: gl.constexpr = k_ring.shape[0]
    QUERY_STAGES: gl.constexpr = q_ring.shape[0] // CONSUMERS
    BLOCK_TOKENS: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    TILE_BYTES: gl.constexpr = BLOCK_TOKENS * HEAD_DIM * 2
    PACKED: gl.constexpr = GROUP_HEADS if PACK_HEADS else 1
    number, step = 0, 0
    mbarrier.wait(posted.index(0), 0)
    num_tiles = read_field(board, 0, 0)
    while num_tiles >= 0:
        place = number % PLACES
        first_token = read_field(board, place, 1)
        first_row = first_token - read_field(board, place, 3)  # of a sequence that begins here
        context = read_field(board, place, 4)
        head = read_field(board, place, 5)
        table_row = read_field(board, place, 6).to(gl.int64)
        sync_group()
        mbarrier.arrive(taken.index(place), count=1)
        kv_head = head if PACK_HEADS else head // GROUP_HEADS

        q_slot = number % QUERY_STAGES
        mbarrier.wait(q_empty.index(q_slot), ((number // QUERY_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(q_slot), CONSUMERS * ROWS * HEAD_DIM * 2)
        for consumer in gl.static_range(CONSUMERS):
            fetch_tile(
                q_desc,
                [first_token + consumer * (ROWS // PACKED), head * PACKED, 0],
                q_full.index(q_slot),
                q_ring.index(q_slot * CONSUMERS + consumer),
            )
        pages_ptr = block_table_ptr + table_row * table_stride
        for tile in range(num_tiles - 1, -1, -1):
            tile_start = tile * BLOCK_TOKENS
            page, next_page = 0, 0
            if not FROM_ROWS:
                pages = tile_start // PAGE_SIZE
                page = gl.load(pages_ptr + pages)
                if BLOCK_TOKENS > PAGE_SIZE:
                    # What follows the sequence's last page is never used.
                    inside = tile_start + PAGE_SIZE < context
                    next_page = gl.load(pages_ptr + pages + 1, mask=inside, other=0)
            slot = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), TILE_BYTES)
            fetch_tokens(
                k_desc, page, next_page, first_row + tile_start, k_full.index(slot),
                k_ring.index(slot), tile_start % PAGE_SIZE, kv_head, NUM_KV_HEADS, PAGE_SIZE,
                FROM_ROWS,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), TILE_BYTES)
            fetch_tokens(
                v_desc, page, next_page, first_row + tile_start, v_full.index(slot),
                v_ring.index(slot), tile_start % PAGE_SIZE, kv_head, NUM_KV_HEADS, PAGE_SIZE,
                FROM_ROWS,
            )  # fmt: skip
            step += 1
        number += 1
        place = number % PLACES
        mbarrier.wait(posted.index(place), (number // PLACES) & 1)
        num_tiles = read_field(board, place, 0)


@gluon.jit
def weigh(scores, best, tile_start, positions, SCALE_LOG2: gl.constexpr, MASKED: gl.constexpr):
    """Give the weights of a tile, the new best score, and what the old sums are multiplied by."""
    if MASKED:
        # A limit above all scores up to the row's own position, and below them beyond: for numbers
        # take fewer instructions than conditions. Not infinite: a row may see nothing of its first
        # tile. What is no number becomes the limit.
        columns = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        reach = (positions - tile_start).to(gl.float32) * 2.0e30 + 1.0e30  # [ROWS]
        steps = columns.to(gl.float32) * 2.0e30  # [BLOCK_TOKENS]
        scores = gl.minimum(scores, reach[:, None] - steps[None, :])  # [ROWS, BLOCK_TOKENS]
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    new_best = gl.maximum(best, gl.max(scores, 1) * SCALE_LOG2)  # [ROWS]
    weights = gl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [ROWS, BLOCK_TOKENS]
    return weights, new_best, gl.exp2(best - new_best)


@gluon.jit
def attend_tile(
    acc,
    best,
    total,
    rescale,
    weights,
    q_tile,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turn,
    step,
    tile_start,
    positions,
    CONSUMER: gl.constexpr,
    SCALE_LOG2: gl.constexpr,
    PING_PONG: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Ask for scores of tile `step`, add the values of the one before, weigh meanwhile."""
    STAGES: gl.constexpr = k_ring.shape[0]
    BLOCK_TOKENS: gl.constexpr = k_ring.shape[1]
    scores_layout: gl.constexpr = positions.type.layout.parent
    slot, before = step % STAGES, (step - 1) % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    if PING_PONG:
        mbarrier.wait(turn.index(CONSUMER), (step & 1) ^ (0 if CONSUMER > 0 else 1))
    scores = gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, layout=scores_layout)
    scores = warpgroup_mma(
        q_tile, k_ring.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True
    )  # [ROWS, BLOCK_TOKENS]
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
    acc = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)  # [ROWS, HEAD_DIM]
    if PING_PONG:
        sync_group()
        mbarrier.arrive(turn.index((CONSUMER + 1) % CONSUMERS), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    sync_group()
    mbarrier.arrive(k_empty.index(slot), count=1)
    new_weights, best, rescale = weigh(scores, best, tile_start, positions, SCALE_LOG2, MASKED)
    total = total * rescale + gl.sum(new_weights, 1)  # [ROWS]
    # The assembler moves exponentials behind the wait for the product that should hide them, but
    # not over a loop, such as the one that waits here for what came long ago.
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    # Packed behind it: before, old and new weights beside the scores would take too many registers.
    new_weights = gl.convert_layout(new_weights.to(v_ring.dtype), weights.type.layout)
    acc, new_weights = warpgroup_mma_wait(0, deps=(acc, new_weights))
    sync_group()
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc, best, total, rescale, new_weights


@gluon.jit
def consume(
    out_ptr,
    board,
    posted,
    taken,
    q_ring,
    k_ring,
    v_ring,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turn,
    CONSUMER: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP_HEADS: gl.constexpr,
    SCALE_LOG2: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Attend from this consumer's rows of every block of queries, and write their output."""
    PLACES: gl.constexpr = board.shape[0] // FIELDS
    STAGES: gl.constexpr = k_ring.shape[0]
    QUERY_STAGES: gl.constexpr = q_ring.shape[0] // CONSUMERS
    BLOCK_TOKENS: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    PACKED: gl.constexpr = GROUP_HEADS if PACK_HEADS else 1
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_TOKENS, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=acc_layout, k_width=2
    )
    # Eight values, 16 bytes, a thread.
    row_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    rows_of_scores: gl.constexpr = gl.SliceLayout(1, scores_layout)
    rows_of_acc: gl.constexpr = gl.SliceLayout(1, acc_layout)
    rows = gl.arange(0, ROWS, layout=rows_of_scores)  # [ROWS]
    own_query: gl.constexpr = CONSUMER * (ROWS // PACKED)
    number, step = 0, 0
    mbarrier.wait(posted.index(0), 0)
    num_tiles = read_field(board, 0, 0)
    while num_tiles >= 0:
        place = number % PLACES
        first_token = read_field(board, place, 1).to(gl.int64) + own_query
        num_queries = read_field(board, place, 2) - own_query
        block_position = read_field(board, place, 3)
        context = read_field(board, place, 4)
        head = read_field(board, place, 5)
        sync_group()
        mbarrier.arrive(taken.index(place), count=1)

        q_slot = number % QUERY_STAGES
        q_memory = q_ring.index(q_slot * CONSUMERS + CONSUMER)
        q_tile = q_memory.reshape([ROWS, HEAD_DIM])
        positions = block_position + own_query + rows // PACKED  # [ROWS]
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout)
        # Below any score and far above what is masked: where a row sees nothing of a tile, all
        # weights are 0. Were the best score a masked one, the rounding of so large a product, which
        # the fused multiply-add of the exponent does not share, would make some of them infinite.
        best = gl.full([ROWS], -1.0e20, gl.float32, layout=rows_of_scores)
        total = gl.zeros([ROWS], gl.float32, layout=rows_of_scores)
        mbarrier.wait(q_full.index(q_slot), (number // QUERY_STAGES) & 1)
        if num_tiles > 0:
            slot = step % STAGES
            tile_start = (num_tiles - 1) * BLOCK_TOKENS
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            if PING_PONG:
                mbarrier.wait(turn.index(CONSUMER), (step & 1) ^ (0 if CONSUMER > 0 else 1))
            scores = gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, layout=scores_layout)
            scores = warpgroup_mma(
                q_tile, k_ring.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True
            )  # [ROWS, BLOCK_TOKENS]
            if PING_PONG:
                sync_group()
                mbarrier.arrive(turn.index((CONSUMER + 1) % CONSUMERS), count=1)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            sync_group()
            mbarrier.arrive(k_empty.index(slot), count=1)
            first_weights, best, rescale = weigh(
                scores, best, tile_start, positions, SCALE_LOG2, True
            )
            total = gl.sum(first_weights, 1)  # [ROWS]
            weights = gl.convert_layout(first_weights.to(v_ring.dtype), weights_layout)
            if tile_start + BLOCK_TOKENS > context:
                # Slots that hold no token of the sequence may hold anything, and NaN times zero is
                # NaN. Every consumer writes the same zeros, before it reads the tile.
                mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
                tokens = tile_start + gl.arange(
                    0, BLOCK_TOKENS, layout=gl.SliceLayout(1, row_layout)
                )  # [BLOCK_TOKENS]
                values = v_ring.index(slot).load(row_layout)  # [BLOCK_TOKENS, HEAD_DIM]
                nothing = gl.zeros([BLOCK_TOKENS, HEAD_DIM], v_ring.dtype, layout=row_layout)
                v_ring.index(slot).store(gl.where((tokens < context)[:, None], values, nothing))
                fence_async_shared()
                sync_group()
            step += 1
            # The tiles from `num_full` on hold keys that some row of the block does not see.
            num_full = (block_position + own_query + 1) // BLOCK_TOKENS
            num_masked = gl.minimum(gl.maximum(num_tiles - num_full, 1), num_tiles)
            for done in range(1, num_masked):
                acc, best, total, rescale, weights = attend_tile(
                    acc, best, total, rescale, weights, q_tile, k_ring, v_ring, k_full, k_empty,
                    v_full, v_empty, turn, step, tile_start - done * BLOCK_TOKENS, positions,
                    CONSUMER, SCALE_LOG2, PING_PONG, True,
                )  # fmt: skip
                step += 1
            for _ in range(num_masked, num_tiles):
                acc, best, total, rescale, weights = attend_tile(
                    acc, best, total, rescale, weights, q_tile, k_ring, v_ring, k_full, k_empty,
                    v_full, v_empty, turn, step, 0, positions, CONSUMER,
                    SCALE_LOG2, PING_PONG, False,
                )  # fmt: skip
                step += 1
            before = (step - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            acc = acc * gl.convert_layout(rescale, rows_of_acc)[:, None]
            acc = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            sync_group()
            mbarrier.arrive(v_empty.index(before), count=1)

        # A padding sequence read nothing: its zeros are divided by one.
        scale = 1.0 / gl.where(total > 0.0, total, 1.0)  # [ROWS]
        acc = acc * gl.convert_layout(scale, rows_of_acc)[:, None]  # [ROWS, HEAD_DIM]
        # The output leaves by way of the queries' memory, in whole rows.
        q_tile.store(acc.to(q_ring.dtype))
        sync_group()
        out = q_tile.load(row_layout)  # [ROWS, HEAD_DIM]
        out_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout))  # [ROWS]
        dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, row_layout))  # [HEAD_DIM]
        queries = out_rows // PACKED  # [ROWS]
        offsets = (queries * NUM_HEADS + out_rows % PACKED) * HEAD_DIM  # [ROWS]
        start = (first_token * NUM_HEADS + head * PACKED) * HEAD_DIM
        mask = (queries < num_queries)[:, None]  # [ROWS, 1]
        gl.store(out_ptr + start + (offsets[:, None] + dims[None, :]), out, mask=mask)
        fence_async_shared()
        sync_group()
        mbarrier.arrive(q_empty.index(q_slot), count=1)
        number += 1
        place = number % PLACES
        mbarrier.wait(posted.index(place), (number // PLACES) & 1)
        num_tiles = read_field(board, place, 0)


@gluon.jit
def attend_by_warps(
    q_desc,
    k_desc,
    v_desc,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    counters_ptr,
    table_stride,
    num_seqs,
    num_blocks,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SCALE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    PING_PONG: gl.constexpr,
    FROM_ROWS: gl.constexpr,
):
    """Attend from blocks of 128 rows until all are taken.

    FROM_ROWS: keys and values are the step's own, as they were computed, and only sequences that
    begin in the step are attended from; else they are in pages.
    """
    GROUP_HEADS: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    PACKED: gl.constexpr = GROUP_HEADS if PACK_HEADS else 1
    HEADS: gl.constexpr = NUM_HEADS // PACKED
    SCALE_LOG2: gl.constexpr = SCALE * 1.4426950408889634
    PLACES: gl.constexpr = 2
    q_ring = gl.allocate_shared_memory(
        q_desc.dtype, [QUERY_STAGES * CONSUMERS, ROWS // PACKED, PACKED, HEAD_DIM], q_desc.layout
    )
    k_ring = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES, BLOCK_TOKENS, HEAD_DIM], k_desc.layout
    )
    v_ring = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, BLOCK_TOKENS, HEAD_DIM], v_desc.layout
    )
    board_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    board = gl.allocate_shared_memory(gl.int32, [PLACES * FIELDS, 1], board_layout)
    posted = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(posted.index(i), count=1)
        mbarrier.init(taken.index(i), count=CONSUMERS + 1)
    for i in gl.static_range(QUERY_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    sync_group()

    # The first consumer is the program's own four warps; what the others leave of the registers
    # goes to the consumers.
    gl.warp_specialize(
        [
            (
                consume,
                (
                    out_ptr, board, posted, taken, q_ring, k_ring, v_ring, q_full, q_empty, k_full,
                    k_empty, v_full, v_empty, turn, 0, NUM_HEADS, GROUP_HEADS,
                    SCALE_LOG2, PACK_HEADS, PING_PONG,
                ),
            ),
            (
                consume,
                (
                    out_ptr, board, posted, taken, q_ring, k_ring, v_ring, q_full, q_empty, k_full,
                    k_empty, v_full, v_empty, turn, 1, NUM_HEADS, GROUP_HEADS,
                    SCALE_LOG2, PACK_HEADS, PING_PONG,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, block_table_ptr, table_stride, board, posted, taken,
                    q_ring, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    GROUP_HEADS, NUM_KV_HEADS, PAGE_SIZE, PACK_HEADS, FROM_ROWS,
                ),
            ),
            (
                plan,
                (
                    seq_rows_ptr, query_start_ptr, context_lens_ptr, counters_ptr, board, posted,
                    taken, num_seqs, num_blocks, HEADS, CONSUMERS * (ROWS // PACKED), BLOCK_TOKENS,
                    FROM_ROWS,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 32, 32],
    )  # fmt: skip


def describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of heads, of keys or of values to the bulk copy engine."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)


@triton.jit
def tile_page(pages_ptr, tile_start, stop, PAGE_SIZE: tl.constexpr):
    """Give the page id of a tile."""
    return tl.load(pages_ptr + tile_start // PAGE_SIZE, mask=tile_start < stop, other=0).to(
        tl.int64
    )


@triton.jit
def load_codes(
    k_cache_ptr,
    v_cache_ptr,
    page,
    tile_start,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Load a tile of a full page: codes, scales and zeros of keys, codes and words of values.

    Codes are [BLOCK_TOKENS, BLOCK_W] and [BLOCK_W, BLOCK_TOKENS]; scales and zeros of keys
    f16[BLOCK_W], of the first half of the features and of the second where a byte holds two; words
    of values [BLOCK_TOKENS].
    """
    HAS_PLANES: tl.constexpr = ROW_BYTES < HEAD_DIM
    byte = tl.arange(0, BLOCK_W)  # [BLOCK_W]
    inside = byte < ROW_BYTES  # [BLOCK_W]
    block = page * NUM_KV_HEADS + kv_head
    k_block_ptr = k_cache_ptr + block * (PAGE_SIZE * ROW_BYTES + HEAD_DIM * 4)
    v_block_ptr = v_cache_ptr + block * (PAGE_SIZE * (ROW_BYTES + (4 if HAS_PLANES else 2)))
    # The tile begins at a multiple of its size, which makes wide loads legal.
    slot = tl.multiple_of(tile_start % PAGE_SIZE, BLOCK_TOKENS) + tl.arange(0, BLOCK_TOKENS)
    k_ptrs = k_block_ptr + (slot[:, None] * ROW_BYTES + byte[None, :])
    v_ptrs = v_block_ptr + (byte[:, None] * PAGE_SIZE + slot[None, :])
    keys = tl.load(k_ptrs, mask=inside[None, :], other=0)  # [BLOCK_TOKENS, BLOCK_W]
    values = tl.load(v_ptrs, mask=inside[:, None], other=0)  # [BLOCK_W, BLOCK_TOKENS]
    scale_ptrs = (k_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.float16)) + byte
    scales = tl.load(scale_ptrs, mask=inside, other=0.0)  # [BLOCK_W]
    zeros = tl.load(scale_ptrs + HEAD_DIM, mask=inside, other=0.0)  # [BLOCK_W]
    second_scales, second_zeros = scales, zeros
    if HAS_PLANES:
        second_scales = tl.load(scale_ptrs + ROW_BYTES, mask=inside, other=0.0)  # [BLOCK_W]
        second_zeros = tl.load(scale_ptrs + HEAD_DIM + ROW_BYTES, mask=inside, other=0.0)
        value_word_ptrs = (v_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.int32))
    else:
        value_word_ptrs = (v_block_ptr + PAGE_SIZE * ROW_BYTES).to(tl.pointer_type(tl.float16))
    value_words = tl.load(value_word_ptrs + slot)  # [BLOCK_TOKENS]
    return keys, scales, zeros, second_scales, second_zeros, values, value_words


@triton.jit
def low_half(word):
    """Give the f16 in the low half of a word."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(word):
    """Give the f16 in the high half of a word."""
    return low_half(word >> 16)


@triton.jit
def to_f16(codes, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Give 1024 + code of int8, or the e4m3 number (over 256 without PTX), in f16."""
    if KV_FORMAT == "fp8":
        if USE_PTX:
            # The hardware's conversion is exact, and two numbers an instruction.
            return tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }""",
                "=r,=r,r",
                [codes],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True)
    elif USE_PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 magic;
            mov.b32 magic, 0x64646464;
            prmt.b32 $0, $2, magic, 0x4140;
            prmt.b32 $1, $2, magic, 0x4342;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def to_f16_planes(codes, USE_PTX: tl.constexpr):
    """Give 1024 + low nibble and 1024 + 16 * high nibble of each byte, in f16."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 $0, first, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, second, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $2, first, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 $3, second, 0x00F000F0, 0x64006400, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.uint16)
        low = ((wide & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
        return low, ((wide & 0xF0) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def to_keys(codes, scales, zeros, KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Give the keys of a tile in f16, [BLOCK_TOKENS, BLOCK_W], of one code a byte."""
    numbers = to_f16(codes, KV_FORMAT, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W]
    if KV_FORMAT == "fp8":
        # The hardware converts to numbers, other GPUs to numbers over 256, which the scales mean.
        if USE_PTX:
            scales = scales * (1.0 / 256.0)  # [BLOCK_W]
    else:
        numbers -= 1024.0  # [BLOCK_TOKENS, BLOCK_W]
    return numbers * scales[None, :] + zeros[None, :]


@triton.jit
def to_key_planes(codes, scales, zeros, second_scales, second_zeros, USE_PTX: tl.constexpr):
    """Give the keys of a tile of int4 in f16: the first half of their features, the second."""
    first, second = to_f16_planes(codes, USE_PTX)  # [BLOCK_TOKENS, BLOCK_W] each
    first = (first - 1024.0) * scales[None, :] + zeros[None, :]
    second = (second - 1024.0) * (second_scales * 0.0625)[None, :]
    return first, second + second_zeros[None, :]


@triton.jit
def weigh_values(
    acc, second_acc, least_sum, weights, rescale, values, words,
    KV_FORMAT: tl.constexpr, USE_PTX: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Add the values of a tile, by weights [rows, BLOCK_TOKENS], to sums [rows, BLOCK_W]."""
    acc = acc * rescale[:, None]  # [rows, BLOCK_W]
    if KV_FORMAT == "fp8":
        UNIT: tl.constexpr = LIFT / 256.0 if USE_PTX else LIFT
        scaled = (weights * (words.to(tl.float32) * UNIT)[None, :]).to(tl.float16)
        acc = tl.dot(scaled, tl.trans(to_f16(values, KV_FORMAT, USE_PTX)), acc)
    elif KV_FORMAT == "int8":
        # What the bits add to a code is taken back in the same tile: nothing large remains in the
        # sums, and it costs no instruction.
        scaled = (weights * (words.to(tl.float32) * LIFT)[None, :]).to(tl.float16)
        added = 1152.0 * tl.sum(scaled.to(tl.float32), 1)[:, None]  # [rows, 1]
        acc = tl.dot(scaled, tl.trans(to_f16(values, KV_FORMAT, USE_PTX)), acc - added)
    else:
        scale, least = low_half(words).to(tl.float32), high_half(words).to(tl.float32)
        least_sum = least_sum * rescale + tl.sum(weights * least[None, :], 1)  # [rows]
        scaled = (weights * (scale * LIFT)[None, :]).to(tl.float16)
        added = 1024.0 * tl.sum(scaled.to(tl.float32), 1)[:, None]  # [rows, 1]
        first, second = to_f16_planes(values, USE_PTX)  # [BLOCK_W, BLOCK_TOKENS] each
        second_acc = tl.dot(scaled, tl.trans(second), second_acc * rescale[:, None] - added)
        acc = tl.dot(scaled, tl.trans(first), acc - added)  # [rows, BLOCK_W]
    return acc, second_acc, least_sum


@triton.jit
def attend_own(
    acc,
    second_acc,
    best,
    total,
    q,
    second_q,
    queries,
    positions,
    k_ptr,
    v_ptr,
    tile_start,
    stop,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys and values that are no codes to the running softmax; MASKED: causal.

    A row sees the tokens up to `queries`; it stands at `positions` itself, counted like the tokens.
    """
    tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    dims = tl.arange(0, BLOCK_W)
    mask = (dims < WIDTH)[None, :]  # [1, BLOCK_W]
    if MASKED:
        mask = (tokens < stop)[:, None] & mask  # [BLOCK_TOKENS, BLOCK_W]
    offsets = tokens[:, None].to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_TOKENS, BLOCK_W]
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(q.dtype)  # [BLOCK_TOKENS, BLOCK_W]
    scores = tl.dot(q, tl.trans(k))  # [BLOCK_ROWS, BLOCK_TOKENS]
    if WIDTH < HEAD_DIM:
        second_k = tl.load(k_ptr + WIDTH + offsets, mask=mask, other=0.0).to(q.dtype)
        second_v = tl.load(v_ptr + WIDTH + offsets, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(second_q, tl.trans(second_k), scores)  # [BLOCK_ROWS, BLOCK_TOKENS]
    if MASKED:
        visible = tokens[None, :] <= queries[:, None]  # [BLOCK_ROWS, BLOCK_TOKENS]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
    # The scale joins the exponent as one multiply-add.
    new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
    rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
    weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])  # [BLOCK_ROWS, BLOCK_TOKENS]
    total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])  # [BLOCK_ROWS, BLOCK_W]
    if WIDTH < HEAD_DIM:
        second_acc = second_acc * rescale[:, None]  # [BLOCK_ROWS, BLOCK_W]
        second_acc = tl.dot(weights.to(v.dtype), second_v, second_acc)
    return acc, second_acc, new_best, total


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["table_stride", "num_seqs"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def attention_prefill_quantised(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_open_ptr,
    v_open_ptr,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    table_stride,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACK_HEADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    LEAVES_WHOLE: tl.constexpr,
):
    # Grid: axis 0 = KV head (PACK_HEADS) or query head, axis 1 = query block, last one first:
    # late blocks of a sequence see the most keys and should not be the ones that run alone.
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    GROUP_HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_ROWS // GROUP_HEADS if PACK_HEADS else BLOCK_ROWS
    # With int4 a tile of bytes is two planes of features: the first half of a head and the second.
    HAS_PLANES: tl.constexpr = KV_FORMAT == "int4"
    WIDTH: tl.constexpr = HEAD_DIM // 2 if HAS_PLANES else HEAD_DIM
    BLOCK_W: tl.constexpr = 32 if WIDTH < 32 else triton.next_power_of_2(WIDTH)
    SEARCH_WIDTH: tl.constexpr = 256
    # Scores are kept in units of log2: each exponential is then one exp2 of one multiply-add.
    SCALE_LOG2: tl.constexpr = SCALE * 1.4426950408889634
    # Scales of values are often too small for f16: a fixed factor goes in here and out at the end.
    LIFT: tl.constexpr = 1.0 if KV_FORMAT == "fp8" and not USE_PTX else 64.0

    # Sequence i owns the query blocks from first_blocks[i] on, which grow strictly with i: the
    # last one at or below `block` is ours. Counting takes one load where bisecting takes many.
    launch_start = tl.load(query_start_ptr)
    num_starts = 0
    for first in range(0, num_seqs, SEARCH_WIDTH):
        seqs = first + tl.arange(0, SEARCH_WIDTH)  # [SEARCH_WIDTH]
        starts = tl.load(query_start_ptr + seqs, mask=seqs < num_seqs, other=0)  # [SEARCH_WIDTH]
        first_blocks = (starts - launch_start) // BLOCK_Q + seqs  # [SEARCH_WIDTH]
        is_start = (first_blocks <= block) & (seqs < num_seqs)  # [SEARCH_WIDTH]
        num_starts += tl.sum(is_start.to(tl.int32), 0)
    seq = num_starts - 1
    start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - start
    first_query = (block - (start - launch_start) // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= num_queries:
        return
    table_row = tl.load(seq_rows_ptr + seq)
    context = tl.where(table_row < 0, 0, tl.load(context_lens_ptr + seq))
    # Sequences that begin in this step may have a kernel of their own.
    if LEAVES_WHOLE & (context == num_queries):
        return

    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_W)
    if PACK_HEADS:
        kv_head = head
        queries = first_query + rows // GROUP_HEADS  # [BLOCK_ROWS]
        heads = kv_head * GROUP_HEADS + rows % GROUP_HEADS  # [BLOCK_ROWS]
        row_mask = (queries < num_queries) & (rows < BLOCK_Q * GROUP_HEADS)  # [BLOCK_ROWS]
    else:
        kv_head = head // GROUP_HEADS
        queries = first_query + rows  # [BLOCK_ROWS]
        heads = head
        row_mask = queries < num_queries  # [BLOCK_ROWS]
    mask = row_mask[:, None] & (dims < WIDTH)[None, :]  # [BLOCK_ROWS, BLOCK_W]
    row_offsets = (queries * NUM_HEADS + heads) * HEAD_DIM  # [BLOCK_ROWS]
    offsets = row_offsets[:, None] + dims[None, :]  # [BLOCK_ROWS, BLOCK_W]
    start_offset = start.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    q = tl.load(q_ptr + start_offset + offsets, mask=mask, other=0.0)  # [BLOCK_ROWS, BLOCK_W]

    if HAS_PLANES:
        second_q = tl.load(q_ptr + start_offset + WIDTH + offsets, mask=mask, other=0.0)
    else:
        second_q = q

    # Query j stands at position prior + j and sees the keys up to and including its own. Padding
    # has no context: no keys, earlier or own.
    prior = tl.maximum(context - num_queries, 0)
    positions = prior + queries  # [BLOCK_ROWS]
    stop = tl.where(context > 0, tl.minimum(first_query + BLOCK_Q, num_queries), 0)
    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)  # [BLOCK_ROWS]
    total = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    least_sum = tl.zeros((BLOCK_ROWS,), tl.float32)  # [BLOCK_ROWS]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    second_acc = tl.zeros((BLOCK_ROWS, BLOCK_W), tl.float32)  # [BLOCK_ROWS, BLOCK_W]
    # Pages that this step has filled hold what came before it too.
    full_stop = tl.minimum(prior, context // PAGE_SIZE * PAGE_SIZE)
    if full_stop > 0:
        pages_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride
        page = tile_page(pages_ptr, 0, full_stop, PAGE_SIZE)
        # Every row sees every earlier key.
        for tile_start in range(0, full_stop, BLOCK_TOKENS):
            keys, scales, zeros, second_scales, second_zeros, values, value_words = load_codes(
                k_cache_ptr, v_cache_ptr, page, tile_start, kv_head,
                NUM_KV_HEADS, HEAD_DIM, WIDTH, PAGE_SIZE, BLOCK_TOKENS, BLOCK_W,
            )  # fmt: skip
            page = tile_page(pages_ptr, tile_start + BLOCK_TOKENS, full_stop, PAGE_SIZE)
            if HAS_PLANES:
                earlier_k, second_k = to_key_planes(
                    keys, scales, zeros, second_scales, second_zeros, USE_PTX
                )
                scores = tl.dot(q.to(tl.float16), tl.trans(earlier_k))
                scores = tl.dot(second_q.to(tl.float16), tl.trans(second_k), scores)
            else:
                earlier_k = to_keys(keys, scales, zeros, KV_FORMAT, USE_PTX)
                scores = tl.dot(q.to(tl.float16), tl.trans(earlier_k))
            tokens = tile_start + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
            # The step's own tokens may lie in the last of these pages.
            live = tokens < prior  # [BLOCK_TOKENS]
            scores = tl.where(live[None, :], scores, float("-inf"))  # [BLOCK_ROWS, BLOCK_TOKENS]
            new_best = tl.maximum(best, tl.max(scores, 1) * SCALE_LOG2)  # [BLOCK_ROWS]
            rescale = tl.exp2(best - new_best)  # [BLOCK_ROWS]
            weights = tl.exp2(scores * SCALE_LOG2 - new_best[:, None])
            total = total * rescale + tl.sum(weights, 1)  # [BLOCK_ROWS]
            best = new_best  # [BLOCK_ROWS]
            acc, second_acc, least_sum = weigh_values(
                acc, second_acc, least_sum, weights, rescale, values, value_words,
                KV_FORMAT, USE_PTX, LIFT,
            )  # fmt: skip
        acc = acc * (1.0 / LIFT) + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]
        second_acc = second_acc * (0.0625 / LIFT) + least_sum[:, None]  # [BLOCK_ROWS, BLOCK_W]

    # Earlier tokens in the open page: every row sees them all.
    open_offset = tl.maximum(table_row, 0).to(tl.int64) * PAGE_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    open_offset += kv_head * HEAD_DIM
    num_open = prior - full_stop
    newest = tl.zeros((BLOCK_ROWS,), tl.int32) + num_open - 1  # [BLOCK_ROWS]
    for tile_start in range(0, num_open, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, newest, num_open + queries,
            k_open_ptr + open_offset, v_open_ptr + open_offset, tile_start, num_open, NUM_KV_HEADS,
            HEAD_DIM, WIDTH, SCALE_LOG2, BLOCK_TOKENS, BLOCK_W, True,
        )  # fmt: skip

    own_offset = start.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    # Every row sees every key of the full tiles: no mask.
    full_stop = tl.minimum((first_query + 1) // BLOCK_TOKENS * BLOCK_TOKENS, stop)
    first_own = 0
    for tile_start in range(first_own, full_stop, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, queries, queries, k_ptr + own_offset,
            v_ptr + own_offset, tile_start, stop, NUM_KV_HEADS, HEAD_DIM, WIDTH, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_W, False,
        )  # fmt: skip
    for tile_start in range(full_stop, stop, BLOCK_TOKENS):
        acc, second_acc, best, total = attend_own(
            acc, second_acc, best, total, q, second_q, queries, queries, k_ptr + own_offset,
            v_ptr + own_offset, tile_start, stop, NUM_KV_HEADS, HEAD_DIM, WIDTH, SCALE_LOG2,
            BLOCK_TOKENS, BLOCK_W, True,
        )  # fmt: skip

    # A padding sequence read nothing: its zeros are divided by one.
    divisor = tl.where(total > 0.0, total, 1.0)[:, None]  # [BLOCK_ROWS, 1]
    out_ptrs = out_ptr + start_offset + offsets  # [BLOCK_ROWS, BLOCK_W]
    tl.store(out_ptrs, (acc / divisor).to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_PLANES:
        second_out = (second_acc / divisor).to(out_ptr.dtype.element_ty)  # [BLOCK_ROWS, BLOCK_W]
        tl.store(out_ptrs + WIDTH, second_out, mask=mask)


# The step's metadata may be slices: their alignment must not select another compiled kernel.
@gluon.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_blocks"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def attend_whole_prompts(
    q_desc,
    k_desc,
    v_desc,
    block_table_ptr,
    seq_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    counters_ptr,
    table_stride,
    num_seqs,
    num_blocks,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SCALE: gl.constexpr,
    OWN_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    PACK_HEADS: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Attend from blocks of 128 rows of sequences that begin in the step, until all are taken."""
    # Grid: axis 0 programs; each takes the next block when it has room for one.
    attend_by_warps(
        q_desc, k_desc, v_desc, block_table_ptr, seq_rows_ptr, query_start_ptr, context_lens_ptr,
        out_ptr, counters_ptr, table_stride, num_seqs, num_blocks, NUM_HEADS, NUM_KV_HEADS,
        HEAD_DIM, PAGE_SIZE, SCALE, OWN_TOKENS, STAGES, QUERY_STAGES, PACK_HEADS, PING_PONG,
        True,
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_open: torch.Tensor,
    v_open: torch.Tensor,
    block_table: torch.Tensor,
    seq_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Write the attention output of `num_seqs` sequences of at most `num_tokens` tokens in all."""
    num_heads, num_kv_heads = SHAPE["NUM_HEADS"], SHAPE["NUM_KV_HEADS"]
    head_dim, group_heads = SHAPE["HEAD_DIM"], num_heads // num_kv_heads
    pack_heads = SCHEDULE["PACK_HEADS"]
    packed, heads = (group_heads, num_kv_heads) if pack_heads else (1, num_heads)
    block_q = SCHEDULE["BLOCK_ROWS"] // packed
    attention_prefill_quantised[(heads, num_tokens // block_q + num_seqs)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        k_open,
        v_open,
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        block_table.stride(0),
        num_seqs,
        **SHAPE,
        BLOCK_ROWS=SCHEDULE["BLOCK_ROWS"],
        BLOCK_TOKENS=SCHEDULE["BLOCK_TOKENS"],
        PACK_HEADS=pack_heads,
        USE_PTX=SCHEDULE["USE_PTX"],
        LEAVES_WHOLE=True,
        num_warps=SCHEDULE["num_warps"],
        num_stages=SCHEDULE["num_stages"],
        enable_fp_fusion=True,
    )
    rows = 64 // packed  # of each of two consumers
    num_blocks = num_tokens // (2 * rows) + num_seqs
    tile = [SCHEDULE["OWN_TOKENS"], head_dim]
    # Descriptors go with the launch: none has to be kept.
    attend_whole_prompts[(min(num_blocks * heads, SCHEDULE["NUM_PROGRAMS"]),)](
        describe(q.view(-1, num_heads, head_dim), [rows, packed, head_dim]),
        describe(k.view(-1, num_kv_heads * head_dim), tile),
        describe(v.view(-1, num_kv_heads * head_dim), tile),
        block_table,
        seq_rows,
        query_start,
        context_lens,
        out,
        counters,
        block_table.stride(0),
        num_seqs,
        num_blocks,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=SHAPE["PAGE_SIZE"],
        SCALE=SHAPE["SCALE"],
        OWN_TOKENS=SCHEDULE["OWN_TOKENS"],
        STAGES=SCHEDULE["STAGES"],
        QUERY_STAGES=SCHEDULE["QUERY_STAGES"],
        PACK_HEADS=pack_heads,
        PING_PONG=SCHEDULE["PING_PONG"],
        num_warps=4,
        enable_fp_fusion=True,
    )
