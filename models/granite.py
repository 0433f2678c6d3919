"""The Granite family, dense: a Llama whose embeddings, scores, residuals and logits are scaled."""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("GraniteForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        attended = rotary_attention(layer, layer.norm(x, "input_layernorm"), table)
        attended = b.scale(attended, config.residual_scale, name="scaled_attention")
        x = b.add(x, attended, name="after_attention")
        fed = gated_mlp(layer, layer.norm(x, "post_attention_layernorm"))
        return b.add(x, b.scale(fed, config.residual_scale, name="scaled_mlp"), name="after_mlp")

    return decoder(b, config, block)
