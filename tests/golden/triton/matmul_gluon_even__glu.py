"""`matmul_gluon_even__glu`: a linear of a test.

Covers:
  product = linear(x, weight)

Schedule: BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, STAGES=5, NUM_PROGRAMS=132, USE_PDL=False,
  num_warps=4
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

SHAPE = dict(N=6144, K=4096, N_OUT=3072)
SCHEDULE = dict(
    BLOCK_M=64,
    BLOCK_N=128,
    BLOCK_K=64,
    STAGES=5,
    NUM_PROGRAMS=132,
    USE_PDL=False,
    num_warps=4,
)

# Three names that changed between Triton 3.6 and 3.9.
fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
sync_group = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def wait_for_producer():
    """Wait until the kernels before this one have ended and their results can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_dependents_begin():
    """Let the next kernel's programs take their places as this one's leave."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def hand_over(arrivals_ptr):
    """Count this thread: what it has written can be read by who has waited for all of them."""
    gl.inline_asm_elementwise(
        "red.release.gpu.global.add.s32 [$1], 1; // $0",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_arrivals(arrivals_ptr):
    """Read how many threads have handed their part over."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_over(arrivals_ptr):
    """Wait for all threads of another group of four warps, and set their count to 0 again."""
    arrived = count_arrivals(arrivals_ptr)
    while arrived < 128:
        arrived = count_arrivals(arrivals_ptr)
    sync_group()  # everybody has seen it
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.s32 [$1], 0; // $0",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def first_unit(member, members, UNITS: gl.constexpr):
    """Give where a program's share of the UNITS blocks of w begins, and the one before it ends."""
    return member * UNITS // members


@gluon.jit
def part_ptrs(partials_ptr, part, acc):
    """Give where the results of a part lie: f32[BLOCK_M, BLOCK_N], row by row."""
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    first = partials_ptr + part * (acc.shape[0] * acc.shape[1])
    return first + rows[:, None] * acc.shape[1] + columns[None, :]


@gluon.jit
def produce(
    x_desc, w_desc, x_ring, w_ring, full, empty, pid_m, begin, end, NUM_K: gl.constexpr, USE_PDL
):
    """Fetch this share's blocks of w, and the blocks of x beside them."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    STAGE_BYTES: gl.constexpr = (2 * BLOCK_M + BLOCK_N) * BLOCK_K * 2
    early = 0
    if USE_PDL:
        early = gl.minimum(STAGES, end - begin)
        for step in range(early):
            unit = begin + step
            place = [unit // NUM_K * BLOCK_N, unit % NUM_K * BLOCK_K]
            mbarrier.expect(full.index(step), STAGE_BYTES)
            fetch_tile(w_desc, place, full.index(step), w_ring.index(step))
        wait_for_producer()
        let_dependents_begin()
    for step in range(end - begin):
        unit = begin + step
        k = unit % NUM_K * BLOCK_K
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        ready = full.index(slot)
        more = step >= early
        mbarrier.expect(ready, STAGE_BYTES, pred=more)
        fetch_tile(w_desc, [unit // NUM_K * BLOCK_N, k], ready, w_ring.index(slot), pred=more)
        for share in gl.static_range(2):
            row = (pid_m * 2 + share) * BLOCK_M
            fetch_tile(x_desc, [row, k], ready, x_ring.index(slot * 2 + share))


@gluon.jit
def consume(
    y_desc,
    partials_ptr,
    counters_ptr,
    x_ring,
    w_ring,
    y_tiles,
    full,
    empty,
    num_tokens,
    pid_m,
    num_m,
    member,
    members,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    N_OUT: gl.constexpr,
    UNITS: gl.constexpr,
    NUM_K: gl.constexpr,
):
    """Multiply this consumer's rows of the share; store tiles, or leave a part of one."""
    STAGES: gl.constexpr = w_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    OUT_N: gl.constexpr = BLOCK_N * N_OUT // N
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    y_tile = y_tiles.index(CONSUMER)
    unit = first_unit(member, members, UNITS)
    end = first_unit(member + 1, members, UNITS)
    step = 0
    while unit < end:
        pid_n, first_k = unit // NUM_K, unit % NUM_K
        num_k = gl.minimum(NUM_K - first_k, end - unit)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=acc_layout)  # [BLOCK_M, BLOCK_N]
        for k in range(num_k):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            x = x_ring.index(slot * 2 + CONSUMER)  # [BLOCK_M, BLOCK_K]
            w = w_ring.index(slot).permute((1, 0))  # [BLOCK_K, BLOCK_N]
            acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
            # The product before this one is finished: its stage may be filled again.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            sync_group()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        sync_group()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        unit += num_k

        if first_k > 0:
            part = gl.program_id(0) * 2 + CONSUMER
            gl.store(part_ptrs(partials_ptr, part, acc), acc)
            hand_over(counters_ptr + part)
        else:
            other, done = member, num_k
            while done < NUM_K:
                other += 1
                others_end = first_unit(other + 1, members, UNITS)
                part = (other * num_m + pid_m) * 2 + CONSUMER
                take_over(counters_ptr + part)
                acc += gl.load(part_ptrs(partials_ptr, part, acc))
                done = gl.minimum(others_end - pid_n * NUM_K, NUM_K)
            first_token = (pid_m * 2 + CONSUMER) * BLOCK_M
            # product = linear(x, weight)
            # gated = glu(product, act='silu', interleave=8)
            pairs = gl.reshape(acc, (BLOCK_M, BLOCK_N // 16, 2, 8))
            gate, up = gl.split(gl.permute(pairs, (0, 1, 3, 2)))
            gate = gate / (1.0 + gl.exp(-gate))
            y = gl.reshape(gate * up, (BLOCK_M, BLOCK_N // 2))  # [BLOCK_M, BLOCK_N // 2]
            # Registers, shared memory, y: the store before this one has left `y_tile` by then.
            tma.store_wait(pendings=0)
            sync_group()
            y_tile.store(y.to(y_desc.dtype))
            fence_async_shared()
            sync_group()
            store_tile(y_desc, [first_token, pid_n * OUT_N], y_tile)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_tokens"])
def matmul_gluon_even__glu(
    x_desc,
    w_desc,
    y_desc,
    partials_ptr,
    counters_ptr,
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    N_OUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute an even share of the blocks with one producer and two consumers."""
    # Grid: axis 0 programs: the members of each block of tokens, the blocks in turn.
    OUT_N: gl.constexpr = BLOCK_N * N_OUT // N
    NUM_K: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNITS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * NUM_K
    num_m = (num_tokens + 2 * BLOCK_M - 1) // (2 * BLOCK_M)
    members = gl.num_programs(0) // num_m
    pid_m, member = gl.program_id(0) % num_m, gl.program_id(0) // num_m
    begin = first_unit(member, members, UNITS)
    end = first_unit(member + 1, members, UNITS)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, BLOCK_M, OUT_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    sync_group()

    # The first consumer is the program's own four warps; the producer's registers go to both.
    gl.warp_specialize(
        [
            (
                consume,
                (
                    y_desc,
                    partials_ptr,
                    counters_ptr,
                    x_ring,
                    w_ring,
                    y_tiles,
                    full,
                    empty,
                    num_tokens,
                    pid_m,
                    num_m,
                    member,
                    members,
                    0,
                    N,
                    N_OUT,
                    UNITS,
                    NUM_K,
                ),
            ),
            (
                consume,
                (
                    y_desc,
                    partials_ptr,
                    counters_ptr,
                    x_ring,
                    w_ring,
                    y_tiles,
                    full,
                    empty,
                    num_tokens,
                    pid_m,
                    num_m,
                    member,
                    members,
                    1,
                    N,
                    N_OUT,
                    UNITS,
                    NUM_K,
                ),
            ),
            (
                produce,
                (
                    x_desc,
                    w_desc,
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    pid_m,
                    begin,
                    end,
                    NUM_K,
                    USE_PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def workspace_sizes(num_tokens: int) -> tuple[int, int]:
    """Give the elements of `partials` (f32) and of `counters` (i32, zero before and after)."""
    tiles = 2 * SCHEDULE["NUM_PROGRAMS"]
    return tiles * SCHEDULE["BLOCK_M"] * SCHEDULE["BLOCK_N"], tiles


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
    partials: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows. Descriptors go with the launch: none has to be kept."""
    block_m, block_n = SCHEDULE["BLOCK_M"], SCHEDULE["BLOCK_N"]
    num_m = triton.cdiv(num_tokens, 2 * block_m)
    num_k = triton.cdiv(SHAPE["K"], SCHEDULE["BLOCK_K"])
    units = triton.cdiv(SHAPE["N"], block_n) * num_k
    out_n = block_n * SHAPE["N_OUT"] // SHAPE["N"]
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul_gluon_even__glu[(min(SCHEDULE["NUM_PROGRAMS"] // num_m, units) * num_m,)](
        describe(x, [block_m, SCHEDULE["BLOCK_K"]]),
        describe(w, [block_n, SCHEDULE["BLOCK_K"]]),
        describe(y[:num_tokens], [block_m, out_n]),
        partials,
        counters,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
