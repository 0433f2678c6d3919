"""The meaning of products of rows and a weight, which may be packed for the CPU's library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from treadle.ir import errors

# Rows from which widening a weight in fp16 costs less than what oneDNN or MKL gains by fp32: at 512
# rows FBGEMM takes a quarter longer (SmolLM2-135M, 2 cores of an Emerald Rapids, torch 2.13).
WIDEN_FROM_ROWS = 192
# Elements that are widened or looked at in one go: 16 MiB in fp32.
CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class Float16Weight:
    """Hold a weight in fp16 for products that are computed in fp32, by `linear` only.

    `blocks` is FBGEMM's own form, which few rows are multiplied with; `plain` f16[N, K] is widened
    for many.
    """

    blocks: torch.ScriptObject
    plain: torch.Tensor


PackedWeight = torch.Tensor | Float16Weight


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight stored output-major and add a bias.

    Formula: x @ weight.T + bias.
    Shapes: x [T, K], weight [N, K] (plain, from `pack_weight` or `pack_float16`), bias [N] ->
      [T, N] in `out_dtype`, by default the dtype of x.
    Numerics: fp32 accumulation, the bias added before the one rounding. A packed bf16 weight with
      fp32 results takes two passes, and is good to about 17 bits. One from `pack_float16`
      multiplies x in fp32.
    Raises: ShapeError: a packed weight of another dtype than x (fp32 takes any x).
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if isinstance(weight, Float16Weight):
        bias = None if bias is None else bias.float()  # [N]
        return linear_float16(x.float(), weight, bias).to(out_dtype)  # [T, N]
    if weight.is_mkldnn:
        return _linear_packed(x, weight, bias, out_dtype)  # [T, N]
    uniform = x.dtype == weight.dtype == out_dtype and (bias is None or bias.dtype == x.dtype)
    if uniform and x.dtype != torch.float16:  # torch rounds fp16 sums in between
        return F.linear(x, weight, bias)  # [T, N]
    bias = None if bias is None else bias.float()  # [N]
    return F.linear(x.float(), weight.float(), bias).to(out_dtype)  # [T, N]


def can_pack_weight(dtype: torch.dtype) -> bool:
    """Tell whether `pack_weight` works for weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight into the blocked layout that oneDNN multiplies fastest, for `linear` only.

    The result is opaque; the original is not needed any more. A decode step's products run 1.6 to 3
    times faster than with the plain layout (SmolLM2-135M, 2 cores of a Zen 5, torch 2.13).
    Shapes: weight [N, K] in fp32 or bf16, contiguous.
    Raises: MachineError: `can_pack_weight` says no.
    """
    if not can_pack_weight(weight.dtype):
        raise errors.MachineError(
            f"pack_weight: expected a dtype oneDNN multiplies on this CPU, found {weight.dtype}.",
            remedy="Keep the plain layout, or convert the weight to torch.float32 first.",
        )
    # Left to itself (no batch size as a hint) the layout suits every number of rows; the hint 1
    # gives one that is reordered at each call with more.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def can_pack_float16() -> bool:
    """Tell whether torch multiplies fp32 by weights in fp16 here: FBGEMM, on x86 only."""
    quantized = torch.backends.quantized
    # Both of these engines stand for FBGEMM, where the product in fp16 is concerned.
    return "fbgemm" in quantized.supported_engines and quantized.engine in ("fbgemm", "x86")


def float16_loss(weight: torch.Tensor) -> float:
    """Give the share of a weight that rounding it to fp16 takes, as norms; inf beyond its range.

    A few numbers too small for fp16 don't count beside others; a weight of nothing else does.
    Shapes: weight [N, K] in a floating-point dtype.
    """
    squares = lost_squares = 0.0
    for stored in weight.split(max(CHUNK_ELEMENTS // weight.shape[1], 1)):
        rows = stored.float()
        lost = rows.half().float().sub_(rows)
        squares += float(rows.norm()) ** 2
        lost_squares += float(lost.norm()) ** 2
    return math.sqrt(lost_squares / squares) if squares else 0.0


def pack_float16(weight: torch.Tensor) -> Float16Weight:
    """Round a weight to fp16 and copy it into the forms that `linear` multiplies fastest.

    The original is not needed any more. Up to 8 rows take 60 to 80 % of the time that fp32 from
    `pack_weight` takes (SmolLM2-135M, 2 cores of an Emerald Rapids, torch 2.13).
    Shapes: weight [N, K] in a floating-point dtype, of a finite `float16_loss`.
    Raises: MachineError: `can_pack_float16` says no.
    """
    if not can_pack_float16():
        raise errors.MachineError(
            "pack_float16: expected torch with FBGEMM, found the engine "
            f"`{torch.backends.quantized.engine}`.",
            remedy="Keep the weight in float32.",
        )
    plain = weight.to(torch.float16, memory_format=torch.contiguous_format)  # [N, K]
    return Float16Weight(torch.ops.quantized.linear_prepack_fp16(plain.float(), None), plain)


def packed_bytes(weight: PackedWeight) -> int:
    """Give the bytes of a packed weight, without the few that fill up its blocks."""
    if isinstance(weight, Float16Weight):
        return 2 * weight.plain.nbytes
    return weight.numel() * weight.dtype.itemsize


def linear_float16(
    x: torch.Tensor, weight: Float16Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows in fp32 by a weight from `pack_float16`; see `linear`.

    Shapes: x f32[T, K], weight [N, K], bias f32[N] -> f32[T, N].
    """
    if x.shape[0] < WIDEN_FROM_ROWS:
        y = torch.ops.quantized.linear_dynamic_fp16.default(x, weight.blocks)  # [T, N]
    else:
        y = x.new_empty(x.shape[0], weight.plain.shape[0])  # [T, N]
        chunk = max(CHUNK_ELEMENTS // x.shape[1], 1)
        for rows, own in zip(weight.plain.split(chunk), y.split(chunk, dim=1), strict=True):
            torch.mm(x, rows.float().mT, out=own)
    return y if bias is None else y.add_(bias)  # [T, N]


def _linear_packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if weight.dtype == torch.float32:
        x = x.float()  # [T, K]
    elif x.dtype != weight.dtype:
        raise errors.ShapeError(
            f"linear: expected x in the packed weight's {weight.dtype}, found {x.dtype}."
        )
    bias = None if bias is None else bias.to(weight.dtype)  # [N]
    x = x.contiguous()  # [T, K]
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # [T, N]
    if out_dtype == torch.float32 and weight.dtype == torch.bfloat16:
        # oneDNN adds -y before its one rounding, so the second pass gives what y has lost.
        lost = torch.ops.mkldnn._linear_pointwise.binary(x, -y, weight, bias, "add")  # [T, N]
        return y.float() + lost.float()  # [T, N]
    return y.to(out_dtype)  # [T, N]


def head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_heads: int,
    first: int,
    rows: int,
    transposed: bool = False,
) -> torch.Tensor:
    """Multiply each head of each row by its own rows of a weight, or by their columns.

    Formula: y[t, h] = x[t, h, :K] @ w.T, w the rows `first` to `first + rows` of the head's share
      of the weight; transposed, y[t, h] = x[t, h, :rows] @ w.
    Shapes: x [T, H * D], weight [N, K] -> [T, H * rows], or [T, H * K] if transposed, in the dtype
      of x.
    Numerics: fp32 accumulation, rounded once at the end.
    """
    by_head = weight.unflatten(0, (num_heads, -1))[:, first : first + rows]  # [H, rows, K]
    factors = by_head if transposed else by_head.mT  # [H, features in, features out]
    heads = x.unflatten(-1, (num_heads, -1))[..., : factors.shape[1]].transpose(0, 1)  # [H, T, in]
    if x.dtype != weight.dtype or x.dtype == torch.float16:  # torch rounds fp16 sums in between
        heads, factors = heads.float(), factors.float()
    return (heads @ factors).transpose(0, 1).flatten(1).to(x.dtype)  # [T, H * out]
