"""The SmolLM3 family: a Llama in which some layers have no RoPE, every fourth by default.

A layer without RoPE rotates by angles that are all zero, which changes nothing: it shares the
kernels of the other layers.
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

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    frequencies = rope_inverse_frequencies(config.rope, config.head_dim)
    tables = {}
    if len(config.no_rope_layers) < config.num_layers:
        tables[True] = b.rope_table("rope", frequencies, rope_attention_factor(config.rope))
    if config.no_rope_layers:
        tables[False] = b.rope_table("no_rope", (0.0,) * len(frequencies), 1.0)
    shape = (config.vocab_size, config.hidden_size)
    x = b.embed(b.weight("embed", "model.embed_tokens.weight", *shape))
    for index in range(config.num_layers):
        b.scope(f"layers.{index}")
        layer = Layer(b, index)
        normed = layer.norm(x, "input_layernorm", eps=config.rms_norm_eps)
        table = tables[index not in config.no_rope_layers]
        attended = rotary_attention(layer, normed, config, table)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm", eps=config.rms_norm_eps)
        x = b.add(x, gated_mlp(layer, normed, config), name="after_mlp")
    b.scope("")
    return head(b, x, config)
