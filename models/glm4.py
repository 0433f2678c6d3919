"""The GLM-4 family, dense (0414): norms before and after each block, neighbours rotate as pairs.

RoPE rotates half of each head; one tensor holds gate and up.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Glm4ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table, interleaved=True)
        attended = layer.norm(attended, "post_self_attn_layernorm")
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        fed = gated_mlp(layer, normed, modules=("mlp.gate_up_proj",))
        return b.add(x, layer.norm(fed, "post_mlp_layernorm"), name="after_mlp")

    return decoder(b, config, block)
