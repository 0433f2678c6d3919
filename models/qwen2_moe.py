"""The Qwen2 mixtures of experts: Qwen2's attention, routed experts and one that all tokens share.

The shared expert's result is scaled by a gate. Some layers may keep a plain feed-forward.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    Layer,
    add_experts,
    decoder,
    gated_mlp,
    rope_table,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        if layer.has_experts:
            return add_experts(layer, x, normed)
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
