"""The Qwen3 family, dense: a Llama whose queries and keys are normalised head by head before rope.

Pre-norm blocks, grouped-query attention, a SwiGLU feed-forward; the head size is the config's own.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table, has_head_norms=True)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
