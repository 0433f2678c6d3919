"""The DeepSeek family, V2 and V3: latent attention, and mixtures of experts with shared ones.

Keys and values of all heads are projections of one latent per token, which is what the cache holds.
They are made for prompts that begin in a step alone; elsewhere the projection to the keys is moved
to the queries, that to the values behind the attention. The first layers keep a plain feed-forward.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.blocks import (
    ExpertNames,
    Layer,
    add_experts,
    decoder,
    gated_mlp,
    rope_table,
)
from treadle.models.config import ModelConfig
from treadle.models.latent import LatentConfig

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
NAMES = ExpertNames(shared="mlp.shared_experts")
WHOLE_FROM = 32  # tokens of a prompt from which keys and values of its own cost less than latents
LATENT_EPS = 1e-6  # of the latents' norms, whatever the config says of the others


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    table = rope_table(b, config)

    def block(layer: Layer, x: Value) -> Value:
        normed = layer.norm(x, "input_layernorm")
        x = b.add(x, _attention(layer, normed, table), name="after_attention")
        normed = layer.norm(x, "post_attention_layernorm")
        if layer.has_experts:
            return add_experts(layer, x, normed, names=NAMES)
        return b.add(x, gated_mlp(layer, normed), name="after_mlp")

    return decoder(b, config, block)


def _attention(layer: Layer, x: Value, table: Value) -> Value:
    """Attend from queries that are projected to where the keys' latents are."""
    b, config, sizes = layer.b, layer.config, layer.config.latent
    assert sizes is not None, "the config of this family has latents"
    heads, head_dim = config.num_heads, sizes.nope_dim + sizes.rope_dim
    q, latent, key = _project(layer, x, sizes)
    latent = _latent_norm(layer, latent, "kv_a_layernorm")
    style = {"interleaved": sizes.interleaved}
    key = b.rope(key, table, head_dim=sizes.rope_dim, name="k_rope", **style)
    q = b.rope(q, table, head_dim=head_dim, start=sizes.nope_dim, name="q_rope", **style)
    latents = b.append_latent(latent, key, cache=f"kv.{layer.index}")
    # Rows of each head: those that make its keys, then those that make its values.
    up = b.weight(
        f"layers.{layer.index}.kv_b",
        f"{layer.at}.self_attn.kv_b_proj.weight",
        heads * (sizes.nope_dim + sizes.value_dim),
        sizes.kv_rank,
    )
    absorbed = b.head_linear(
        q, up, num_heads=heads, first=0, rows=sizes.nope_dim, transposed=True, name="q_latent"
    )
    attended = b.latent_attention(
        absorbed,
        q,
        latents,
        num_heads=heads,
        value_dim=sizes.kv_rank,
        scale=config.attention_scale,
        whole_from=WHOLE_FROM,
        name="attended_latent",
    )
    attended = b.head_linear(
        attended,
        up,
        num_heads=heads,
        first=sizes.nope_dim,
        rows=sizes.value_dim,
        name="attended",
    )
    b.prompt_attention(
        q,
        latent,
        up,
        latents,
        attended,
        num_heads=heads,
        nope_dim=sizes.nope_dim,
        value_dim=sizes.value_dim,
        scale=config.attention_scale,
        whole_from=WHOLE_FROM,
    )
    return layer.project(attended, "o", {"self_attn.o_proj": config.hidden_size}, bias=False)


def _project(layer: Layer, x: Value, sizes: LatentConfig) -> tuple[Value, Value, Value]:
    """Give the queries, the latent and the part of the key to be rotated."""
    b, parts = layer.b, (sizes.kv_rank, sizes.rope_dim)
    q_width = layer.config.num_heads * (sizes.nope_dim + sizes.rope_dim)
    down = {"self_attn.kv_a_proj_with_mqa": sum(parts)}
    if not sizes.q_rank:
        rows = {"self_attn.q_proj": q_width, **down}
        q, latent, key = b.split(
            layer.project(x, "qkv", rows, bias=False), q_width, *parts, name="q latent key"
        )
        return q, latent, key
    q = layer.project(x, "q_a", {"self_attn.q_a_proj": sizes.q_rank}, bias=False)
    q = _latent_norm(layer, q, "q_a_layernorm")
    q = layer.project(q, "q", {"self_attn.q_b_proj": q_width}, bias=False)
    latent, key = b.split(layer.project(x, "kv_a", down, bias=False), *parts, name="latent key")
    return q, latent, key


def _latent_norm(layer: Layer, x: Value, module: str) -> Value:
    weight = layer.b.weight(
        f"layers.{layer.index}.{module}", f"{layer.at}.self_attn.{module}.weight", x.type.size(-1)
    )
    return layer.b.rms_norm(x, weight, eps=LATENT_EPS, name=module)
