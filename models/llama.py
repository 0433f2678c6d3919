"""The Llama family: Llama 2 and 3, Mistral, SmolLM2 and everything of their shape.

Pre-norm blocks, grouped-query attention with rotary positions, a SwiGLU feed-forward, and a head
that may be tied to the embedding. Biases, rope scaling and head sizes come from the config.
"""

from __future__ import annotations

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph
from treadle.models.config import ModelConfig, rope_inverse_frequencies

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def build(config: ModelConfig, b: GraphBuilder) -> Graph:
    """Describe one step of the model."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    table = b.rope_table("rope", rope_inverse_frequencies(config.rope, head_dim))
    vocabulary = b.weight("embed", "model.embed_tokens.weight", config.vocab_size, hidden)

    x = b.embed(vocabulary)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        qkv = {
            f"{at}.self_attn.q_proj": q_width,
            f"{at}.self_attn.k_proj": kv_width,
            f"{at}.self_attn.v_proj": kv_width,
        }
        gate_up = {
            f"{at}.mlp.gate_proj": config.intermediate_size,
            f"{at}.mlp.up_proj": config.intermediate_size,
        }

        def project(x, name, modules, bias, b=b, layer=layer):  # type: ignore[no-untyped-def]
            """Multiply by the modules' weights, joined, and add their biases where they have any."""
            weights = {f"{module}.weight": rows for module, rows in modules.items()}
            biases = {f"{module}.bias": rows for module, rows in modules.items()}
            return b.linear(
                x,
                b.weight(f"layers.{layer}.{name}", weights, x.type.shape[-1]),
                b.weight(f"layers.{layer}.{name}_bias", biases) if bias else None,
                name=name,
            )

        def norm(x, name, b=b, at=at, layer=layer):  # type: ignore[no-untyped-def]
            """Normalise by the weight of the layer's norm `name`."""
            weight = b.weight(f"layers.{layer}.{name}", f"{at}.{name}.weight", hidden)
            return b.rms_norm(x, weight, eps=config.rms_norm_eps, name=name)

        b.scope(f"layers.{layer}")
        q, k, v = b.split(
            project(norm(x, "input_layernorm"), "qkv", qkv, config.attention_bias),
            q_width,
            kv_width,
            kv_width,
            name="q k v",
        )
        attended = b.attention(
            b.rope(q, table, head_dim=head_dim, name="q_rope"),
            b.rope(k, table, head_dim=head_dim, name="k_rope"),
            v,
            cache=f"kv.{layer}",
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            name="attended",
        )
        o = project(attended, "o", {f"{at}.self_attn.o_proj": hidden}, config.attention_bias)
        x = b.add(x, o, name="after_attention")
        gated = b.glu(
            project(norm(x, "post_attention_layernorm"), "gate_up", gate_up, config.mlp_bias),
            act=config.hidden_act,
            name="gated",
        )
        down = project(gated, "down", {f"{at}.mlp.down_proj": hidden}, config.mlp_bias)
        x = b.add(x, down, name="after_mlp")

    b.scope("")
    norm_weight = b.weight("norm", "model.norm.weight", hidden)
    x = b.rms_norm(b.last_rows(x, name="last"), norm_weight, eps=config.rms_norm_eps, name="normed")
    head = b.weight(
        "lm_head",
        "lm_head.weight",
        config.vocab_size,
        hidden,
        fallback="model.embed_tokens.weight" if config.tie_word_embeddings else "",
    )
    return b.finish(b.linear(x, head, out_dtype="f32", name="logits"))
