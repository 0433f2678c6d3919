"""`head_linear`: multiply each head of each row by the head's own rows of the weight.

Covers:
  q_latent: bf16[T, 8192] = head_linear(q_rope, @kv_b; num_heads=16, first=0, rows=128,
    transposed=True)

Must move 2,097,152 bytes and 22,528 per token; must compute 2,097,152 operations per token.

Schedule: BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, USE_PDL=True, PREFETCH=True, num_warps=4,
  num_stages=2
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(NUM_HEADS=16, X_DIM=192, WEIGHT_ROWS=256, FIRST=0, ROWS=128, K=512, TRANSPOSED=True)
SCHEDULE = dict(
    BLOCK_M=16,
    BLOCK_N=64,
    BLOCK_K=128,
    USE_PDL=True,
    PREFETCH=True,
    num_warps=4,
    num_stages=2,
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
def head_linear(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    X_DIM: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    # Grid: axis 0 = block of features, axis 1 = head, axis 2 = block of tokens.
    NUM_INPUTS: tl.constexpr = ROWS if TRANSPOSED else K
    NUM_OUTPUTS: tl.constexpr = K if TRANSPOSED else ROWS
    head = tl.program_id(1)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    lane = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_token = (token < num_tokens)[:, None]  # [BLOCK_M, 1]
    is_feature = below(feature, NUM_OUTPUTS, BLOCK_N)  # [BLOCK_N]
    x_offsets = token.to(tl.int64)[:, None] * (NUM_HEADS * X_DIM) + lane[None, :]
    x_ptrs = x_ptr + head * X_DIM + x_offsets  # [BLOCK_M, BLOCK_K]
    w_ptr += (head * WEIGHT_ROWS + FIRST).to(tl.int64) * K
    if USE_PDL and PREFETCH:
        # Weights depend on nothing: they are on their way before the wait for the producer of x.
        first_feature = tl.program_id(0) * BLOCK_N
        BLOCK_ROWS: tl.constexpr = triton.next_power_of_2(ROWS)
        if TRANSPOSED:
            prefetch_tiles(w_ptr, 0, first_feature, K, ROWS, K, BLOCK_ROWS, BLOCK_N, 1)
        else:
            COLUMNS: tl.constexpr = triton.next_power_of_2(K)
            prefetch_tiles(w_ptr, first_feature, 0, K, ROWS, K, BLOCK_N, COLUMNS, 1)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for start in range(0, NUM_INPUTS, BLOCK_K):
        is_input = below(start + lane, NUM_INPUTS, BLOCK_K)  # [BLOCK_K]
        x = tl.load(x_ptrs + start, mask=is_token & is_input[None, :], other=0.0)
        if TRANSPOSED:
            w_ptrs = w_ptr + (start + lane)[:, None] * K + feature[None, :]  # [BLOCK_K, BLOCK_N]
            w = tl.load(w_ptrs, mask=is_input[:, None] & is_feature[None, :], other=0.0)
        else:
            w_ptrs = w_ptr + feature[:, None] * K + (start + lane)[None, :]  # [BLOCK_N, BLOCK_K]
            w = tl.load(w_ptrs, mask=is_feature[:, None] & is_input[None, :], other=0.0)
            w = tl.trans(w)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, w, acc)  # [BLOCK_M, BLOCK_N]

    y_offsets = token.to(tl.int64)[:, None] * (NUM_HEADS * NUM_OUTPUTS) + feature[None, :]
    y_ptrs = y_ptr + head * NUM_OUTPUTS + y_offsets  # [BLOCK_M, BLOCK_N]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_token & is_feature[None, :])


def launch(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, num_tokens: int) -> None:
    """Write the products of the first `num_tokens` tokens to `y`."""
    num_outputs = SHAPE["K"] if SHAPE["TRANSPOSED"] else SHAPE["ROWS"]
    grid = (
        triton.cdiv(num_outputs, SCHEDULE["BLOCK_N"]),
        SHAPE["NUM_HEADS"],
        triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"]),
    )
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    head_linear[grid](
        x,
        w,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
