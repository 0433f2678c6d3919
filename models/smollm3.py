"""The SmolLM3 family: a Llama in which some layers have no RoPE, every fourth by default.

A layer without RoPE rotates by angles that are all zero, which changes nothing: it shares the
kernels of the other layers.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_tables, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    tables = rope_tables(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, tables[layer.index])
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
