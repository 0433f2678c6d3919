"""The gpt-oss family: windows in every second layer, sinks in every softmax, biased experts.

The router's choice, a softmax over the chosen logits, is the `route` of a softmax over all of them
that is normalised over the chosen: the sum of the others cancels.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    JoinedExperts,
    Layer,
    add_experts,
    decoder,
    rope_table,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("GptOssForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        x = b.add(x, rotary_attention(layer, normed, table, has_sinks=True), name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        return add_experts(layer, x, normed, names=JoinedExperts())

    return decoder(b, config, block)
