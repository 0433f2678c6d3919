"""Multiply 2 to 128 rows by a weight that the bulk copy engine (TMA) fetches: y = x @ w.T.

As `matmul_skinny`, the weight as the left operand, but one thread asks for whole tiles instead of
every thread for its part: fewer instructions, no masks. Needs compute capability 9.0 or later.

Shapes (T tokens, N rows of the weight, K features in, N_OUT features out):
  x         [T, K]: contiguous, rows a multiple of 16 bytes
  w         [N, K]: contiguous, rows a multiple of 16 bytes
  y         [T, N_OUT]: contiguous
  partials  f32, at least `workspace_sizes(T)[0]` elements of scratch
  counters  i32, at least `workspace_sizes(T)[1]` elements, zero before and after every launch

Grid: (block of BLOCK_M tokens, block of BLOCK_N features, part of K). With SPLIT_K parts, the last
program to finish a tile adds the parts in their order, so the result does not depend on timing.
Bound by reading w once; SPLIT_K fills the GPU where N gives too few programs.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from treadle.kernels.templates.parts.prefetch import prefetch_tiles

SHAPE = dict(N=4096, K=4096, N_OUT=4096)
SCHEDULE = dict(
    BLOCK_M=16,
    BLOCK_N=64,
    BLOCK_K=128,
    SPLIT_K=1,
    PREFETCH_TILES=0,
    USE_PDL=False,
    num_warps=4,
    num_stages=4,
)


@triton.jit
def EPILOGUE(acc, token, pid_n, BLOCK_N: tl.constexpr):
    """Turn results f32[BLOCK_N, BLOCK_M] into outputs, and give the columns of y they belong to."""
    return acc, pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def matmul_skinny_tma(
    x_desc,
    w_desc,
    w_ptr,
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

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # [BLOCK_N, BLOCK_M]
    first = part * PART_K
    stop = tl.minimum(first + PART_K, K)
    # What lies outside of x and w arrives as zeros.
    if USE_PDL and PREFETCH_TILES > 0:
        # The first tiles of w depend on nothing: they are on their way into L2 before the wait for
        # the producer of x, and the loop below finds them there.
        prefetch_tiles(w_ptr, pid_n * BLOCK_N, first, stop, N, K, BLOCK_N, BLOCK_K, PREFETCH_TILES)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    elif USE_PDL:
        # The first tile of w depends on nothing: fetch it before waiting for the producer of x.
        w = w_desc.load([pid_n * BLOCK_N, first])  # [BLOCK_N, BLOCK_K]
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        x = x_desc.load([pid_m * BLOCK_M, first])  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(w, x.T, acc)  # [BLOCK_N, BLOCK_M]
        first += BLOCK_K
    for start in range(first, stop, BLOCK_K):
        w = w_desc.load([pid_n * BLOCK_N, start])  # [BLOCK_N, BLOCK_K]
        x = x_desc.load([pid_m * BLOCK_M, start])  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(w, x.T, acc)  # [BLOCK_N, BLOCK_M]

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
        y, column = EPILOGUE(acc, token, pid_n, BLOCK_N)
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
    y: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows. Descriptors go with the launch: none has to be kept."""
    grid = (
        triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"]),
        triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"]),
        SCHEDULE["SPLIT_K"],
    )
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul_skinny_tma[grid](
        TensorDescriptor.from_tensor(x, [SCHEDULE["BLOCK_M"], SCHEDULE["BLOCK_K"]]),
        TensorDescriptor.from_tensor(w, [SCHEDULE["BLOCK_N"], SCHEDULE["BLOCK_K"]]),
        w,
        y,
        partials,
        counters,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
