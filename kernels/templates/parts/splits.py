"""Add up what programs found that share the context of one sequence (flash decoding)."""

import triton
import triton.language as tl


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
