"""The Cohere 2 family, Command R7B and A: attention and feed-forward read one layer norm.

Layers with a sliding window rotate, neighbours as pairs; those that see the whole context do not.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    Layer,
    NormStyle,
    decoder,
    gated_mlp,
    rope_tables,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Cohere2ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    tables = rope_tables(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, tables[layer.index], interleaved=True)
        x = b.add(x, attended, name="after_attention")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block, norm_style=NormStyle(is_centred=True))
