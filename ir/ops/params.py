"""How an op's parameters are declared and printed; those of ops that have none, and of fused ops.

The parameters of each other kind stand beside its type rule.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class NoParams:
    """Take no parameters."""


@dataclass(frozen=True)
class FusedParams:
    """`kernel` names the kernel that a fused op becomes: anchor first, then what joined it."""

    kernel: str


def describe(params: Any) -> str:
    """Write parameters as `name=value, …`, in the order they are declared.

    Rare ones, which few models need, are left out where they have their defaults.
    """
    return ", ".join(settings(params))


def settings(params: Any) -> list[str]:
    """Write each parameter that `describe` shows as `name=value`."""
    shown = [f for f in fields(params) if not _is_rare_default(params, f)]
    return [f"{f.name}={getattr(params, f.name)!r}" for f in shown]


def rare(default: Any) -> Any:
    """Declare a parameter that is printed only where it differs from its default."""
    return field(default=default, metadata={"rare": True})


def _is_rare_default(params: Any, declared: Field[Any]) -> bool:
    is_rare = bool(declared.metadata.get("rare"))
    return is_rare and getattr(params, declared.name) == declared.default
