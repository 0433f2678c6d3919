"""The InternLM2 family: a Llama under other names, with one tensor for q, k and v.

The rows of that tensor come KV head by KV head: the queries that share it, its key, its value.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, Names, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("InternLM2ForCausalLM",)
NAMES = Names(embed="model.tok_embeddings", head="output")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "attention_norm")
        attended = rotary_attention(
            layer,
            normed,
            table,
            modules=("attention.wqkv",),
            output="attention.wo",
            is_grouped=True,
        )
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "ffn_norm")
        gate_up = ("feed_forward.w1", "feed_forward.w3")
        fed = gated_mlp(layer, normed, modules=gate_up, output="feed_forward.w2")
        return b.add(x, fed, name="after_mlp")

    return decoder(b, config, block, names=NAMES)
