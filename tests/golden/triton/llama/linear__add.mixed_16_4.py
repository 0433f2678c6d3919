"""`linear__add`: multiply each row by the transposed weight and add the bias; then Add two tensors
of one shape: the residual connection.

Covers:
  down: bf16[B, 2048] = linear(gated, @down; out_dtype='')
  after_mlp: bf16[B, 2048] = add(after_attention, down)

Must move 33,554,432 bytes and 24,576 per token; must compute 33,556,480 operations per token.

Schedule: BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, SPLIT_K=8, PREFETCH_TILES=0, USE_PDL=False,
  num_warps=4, num_stages=4
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(N=2048, K=8192, N_OUT=2048)
SCHEDULE = dict(
    BLOCK_M=16,
    BLOCK_N=64,
    BLOCK_K=128,
    SPLIT_K=8,
    PREFETCH_TILES=0,
    USE_PDL=False,
    num_warps=4,
    num_stages=4,
)


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE


@triton.jit
def prefetch(pointers):
    """Ask for the lines that hold these addresses to be brought into L2. NVIDIA GPUs only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tiles(
    w_ptr,
    first_row,
    first,
    stop,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
):
    """Ask for the first tiles of a part of w, a line of 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    NUM_LINES: tl.constexpr = PREFETCH_TILES * BLOCK_K // LINE if BLOCK_K > LINE else PREFETCH_TILES
    row = tl.minimum(first_row + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)  # [BLOCK_N]
    k = tl.minimum(first + tl.arange(0, NUM_LINES) * LINE, stop - 1)  # [NUM_LINES]
    prefetch(w_ptr + row[:, None] * K + k[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def linear__add(
    x_ptr,
    w_ptr,
    residual_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute one part of a tile of BLOCK_N features by BLOCK_M tokens."""
    # Grid: axis 0 blocks of tokens, axis 1 blocks of features, axis 2 parts of K.
    PART_K: tl.constexpr = triton.cdiv(triton.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    part = tl.program_id(2)
    token = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]  # [1, BLOCK_M]
    feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    w_tile_ptr = w_ptr + (pid_n * BLOCK_N).to(tl.int64) * K
    w_ptrs = w_tile_ptr + tl.arange(0, BLOCK_N)[:, None] * K + lane[None, :]  # [BLOCK_N, BLOCK_K]
    x_ptrs = x_ptr + token * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
    row_mask = below(feature, N, BLOCK_N)  # [BLOCK_N, 1]
    x_mask = token < num_tokens  # [1, BLOCK_M]

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # [BLOCK_N, BLOCK_M]
    first = part * PART_K
    stop = tl.minimum(first + PART_K, K)
    if USE_PDL and PREFETCH_TILES > 0:
        # The first tiles of w depend on nothing: they are on their way into L2 before the wait for
        # the producer of x, and the loop below finds them there.
        prefetch_tiles(w_ptr, pid_n * BLOCK_N, first, stop, N, K, BLOCK_N, BLOCK_K, PREFETCH_TILES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    elif USE_PDL:
        # The first tile of w depends on nothing: fetch it before waiting for the producer of x.
        k_mask = below(first + lane, K, BLOCK_K * SPLIT_K)  # [BLOCK_K]
        w_mask = row_mask & k_mask[None, :]  # [BLOCK_N, BLOCK_K]
        w = tl.load(w_ptrs + first, mask=w_mask, other=0.0, eviction_policy="evict_first")
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(x_ptrs + first, mask=x_mask & k_mask[:, None], other=0.0)
        acc = tl.dot(w, x, acc)  # [BLOCK_N, BLOCK_M]
        first += BLOCK_K
    for start in range(first, stop, BLOCK_K):
        k_mask = below(start + lane, K, BLOCK_K)  # [BLOCK_K]
        w_mask = row_mask & k_mask[None, :]  # [BLOCK_N, BLOCK_K]
        w = tl.load(w_ptrs + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + start, mask=x_mask & k_mask[:, None], other=0.0)
        acc = tl.dot(w, x, acc)  # [BLOCK_N, BLOCK_M]

    arrived = SPLIT_K - 1
    if SPLIT_K > 1:
        tile = pid_n * tl.num_programs(0) + pid_m
        num_tiles = tl.num_programs(0) * tl.num_programs(1)
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tile_ptrs = partials_ptr + tile * (BLOCK_N * BLOCK_M) + cell  # [BLOCK_N, BLOCK_M]
        part_size = num_tiles * (BLOCK_N * BLOCK_M)
        tl.store(tile_ptrs + part * part_size, acc)
        # All threads' stores come before the count that announces them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT_K - 1:
        if SPLIT_K > 1:
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # [BLOCK_N, BLOCK_M]
            for other in range(SPLIT_K):
                # Other programs wrote these: `.cg` reads L2, not this multiprocessor's own cache.
                acc += tl.load(tile_ptrs + other * part_size, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
        # down = linear(gated, down)
        # after_mlp = add(after_attention, down)
        inside = (token < num_tokens) & (feature < N_OUT)
        residual_ptrs = residual_ptr + token.to(tl.int64) * N_OUT + feature
        residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
        y = acc + residual
        column = feature
        y = y.to(y_ptr.dtype.element_ty)
        mask = (token < num_tokens) & (column < N_OUT)
        tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=mask)


def workspace_sizes(num_tokens: int) -> tuple[int, int]:
    """Give the elements that `partials` and `counters` need for that many tokens."""
    if SCHEDULE["SPLIT_K"] == 1:
        return 0, 0
    num_m = triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"])
    num_tiles = num_m * triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"])
    tile_size = SCHEDULE["BLOCK_M"] * SCHEDULE["BLOCK_N"]
    return SCHEDULE["SPLIT_K"] * num_tiles * tile_size, num_tiles


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor,
    y: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows."""
    grid = (
        triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"]),
        triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]),
        SCHEDULE["SPLIT_K"],
    )
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    linear__add[grid](
        x,
        w,
        residual,
        y,
        partials,
        counters,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
