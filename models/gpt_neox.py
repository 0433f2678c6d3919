"""The GPT-NeoX family, Pythia too: layer norms, biases, a feed-forward without a gate.

Residuals are in parallel or not; in parallel, attention and feed-forward have norms of their own.
RoPE rotates a part of each head; one tensor holds q, k and v, head by head.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    Layer,
    Names,
    NormStyle,
    decoder,
    mlp,
    rope_table,
    rotary_attention,
)
from treadle.models.config import ModelConfig

ARCHITECTURES = ("GPTNeoXForCausalLM",)
NAMES = Names(
    embed="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
)


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        attended = rotary_attention(
            layer,
            normed,
            table,
            modules=("attention.query_key_value",),
            output="attention.dense",
            is_grouped=True,
        )
        after = b.add(x, attended, name="after_attention")
        read = x if config.parallel_residual else after
        normed = layer.norm(read, "post_attention_layernorm")
        fed = mlp(layer, normed, module="mlp.dense_h_to_4h", output="mlp.dense_4h_to_h")
        return b.add(after, fed, name="after_mlp")

    norm_style = NormStyle(is_centred=True, has_bias=True)
    return decoder(b, config, block, names=NAMES, norm_style=norm_style)
