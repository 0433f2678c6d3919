"""Apply a gated activation to rows: y = act(SHARPNESS * gate) / SHARPNESS * (up + UP_OFFSET).

With INTERLEAVE 0 the first F of a row's 2F features are the gate and the rest up; with g > 0 groups
of g gate features alternate with groups of g up features. A LIMIT above 0 cuts the gate off above
it and up on both sides.

Shapes (T tokens, F = WIDTH features out):
  gate_up  [T, 2F]: contiguous
  y        [T, F]: contiguous

Grid: (token, block of BLOCK_F features).
Bound by moving 3 * T * F elements.
"""

import torch
import triton
import triton.language as tl

SHAPE = dict(WIDTH=1536, ACT="silu", INTERLEAVE=0, LIMIT=0.0, SHARPNESS=1.0, UP_OFFSET=0.0)
SCHEDULE = dict(BLOCK_F=1024, USE_PDL=False, num_warps=4, num_stages=1)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Apply the activation named ACT, in fp32."""
    tl.static_assert((ACT == "silu") or (ACT == "gelu") or (ACT == "gelu_tanh") or (ACT == "relu"))
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = 1 / (1 + exp(-2z)), and tanh is not in every Triton.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * z))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def glu(
    gate_up_ptr,
    y_ptr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARPNESS: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_F: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Grid: axis 0 = token, axis 1 = block of features.
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    mask = feature < WIDTH  # [BLOCK_F]
    GROUP: tl.constexpr = INTERLEAVE if INTERLEAVE > 0 else WIDTH
    gate_column = feature // GROUP * (2 * GROUP) + feature % GROUP  # [BLOCK_F]
    gate_ptrs = gate_up_ptr + token * (2 * WIDTH) + gate_column  # [BLOCK_F]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_F]
    up = tl.load(gate_ptrs + GROUP, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_F]
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)  # [BLOCK_F]
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)  # [BLOCK_F]
    if SHARPNESS != 1.0:
        gate = activate(gate * SHARPNESS, ACT) / SHARPNESS  # [BLOCK_F]
    else:
        gate = activate(gate, ACT)  # [BLOCK_F]
    y = gate * (up + UP_OFFSET)  # [BLOCK_F]
    tl.store(y_ptr + token * WIDTH + feature, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    gate_up: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
) -> None:
    """Write the gated rows of the first `num_tokens` tokens to `y`."""
    grid = (num_tokens, triton.cdiv(SHAPE["WIDTH"], SCHEDULE["BLOCK_F"]))
    pdl = {"launch_pdl": True} if SCHEDULE["USE_PDL"] else {}
    glu[grid](
        gate_up,
        y,
        **SHAPE,
        **SCHEDULE,
        **pdl,
        enable_fp_fusion=True,
    )
