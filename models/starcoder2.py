"""The StarCoder2 family: pre-norm blocks, layer norms, biases, a feed-forward without a gate."""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, NormStyle, decoder, mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("Starcoder2ForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        x = b.add(x, rotary_attention(layer, normed, table), name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        fed = mlp(layer, normed, module="mlp.c_fc", output="mlp.c_proj")
        return b.add(x, fed, name="after_mlp")

    norm_style = NormStyle(is_centred=True, has_bias=True)
    return decoder(b, config, block, norm_style=norm_style)
