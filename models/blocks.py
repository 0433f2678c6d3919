"""The blocks that decoder specs are made of: layers, norms, attention, feed-forward, head.

Differences between families are arguments. Called by the specs; knows the builder, not the
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from treadle.ir.builder import GraphBuilder
from treadle.ir.graph import Graph, Value
from treadle.models.config import ModelConfig
from treadle.models.rope import RopeConfig, rope_attention_factor, rope_inverse_frequencies


@dataclass(frozen=True)
class Names:
    """Say what a checkpoint calls its layers and what stands around them; by default as Llama's."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True)
class NormStyle:
    """Say which norm a family uses: of the root mean square, or, if centred, of mean and variance.

    `offset` is added to the weight, which a centred norm can't have; `has_bias` one to the result.
    """

    is_centred: bool = False
    has_bias: bool = False
    offset: float = 0.0


LLAMA_NAMES = Names()
RMS_NORM = NormStyle()


@dataclass(frozen=True)
class Layer:
    """Write the ops of one layer and name its weights.

    The weights of layer 3 are `layers.3.qkv` in graphs, `model.layers.3.…` in checkpoints.
    """

    b: GraphBuilder
    config: ModelConfig
    index: int
    names: Names
    norm_style: NormStyle

    def norm(self, x: Value, module: str) -> Value:
        """Normalise by the weight of `module`, `input_layernorm` for example."""
        b, at, eps = self.b, f"{self.at}.{module}", self.config.norm_eps
        return _norm(b, x, at, f"layers.{self.index}.{module}", self.norm_style, eps, name=module)

    def head_norm(self, x: Value, module: str) -> Value:
        """Normalise each head by the weight of `module`, `self_attn.q_norm` for example."""
        name = module.rpartition(".")[2]
        weight = self.b.weight(
            f"layers.{self.index}.{name}", f"{self.at}.{module}.weight", self.config.head_dim
        )
        style, eps = self.norm_style, self.config.norm_eps
        return self.b.head_norm(x, weight, eps=eps, offset=style.offset, name=name)

    def section_norm(self, x: Value, name: str, modules: Mapping[str, int]) -> Value:
        """Normalise the first sections of rows by the weights of `modules`; numbers are widths."""
        weights = {f"{self.at}.{module}.weight": size for module, size in modules.items()}
        weight = self.b.weight(f"layers.{self.index}.{name}", weights)
        sizes, style = tuple(modules.values()), self.norm_style
        return self.b.section_norm(
            x, weight, sizes=sizes, eps=self.config.norm_eps, offset=style.offset, name=name
        )

    def project(
        self,
        x: Value,
        name: str,
        modules: Mapping[str, int],
        *,
        bias: bool,
        sections: tuple[int, ...] = (),
        groups: int = 1,
        out_dtype: str = "",
    ) -> Value:
        """Multiply by the weights of `modules`, joined in order; the numbers are their rows.

        With `groups` a module's rows come group by group, each with its share of every section.
        """
        weights = {f"{self.at}.{module}.weight": rows for module, rows in modules.items()}
        biases = {f"{self.at}.{module}.bias": rows for module, rows in modules.items()}
        label = f"layers.{self.index}.{name}"
        weight = self.b.weight(label, weights, x.type.size(-1), sections=sections, groups=groups)
        bias_value = None
        if bias:
            bias_value = self.b.weight(f"{label}_bias", biases, sections=sections, groups=groups)
        return self.b.linear(x, weight, bias_value, out_dtype=out_dtype, name=name)

    def expert_weight(
        self, name: str, modules: Mapping[str, int], num_inputs: int, *, joined: str
    ) -> Value:
        """Declare a weight of every expert: `modules` of each, or one tensor `joined` of all."""
        assert self.config.experts is not None, "a config without experts has no such layer"
        return self.b.weight(
            f"layers.{self.index}.{name}",
            {f"{self.at}.{module}.weight": rows for module, rows in modules.items()},
            num_inputs,
            stack=self.config.experts.num_experts,
            fallback=f"{self.at}.{joined}",
        )

    @property
    def has_experts(self) -> bool:
        """Whether this layer has a mixture of experts, and no plain feed-forward."""
        experts = self.config.experts
        return experts is not None and self.index not in experts.dense_layers

    @property
    def at(self) -> str:
        """What the checkpoint's names of this layer begin with."""
        return f"{self.names.layers}.{self.index}"


def decoder(
    b: GraphBuilder,
    config: ModelConfig,
    block: Callable[[Layer, Value], Value],
    *,
    names: Names = LLAMA_NAMES,
    norm_style: NormStyle = RMS_NORM,
    embedding_scale: float = 1.0,
) -> Graph:
    """Describe a step: embed the tokens, pass them through a block per layer, sample.

    `block` takes a layer and the stream before it, and gives the stream after it.
    """
    table = b.weight("embed", f"{names.embed}.weight", config.vocab_size, config.hidden_size)
    x = b.embed(table, scale=embedding_scale * config.embedding_scale)
    for index in range(config.num_layers):
        b.scope(f"layers.{index}")
        x = block(Layer(b, config, index, names, norm_style), x)
    b.scope("")
    x = b.last_rows(x, name="last")
    x = _norm(b, x, names.norm, "norm", norm_style, config.norm_eps, name="normed")
    return b.finish(_logits(b, config, x, names), x)


def rope_table(b: GraphBuilder, config: ModelConfig) -> Value:
    """Declare the cosines and sines of the config's RoPE."""
    return _table(b, "rope", config.rope)


def _table(b: GraphBuilder, name: str, rope: RopeConfig) -> Value:
    scale = rope_attention_factor(rope)
    if rope.kind != "longrope":
        return b.rope_table(name, rope_inverse_frequencies(rope), scale)
    return b.rope_table(
        name,
        rope_inverse_frequencies(rope),
        scale,
        short_window=rope.original_max_position_embeddings or 0,
        long_inverse_frequencies=rope_inverse_frequencies(rope, is_long=True),
    )


def rope_tables(b: GraphBuilder, config: ModelConfig) -> Sequence[Value]:
    """Declare a table for each layer: of the config's RoPE, of its local one, or of zeros.

    Rotating by angles of zero changes nothing, so that layers without RoPE share the kernels of the
    others.
    """
    tables: dict[str, Value] = {}
    chosen = []
    for index in range(config.num_layers):
        name, rope = "rope", config.rope
        if index in config.no_rope_layers:
            name = "no_rope"
        elif config.local_rope and index in config.sliding_layers:
            name, rope = "local_rope", config.local_rope
        if name not in tables:
            zeros = (0.0,) * (rope.rotary_dim // 2)
            is_rope = name != "no_rope"
            tables[name] = _table(b, name, rope) if is_rope else b.rope_table(name, zeros)
        chosen.append(tables[name])
    return chosen


def rotary_attention(
    layer: Layer,
    x: Value,
    table: Value,
    *,
    modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output: str = "self_attn.o_proj",
    has_head_norms: bool = False,
    has_row_norms: bool = False,
    is_grouped: bool = False,
    interleaved: bool = False,
    has_sinks: bool = False,
) -> Value:
    """Project to q, k and v, rotate, attend through the layer's pages and project back.

    `modules` are those of q, k and v, or the one that holds all three. With `has_head_norms` the
    heads of q and k are normalised before they are rotated, with `has_row_norms` all heads of a
    token together. `is_grouped` says that the one module's rows come KV head by KV head, each with
    its queries; `interleaved` that neighbours rotate as a pair; `has_sinks` that each head has a
    score of its own that joins the softmax.
    """
    b, config = layer.b, layer.config
    head_dim = config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    sizes = (q_width, kv_width, kv_width)
    groups = config.num_kv_heads if is_grouped else 1
    qkv = layer.project(
        x,
        "qkv",
        _rows_of(modules, sizes),
        bias=config.qkv_bias,
        sections=sizes,
        groups=groups,
    )
    if has_row_norms:
        widths = {"self_attn.q_norm": q_width, "self_attn.k_norm": kv_width}
        qkv = layer.section_norm(qkv, "qk_norm", widths)
    q, k, v = b.split(qkv, q_width, kv_width, kv_width, name="q k v")
    if has_head_norms:
        q = layer.head_norm(q, "self_attn.q_norm")
        k = layer.head_norm(k, "self_attn.k_norm")
    sinks = None
    if has_sinks:
        sinks = b.weight(
            f"layers.{layer.index}.sinks", f"{layer.at}.self_attn.sinks", config.num_heads
        )
    attended = b.attention(
        b.rope(q, table, head_dim=head_dim, interleaved=interleaved, name="q_rope"),
        b.rope(k, table, head_dim=head_dim, interleaved=interleaved, name="k_rope"),
        v,
        sinks,
        cache=f"kv.{layer.index}",
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        scale=config.attention_scale,
        window=config.window_of(layer.index),
        soft_cap=config.attention_cap,
        name="attended",
    )
    return layer.project(attended, "o", {output: config.hidden_size}, bias=config.output_bias)


def gated_mlp(
    layer: Layer,
    x: Value,
    *,
    modules: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj"),
    output: str = "mlp.down_proj",
    size: int = 0,
    prefix: str = "",
) -> Value:
    """Project up twice, gate one half by the other's activation, and project down.

    `modules` are those of gate and up, or the one that holds both; `size` is their width where it
    is not the config's. The graph's names begin with `prefix`.
    """
    config = layer.config
    size = size or config.intermediate_size
    gate_up = layer.project(
        x, f"{prefix}gate_up", _rows_of(modules, (size, size)), bias=config.mlp_bias
    )
    gated = layer.b.glu(gate_up, act=config.hidden_act, name=f"{prefix}gated")
    rows = {output: config.hidden_size}
    return layer.project(gated, f"{prefix}down", rows, bias=config.mlp_bias)


@dataclass(frozen=True)
class ExpertNames:
    """Say what a checkpoint calls the parts of a mixture of experts, within a layer.

    `{}` stands for an expert's number; `joined_gate_up` and `joined_down` are tensors that hold all
    experts as one, for checkpoints that have those instead.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    joined_gate_up: str = "mlp.experts.gate_up_proj"
    joined_down: str = "mlp.experts.down_proj"
    shared: str = "mlp.shared_expert"


EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True)
class JoinedExperts:
    """Say what a checkpoint calls tensors that hold all experts, inputs before outputs.

    Gate and up alternate among the outputs. Biases, where there are any, end in `_bias`.
    """

    router: str = "mlp.router"
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"


def add_experts(
    layer: Layer, x: Value, normed: Value, *, names: ExpertNames | JoinedExperts = EXPERT_NAMES
) -> Value:
    """Add to the stream `x` what the experts make of the `normed` one.

    Each token passes the best of them, scaled, and the shared one if there is one.
    """
    b, experts = layer.b, layer.config.experts
    assert experts is not None, "a config without experts has no such layer"
    chosen, scales = _route(layer, normed, names.router)
    if isinstance(names, ExpertNames) and experts.shared_size:
        shared = _shared_expert(layer, normed, names)
        x = b.add(x, shared, name="after_shared")
    (gate_up, gate_up_bias), (down, down_bias) = _expert_weights(layer, names)
    up = b.expert_linear(normed, gate_up, chosen, gate_up_bias, name="experts_gate_up")
    gated = b.glu(
        up,
        act=layer.config.hidden_act,
        limit=experts.gate_limit,
        sharpness=experts.gate_sharpness,
        up_offset=experts.up_offset,
        name="experts_gated",
    )
    results = b.expert_linear(gated, down, chosen, down_bias, name="experts_down")
    return b.add(x, b.combine(results, scales, name="routed"), name="after_mlp")


def _expert_weights(
    layer: Layer, names: ExpertNames | JoinedExperts
) -> tuple[tuple[Value, Value | None], tuple[Value, Value | None]]:
    """Declare the weight and the bias of gate and up, then those of down."""
    b, experts, hidden = layer.b, layer.config.experts, layer.config.hidden_size
    assert experts is not None, "a config without experts has no such layer"
    size = experts.intermediate_size
    if isinstance(names, ExpertNames):
        modules, joined = {names.gate: size, names.up: size}, names.joined_gate_up
        gate_up = layer.expert_weight("experts_gate_up", modules, hidden, joined=joined)
        modules, joined = {names.down: hidden}, names.joined_down
        down = layer.expert_weight("experts_down", modules, size, joined=joined)
        return (gate_up, None), (down, None)

    def declare(
        name: str, tensor: str, rows: int, inputs: int, sections: tuple[int, ...] = ()
    ) -> tuple[Value, Value | None]:
        label, source = f"layers.{layer.index}.{name}", f"{layer.at}.{tensor}"
        groups = sections[0] if sections else 1
        order = partial(b.weight, sections=sections, groups=groups, stack=experts.num_experts)
        weight = order(label, {source: rows}, inputs, transposed=True)
        bias = order(f"{label}_bias", {f"{source}_bias": rows}) if experts.has_biases else None
        return weight, bias

    gate_up_rows = (size, size)
    return (
        declare("experts_gate_up", names.gate_up, 2 * size, hidden, gate_up_rows),
        declare("experts_down", names.down, hidden, size),
    )


def _route(layer: Layer, normed: Value, module: str) -> tuple[Value, Value]:
    b, experts = layer.b, layer.config.experts
    assert experts is not None, "a config without experts has no such layer"
    router, has_bias = {module: experts.num_experts}, experts.has_biases
    logits = layer.project(normed, "router", router, bias=has_bias, out_dtype="f32")
    correction = None
    if experts.has_correction:
        correction = b.weight(
            f"layers.{layer.index}.correction",
            f"{layer.at}.{module}.e_score_correction_bias",
            experts.num_experts,
            dtype="f32",
        )
    return b.route(
        logits,
        correction,
        top_k=experts.top_k,
        score=experts.score,
        normalise=experts.normalise,
        scaling=experts.scaling,
        num_groups=experts.num_groups,
        kept_groups=experts.kept_groups,
        group_top=experts.group_top,
        name="experts scales",
    )


def _shared_expert(layer: Layer, normed: Value, names: ExpertNames) -> Value:
    """Let every token pass one more expert, its result scaled by a gate where it has one."""
    experts, module = layer.config.experts, names.shared
    assert experts is not None, "a config without experts has no such layer"
    shared = gated_mlp(
        layer,
        normed,
        modules=(f"{module}.gate_proj", f"{module}.up_proj"),
        output=f"{module}.down_proj",
        size=experts.shared_size,
        prefix="shared_",
    )
    if not experts.has_shared_gate:
        return shared
    gate = layer.project(normed, "shared_gate", {f"{module}_gate": 1}, bias=False)
    return layer.b.row_gate(shared, gate, name="shared")


def mlp(layer: Layer, x: Value, *, module: str, output: str) -> Value:
    """Project up, activate and project down, without a gate."""
    config = layer.config
    rows = {module: config.intermediate_size}
    hidden = layer.project(x, "up", rows, bias=config.mlp_bias)
    hidden = layer.b.activate(hidden, act=config.hidden_act, name="activated")
    return layer.project(hidden, "down", {output: config.hidden_size}, bias=config.mlp_bias)


def _rows_of(modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    if len(modules) == 1:
        return {modules[0]: sum(sizes)}
    return dict(zip(modules, sizes, strict=True))


def _norm(
    b: GraphBuilder,
    x: Value,
    module: str,
    weight_name: str,
    style: NormStyle,
    eps: float,
    *,
    name: str,
) -> Value:
    """Normalise rows by the weight, and bias, of a module of the checkpoint."""
    weight = b.weight(weight_name, f"{module}.weight", x.type.size(-1))
    if not style.is_centred:
        return b.rms_norm(x, weight, eps=eps, offset=style.offset, name=name)
    bias = None
    if style.has_bias:
        bias = b.weight(f"{weight_name}_bias", f"{module}.bias", x.type.size(-1))
    return b.layer_norm(x, weight, bias, eps=eps, name=name)


def _logits(b: GraphBuilder, config: ModelConfig, x: Value, names: Names) -> Value:
    """Multiply by the head, tied or not, scale and cap."""
    tied_to = f"{names.embed}.weight" if config.tie_word_embeddings else ""
    shape = (config.vocab_size, config.hidden_size)
    weight = b.weight("lm_head", f"{names.head}.weight", *shape, fallback=tied_to)
    scale, cap = config.logit_scale, config.logit_cap
    is_raw = scale == 1.0 and not cap
    logits = b.linear(x, weight, out_dtype="f32", name="logits" if is_raw else "raw_logits")
    if scale != 1.0:
        logits = b.scale(logits, scale, name="scaled_logits" if cap else "logits")
    return b.soft_cap(logits, cap, name="logits") if cap else logits
