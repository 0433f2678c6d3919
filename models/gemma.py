"""The Gemma family, 2 and 3 (text): norms before and after each block, with 1 added to weights.

Layers alternate between a sliding window and the whole context, each kind with a RoPE of its own in
Gemma 3, which also normalises the heads of q and k; Gemma 2 caps scores and logits. Embeddings are
multiplied by the root of their width.
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

ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    tables = rope_tables(b, config)
    has_head_norms = config.architecture == "Gemma3ForCausalLM"

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        table = tables[layer.index]
        attended = rotary_attention(layer, normed, table, has_head_norms=has_head_norms)
        attended = layer.norm(attended, "post_attention_layernorm")
        x = b.add(x, attended, name="after_attention")
        fed = gated_mlp(layer, layer.norm(x, "pre_feedforward_layernorm"))
        return b.add(x, layer.norm(fed, "post_feedforward_layernorm"), name="after_mlp")

    return decoder(
        b,
        config,
        block,
        norm_style=NormStyle(offset=1.0),
        embedding_scale=config.hidden_size**0.5,
    )
