"""Bring the first tiles of a weight into L2 before the kernel before has ended."""

import triton
import triton.language as tl


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
