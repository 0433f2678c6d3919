"""The Phi-3 family, Phi-4 too: a Llama whose checkpoint joins projections that are read together.

One tensor holds q, k and v, another gate and up. RoPE may rotate a part of each head only.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Phi3ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table, modules=("self_attn.qkv_proj",))
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        gated = gated_mlp(layer, normed, modules=("mlp.gate_up_proj",))
        return b.add(x, gated, name="after_mlp")

    return decoder(b, config, block)
