"""The meaning of every op as one torch function: the oracle of the kernels, the CPU's arithmetic.

The one table that finds it by kind: the registry of ops loads without torch and can't hold it. The
functions know tensors only; must not know graphs, schedules, models or the engine's objects. Called
by the CPU executor and by the tests of every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.kernels.reference import (
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

REFERENCES: dict[str, Callable[..., Any]] = {
    "embed": rows.embed,
    "rms_norm": norms.rms_norm,
    "head_norm": norms.head_norm,
    "layer_norm": norms.layer_norm,
    "section_norm": norms.section_norm,
    "linear": linears.linear,
    "head_linear": linears.head_linear,
    "add": pointwise.add,
    "scale": pointwise.scale,
    "soft_cap": pointwise.soft_cap,
    "activate": pointwise.activate,
    "glu": pointwise.glu,
    "split": rows.split,
    "rope": rope.rope,
    "route": experts.route,
    "expert_linear": experts.expert_linear,
    "sort_by_expert": experts.sort_by_expert,
    "grouped_linear": experts.grouped_linear,
    "combine": experts.combine,
    "row_gate": experts.row_gate,
    "kv_write": attention.kv_write,
    "attention": attention.attention,
    "latent_write": latent_attention.latent_write,
    "latent_attention": latent_attention.latent_attention,
    "prompt_attention": latent_attention.prompt_attention,
    "gather_rows": rows.gather_rows,
    "sample": sampling.sample,
    "adjust_logits": sampling.adjust_logits,
    "count_tokens": sampling.count_tokens,
    "advance": step_inputs.advance,
    "resolve_tokens": step_inputs.resolve_tokens,
}
