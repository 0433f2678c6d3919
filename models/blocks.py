"""The blocks that decoder specs are made of: layers, norms, attention, feed-forward, head.

Differences between families are arguments. Called by the specs; knows the builder, not the
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.config import ModelConfig
from treadle.models.rope import rope_attention_factor, rope_inverse_frequencies


@dataclass(frozen=True)
class Names:
    """Say what a checkpoint calls its layers and what stands around them; by default as Llama's."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA_NAMES = Names()


@dataclass(frozen=True)
class Layer:
    """Write the ops of one layer and name its weights.

    The weights of layer 3 are `layers.3.qkv` in graphs, `model.layers.3.…` in checkpoints.
    """

    b: GraphBuilder
    config: ModelConfig
    index: int
    names: Names

    def norm(self, x: Value, module: str) -> Value:
        """Normalise by the weight of `module`, `input_layernorm` for example."""
        weight = f"layers.{self.index}.{module}"
        return _norm(self.b, self.config, x, f"{self._at}.{module}", weight=weight, name=module)

    def head_norm(self, x: Value, module: str) -> Value:
        """Normalise each head by the weight of `module`, `self_attn.q_norm` for example."""
        name = module.rpartition(".")[2]
        weight = self.b.weight(
            f"layers.{self.index}.{name}", f"{self._at}.{module}.weight", self.config.head_dim
        )
        return self.b.head_norm(x, weight, eps=self.config.norm_eps, name=name)

    def project(self, x: Value, name: str, modules: Mapping[str, int], *, bias: bool) -> Value:
        """Multiply by the weights of `modules`, joined in order; the numbers are their rows."""
        weights = {f"{self._at}.{module}.weight": rows for module, rows in modules.items()}
        biases = {f"{self._at}.{module}.bias": rows for module, rows in modules.items()}
        weight = self.b.weight(f"layers.{self.index}.{name}", weights, x.type.size(-1))
        bias_value = self.b.weight(f"layers.{self.index}.{name}_bias", biases) if bias else None
        return self.b.linear(x, weight, bias_value, name=name)

    @property
    def _at(self) -> str:
        return f"{self.names.layers}.{self.index}"


def decoder(
    b: GraphBuilder,
    config: ModelConfig,
    block: Callable[[Layer, Value], Value],
    *,
    names: Names = LLAMA_NAMES,
) -> Graph:
    """Describe a step: embed the tokens, pass them through a block per layer, sample.

    `block` takes a layer and the stream before it, and gives the stream after it.
    """
    x = b.embed(b.weight("embed", f"{names.embed}.weight", config.vocab_size, config.hidden_size))
    for index in range(config.num_layers):
        b.scope(f"layers.{index}")
        x = block(Layer(b, config, index, names), x)
    b.scope("")
    x = b.last_rows(x, name="last")
    x = _norm(b, config, x, names.norm, weight="norm", name="normed")
    return b.finish(_head(b, config, x, names))


def rope_table(b: GraphBuilder, config: ModelConfig) -> Value:
    """Declare the cosines and sines of the config's RoPE."""
    frequencies = rope_inverse_frequencies(config.rope, config.head_dim)
    return b.rope_table("rope", frequencies, rope_attention_factor(config.rope))


def rope_tables(b: GraphBuilder, config: ModelConfig) -> Sequence[Value]:
    """Declare a table for each layer, the same for those that rotate, zeros for those that don't.

    Rotating by angles of zero changes nothing, so that all layers share their kernels.
    """
    without = config.no_rope_layers
    tables = {}
    if len(without) < config.num_layers:
        tables[True] = rope_table(b, config)
    if without:
        pairs = config.rope.rotary_dim // 2
        tables[False] = b.rope_table("no_rope", (0.0,) * pairs, 1.0)
    return [tables[index not in without] for index in range(config.num_layers)]


def rotary_attention(
    layer: Layer,
    x: Value,
    table: Value,
    *,
    modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output: str = "self_attn.o_proj",
    has_head_norms: bool = False,
) -> Value:
    """Project to q, k and v, rotate, attend through the layer's pages and project back.

    `modules` are those of q, k and v, or the one that holds all three. With `has_head_norms` the
    heads of q and k are normalised before they are rotated.
    """
    b, config = layer.b, layer.config
    head_dim = config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = _rows_of(modules, (q_width, kv_width, kv_width))
    qkv = layer.project(x, "qkv", rows, bias=config.qkv_bias)
    q, k, v = b.split(qkv, q_width, kv_width, kv_width, name="q k v")
    if has_head_norms:
        q = layer.head_norm(q, "self_attn.q_norm")
        k = layer.head_norm(k, "self_attn.k_norm")
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
    return layer.project(attended, "o", {output: config.hidden_size}, bias=config.output_bias)


def gated_mlp(
    layer: Layer,
    x: Value,
    *,
    modules: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj"),
    output: str = "mlp.down_proj",
) -> Value:
    """Project up twice, gate one half by the other's activation, and project down.

    `modules` are those of gate and up, or the one that holds both.
    """
    config = layer.config
    rows = _rows_of(modules, (config.intermediate_size, config.intermediate_size))
    gate_up = layer.project(x, "gate_up", rows, bias=config.mlp_bias)
    gated = layer.b.glu(gate_up, act=config.hidden_act, name="gated")
    return layer.project(gated, "down", {output: config.hidden_size}, bias=config.mlp_bias)


def _rows_of(modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    if len(modules) == 1:
        return {modules[0]: sum(sizes)}
    return dict(zip(modules, sizes, strict=True))


def _norm(
    b: GraphBuilder, config: ModelConfig, x: Value, module: str, *, weight: str, name: str
) -> Value:
    """Normalise rows by the weight of a module, which the graph calls `weight`."""
    scale = b.weight(weight, f"{module}.weight", x.type.size(-1))
    return b.rms_norm(x, scale, eps=config.norm_eps, name=name)


def _head(b: GraphBuilder, config: ModelConfig, x: Value, names: Names) -> Value:
    """Multiply by the head, tied or not, which gives the logits."""
    tied_to = f"{names.embed}.weight" if config.tie_word_embeddings else ""
    shape = (config.vocab_size, config.hidden_size)
    weight = b.weight("lm_head", f"{names.head}.weight", *shape, fallback=tied_to)
    return b.linear(x, weight, out_dtype="f32", name="logits")
