"""The meaning of ops on each element alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from treadle.ir import errors

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add two tensors of one shape and dtype; fp32 inside, rounded once."""
    return a + b


def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two tensors of one shape and dtype; fp32 inside, rounded once."""
    return a * b


def scale(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Multiply by a constant; fp32 inside, rounded once."""
    return (x.float() * factor).to(x.dtype)


def soft_cap(x: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Bend what is large, so that nothing exceeds the cap: cap * tanh(x / cap).

    Numerics: fp32 inside, rounded once.
    """
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


def activate(x: torch.Tensor, *, act: str) -> torch.Tensor:
    """Apply an activation to every element; fp32 inside, rounded once.

    Raises: SpecError: unknown activation.
    """
    if act not in ACTIVATIONS:
        raise errors.SpecError(f"activate: expected `act` in {sorted(ACTIVATIONS)}, found `{act}`.")
    return ACTIVATIONS[act](x.float()).to(x.dtype)


def glu(
    x: torch.Tensor,
    *,
    act: str = "silu",
    interleave: int = 0,
    limit: float = 0.0,
    sharpness: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Apply a gated activation: act(s gate) / s * (up + up_offset), both within the limit if any.

    Shapes: x [T, 2F] -> [T, F] in the dtype of x. `interleave` 0: the first F features are the
      gate, the rest up. `interleave` g > 0: groups of g gate features alternate with groups of g up
      features.
    Numerics: fp32 inside, rounded once at the end.
    Raises: ShapeError: 2F can't be cut that way. SpecError: unknown activation.
    """
    if act not in ACTIVATIONS:
        raise errors.SpecError(f"glu: expected `act` in {sorted(ACTIVATIONS)}, found `{act}`.")
    group = interleave or x.shape[-1] // 2
    if x.shape[-1] % (2 * group) != 0:
        raise errors.ShapeError(
            f"glu: expected a last dimension divisible by {2 * group}, found {x.shape[-1]}."
        )
    gate, up = x.float().unflatten(-1, (-1, 2, group)).unbind(-2)  # [T, F / g, g] each
    form = {"limit": limit, "sharpness": sharpness, "up_offset": up_offset}
    return gated(gate, up, act=act, **form).flatten(-2).to(x.dtype)  # [T, F]


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    act: str,
    limit: float = 0.0,
    sharpness: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """Gate `up` in fp32, as `glu` says; `gate` and `up` stay as they are."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if sharpness != 1.0:
        activated = ACTIVATIONS[act](gate * sharpness).div_(sharpness)
    else:
        activated = ACTIVATIONS[act](gate)
    return activated.mul_(up + up_offset if up_offset else up)
