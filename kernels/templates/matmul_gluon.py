"""Multiply many rows by a weight on Hopper's tensor cores: y = x @ w.T, specialised warps.

One warp of a program fetches tiles with the bulk copy engine (TMA) into a ring of STAGES; two
groups of four warps, the consumers, multiply them. Both share a tile of 2 * BLOCK_M tokens, or
(PING_PONG) each has tiles of BLOCK_M tokens of its own and stores one while the other multiplies.
With USE_PDL the ring's first tiles of w are on their way before the producer of x is waited for.
Written in Gluon, the part of Triton that leaves layouts and barriers to the author.

Shapes (T tokens, N rows of the weight, K features in, N_OUT features out):
  x  [T, K]: contiguous, 16-bit, rows a multiple of 16 bytes
  w  [N, K]: contiguous, 16-bit, rows a multiple of 16 bytes
  y  [T, N_OUT]: contiguous, rows a multiple of 16 bytes

Grid: programs that stay, one a multiprocessor. Tiles go GROUP_M tiles of tokens at a time, so that
tiles that run together share rows of x and w in L2.
Bound by tensor cores: 2 * T * N * K operations. Needs compute capability 9.0, no other.
"""

import torch
import triton
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

from treadle.kernels.templates.parts.dependent_launch import let_dependents_begin, wait_for_producer

SHAPE = dict(N=4096, K=4096, N_OUT=4096)
SCHEDULE = dict(
    BLOCK_M=64,
    BLOCK_N=256,
    BLOCK_K=64,
    STAGES=3,
    GROUP_M=8,
    PING_PONG=False,
    NUM_PROGRAMS=132,
    USE_PDL=False,
    num_warps=4,
)

# Three names that changed between Triton 3.6 and 3.9.
fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
sync_group = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def EPILOGUE(acc, first_token, first_feature):
    """Turn results f32[BLOCK_M, BLOCK_N] into outputs."""
    return acc


@gluon.jit
def tile_place(tile, num_m, NUM_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Give the block of tokens and the block of features of a tile."""
    first_m = tile // (GROUP_M * NUM_N) * GROUP_M
    group_m = gl.minimum(num_m - first_m, GROUP_M)
    return first_m + tile % (GROUP_M * NUM_N) % group_m, tile % (GROUP_M * NUM_N) // group_m


@gluon.jit
def produce(
    x_desc,
    w_desc,
    x_ring,
    w_ring,
    full,
    empty,
    num_m,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP_M: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Fetch the tiles of x and w in the order in which the consumers want them."""
    STAGES: gl.constexpr = w_ring.shape[0]
    SHARES: gl.constexpr = x_ring.shape[0] // STAGES
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    NUM_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STAGE_BYTES: gl.constexpr = (SHARES * BLOCK_M + BLOCK_N) * BLOCK_K * 2
    NUM_K: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EARLY: gl.constexpr = (STAGES if STAGES < NUM_K else NUM_K) if USE_PDL else 0
    if USE_PDL:
        _, pid_n = tile_place(gl.program_id(0), num_m, NUM_N, GROUP_M)
        for k in range(EARLY):
            mbarrier.expect(full.index(k), STAGE_BYTES)
            fetch_tile(w_desc, [pid_n * BLOCK_N, k * BLOCK_K], full.index(k), w_ring.index(k))
        wait_for_producer()
        let_dependents_begin()
    step = 0
    for tile in range(gl.program_id(0), num_m * NUM_N, gl.num_programs(0)):
        pid_m, pid_n = tile_place(tile, num_m, NUM_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            more = step >= EARLY
            mbarrier.expect(ready, STAGE_BYTES, pred=more)
            fetch_tile(w_desc, [pid_n * BLOCK_N, k], ready, w_ring.index(slot), pred=more)
            for share in gl.static_range(SHARES):
                row = (pid_m * SHARES + share) * BLOCK_M
                fetch_tile(x_desc, [row, k], ready, x_ring.index(slot * SHARES + share))
            step += 1


@gluon.jit
def consume(
    y_desc,
    x_ring,
    w_ring,
    y_tiles,
    full,
    empty,
    turn,
    num_tokens,
    num_m,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    N_OUT: gl.constexpr,
    GROUP_M: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Multiply and store this consumer's tiles, or its share of every tile."""
    STAGES: gl.constexpr = w_ring.shape[0]
    SHARES: gl.constexpr = x_ring.shape[0] // STAGES
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    NUM_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_K: gl.constexpr = (K + w_ring.shape[2] - 1) // w_ring.shape[2]
    OUT_N: gl.constexpr = BLOCK_N * N_OUT // N
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    share: gl.constexpr = 0 if PING_PONG else CONSUMER
    y_tile = y_tiles.index(CONSUMER)
    first, stride = gl.program_id(0), gl.num_programs(0)
    step = 0
    if PING_PONG:
        first += CONSUMER * stride
        stride = stride * 2
        step += CONSUMER * NUM_K
    turns = 0
    for tile in range(first, num_m * NUM_N, stride):
        if PING_PONG:
            # Take turns: nobody waits for a stage while the ring is a whole turn behind.
            mbarrier.wait(turn.index(CONSUMER), (turns & 1) ^ (1 - CONSUMER))
            turns += 1
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=acc_layout)  # [BLOCK_M, BLOCK_N]
        for k in range(NUM_K):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            x = x_ring.index(slot * SHARES + share)  # [BLOCK_M, BLOCK_K]
            w = w_ring.index(slot).permute((1, 0))  # [BLOCK_K, BLOCK_N]
            acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
            # The product before this one is finished: its stage may be filled again.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            sync_group()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if PING_PONG:
            mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        sync_group()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if PING_PONG:
            step += NUM_K

        pid_m, pid_n = tile_place(tile, num_m, NUM_N, GROUP_M)
        first_token = (pid_m * SHARES + share) * BLOCK_M
        y = EPILOGUE(acc, first_token, pid_n * BLOCK_N)
        # Registers, shared memory, y: the store before this one has left `y_tile` by then.
        tma.store_wait(pendings=0)
        sync_group()
        y_tile.store(y.to(y_desc.dtype))
        fence_async_shared()
        sync_group()
        store_tile(y_desc, [first_token, pid_n * OUT_N], y_tile)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_tokens"])
def matmul_gluon(
    x_desc,
    w_desc,
    y_desc,
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    N_OUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    PING_PONG: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute every NUM_PROGRAMS-th tile with one producer and two consumers."""
    # Grid: axis 0 programs; each takes every NUM_PROGRAMS-th tile.
    SHARES: gl.constexpr = 1 if PING_PONG else 2
    OUT_N: gl.constexpr = BLOCK_N * N_OUT // N
    num_m = (num_tokens + SHARES * BLOCK_M - 1) // (SHARES * BLOCK_M)
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * SHARES, BLOCK_M, BLOCK_K], x_desc.layout
    )
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, BLOCK_M, OUT_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=SHARES)
    fence_async_shared()
    sync_group()

    # The first consumer is the program's own four warps; the producer's registers go to both.
    gl.warp_specialize(
        [
            (
                consume,
                (
                    y_desc,
                    x_ring,
                    w_ring,
                    y_tiles,
                    full,
                    empty,
                    turn,
                    num_tokens,
                    num_m,
                    0,
                    N,
                    K,
                    N_OUT,
                    GROUP_M,
                    PING_PONG,
                ),
            ),
            (
                consume,
                (
                    y_desc,
                    x_ring,
                    w_ring,
                    y_tiles,
                    full,
                    empty,
                    turn,
                    num_tokens,
                    num_m,
                    1,
                    N,
                    K,
                    N_OUT,
                    GROUP_M,
                    PING_PONG,
                ),
            ),
            (
                produce,
                (x_desc, w_desc, x_ring, w_ring, full, empty, num_m, N, K, GROUP_M, USE_PDL),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of a matrix to the bulk copy engine."""
    bits = 8 * tensor.element_size()
    swizzle = next(size for size in (128, 64, 32) if block[1] * bits // 8 % size == 0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows. Descriptors go with the launch: none has to be kept."""
    block_m, block_n = SCHEDULE["BLOCK_M"], SCHEDULE["BLOCK_N"]
    num_m = triton.cdiv(num_tokens, block_m * (1 if SCHEDULE["PING_PONG"] else 2))
    num_n = triton.cdiv(SHAPE["N"], block_n)
    out_n = block_n * SHAPE["N_OUT"] // SHAPE["N"]
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul_gluon[(min(num_m * num_n, SCHEDULE["NUM_PROGRAMS"]),)](
        describe(x, [block_m, SCHEDULE["BLOCK_K"]]),
        describe(w, [block_n, SCHEDULE["BLOCK_K"]]),
        describe(y[:num_tokens], [block_m, out_n]),
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
