"""The registry of ops: parameters, type rule, cost, fusion role. One entry per kind, read by all.

The meaning of each op is the function of the same name in `kernels/reference.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from treadle.ir import dims as d
from treadle.ir.errors import ShapeError, SpecError
from treadle.ir.types import DTYPE_BYTES, FLOATS, TensorType

Types = tuple[TensorType, ...]
Dims = Mapping[str, int]


@dataclass(frozen=True)
class OpDef:
    """Define one kind of op.

    `operands` name the inputs in order, `results` the outputs; an operand ending in `?` may be left
    out, those of one of the `groups` together: how many inputs there are says which. `mutates`
    names operands written in place: such an op never moves past
    another that touches the same operand. `role` is what fusion may do with it: an `anchor` gets a
    kernel, a `pointwise` op joins its producer's epilogue, a `row` op a prologue, a `view`
    vanishes.
    """

    kind: str
    params: type
    operands: tuple[str, ...]
    results: tuple[str, ...]
    role: str
    infer: Callable[..., Types]
    flops: Callable[[Any, Types, Types, Dims], int]
    bytes: Callable[[Any, Types, Types, Dims], int]
    doc: str
    mutates: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def required(self) -> int:
        """The number of operands that can't be left out."""
        return sum(not name.endswith("?") for name in self.operands)

    def present(self, count: int) -> tuple[str, ...]:
        """Name the operands that `count` inputs are; no names where no choice of them fits."""
        needed = self.operands[: self.required]
        for taken in itertools.product((True, False), repeat=len(self.groups)):
            chosen = itertools.compress(self.groups, taken)
            names = (*needed, *itertools.chain.from_iterable(chosen))
            if len(names) == count:
                return names
        return ()


REGISTRY: dict[str, OpDef] = {}


def _moved_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return sum(type_.num_bytes(dims) for type_ in (*inputs, *outputs))


def _elements(type_: TensorType, dims: Dims) -> int:
    return math.prod(type_.bound_shape(dims))


def _per_element(count: int) -> Callable[[Any, Types, Types, Dims], int]:
    def flops(_params: Any, _inputs: Types, outputs: Types, dims: Dims) -> int:
        return count * sum(_elements(type_, dims) for type_ in outputs)

    return flops


def _define(
    kind: str,
    params: type,
    operands: str,
    results: str,
    role: str,
    *,
    flops: Callable[[Any, Types, Types, Dims], int] | None = None,
    bytes_: Callable[[Any, Types, Types, Dims], int] | None = None,
    mutates: str = "",
) -> Callable[[Callable[..., Types]], Callable[..., Types]]:
    """Register the decorated type rule, with its docstring, as the op `kind`.

    Of `operands`, those joined by `+` come together or not at all.
    """
    together = [part.split("+") for part in operands.replace("?", "").split()]
    is_optional = [part.endswith("?") for part in operands.split()]
    marks = zip(together, is_optional, strict=True)

    def register(infer: Callable[..., Types]) -> Callable[..., Types]:
        REGISTRY[kind] = OpDef(
            kind,
            params,
            tuple(name + "?" * optional for names, optional in marks for name in names),
            tuple(results.split()),
            role,
            infer,
            flops or _per_element(0),
            bytes_ or _moved_bytes,
            (infer.__doc__ or "").strip(),
            tuple(mutates.split()),
            tuple(map(tuple, itertools.compress(together, is_optional))),
        )
        return infer

    return register


def lookup(kind: str) -> OpDef:
    """Give the definition of `kind`. Raises: SpecError: there is none; lists those there are."""
    if kind not in REGISTRY:
        raise SpecError(
            f"There is no op `{kind}`; the registry holds {', '.join(sorted(REGISTRY))}."
        )
    return REGISTRY[kind]


def make_params(kind: str, values: Mapping[str, Any]) -> Any:
    """Make the parameters of an op of this kind. Raises: SpecError: some are missing or unknown."""
    try:
        return lookup(kind).params(**values)
    except TypeError as error:
        raise SpecError(f"`{kind}`: {error}.") from None


def infer_types(kind: str, params: Any, inputs: Types) -> Types:
    """Give the result types of an op, or say which operand does not fit.

    Raises: SpecError: wrong number of operands or wrong parameters. ShapeError: types don't fit.
    """
    definition = lookup(kind)
    if not isinstance(params, definition.params):
        raise SpecError(
            f"`{kind}` takes {definition.params.__name__}, found {type(params).__name__}."
        )
    names = definition.present(len(inputs))
    if not names:
        raise SpecError(
            f"`{kind}` takes the operands {', '.join(definition.operands)}; found {len(inputs)} of "
            "them."
        )
    needed = definition.required
    given = dict(zip(names[needed:], inputs[needed:], strict=True))
    return definition.infer(params, *inputs[:needed], **given)


def describe(params: Any) -> str:
    """Write parameters as `name=value, …`, in the order they are declared.

    Rare ones, which few models need, are left out where they have their defaults.
    """
    return ", ".join(settings(params))


def settings(params: Any) -> list[str]:
    """Write each parameter that `describe` shows as `name=value`."""
    shown = [f for f in fields(params) if not _is_rare_default(params, f)]
    return [f"{f.name}={getattr(params, f.name)!r}" for f in shown]


def _rare(default: Any) -> Any:
    """Declare a parameter that is printed only where it differs from its default."""
    return field(default=default, metadata={"rare": True})


def _is_rare_default(params: Any, declared: Field[Any]) -> bool:
    is_rare = bool(declared.metadata.get("rare"))
    return is_rare and getattr(params, declared.name) == declared.default


# --- checks shared by the type rules ------------------------------------------------------------


def _expect(ok: bool, kind: str, expected: str, *found: TensorType) -> None:
    if not ok:
        raise ShapeError(f"`{kind}` expects {expected}; found {' and '.join(map(str, found))}.")


def _expect_ints(kind: str, **operands: tuple[TensorType, tuple[d.Dim, ...]]) -> None:
    for name, (type_, shape) in operands.items():
        expected = TensorType(shape, "i32")
        _expect(type_ == expected, kind, f"`{name}` of type {expected}", type_)


# --- parameters ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoParams:
    """Take no parameters."""


@dataclass(frozen=True)
class EmbedParams:
    """`scale` multiplies the embedding (Gemma); 1.0 for most models."""

    scale: float = 1.0


@dataclass(frozen=True)
class RmsNormParams:
    """`eps` is added to the mean square; `offset` to the weight."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class LayerNormParams:
    """`eps` is added to the variance."""

    eps: float


@dataclass(frozen=True)
class SectionNormParams:
    """`sizes` are the widths of the sections; `eps` is added to each mean square, `offset` to the
    weight.
    """

    sizes: tuple[int, ...]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class ScaleParams:
    """`factor` is what every element is multiplied by."""

    factor: float


@dataclass(frozen=True)
class SoftCapParams:
    """`cap` is what no result's absolute value exceeds."""

    cap: float


@dataclass(frozen=True)
class ActivateParams:
    """`act` is the activation."""

    act: str


@dataclass(frozen=True)
class LinearParams:
    """`out_dtype` is the result's dtype; empty for the input's."""

    out_dtype: str = ""


@dataclass(frozen=True)
class GluParams:
    """`act` is the gate's activation; `interleave` the width of alternating gate and up groups.

    With a `limit` the gate is cut off above it, up on both sides. `sharpness` multiplies what the
    activation is applied to and divides the result; `up_offset` is added to up.
    """

    act: str = "silu"
    interleave: int = 0
    limit: float = _rare(0.0)
    sharpness: float = _rare(1.0)
    up_offset: float = _rare(0.0)


@dataclass(frozen=True)
class SplitParams:
    """`sizes` are the widths of the parts of the last axis."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class RopeParams:
    """`head_dim` is the width of a head; the table's width r says how much of it is rotated.

    Pairs are made of the two halves of these r features, or of neighbours if `interleaved`. The
    features before `start` pass through.
    """

    head_dim: int
    interleaved: bool = _rare(False)
    start: int = _rare(0)


@dataclass(frozen=True)
class AttentionParams:
    """Heads of the queries and of the cache; `scale` multiplies the scores.

    With a `window` W > 0 a token sees itself and the W - 1 tokens before it. With `soft_cap` c > 0
    a score s counts as c tanh(s/c).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = _rare(0)
    soft_cap: float = _rare(0.0)


@dataclass(frozen=True)
class HeadLinearParams:
    """Heads of x and of the weight; of a head's rows of the weight, `rows` from `first` on count.

    With `transposed` it is their columns that are multiplied by.
    """

    num_heads: int
    first: int
    rows: int
    transposed: bool = False


@dataclass(frozen=True)
class LatentAttentionParams:
    """Heads of the queries; `scale` multiplies the scores.

    The first `value_dim` features of a latent are its value, all of them its key. With `whole_from`
    n > 0 sequences whose tokens, n or more, are all of this step are left out.
    """

    num_heads: int
    value_dim: int
    scale: float
    whole_from: int = _rare(0)


@dataclass(frozen=True)
class PromptAttentionParams:
    """Heads; of a head's q `nope_dim` features are not rotated; `value_dim` are of its value.

    `scale` multiplies the scores. Sequences whose tokens, `whole_from` or more, are all of this
    step are served.
    """

    num_heads: int
    nope_dim: int
    value_dim: int
    scale: float
    whole_from: int


@dataclass(frozen=True)
class RouteParams:
    """`score` turns logits into probabilities: `softmax` over experts, or `sigmoid` of each.

    `top_k` experts are chosen for each token; with `normalise` their probabilities are made to sum
    to 1, then multiplied by `scaling`. Experts in `num_groups` groups of equal size: only those of
    the `kept_groups` best are chosen from, a group scored by the sum of its `group_top` best.
    """

    top_k: int
    score: str = "softmax"
    normalise: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_top: int = 1


@dataclass(frozen=True)
class SortParams:
    """`num_experts` is how many there are, chosen or not."""

    num_experts: int


@dataclass(frozen=True)
class FusedParams:
    """`kernel` names the kernel that a fused op becomes: anchor first, then what joined it."""

    kernel: str


# --- ops ----------------------------------------------------------------------------------------


def _embed_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return inputs[0].num_bytes(dims) + 2 * outputs[0].num_bytes(dims)


@_define("embed", EmbedParams, "token_ids table", "rows", "anchor", bytes_=_embed_bytes)
def _embed(params: EmbedParams, token_ids: TensorType, table: TensorType) -> Types:
    """Look up one row of the table per token.

    Formula: rows[t] = scale * table[token_ids[t]]
    Shapes: token_ids i32[T]; table [V, E]; rows [T, E].
    """
    _expect_ints("embed", token_ids=(token_ids, (d.T,)))
    _expect(len(table.shape) == 2 and table.dtype in FLOATS, "embed", "a table [V, E]", table)
    return (TensorType((d.T, table.shape[1]), table.dtype),)


@_define("rms_norm", RmsNormParams, "x weight", "y", "row", flops=_per_element(4))
def _rms_norm(params: RmsNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale each row to unit root mean square, then by the weight.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset)
    Shapes: x [T, E]; weight [E]; y [T, E].
    Numerics: computed in f32.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    _expect(
        weight.shape == x.shape[-1:], "rms_norm", "a weight as wide as x's last axis", x, weight
    )
    return (x,)


@_define("head_norm", RmsNormParams, "x weight", "y", "row", flops=_per_element(4))
def _head_norm(params: RmsNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale each head of each row to unit root mean square, then by the weight that heads share.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset), the mean over the D of a head
    Shapes: x [T, n*D]; weight [D]; y [T, n*D].
    Numerics: computed in f32.
    Source: Henry et al., Query-Key Normalization for Transformers, 2020.
    """
    _expect(
        len(weight.shape) == 1 and x.size(-1) % weight.size(0) == 0,
        "head_norm",
        "a weight as wide as a head, and x of whole heads",
        x,
        weight,
    )
    return (x,)


@_define("layer_norm", LayerNormParams, "x weight bias?", "y", "row", flops=_per_element(7))
def _layer_norm(
    params: LayerNormParams, x: TensorType, weight: TensorType, bias: TensorType | None = None
) -> Types:
    """Shift and scale each row to mean 0 and variance 1, then by the weight, and add the bias.

    Formula: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    Shapes: x [T, E]; weight [E]; bias [E]; y [T, E].
    Numerics: computed in f32; the variance is that of the row, not an estimate (divided by E).
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    for vector in (weight, bias):
        if vector is not None:
            expected = "weight and bias as wide as x's last axis"
            _expect(vector.shape == x.shape[-1:], "layer_norm", expected, x, vector)
    return (x,)


@_define("section_norm", SectionNormParams, "x weight", "y", "row", flops=_per_element(4))
def _section_norm(params: SectionNormParams, x: TensorType, weight: TensorType) -> Types:
    """Scale the first sections of each row, each to unit root mean square, then by the weight.

    Formula: y = x / sqrt(mean(x²) + eps) * (weight + offset), the mean over a section; what lies
    beyond the sections passes through
    Shapes: x [T, W]; weight [sum(sizes)], at most W; y [T, W].
    Numerics: computed in f32.
    Source: the norms of q and k in OLMo 2, 2025, where q, k and v are one projection.
    """
    width = sum(params.sizes)
    _expect(
        weight.shape == (width,) and width <= x.size(-1),
        "section_norm",
        f"a weight of {'+'.join(map(str, params.sizes))} elements and x no narrower",
        x,
        weight,
    )
    return (x,)


def _linear_flops(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return 2 * _elements(outputs[0], dims) * d.bind(inputs[1].shape[1], dims)


@_define("linear", LinearParams, "x weight bias?", "y", "anchor", flops=_linear_flops)
def _linear(
    params: LinearParams, x: TensorType, weight: TensorType, bias: TensorType | None = None
) -> Types:
    """Multiply each row by the transposed weight and add the bias.

    Formula: y = x @ weight.T + bias
    Shapes: x [T, K]; weight [N, K]; bias [N]; y [T, N].
    Numerics: accumulated in f32.
    """
    _expect(
        len(weight.shape) == 2 and x.shape[-1] == weight.shape[1],
        "linear",
        "x [.., K] and a weight [N, K]",
        x,
        weight,
    )
    if bias is not None:
        _expect(bias.shape == weight.shape[:1], "linear", "a bias [N]", weight, bias)
    return (TensorType((*x.shape[:-1], weight.shape[0]), params.out_dtype or x.dtype),)


def _head_linear_flops(params: HeadLinearParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    summed = params.rows if params.transposed else inputs[1].size(1)
    return 2 * _elements(outputs[0], dims) * summed


def _head_linear_bytes(params: HeadLinearParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    x, weight = inputs
    touched = params.num_heads * params.rows * weight.size(1) * DTYPE_BYTES[weight.dtype]
    return x.num_bytes(dims) + touched + outputs[0].num_bytes(dims)


@_define(
    "head_linear",
    HeadLinearParams,
    "x weight",
    "y",
    "anchor",
    flops=_head_linear_flops,
    bytes_=_head_linear_bytes,
)
def _head_linear(params: HeadLinearParams, x: TensorType, weight: TensorType) -> Types:
    """Multiply each head of each row by the head's own rows of the weight.

    Formula: y[t, h] = x[t, h, :K] @ w.T, w = weight[h*n + first : h*n + first + rows], n = N/H;
    transposed, y[t, h] = x[t, h, :rows] @ w
    Shapes: x [T, H*D], whose heads may be wider than what is multiplied; weight [N, K]; y
    [T, H*rows], or [T, H*K] if transposed.
    Numerics: accumulated in f32.
    Source: of latent attention, DeepSeek-V2, 2024: the projections up from the latent, moved from
    the keys to the queries and from the values to the results.
    """
    heads, kind = params.num_heads, "head_linear"
    is_whole = len(weight.shape) == 2 and weight.size(0) % heads == 0 and x.size(-1) % heads == 0
    _expect(is_whole, kind, f"x and a weight [N, K] of {heads} heads", x, weight)
    fits = params.first >= 0 and params.first + params.rows <= weight.size(0) // heads
    _expect(fits and params.rows > 0, kind, f"{params.rows} rows from {params.first} on", weight)
    taken, made = weight.size(1), params.rows
    if params.transposed:
        taken, made = made, taken
    _expect(x.size(-1) // heads >= taken, kind, f"heads of at least {taken}", x)
    return (x.with_shape(*x.shape[:-1], heads * made),)


@_define("add", NoParams, "a b", "y", "pointwise", flops=_per_element(1))
def _add(params: NoParams, a: TensorType, b: TensorType) -> Types:
    """Add two tensors of one shape: the residual connection.

    Formula: y = a + b
    """
    _expect(a == b, "add", "two operands of one type", a, b)
    return (a,)


@_define("scale", ScaleParams, "x", "y", "pointwise", flops=_per_element(1))
def _scale(params: ScaleParams, x: TensorType) -> Types:
    """Multiply by a constant.

    Formula: y = factor * x
    """
    return (x,)


@_define("soft_cap", SoftCapParams, "x", "y", "pointwise", flops=_per_element(5))
def _soft_cap(params: SoftCapParams, x: TensorType) -> Types:
    """Bend what is large, so that nothing exceeds the cap.

    Formula: y = cap * tanh(x / cap)
    Numerics: computed in f32.
    Source: Gemma Team, Gemma 2, 2024.
    """
    return (x,)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _expect_activation(kind: str, act: str) -> None:
    if act not in ACTIVATIONS:
        raise SpecError(f"`{kind}` knows the activations {', '.join(ACTIVATIONS)}; found `{act}`.")


@_define("activate", ActivateParams, "x", "y", "pointwise", flops=_per_element(6))
def _activate(params: ActivateParams, x: TensorType) -> Types:
    """Apply an activation to every element: of a feed-forward without a gate.

    Formula: y = act(x)
    Numerics: computed in f32; `gelu_tanh` is the approximation by tanh.
    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    _expect_activation("activate", params.act)
    return (x,)


@_define("glu", GluParams, "gate_up", "y", "pointwise", flops=_per_element(6))
def _glu(params: GluParams, gate_up: TensorType) -> Types:
    """Gate one half of the features with the activated other half.

    Formula: y = act(s * min(gate, limit)) / s * (clamp(up, -limit, limit) + up_offset), s being the
    sharpness; by default act(gate) * up
    Shapes: gate_up [T, 2F]; y [T, F]. With interleave 0 the first F features are the gate; with
    g > 0 groups of g gate features alternate with groups of g up features.
    Numerics: computed in f32.
    Source: Shazeer, GLU Variants Improve Transformer, 2020; limit, sharpness and offset as in
    OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025.
    """
    width = gate_up.size(-1)
    _expect(width % 2 == 0, "glu", "an even last axis", gate_up)
    _expect_activation("glu", params.act)
    if params.limit < 0 or params.sharpness <= 0:
        raise SpecError(
            f"`glu` expects a limit of 0 or more and a sharpness above 0; found {params.limit} and "
            f"{params.sharpness}."
        )
    if params.interleave and (width // 2) % params.interleave:
        raise SpecError(f"`glu` can't alternate groups of {params.interleave} in {gate_up}.")
    return (gate_up.with_shape(*gate_up.shape[:-1], width // 2),)


@_define("split", SplitParams, "x", "parts", "view")
def _split(params: SplitParams, x: TensorType) -> Types:
    """Cut the last axis into parts of the given sizes.

    Shapes: x [T, sum(sizes)]; parts [T, size] each.
    """
    _expect(
        x.shape[-1] == sum(params.sizes),
        "split",
        f"a last axis of {'+'.join(map(str, params.sizes))}",
        x,
    )
    return tuple(x.with_shape(*x.shape[:-1], size) for size in params.sizes)


@_define("rope", RopeParams, "x positions table", "y", "pointwise", flops=_per_element(6))
def _rope(params: RopeParams, x: TensorType, positions: TensorType, table: TensorType) -> Types:
    """Rotate each head's halves by the angle of the token's position.

    Formula: y[:r/2] = x1*cos - x2*sin; y[r/2:r] = x2*cos + x1*sin; dims beyond r pass through;
    interleaved, x1 and y[:r/2] are the even features below r, x2 and y[r/2:r] the odd ones; all
    counted from `start`
    Shapes: x [T, n*D]; positions i32[T]; table f32[C, r], cosines first, then sines.
    Numerics: computed in f32.
    Source: Su et al., RoFormer, 2021; halves as in Hugging Face's `rotate_half`.
    """
    _expect_ints("rope", positions=(positions, (d.T,)))
    head_dim, rotary_dim = params.head_dim, table.size(-1)
    _expect(x.size(-1) % head_dim == 0, "rope", f"heads of {head_dim}", x)
    _expect(
        params.start + rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "rope",
        f"a table of even width no wider than the head of {head_dim} from {params.start} on",
        table,
    )
    return (x,)


# --- mixtures of experts ------------------------------------------------------------------------


@_define("route", RouteParams, "logits correction?", "experts scales", "row")
def _route(params: RouteParams, logits: TensorType, correction: TensorType | None = None) -> Types:
    """Choose the experts of each token, and what their results are scaled by.

    Formula: p = score(logits); experts = top_k of p + correction within the best groups;
    scales = scaling * p[experts], over their sum where normalised
    Shapes: logits f32[T, X]; correction f32[X]; experts i32[T, k], the best first, of equal ones
    the lower number; scales f32[T, k].
    Numerics: the correction decides the choice alone, not the scales.
    Source: Shazeer et al., Outrageously Large Neural Networks, 2017; groups and correction as in
    DeepSeek-V2 and DeepSeek-V3 Technical Reports, 2024.
    """
    _expect(logits.dtype == "f32" and len(logits.shape) == 2, "route", "logits f32[T, X]", logits)
    num_experts = logits.size(1)
    if correction is not None:
        expected = TensorType((num_experts,), "f32")
        _expect(correction == expected, "route", f"a correction {expected}", correction)
    if params.score not in ("softmax", "sigmoid"):
        raise SpecError(f"`route` scores by `softmax` or `sigmoid`, found `{params.score}`.")
    groups, kept = params.num_groups, params.kept_groups
    if groups < 1 or num_experts % groups or not 1 <= kept <= groups:
        raise SpecError(
            f"`route` keeps some of several equal groups; found {kept} of {groups} groups of "
            f"{num_experts} experts."
        )
    size = num_experts // groups
    if not 1 <= params.top_k <= kept * size or not 1 <= params.group_top <= size:
        raise SpecError(
            f"`route` can't choose {params.top_k} experts from {kept} groups of {size}, scored by "
            f"their best {params.group_top}."
        )
    shape = (logits.shape[0], params.top_k)
    return (TensorType(shape, "i32"), TensorType(shape, "f32"))


def _expect_expert_weight(
    kind: str, x: TensorType, weight: TensorType, bias: TensorType | None
) -> None:
    _expect(
        len(weight.shape) == 3 and x.shape[-1] == weight.shape[2],
        kind,
        "x [.., K] and a weight [X, N, K]",
        x,
        weight,
    )
    if bias is not None:
        _expect(bias.shape == weight.shape[:2], kind, "a bias [X, N]", weight, bias)


def _choice_rows(experts: TensorType) -> d.Dim:
    """Give kT: one row for each choice of each token."""
    return experts.shape[0] * experts.size(1)


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Give how many distinct experts that many tokens choose, if each choice is as likely.

    Formula: X * (1 - (1 - k/X)^T)
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def _expert_bytes(
    x: TensorType, weight: TensorType, choices: int, outputs: Types, dims: Dims
) -> int:
    """Count x, results and ids once, and the weights of the experts that the choices touch."""
    tokens = dims["T"]
    touched = expected_experts(weight.size(0), choices, tokens)
    each = weight.num_bytes(dims) // weight.size(0)
    ids = TensorType((choices,), "i32").num_bytes(dims) * tokens
    moved = x.num_bytes(dims) + sum(type_.num_bytes(dims) for type_ in outputs)
    return round(touched * each) + ids + moved


def _expert_linear_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return _expert_bytes(inputs[0], inputs[1], inputs[2].size(1), outputs, dims)


def _expert_flops(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    return 2 * _elements(outputs[0], dims) * inputs[1].size(2)


@_define(
    "expert_linear",
    NoParams,
    "x weight experts bias?",
    "y",
    "anchor",
    flops=_expert_flops,
    bytes_=_expert_linear_bytes,
)
def _expert_linear(
    params: NoParams,
    x: TensorType,
    weight: TensorType,
    experts: TensorType,
    bias: TensorType | None = None,
) -> Types:
    """Multiply rows by the weights of the experts chosen for their token.

    Formula: y[t*k+j] = x[row] @ weight[experts[t, j]].T + bias[experts[t, j]]; row is t where x has
    a row per token, t*k+j where it has one per choice
    Shapes: x [T, K] or [kT, K]; weight [X, N, K]; experts i32[T, k]; bias [X, N]; y [kT, N].
    Numerics: accumulated in f32.
    Cost: bytes are of the experts that T tokens touch on average, every choice being as likely.
    """
    _expect(
        experts.dtype == "i32" and len(experts.shape) == 2,
        "expert_linear",
        "experts i32[T, k]",
        experts,
    )
    _expect_expert_weight("expert_linear", x, weight, bias)
    rows = _choice_rows(experts)
    _expect(
        x.shape[0] in (experts.shape[0], rows),
        "expert_linear",
        "x with a row per token or per choice",
        x,
        experts,
    )
    return (x.with_shape(rows, weight.shape[1]),)


@_define("sort_by_expert", SortParams, "experts", "order starts", "row")
def _sort_by_expert(params: SortParams, experts: TensorType) -> Types:
    """Sort the choices of all tokens by expert, those of one expert in the order of tokens.

    Formula: order = argsort of experts, stable; starts[e] = the number of choices below e
    Shapes: experts i32[T, k]; order i32[kT], of numbers t*k+j; starts i32[X+1].
    """
    _expect(
        experts.dtype == "i32" and len(experts.shape) == 2,
        "sort_by_expert",
        "experts i32[T, k]",
        experts,
    )
    starts = TensorType((params.num_experts + 1,), "i32")
    return (TensorType((_choice_rows(experts),), "i32"), starts)


def _grouped_linear_bytes(_params: Any, inputs: Types, outputs: Types, dims: Dims) -> int:
    choices = d.bind(inputs[2].shape[0], {"T": 1, "B": 1})
    return _expert_bytes(inputs[0], inputs[1], choices, outputs, dims)


@_define(
    "grouped_linear",
    NoParams,
    "x weight order starts bias?",
    "y",
    "anchor",
    flops=_expert_flops,
    bytes_=_grouped_linear_bytes,
)
def _grouped_linear(
    params: NoParams,
    x: TensorType,
    weight: TensorType,
    order: TensorType,
    starts: TensorType,
    bias: TensorType | None = None,
) -> Types:
    """Multiply rows by the weights of the experts chosen for their token, expert by expert.

    Formula: as `expert_linear`; the choices of expert e are order[starts[e]:starts[e+1]]
    Shapes: x [T, K] or [kT, K]; weight [X, N, K]; order i32[kT]; starts i32[X+1]; bias [X, N];
    y [kT, N].
    Numerics: accumulated in f32.
    Cost: bytes are of the experts that T tokens touch on average, every choice being as likely.
    """
    _expect_expert_weight("grouped_linear", x, weight, bias)
    expected = TensorType((weight.size(0) + 1,), "i32")
    _expect(starts == expected, "grouped_linear", f"starts of type {expected}", starts)
    _expect(
        order.dtype == "i32" and len(order.shape) == 1,
        "grouped_linear",
        "order i32[kT]",
        order,
    )
    return (x.with_shape(order.shape[0], weight.shape[1]),)


@_define("combine", NoParams, "rows scales", "y", "row")
def _combine(params: NoParams, rows: TensorType, scales: TensorType) -> Types:
    """Add up the results of each token's experts, scaled.

    Formula: y[t] = sum over j of scales[t, j] * rows[t*k+j]
    Shapes: rows [kT, E]; scales f32[T, k]; y [T, E].
    Numerics: added in f32, in the order of the choices.
    """
    _expect(
        scales.dtype == "f32" and len(scales.shape) == 2 and rows.shape[0] == _choice_rows(scales),
        "combine",
        "rows [kT, E] and scales f32[T, k]",
        rows,
        scales,
    )
    return (rows.with_shape(scales.shape[0], *rows.shape[1:]),)


@_define("row_gate", NoParams, "x gate", "y", "pointwise", flops=_per_element(2))
def _row_gate(params: NoParams, x: TensorType, gate: TensorType) -> Types:
    """Scale each row by the sigmoid of its gate.

    Formula: y[t] = x[t] / (1 + exp(-gate[t]))
    Shapes: x [T, E]; gate [T, 1]; y [T, E].
    Numerics: computed in f32.
    """
    _expect(
        gate.dtype in FLOATS and gate.shape == (x.shape[0], 1),
        "row_gate",
        "x [T, E] and a gate [T, 1]",
        x,
        gate,
    )
    return (x,)


# --- attention and its cache --------------------------------------------------------------------

_STEP = "positions token_seq seq_rows block_table"


def _expect_step(kind: str, **operands: TensorType) -> None:
    shapes: dict[str, tuple[d.Dim, ...]] = {
        "positions": (d.T,),
        "token_seq": (d.T,),
        "seq_rows": (d.B,),
        "query_start": (d.B + 1,),
        "context_lens": (d.B,),
        "block_table": (d.R, d.M),
    }
    _expect_ints(kind, **{name: (type_, shapes[name]) for name, type_ in operands.items()})


def _kv_write_bytes(_params: Any, inputs: Types, _outputs: Types, dims: Dims) -> int:
    appended = _cached_token_bytes(inputs[6]) * dims["T"]
    return inputs[0].num_bytes(dims) + inputs[1].num_bytes(dims) + appended


def _cached_token_bytes(cache: TensorType) -> int:
    return cache.num_bytes({"P": 1}) // cache.size(2)


@_define(
    "kv_write",
    NoParams,
    f"k v {_STEP} cache query_start+context_lens?",
    "",
    "anchor",
    bytes_=_kv_write_bytes,
    mutates="cache",
)
def _kv_write(
    params: NoParams,
    k: TensorType,
    v: TensorType,
    positions: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    block_table: TensorType,
    cache: TensorType,
    query_start: TensorType | None = None,
    context_lens: TensorType | None = None,
) -> Types:
    """Append the step's keys and values to the pages of their rows.

    Shapes: k, v [T, G*D]; cache kv[P, G, S, D]. Position p of row r lies in page
    block_table[r, p // S], slot p % S. Tokens of a padding sequence (row -1) write nothing.
    Numerics: a quantised cache (docs/kv-cache.md) takes a page's codes when the page is full; it
    needs query_start and context_lens to know the pages that the step fills.
    """
    _expect_step(
        "kv_write",
        positions=positions,
        token_seq=token_seq,
        seq_rows=seq_rows,
        block_table=block_table,
    )
    _expect(cache.layout == "kv", "kv_write", "a paged cache", cache)
    if query_start is not None and context_lens is not None:
        _expect_step("kv_write", query_start=query_start, context_lens=context_lens)
    elif cache.kv_format:
        expected = "query_start and context_lens with a quantised cache"
        _expect(False, "kv_write", expected, cache)
    width = cache.size(1) * cache.size(3)
    _expect(k == v and k.shape[-1] == width, "kv_write", f"k and v of width {width}", k, v)
    return ()


def _attention_flops(params: AttentionParams, _inputs: Types, _outputs: Types, dims: Dims) -> int:
    seen = min(dims["C"], params.window) if params.window else dims["C"]
    return 4 * dims["T"] * params.num_heads * params.head_dim * seen


def _attention_bytes(params: AttentionParams, inputs: Types, outputs: Types, dims: Dims) -> int:
    seen = min(dims["C"], params.window) if params.window else dims["C"]
    query = inputs[0].num_bytes(dims) + outputs[0].num_bytes(dims)
    if "sinks" in lookup("attention").present(len(inputs)):
        query += inputs[-1].num_bytes(dims)
    return query + _cached_token_bytes(inputs[1]) * dims["B"] * seen


@_define(
    "attention",
    AttentionParams,
    "q cache block_table seq_rows query_start context_lens k+v? sinks?",
    "y",
    "anchor",
    flops=_attention_flops,
    bytes_=_attention_bytes,
)
def _attention(
    params: AttentionParams,
    q: TensorType,
    cache: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
    k: TensorType | None = None,
    v: TensorType | None = None,
    sinks: TensorType | None = None,
) -> Types:
    """Attend causally from each token to the tokens of its row, through the pages.

    Formula: y = softmax(scale * q @ K.T + causal mask) @ V per head; query heads share H/G KV
    heads; with a window the mask hides older tokens too, with a soft cap scores are bent first;
    with sinks the softmax of head h has one more score, sinks[h], whose value is zero
    Shapes: q [T, H*D]; cache kv[P, G, S, D]; k, v [T, G*D]; sinks [H]; y [T, H*D]. A step's own
    tokens are already in the cache; with k and v they are read from there, as they were before
    quantisation.
    Cost: counted for B sequences of context C, or of the window where that is shorter.
    """
    _expect_step(
        "attention",
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    width = params.num_heads * params.head_dim
    _expect(q.shape[-1] == width, "attention", f"q of width {width}", q)
    if k is not None or v is not None:
        own_width = params.num_kv_heads * params.head_dim
        both = [own for own in (k, v) if own is not None]
        fits = k == v and both[0] == q.with_shape(q.shape[0], own_width)
        _expect(fits, "attention", f"k and v, both, of width {own_width}", *both)
    if sinks is not None:
        fits = sinks.shape == (params.num_heads,) and sinks.dtype in FLOATS
        _expect(fits, "attention", f"sinks [{params.num_heads}]", sinks)
    _expect(
        cache.layout == "kv"
        and (cache.shape[1], cache.shape[3]) == (params.num_kv_heads, params.head_dim),
        "attention",
        f"a cache of {params.num_kv_heads} heads of {params.head_dim}",
        cache,
    )
    if params.num_heads % params.num_kv_heads:
        raise ShapeError(
            "`attention` expects query heads in whole groups per KV head; found "
            f"{params.num_heads} over {params.num_kv_heads}."
        )
    return (q,)


def _latent_write_bytes(_params: Any, inputs: Types, _outputs: Types, dims: Dims) -> int:
    appended = _cached_token_bytes(inputs[-1]) * dims["T"]
    return inputs[0].num_bytes(dims) + inputs[1].num_bytes(dims) + appended


@_define(
    "latent_write",
    NoParams,
    f"latent k_rope {_STEP} latents",
    "",
    "anchor",
    bytes_=_latent_write_bytes,
    mutates="latents",
)
def _latent_write(
    params: NoParams,
    latent: TensorType,
    k_rope: TensorType,
    positions: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    block_table: TensorType,
    latents: TensorType,
) -> Types:
    """Append the step's latents, one for all heads of a token, to the pages of their rows.

    Shapes: latent [T, R]; k_rope [T, r], the rotated part of the key; latents latent[P, 1, S, R+r].
    Position p of row r lies in page block_table[r, p // S], slot p % S. Tokens of a padding
    sequence (row -1) write nothing.
    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """
    _expect_step(
        "latent_write",
        positions=positions,
        token_seq=token_seq,
        seq_rows=seq_rows,
        block_table=block_table,
    )
    _expect_latents("latent_write", latents)
    rope_dim = latents.size(3) - latent.size(-1)
    _expect(
        rope_dim > 0 and k_rope == latent.with_shape(latent.shape[0], rope_dim),
        "latent_write",
        f"a latent and a k_rope of {latents.size(3)} features together",
        latent,
        k_rope,
    )
    return ()


def _expect_prompts(kind: str, whole_from: int, least: int) -> None:
    # A sequence of one token is decoded, be it its first.
    if whole_from == 1 or whole_from < least:
        raise SpecError(f"`{kind}` tells prompts by 2 tokens or more; found {whole_from}.")


def _expect_latents(kind: str, latents: TensorType) -> None:
    is_one = latents.layout == "latent" and latents.size(1) == 1
    _expect(is_one, kind, "a paged cache of latents", latents)


def _latent_attention_flops(
    params: LatentAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    if params.whole_from:
        return 0
    width = inputs[2].size(3) + params.value_dim
    return 2 * dims["T"] * params.num_heads * width * dims["C"]


def _latent_attention_bytes(
    params: LatentAttentionParams, inputs: Types, outputs: Types, dims: Dims
) -> int:
    query = 2 * inputs[0].num_bytes(dims)
    rope_dim = inputs[2].size(3) - params.value_dim
    rotated = TensorType((d.T, params.num_heads * rope_dim), inputs[1].dtype).num_bytes(dims)
    return query + rotated + _cached_token_bytes(inputs[2]) * dims["B"] * dims["C"]


@_define(
    "latent_attention",
    LatentAttentionParams,
    "q q_rope latents block_table seq_rows query_start context_lens",
    "y",
    "anchor",
    flops=_latent_attention_flops,
    bytes_=_latent_attention_bytes,
)
def _latent_attention(
    params: LatentAttentionParams,
    q: TensorType,
    q_rope: TensorType,
    latents: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
) -> Types:
    """Attend causally from each token to the latents of its row, which all heads share.

    Formula: y[t, h] = softmax(scale * (q[t, h] @ C.T + q_rope[t, h, -r:] @ K.T) + causal mask) @ C,
    where a row of the cache is a row of C, the latents, and one of K, the keys' rotated part; 0 for
    sequences that are left out
    Shapes: q [T, H*R]; q_rope [T, H*D], of whose heads the last r features count; latents
    latent[P, 1, S, R+r], R = value_dim; y [T, H*R]. A step's own tokens are in the cache already.
    Cost: counted for B sequences of context C; where some are left out operations are not counted,
    for it may be all of them.
    Source: DeepSeek-AI, DeepSeek-V2, 2024: latent attention with the projections up absorbed.
    """
    kind = "latent_attention"
    _expect_step(
        kind,
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    _expect_latents(kind, latents)
    width = params.num_heads * params.value_dim
    rope_dim = latents.size(3) - params.value_dim
    _expect(rope_dim > 0, kind, f"latents of more than {params.value_dim} features", latents)
    _expect_prompts(kind, params.whole_from, least=0)
    _expect(q.shape[-1] == width, kind, f"q of width {width}", q)
    heads = params.num_heads
    is_whole = q_rope.size(-1) % heads == 0 and q_rope.size(-1) // heads >= rope_dim
    _expect(is_whole, kind, f"{heads} heads of at least {rope_dim} features", q_rope)
    return (q,)


def _prompt_attention_flops(
    params: PromptAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    features = inputs[0].size(-1) + params.num_heads * params.value_dim
    return 2 * dims["T"] * features * dims["C"]


def _prompt_attention_bytes(
    params: PromptAttentionParams, inputs: Types, _outputs: Types, dims: Dims
) -> int:
    q, kv, latents, *_, y = inputs
    rope_dim = q.size(-1) // params.num_heads - params.nope_dim
    rotated = TensorType((d.T, rope_dim), latents.dtype).num_bytes(dims)
    return q.num_bytes(dims) + kv.num_bytes(dims) + rotated + y.num_bytes(dims)


@_define(
    "prompt_attention",
    PromptAttentionParams,
    "q kv latents block_table seq_rows query_start context_lens y",
    "",
    "anchor",
    flops=_prompt_attention_flops,
    bytes_=_prompt_attention_bytes,
    mutates="y",
)
def _prompt_attention(
    params: PromptAttentionParams,
    q: TensorType,
    kv: TensorType,
    latents: TensorType,
    block_table: TensorType,
    seq_rows: TensorType,
    query_start: TensorType,
    context_lens: TensorType,
    y: TensorType,
) -> Types:
    """Attend causally within the prompts that begin in this step, to keys and values projected up.

    Formula: y[t, h] = softmax(scale * q[t, h] @ (k[h], K).T + causal mask) @ v[h], where k and v
    are the parts of kv, K the rotated part of the keys; for tokens of sequences that are whole,
    whole_from tokens or more; other rows of y stay
    Shapes: q [T, H*(n+r)], n = nope_dim; kv [T, H*(n+v)], v = value_dim; latents latent[P, 1, S,
    R+r], whose last r features are read; y [T, H*v].
    Cost: counted as if all tokens were of whole prompts, with C keys for each.
    Source: DeepSeek-AI, DeepSeek-V2, 2024: latent attention as it is described.
    """
    kind, heads = "prompt_attention", params.num_heads
    _expect_step(
        kind,
        block_table=block_table,
        seq_rows=seq_rows,
        query_start=query_start,
        context_lens=context_lens,
    )
    _expect_latents(kind, latents)
    _expect_prompts(kind, params.whole_from, least=2)
    key_dim = q.size(-1) // heads
    fits = q.size(-1) % heads == 0 and params.nope_dim < key_dim
    _expect(fits, kind, f"q of {heads} heads of more than {params.nope_dim}", q)
    _expect(key_dim - params.nope_dim < latents.size(3), kind, "a rotated part in it", latents)
    own = q.with_shape(q.shape[0], heads * (params.nope_dim + params.value_dim))
    _expect(kv == own, kind, f"kv of type {own}", kv)
    out = q.with_shape(q.shape[0], heads * params.value_dim)
    _expect(y == out, kind, f"y of type {out}", y)
    return ()


@_define("gather_rows", NoParams, "x index", "y", "row")
def _gather_rows(params: NoParams, x: TensorType, index: TensorType) -> Types:
    """Keep the row of each sequence whose logits are wanted.

    Formula: y[b] = x[max(index[b], 0)]
    Shapes: x [T, E]; index i32[B]; y [B, E].
    """
    _expect_ints("gather_rows", index=(index, (d.B,)))
    return (x.with_shape(d.B, *x.shape[1:]),)


@_define(
    "sample",
    NoParams,
    "logits seq_rows sample_index temperature top_k top_p min_p seed length last_token",
    "tokens",
    "anchor",
    mutates="last_token",
)
def _sample(
    params: NoParams,
    logits: TensorType,
    seq_rows: TensorType,
    sample_index: TensorType,
    temperature: TensorType,
    top_k: TensorType,
    top_p: TensorType,
    min_p: TensorType,
    seed: TensorType,
    length: TensorType,
    last_token: TensorType,
) -> Types:
    """Choose the next token of each sequence and note it as its row's last token.

    Formula: greedy at temperature 0; else one uniform number per (seed, position) drawn through the
    inverse of the distribution that top-k, then top-p, then min-p leave.
    Shapes: logits f32[B, V]; sample_index i32[B], -1 where no token is wanted; row state [R];
    tokens i32[B], -1 where none is wanted, -2 where the logits hold NaN.
    """
    _expect_ints("sample", seq_rows=(seq_rows, (d.B,)), sample_index=(sample_index, (d.B,)))
    _expect(logits.dtype == "f32" and len(logits.shape) == 2, "sample", "logits f32[B, V]", logits)
    return (TensorType((d.B,), "i32"),)


# Bits of a row's `adjusted`: what of the row's logits is to be adjusted.
ADJUST_COUNTS, ADJUST_BIASES, ADJUST_ALLOWED = 1, 2, 4
# Bits in a word of `allowed`.
WORD_BITS = 32

_ADJUSTMENTS = (
    "adjusted num_biases bias_tokens bias_values bias_stops "
    "repetition_penalty presence_penalty frequency_penalty token_counts allowed"
)


@_define(
    "adjust_logits",
    NoParams,
    f"logits seq_rows sample_index length {_ADJUSTMENTS}",
    "",
    "anchor",
    mutates="logits",
)
def _adjust_logits(
    params: NoParams,
    logits: TensorType,
    seq_rows: TensorType,
    sample_index: TensorType,
    length: TensorType,
    adjusted: TensorType,
    num_biases: TensorType,
    bias_tokens: TensorType,
    bias_values: TensorType,
    bias_stops: TensorType,
    repetition_penalty: TensorType,
    presence_penalty: TensorType,
    frequency_penalty: TensorType,
    token_counts: TensorType,
    allowed: TensorType,
) -> Types:
    """Change the logits as their rows ask: biases, then penalties, then the allowed tokens.

    Formula: x += value of each of the first num_biases entries whose token this is, while
    length < stop; c = token_counts; x = (x / repetition if x > 0 else x * repetition) if c > 0;
    x -= frequency * (c >> 1) + presence * (c > 1); x = -inf unless bit v % 32 of allowed[v // 32]
    is set. Only what the bits of `adjusted` name: 1 penalties, 2 biases, 4 allowed tokens.
    Shapes: logits f32[B, V], changed in place where sample_index i32[B] is not negative; biases
    [R, K]; token_counts i16[R, V], twice the times that a token was generated, plus 1 if the prompt
    has it; allowed i32[R, ceil(V / 32)]; the other row state [R].
    Source: Keskar et al., CTRL, 2019 (repetition); OpenAI's API reference (the others).
    """
    kind = "adjust_logits"
    _expect_ints(
        kind,
        seq_rows=(seq_rows, (d.B,)),
        sample_index=(sample_index, (d.B,)),
        length=(length, (d.R,)),
        adjusted=(adjusted, (d.R,)),
        num_biases=(num_biases, (d.R,)),
        bias_tokens=(bias_tokens, bias_values.shape),
        bias_stops=(bias_stops, bias_values.shape),
    )
    _expect(logits.dtype == "f32" and len(logits.shape) == 2, kind, "logits f32[B, V]", logits)
    vocab = logits.size(1)
    _expect(token_counts == TensorType((d.R, vocab), "i16"), kind, "i16[R, V]", token_counts)
    words = -(-vocab // WORD_BITS)
    _expect(allowed == TensorType((d.R, words), "i32"), kind, f"i32[R, {words}]", allowed)
    return ()


@_define(
    "count_tokens",
    NoParams,
    "tokens seq_rows adjusted token_counts",
    "",
    "anchor",
    mutates="token_counts",
)
def _count_tokens(
    params: NoParams,
    tokens: TensorType,
    seq_rows: TensorType,
    adjusted: TensorType,
    token_counts: TensorType,
) -> Types:
    """Count the tokens that were drawn, in the rows whose penalties need the counts.

    Formula: token_counts[row, token] += 2, unless token < 0, row < 0 or bit 1 of adjusted is unset
    Shapes: tokens, seq_rows i32[B], no row twice; adjusted i32[R]; token_counts i16[R, V].
    Numerics: a count stays at the most that i16 holds, 16383 times.
    """
    _expect_ints(
        "count_tokens",
        tokens=(tokens, (d.B,)),
        seq_rows=(seq_rows, (d.B,)),
        adjusted=(adjusted, (d.R,)),
    )
    _expect(token_counts.dtype == "i16", "count_tokens", "token_counts i16[R, V]", token_counts)
    return ()


@_define(
    "advance",
    NoParams,
    "seq_rows last_token length",
    "token_ids positions token_seq query_start context_lens sample_index",
    "anchor",
    mutates="length",
)
def _advance(
    params: NoParams, seq_rows: TensorType, last_token: TensorType, length: TensorType
) -> Types:
    """Prepare a decode step from the rows' state: one token per sequence, one longer each.

    Formula: position = length[row]; length[row] += 1; token = last_token[row];
    context = position + 1
    Shapes: seq_rows i32[B], -1 for padding; last_token, length i32[R]. A padding sequence gets
    token 0, position 0, context 0 and sample index -1.
    """
    _expect_ints(
        "advance",
        seq_rows=(seq_rows, (d.B,)),
        last_token=(last_token, (d.R,)),
        length=(length, (d.R,)),
    )
    per_token, per_seq = TensorType((d.T,), "i32"), TensorType((d.B,), "i32")
    return (per_token, per_token, per_token, TensorType((d.B + 1,), "i32"), per_seq, per_seq)


@_define(
    "resolve_tokens", NoParams, "token_ids token_seq seq_rows last_token", "resolved", "anchor"
)
def _resolve_tokens(
    params: NoParams,
    token_ids: TensorType,
    token_seq: TensorType,
    seq_rows: TensorType,
    last_token: TensorType,
) -> Types:
    """Fill in the tokens the host does not know yet: the step before is still running.

    Formula: resolved[t] = token_ids[t] if it is >= 0 else last_token[row of t]
    Shapes: token_ids, token_seq i32[T]; seq_rows i32[B]; last_token i32[R].
    """
    _expect_ints(
        "resolve_tokens",
        token_ids=(token_ids, (d.T,)),
        token_seq=(token_seq, (d.T,)),
        seq_rows=(seq_rows, (d.B,)),
        last_token=(last_token, (d.R,)),
    )
    return (token_ids,)
