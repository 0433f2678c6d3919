"""The StableLM family: layer norms, RoPE over a part of each head, residuals in parallel or not.

In parallel, attention and feed-forward read one norm of the stream.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import Layer, NormStyle, decoder, gated_mlp, rope_table, rotary_attention
from treadle.models.config import ModelConfig

ARCHITECTURES = ("StableLmForCausalLM",)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        x = b.add(x, rotary_attention(layer, normed, table), name="after_attention")
        if not config.parallel_residual:
            normed = layer.norm(x, "post_attention_layernorm")
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    norm_style = NormStyle(is_centred=True, has_bias=True)
    return decoder(b, config, block, norm_style=norm_style)
