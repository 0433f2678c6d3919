"""The Phi-3 family, Phi-4 too: a Llama whose checkpoint joins projections that are read together.

One tensor holds q, k and v, another gate and up. RoPE may rotate a part of each head only; its type
longrope is not supported yet, nor is a sliding window.
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

ARCHITECTURES = ("Phi3ForCausalLM",)


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
        attended = rotary_attention(
            layer, normed, config, table, joined_module="self_attn.qkv_proj"
        )
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm", eps=config.rms_norm_eps)
        gated = gated_mlp(layer, normed, config, joined_module="mlp.gate_up_proj")
        x = b.add(x, gated, name="after_mlp")
    b.scope("")
    return head(b, x, config)
