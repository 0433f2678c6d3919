"""The meaning of products of rows and a weight, which may be packed for the CPU's library."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from treadle.ir import errors


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight stored output-major and add a bias.

    Formula: x @ weight.T + bias.
    Shapes: x [T, K], weight [N, K] (plain or from `pack_weight`), bias [N] -> [T, N] in
      `out_dtype`, by default the dtype of x.
    Numerics: fp32 accumulation, the bias added before the one rounding. A packed bf16 weight with
      fp32 results takes two passes, and is good to about 17 bits.
    Raises: ShapeError: a packed weight of another dtype than x (fp32 takes any x).
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
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
