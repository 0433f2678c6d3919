"""`matmul_stream__bias__add`: a linear of a test.

Covers:
  product = linear(x, weight)

Schedule: BLOCK_M=16, BLOCK_N=32, BLOCK_K=256, PARTS=1, STAGES=4, USE_PDL=False, num_warps=4
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHAPE = dict(N=6144, K=4096, N_OUT=6144)
SCHEDULE = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=256, PARTS=1, STAGES=4, USE_PDL=False, num_warps=4)

# Two names that changed between Triton 3.6 and 3.9.
fetch_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
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


@gluon.jit(do_not_specialize=["num_tokens"])
def matmul_stream__bias__add(
    x_desc,
    w_desc,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    N_OUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """Compute PARTS * BLOCK_N features of BLOCK_M tokens."""
    # Grid: axis 0 blocks of features, axis 1 blocks of tokens.
    first_block = gl.program_id(0) * PARTS
    first_token = gl.program_id(1) * BLOCK_M
    NUM_K: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    AHEAD: gl.constexpr = STAGES if STAGES < NUM_K else NUM_K
    STAGE_BYTES: gl.constexpr = (BLOCK_M + PARTS * BLOCK_N) * BLOCK_K * 2
    OUT_N: gl.constexpr = BLOCK_N * N_OUT // N
    WARPS: gl.constexpr = gl.num_warps()
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    x_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    w_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 2)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * PARTS, BLOCK_N, BLOCK_K], w_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    sync_group()

    for k in range(AHEAD):
        mbarrier.expect(full.index(k), STAGE_BYTES)
        for part in gl.static_range(PARTS):
            feature = (first_block + part) * BLOCK_N
            w_tile = w_ring.index(k * PARTS + part)
            fetch_tile(w_desc, [feature, k * BLOCK_K], full.index(k), w_tile)
    if USE_PDL:
        wait_for_producer()
        let_dependents_begin()
    for k in range(AHEAD):
        fetch_tile(x_desc, [first_token, k * BLOCK_K], full.index(k), x_ring.index(k))

    # PARTS of [BLOCK_M, BLOCK_N]
    accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=acc_layout),) * PARTS
    for k in range(NUM_K):
        stage = k % STAGES
        ready = full.index(stage)
        mbarrier.wait(ready, (k // STAGES) & 1)
        x = x_ring.index(stage).load(x_layout)  # [BLOCK_M, BLOCK_K]
        ws = ()  # PARTS of [BLOCK_K, BLOCK_N]
        for part in gl.static_range(PARTS):
            w_tile = w_ring.index(stage * PARTS + part)
            ws = ws + (w_tile.permute((1, 0)).load(w_layout),)
        # All warps have read the stage: it may be filled again.
        sync_group()
        more = k + STAGES < NUM_K
        next_k = (k + STAGES) * BLOCK_K
        mbarrier.expect(ready, STAGE_BYTES, pred=more)
        for part in gl.static_range(PARTS):
            feature = (first_block + part) * BLOCK_N
            w_tile = w_ring.index(stage * PARTS + part)
            fetch_tile(w_desc, [feature, next_k], ready, w_tile, pred=more)
        fetch_tile(x_desc, [first_token, next_k], ready, x_ring.index(stage), pred=more)
        for part in gl.static_range(PARTS):
            accs = accs[:part] + (mma_v2(x, ws[part], accs[part]),) + accs[part + 1 :]

    # Pairs of features a thread, rows side by side.
    PER_ROW: gl.constexpr = OUT_N // 2 if OUT_N < 64 else 32
    y_layout: gl.constexpr = gl.BlockedLayout([1, 2], [32 // PER_ROW, PER_ROW], [WARPS, 1], [1, 0])
    row = first_token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, y_layout))
    for part in gl.static_range(PARTS):
        pid_n, acc = first_block + part, accs[part]
        tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, acc_layout))
        token = first_token + tokens[:, None]  # [BLOCK_M, 1]
        features = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
        feature = pid_n * BLOCK_N + features[None, :]  # [1, BLOCK_N]
        # product = linear(x, weight, bias)
        bias = gl.load(bias_ptr + feature, mask=feature < N, other=0.0).to(gl.float32)
        product = acc + bias
        # after = add(hidden, product)
        inside = (token < num_tokens) & (feature < N_OUT)
        residual_ptrs = residual_ptr + token.to(gl.int64) * N_OUT + feature
        residual = gl.load(residual_ptrs, mask=inside, other=0.0).to(gl.float32)
        y = product + residual
        y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), y_layout)  # [BLOCK_M, OUT_N]
        column = pid_n * OUT_N + gl.arange(0, OUT_N, layout=gl.SliceLayout(0, y_layout))
        offsets = row.to(gl.int64)[:, None] * N_OUT + column[None, :]  # [BLOCK_M, OUT_N]
        inside = (row < num_tokens)[:, None] & (column < N_OUT)[None, :]  # [BLOCK_M, OUT_N]
        gl.store(y_ptr + offsets, y, mask=inside)


def describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of a matrix to the bulk copy engine."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Compute y of `num_tokens` rows. Descriptors go with the launch: none has to be kept."""
    block_m, block_n, block_k = (SCHEDULE[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    features = block_n * SCHEDULE["PARTS"]
    grid = (triton.cdiv(SHAPE["N"], features), triton.cdiv(num_tokens, block_m))
    options = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    matmul_stream__bias__add[grid](
        describe(x[:num_tokens], [block_m, block_k]),
        describe(w, [block_n, block_k]),
        bias,
        residual,
        y,
        num_tokens,
        **SHAPE,
        **SCHEDULE,
        **options,
        enable_fp_fusion=True,
    )
