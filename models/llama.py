"""The Llama family: Llama, InternLM3, Mistral, Qwen2, SmolLM2 and everything of their shape.

Pre-norm blocks, grouped-query attention with rotary positions, a SwiGLU feed-forward, and a head
that may be tied to the embedding. Biases, windows, RoPE and head sizes come from the config.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = (
    "LlamaForCausalLM",
    "InternLM3ForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        x = b.add(x, rotary_attention(layer, normed, table), name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)
