"""The Mixtral family: a Llama with experts in place of the feed-forward."""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    ExpertNames,
    Layer,
    add_experts,
    decoder,
    rope_table,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("MixtralForCausalLM",)
NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(layer, normed, table)
        x = b.add(x, attended, name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return add_experts(layer, x, normed, names=NAMES)

    return decoder(b, config, block)
