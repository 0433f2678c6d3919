"""The registry of ops: every kind by its name, read by all who take a kind from a graph or a text.

An op counts once it is listed here. The op modules themselves know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.ir.errors import SpecError
from treadle.ir.ops import (
    attention,
    experts,
    latent_attention,
    linears,
    norms,
    pointwise,
    rope,
    rows,
    sampling,
    step_inputs,
)
from treadle.ir.ops.definition import OpDef, Types

# In the order of docs/ir.md, about that of a step.
REGISTRY: dict[str, OpDef] = {
    op.kind: op
    for op in (
        rows.embed,
        norms.rms_norm,
        norms.head_norm,
        norms.layer_norm,
        norms.section_norm,
        linears.linear,
        linears.head_linear,
        pointwise.add,
        pointwise.scale,
        pointwise.soft_cap,
        pointwise.activate,
        pointwise.glu,
        rows.split,
        rope.rope,
        experts.route,
        experts.expert_linear,
        experts.sort_by_expert,
        experts.grouped_linear,
        experts.combine,
        experts.row_gate,
        attention.kv_write,
        attention.attention,
        latent_attention.latent_write,
        latent_attention.latent_attention,
        latent_attention.prompt_attention,
        rows.gather_rows,
        sampling.sample,
        sampling.adjust_logits,
        sampling.count_tokens,
        step_inputs.advance,
        step_inputs.resolve_tokens,
    )
}


def lookup(kind: str) -> OpDef:
    """Give the definition of `kind`. Raises: SpecError: there is none; lists those there are."""
    if kind not in REGISTRY:
        raise SpecError(
            f"There is no op `{kind}`; the registry holds {', '.join(sorted(REGISTRY))}."
        )
    return REGISTRY[kind]


def make_params(kind: str, values: Mapping[str, Any]) -> Any:
    """Make the parameters of an op of this kind. Raises: SpecError: some are missing or unknown."""
    try:
        return lookup(kind).params(**values)
    except TypeError as error:
        raise SpecError(f"`{kind}`: {error}.") from None


def infer_types(kind: str, params: Any, inputs: Types) -> Types:
    """Give the result types of an op, or say which operand does not fit.

    Raises: SpecError: wrong number of operands or wrong parameters. ShapeError: types don't fit.
    """
    definition = lookup(kind)
    if not isinstance(params, definition.params):
        raise SpecError(
            f"`{kind}` takes {definition.params.__name__}, found {type(params).__name__}."
        )
    names = definition.present(len(inputs))
    if not names:
        raise SpecError(
            f"`{kind}` takes the operands {', '.join(definition.operands)}; found {len(inputs)} of "
            "them."
        )
    needed = definition.required
    given = dict(zip(names[needed:], inputs[needed:], strict=True))
    return definition.infer(params, *inputs[:needed], **given)
