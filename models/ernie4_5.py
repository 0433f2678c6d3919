"""The ERNIE 4.5 family, dense: a Llama in which neighbours rotate as pairs."""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Ernie4_5ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table, interleaved=True)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
