"""The Qwen3 family, dense: a Llama whose queries and keys are normalised head by head before rope.

Pre-norm blocks, grouped-query attention, a SwiGLU feed-forward; the head size is the config's own.
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

ARCHITECTURES = ("Qwen3ForCausalLM",)


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
        attended = rotary_attention(layer, normed, config, table, has_head_norms=True)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm", eps=config.rms_norm_eps)
        x = b.add(x, gated_mlp(layer, normed, config), name="after_mlp")
    b.scope("")
    return head(b, x, config)
