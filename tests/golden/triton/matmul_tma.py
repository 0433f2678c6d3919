"""`matmul_tma`: a linear of a test.

Covers:
  product = linear(x, weight)

Schedule: BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, NUM_PROGRAMS=132, USE_PDL=False,
  num_warps=8, num_stages=4
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SHAPE = dict(N=6144, K=4096, N_OUT=6144)
SCHEDULE = dict(
    BLOCK_M=128,
    BLOCK_N=128,
    BLOCK_K=64,
    GROUP_M=8,
    NUM_PROGRAMS=132,
    USE_PDL=False,
    num_warps=8,
    num_stages=4,
)


@triton.jit(do_not_specialize=["num_tokens"])
def matmul_tma(
    x_desc,
    w_desc,
    y_ptr,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    N_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute every NUM_PROGRAMS-th tile of BLOCK_M tokens by BLOCK_N features."""
    # Grid: axis 0 programs. Tiles go down GROUP_M tiles of tokens, then to the next features.
    NUM_N: tl.constexpr = triton.cdiv(N, BLOCK_N)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for tile in tl.range(tl.program_id(0), num_m * NUM_N, NUM_PROGRAMS):
        first_m = tile // (GROUP_M * NUM_N) * GROUP_M
        group_m = tl.minimum(num_m - first_m, GROUP_M)
        pid_m = first_m + tile % (GROUP_M * NUM_N) % group_m
        pid_n = tile % (GROUP_M * NUM_N) // group_m

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        for start in range(0, K, BLOCK_K):
            # What lies outside of x and w arrives as zeros.
            x = x_desc.load([pid_m * BLOCK_M, start])  # [BLOCK_M, BLOCK_K]
            w = w_desc.load([pid_n * BLOCK_N, start])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(x, w.T, acc)  # [BLOCK_M, BLOCK_N]

        token = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        feature = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
        # product = linear(x, weight)
        y = acc
        column = feature
        y = y.to(y_ptr.dtype.element_ty)
        mask = (token < num_tokens) & (column < N_OUT)
        tl.store(y_ptr + token.to(tl.int64) * N_OUT + column, y, mask=mask)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows. Descriptors go with the launch: none has to be kept."""
    num_m = triton.cdiv(num_tokens, SCHEDULE["BLOCK_M"])
    num_n = triton.cdiv(SHAPE["N"], SCHEDULE["BLOCK_N"])
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul_tma[(min(num_m * num_n, SCHEDULE["NUM_PROGRAMS"]),)](
        TensorDescriptor.from_tensor(x, [SCHEDULE["BLOCK_M"], SCHEDULE["BLOCK_K"]]),
        TensorDescriptor.from_tensor(w, [SCHEDULE["BLOCK_N"], SCHEDULE["BLOCK_K"]]),
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
