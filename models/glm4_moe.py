"""The GLM-4.5 mixtures of experts: routed by sigmoids in groups, with a correction of the choice.

Rope rotates half of a head. The first layers keep a plain feed-forward; in the others all tokens
share one more expert.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    ExpertNames,
    Layer,
    add_experts,
    decoder,
    gated_mlp,
    rope_table,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Glm4MoeForCausalLM",)
NAMES = ExpertNames(shared="mlp.shared_experts")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table, has_head_norms=config.has_head_norms)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        if layer.has_experts:
            return add_experts(layer, x, normed, names=NAMES)
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
