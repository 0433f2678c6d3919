"""The OLMo family, 2 and 3: a Llama that normalises what its blocks add, not what they read.

Queries and keys are normalised too, all heads of a token together, before they are rotated. In
OLMo 3 three layers of four have a sliding window, and a RoPE without scaling.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_tables, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    tables = rope_tables(b, config)

    def block(layer: Layer, x: Value) -> Value:
        attended = rotary_attention(layer, x, tables[layer.index], has_row_norms=True)
        attended = layer.norm(attended, "post_attention_layernorm")
        x = b.add(x, attended, name="after_attention")
        fed = layer.norm(gated_mlp(layer, x), "post_feedforward_layernorm")
        return b.add(x, fed, name="after_mlp")

    return decoder(b, config, block)
