"""The blocks that decoder specs are made of: named weights, attention, feed-forward, head.

Differences between families are arguments. Called by the specs; knows the builder, not the
compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.config import ModelConfig


@dataclass(frozen=True)
class Layer:
    """Name the weights of a layer: `layers.3.qkv` in graphs, `model.layers.3.…` in checkpoints."""

    b: GraphBuilder
    index: int

    def norm(self, x: Value, module: str, *, eps: float) -> Value:
        """Normalise by the weight of `module`, `input_layernorm` for example."""
        checkpoint_name = f"model.layers.{self.index}.{module}.weight"
        weight = self.b.weight(f"layers.{self.index}.{module}", checkpoint_name, x.type.size(-1))
        return self.b.rms_norm(x, weight, eps=eps, name=module)

    def head_norm(self, x: Value, module: str, *, head_dim: int, eps: float) -> Value:
        """Normalise each head by the weight of `module`, `self_attn.q_norm` for example."""
        checkpoint_name = f"model.layers.{self.index}.{module}.weight"
        name = module.rpartition(".")[2]
        weight = self.b.weight(f"layers.{self.index}.{name}", checkpoint_name, head_dim)
        return self.b.head_norm(x, weight, eps=eps, name=name)

    def project(self, x: Value, name: str, modules: Mapping[str, int], *, bias: bool) -> Value:
        """Multiply by the weights of `modules`, joined in order; the numbers are their rows."""
        at = f"model.layers.{self.index}"
        weights = {f"{at}.{module}.weight": rows for module, rows in modules.items()}
        biases = {f"{at}.{module}.bias": rows for module, rows in modules.items()}
        weight = self.b.weight(f"layers.{self.index}.{name}", weights, x.type.size(-1))
        bias_value = self.b.weight(f"layers.{self.index}.{name}_bias", biases) if bias else None
        return self.b.linear(x, weight, bias_value, name=name)


def rotary_attention(
    layer: Layer,
    x: Value,
    config: ModelConfig,
    table: Value,
    *,
    has_head_norms: bool = False,
    joined_module: str = "",
) -> Value:
    """Project to q, k and v, rotate, attend through the layer's pages and project back.

    With `has_head_norms` the heads of q and k are normalised before they are rotated.
    `joined_module` holds q, k and v as one tensor, where the checkpoint has them so.
    """
    b, head_dim = layer.b, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    modules = {
        "self_attn.q_proj": q_width,
        "self_attn.k_proj": kv_width,
        "self_attn.v_proj": kv_width,
    }
    if joined_module:
        modules = {joined_module: q_width + 2 * kv_width}
    qkv = layer.project(x, "qkv", modules, bias=config.qkv_bias)
    q, k, v = b.split(qkv, q_width, kv_width, kv_width, name="q k v")
    if has_head_norms:
        eps = config.rms_norm_eps
        q = layer.head_norm(q, "self_attn.q_norm", head_dim=head_dim, eps=eps)
        k = layer.head_norm(k, "self_attn.k_norm", head_dim=head_dim, eps=eps)
    attended = b.attention(
        b.rope(q, table, head_dim=head_dim, name="q_rope"),
        b.rope(k, table, head_dim=head_dim, name="k_rope"),
        v,
        cache=f"kv.{layer.index}",
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        name="attended",
    )
    output = {"self_attn.o_proj": config.hidden_size}
    return layer.project(attended, "o", output, bias=config.output_bias)


def gated_mlp(layer: Layer, x: Value, config: ModelConfig, *, joined_module: str = "") -> Value:
    """Project up twice, gate one half by the other's activation, and project down.

    `joined_module` holds gate and up as one tensor, where the checkpoint has them so.
    """
    modules = {
        "mlp.gate_proj": config.intermediate_size,
        "mlp.up_proj": config.intermediate_size,
    }
    if joined_module:
        modules = {joined_module: 2 * config.intermediate_size}
    gate_up = layer.project(x, "gate_up", modules, bias=config.mlp_bias)
    gated = layer.b.glu(gate_up, act=config.hidden_act, name="gated")
    return layer.project(gated, "down", {"mlp.down_proj": config.hidden_size}, bias=config.mlp_bias)


def head(b: GraphBuilder, x: Value, config: ModelConfig) -> Graph:
    """Normalise the rows whose logits are wanted, multiply by the head, tied or not, and sample."""
    norm = b.weight("norm", "model.norm.weight", config.hidden_size)
    x = b.rms_norm(b.last_rows(x, name="last"), norm, eps=config.rms_norm_eps, name="normed")
    tied_to = "model.embed_tokens.weight" if config.tie_word_embeddings else ""
    shape = (config.vocab_size, config.hidden_size)
    weight = b.weight("lm_head", "lm_head.weight", *shape, fallback=tied_to)
    return b.finish(b.linear(x, weight, out_dtype="f32", name="logits"))
