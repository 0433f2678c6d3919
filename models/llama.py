"""The Llama family: Llama 2 and 3, Mistral, Qwen2, SmolLM2 and everything of their shape.

Pre-norm blocks, grouped-query attention with rotary positions, a SwiGLU feed-forward, and a head
that may be tied to the embedding. Biases, rope scaling and head sizes come from the config.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph
from treadle.models.blocks import Layer, gated_mlp, head, rotary_attention
from treadle.models.config import (
    ModelConfig,
    rope_attention_factor,
    rope_inverse_frequencies,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    frequencies = rope_inverse_frequencies(config.rope, config.head_dim)
    table = b.rope_table("rope", frequencies, rope_attention_factor(config.rope))
    shape = (config.vocab_size, config.hidden_size)
    x = b.embed(b.weight("embed", "model.embed_tokens.weight", *shape))
    for index in range(config.num_layers):
        b.scope(f"layers.{index}")
        layer = Layer(b, index)
        normed = layer.norm(x, "input_layernorm", eps=config.rms_norm_eps)
        attended = rotary_attention(layer, normed, config, table)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm", eps=config.rms_norm_eps)
        x = b.add(x, gated_mlp(layer, normed, config), name="after_mlp")
    b.scope("")
    return head(b, x, config)
