"""Turn a linear and what is fused with it into the hook lines of a matmul template.

Knows the names that matmul templates use and what each pointwise op computes; must not know
schedules. Called by `lower/`, which hands the lines to `emit.py`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from treadle.ir.errors import LoweringError
from treadle.ir.fuse import LINEARS
from treadle.ir.graph import Op
from treadle.ir.ops.params import settings
from treadle.ir.ops.pointwise import GluParams
from treadle.ir.ops.registry import lookup
from treadle.ir.types import DTYPE_BYTES, TensorType
from treadle.kernels.emit import read_template

# Extra operands, in the order that they have in `launch`: after x and w, before y.
OPERANDS = ("bias", "norm_weight", "row_gate", "residual")


@dataclass(frozen=True)
class Tile:
    """Say how a template holds its results: the axes of `acc`, and which one runs over features.

    Templates name their index tensors `token` and `feature`, shaped to broadcast against `acc`.
    `has_prologue` tells whether one lets an op change x on the way in. `aligned` names the operands
    that the bulk copy engine moves: their rows must be multiples of 16 bytes; such a template
    computes `feature` only where it is needed. A Gluon template brings results into the layout
    that it stores; `is_narrow` says that its warps share the features of a tile, so that a gate and
    its up are far apart until they are moved.
    A template `of_experts` knows the `expert` of its tile, one that `combines` adds up the experts
    of its `token`.
    """

    axes: tuple[str, ...]
    feature_axis: int
    has_prologue: bool = False
    aligned: tuple[str, ...] = ()
    is_gluon: bool = False
    is_narrow: bool = False
    of_experts: bool = False
    combines: bool = False

    def index(self, vector: str) -> str:
        """Write a vector over features so that it broadcasts against `acc`."""
        if len(self.axes) == 1:
            return vector
        return f"{vector}[{', '.join(':' if a == self.feature_axis else 'None' for a in (0, 1))}]"

    @property
    def feature_shape(self) -> str:
        """The shape of `feature`."""
        sizes = [size if axis == self.feature_axis else "1" for axis, size in enumerate(self.axes)]
        return f"[{', '.join(sizes)}]"

    def inside(self, column: str) -> str:
        """Write the mask of the results that exist."""
        if len(self.axes) == 1:
            return f"{column} < tl.where(token < num_tokens, N_OUT, 0)"
        return f"(token < num_tokens) & ({column} < N_OUT)"

    def sizes(self, features: str) -> str:
        """Write the sizes of a tile of that many features."""
        sizes = [features if a == self.feature_axis else size for a, size in enumerate(self.axes)]
        return ", ".join(sizes)


PER_TOKEN = Tile(("BLOCK_N",), 0, has_prologue=True)
WEIGHTS_LEFT = Tile(("BLOCK_N", "BLOCK_M"), 0)
TOKENS_LEFT = Tile(("BLOCK_M", "BLOCK_N"), 1)

TILES: dict[str, Tile] = {
    "gemv": PER_TOKEN,
    "matmul": TOKENS_LEFT,
    "matmul_tma": replace(TOKENS_LEFT, aligned=("x", "w")),
    "matmul_gluon": replace(TOKENS_LEFT, aligned=("x", "w", "y"), is_gluon=True),
    "matmul_stream": replace(TOKENS_LEFT, aligned=("x", "w"), is_gluon=True, is_narrow=True),
    "matmul_skinny": WEIGHTS_LEFT,
    "matmul_skinny_tma": replace(WEIGHTS_LEFT, aligned=("x", "w")),
}

EXPERT_TILES: dict[str, Tile] = {
    "expert_gemv": Tile(("BLOCK_N",), 0, of_experts=True),
    "expert_gemv_combine": Tile(("BLOCK_N",), 0, combines=True),
    "grouped_skinny": replace(WEIGHTS_LEFT, of_experts=True),
    "grouped_matmul": replace(TOKENS_LEFT, of_experts=True),
}

# The lines of each activation; the last one gives its value.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "silu": ("{0} / (1.0 + tl.exp(-{0}))",),
    "gelu": ("0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",),
    # 0.5 * (1 + tanh(z)) = 1 / (1 + exp(-2z)), and tanh is not in every Triton.
    "gelu_tanh": (
        "twice_z = 1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0})",
        "{0} / (1.0 + tl.exp(-twice_z))",
    ),
    "relu": ("tl.maximum({0}, 0.0)",),
}


@dataclass(frozen=True)
class FusedLinear:
    """Hold all that emission needs to know of a fused linear.

    `operands` are the extra tensors of `launch`, `inputs` the graph's names of x, w and these, in
    launch order. `shape` has the sizes N, K and N_OUT. BLOCK_N must be a multiple of
    `feature_multiple`.
    """

    operands: tuple[str, ...]
    inputs: tuple[str, ...]
    shape: dict[str, int]
    hooks: dict[str, tuple[str, ...]]
    feature_multiple: int


@dataclass
class _Chain:
    """Carry the state of one lowering from op to op: the lines so far and where results stand."""

    template: str
    tile: Tile
    identifiers: frozenset[str]
    types: Mapping[str, TensorType]
    num_rows: int
    num_inputs: int
    width: int
    result: str = ""  # the graph's name of the chain's latest result
    value: str = "acc"  # what the lines call it
    column: str = "feature"
    multiple: int = 1
    lines: list[str] = field(default_factory=list)
    operands: dict[str, str] = field(default_factory=dict)

    def refuse(self, op: Op, reason: str, remedy: str = "") -> LoweringError:
        return LoweringError(
            f"Template `{self.template}` can't fuse `{op.kind}` (`{op.name}`): {reason}.",
            remedy=remedy,
        )

    def operand(self, op: Op, kind: str, name: str) -> str:
        """Register an extra operand and give the name of its pointer."""
        if kind in self.operands:
            raise self.refuse(op, f"it would be a second `{kind}` of one kernel")
        self.operands[kind] = name
        return f"{kind}_ptr"

    def other_operand(self, op: Op) -> str:
        """Give the operand of a binary op that is not the chain's own result."""
        others = [name for name in op.inputs if name != self.result]
        if len(op.inputs) != 2 or len(others) != 1:
            raise self.refuse(op, f"it should combine `{self.result}` with one other value")
        expected, found = self.types[self.result].shape, self.types[others[0]].shape
        if expected != found:
            raise self.refuse(op, f"`{others[0]}` has the shape {found} and not {expected}")
        return others[0]


def lower_linear(template: str, op: Op, types: Mapping[str, TensorType]) -> FusedLinear:
    """Write the hook lines that make `template` compute a linear with its prologue and epilogue.

    `op` is a `linear`, or a `fused` op with one in its body: an optional `rms_norm`, the linear,
    then a straight chain of the ops in `POINTWISE`. A linear of experts is one too.
    Raises: LoweringError: an op has no place in the template; the message names it.
    """
    tiles = {**TILES, **EXPERT_TILES}
    if template not in tiles:
        raise LoweringError(
            f"Template `{template}` is no matmul; those are {', '.join(sorted(tiles))}."
        )
    body = op.plain
    anchors = [inner for inner in body if inner.kind in LINEARS]
    if len(anchors) != 1:
        raise LoweringError(
            f"A fused linear has one `linear` in its body; `{op.name}` has {len(anchors)}."
        )
    (linear,) = anchors
    before, after = body[: body.index(linear)], body[body.index(linear) + 1 :]
    weight = types[linear.inputs[1]]
    num_rows, num_inputs = weight.size(-2), weight.size(-1)
    names = read_template(template).identifiers
    chain = _Chain(template, tiles[template], names, types, num_rows, num_inputs, num_rows)

    x, prologue = linear.inputs[0], _no_prologue()
    for inner in before:
        if inner.kind != "rms_norm" or len(before) > 1 or inner.outputs[0] != x:
            raise chain.refuse(inner, "before a linear only one `rms_norm` of its own can be fused")
        if not chain.tile.has_prologue:
            raise chain.refuse(inner, "it has no prologue", "Keep the norm as a kernel of its own.")
        x, prologue = inner.inputs[0], _norm_prologue(chain, inner)

    steps: list[tuple[Op, Step]] = []
    if len(linear.inputs) == len(lookup(linear.kind).operands):
        if chain.tile.combines:
            prologue = _scaled_biases(chain, linear)
        else:
            steps.append((linear, _bias))
    elif chain.tile.combines:
        prologue = {"EXPERT_BIAS": ()}
    chain.result = linear.outputs[0]
    chain.lines += _comment(linear)
    for inner in after:
        if inner.kind not in POINTWISE:
            known = ", ".join(sorted(POINTWISE))
            raise chain.refuse(inner, f"no expression for it; there is one for {known}")
        steps.append((inner, POINTWISE[inner.kind]))
    for inner, write in steps:
        if inner is not linear and chain.result not in inner.inputs:
            raise chain.refuse(inner, f"it does not read `{chain.result}`, the chain's result")
        target = "y" if inner is steps[-1][0] else _local(chain, inner)
        chain.lines += _comment(inner) if inner is not linear else []
        write(chain, inner, target)
        chain.result, chain.value = inner.outputs[0], target
    if not steps:
        chain.lines.append("y = acc")
    if chain.column == "feature" and not chain.tile.is_gluon:
        chain.lines.append("column = feature")
    _check_rows(chain, op, weight.dtype, types[op.outputs[0]].dtype)

    operands = tuple(kind for kind in OPERANDS if kind in chain.operands)
    return FusedLinear(
        operands,
        (x, linear.inputs[1], *(chain.operands[kind] for kind in operands)),
        {"N": num_rows, "K": num_inputs, "N_OUT": chain.width},
        {
            **(prologue if chain.tile.has_prologue or chain.tile.combines else {}),
            "EPILOGUE": _epilogue_lines(chain),
        },
        chain.multiple,
    )


def _check_rows(chain: _Chain, op: Op, dtype: str, out_dtype: str) -> None:
    """Refuse what the template can't move: short rows, or operands that are not 16-bit in Gluon."""
    if chain.tile.is_gluon and DTYPE_BYTES[dtype] != 2:
        raise chain.refuse(op, f"it multiplies 16-bit numbers, not {dtype}")
    row_bytes = {
        "x": chain.num_inputs * DTYPE_BYTES[dtype],
        "w": chain.num_inputs * DTYPE_BYTES[dtype],
        "y": chain.width * DTYPE_BYTES[out_dtype],
    }
    for operand in chain.tile.aligned:
        if row_bytes[operand] % 16:
            reason = f"rows of {operand} have {row_bytes[operand]} bytes, not a multiple of 16"
            raise chain.refuse(op, reason, "Use a template that loads by pointer.")


def _epilogue_lines(chain: _Chain) -> tuple[str, ...]:
    """Finish the lines: add the indices they use; in Gluon, name its own functions."""
    tile, text, indices = chain.tile, "\n".join(chain.lines), []
    uses_token, uses_feature = (re.search(rf"\b{name}\b", text) for name in ("token", "feature"))
    if not tile.is_gluon:
        if tile.aligned and uses_feature:
            features = tile.index("tl.arange(0, BLOCK_N)")
            indices = [f"feature = pid_n * BLOCK_N + {features}  # {tile.feature_shape}"]
        return (*indices, *chain.lines)
    if uses_token:
        indices += [
            "tokens = tl.arange(0, BLOCK_M, layout=tl.SliceLayout(1, acc_layout))",
            "token = first_token + tokens[:, None]  # [BLOCK_M, 1]",
        ]
    if uses_feature:
        indices += [
            "features = tl.arange(0, BLOCK_N, layout=tl.SliceLayout(0, acc_layout))",
            f"feature = pid_n * BLOCK_N + features[None, :]  # {tile.feature_shape}",
        ]
    return tuple(re.sub(r"\btl\.", "gl.", line) for line in (*indices, *chain.lines))


# --- before the linear --------------------------------------------------------------------------


def _no_prologue() -> dict[str, tuple[str, ...]]:
    return {"PROLOGUE_BEGIN": (), "PROLOGUE": (), "ROW_SCALE": ()}


def _norm_prologue(chain: _Chain, op: Op) -> dict[str, tuple[str, ...]]:
    """Sum the squares of a row while it streams by; its scale is applied to the results."""
    pointer = chain.operand(op, "norm_weight", op.inputs[1])
    offset = op.params.offset
    scale = f"(norm_weight + {offset!r})" if offset else "norm_weight"
    return {
        "PROLOGUE_BEGIN": (
            *_comment(op),
            "squares = (tl.zeros((BLOCK_K,), tl.float32),) * ROWS  # ROWS of [BLOCK_K]",
        ),
        "PROLOGUE": (
            "squares = squares[:m] + (squares[m] + x * x,) + squares[m + 1 :]",
            f"norm_weight = tl.load({pointer} + k, mask=k < K, other=0.0).to(tl.float32)",
            f"x = x * {scale}  # [BLOCK_K]",
        ),
        "ROW_SCALE": (
            "mean_square = tl.sum(squares[m], axis=0) / K",
            f"acc = acc * tl.rsqrt(mean_square + {op.params.eps!r})  # [BLOCK_N]",
        ),
    }


# --- after it -----------------------------------------------------------------------------------


def _bias(chain: _Chain, op: Op, target: str) -> None:
    pointer = chain.operand(op, "bias", op.inputs[-1])
    if chain.tile.of_experts:
        pointer = f"{pointer} + expert * N"
    chain.lines += [
        f"bias = tl.load({pointer} + feature, mask=feature < N, other=0.0).to(tl.float32)",
        f"{target} = {chain.value} + bias",
    ]


def _scaled_biases(chain: _Chain, op: Op) -> dict[str, tuple[str, ...]]:
    """Add the biases of a token's experts before anything else is added."""
    pointer = chain.operand(op, "bias", op.inputs[-1])
    return {
        "EXPERT_BIAS": (
            "for j in range(TOP_K):",
            "    scale = tl.load(token_scales_ptr + j)",
            f"    bias_ptrs = {pointer} + tl.load(token_experts_ptr + j) * N + feature",
            "    bias = tl.load(bias_ptrs, mask=feature < N, other=0.0)  # [BLOCK_N]",
            "    acc += scale * bias.to(tl.float32)",
        )
    }


def _combine(chain: _Chain, op: Op, target: str) -> None:
    if not chain.tile.combines:
        raise chain.refuse(op, "it adds up rows of several tiles", "Keep it as its own kernel.")
    chain.lines.append(f"{target} = {chain.value}")


def _row_gate(chain: _Chain, op: Op, target: str) -> None:
    pointer = chain.operand(op, "row_gate", op.inputs[1])
    chain.lines += [
        f"row_gate = tl.load({pointer} + token, mask=token < num_tokens, other=0.0)",
        f"{target} = {chain.value} / (1.0 + tl.exp(-row_gate.to(tl.float32)))",
    ]


def _add(chain: _Chain, op: Op, target: str) -> None:
    if chain.tile.is_gluon and chain.column != "feature":
        raise chain.refuse(
            op, "after a `glu` its results lie otherwise than the template's indices"
        )
    pointer = chain.operand(op, "residual", chain.other_operand(op))
    chain.lines += [
        f"inside = {chain.tile.inside(chain.column)}",
        f"residual_ptrs = {pointer} + token.to(tl.int64) * N_OUT + {chain.column}",
        "residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)",
        f"{target} = {chain.value} + residual",
    ]


def _scale(chain: _Chain, op: Op, target: str) -> None:
    chain.lines.append(f"{target} = {chain.value} * {op.params.factor!r}")


def _soft_cap(chain: _Chain, op: Op, target: str) -> None:
    cap = op.params.cap
    chain.lines.append(f"{target} = {soft_cap(chain.value, cap)}")


def soft_cap(value: str, cap: float) -> str:
    """Write cap * tanh(value / cap): tanh is not in every Triton, and exp is."""
    return f"{cap!r} - {2.0 * cap!r} / (1.0 + tl.exp({value} * {2.0 / cap!r}))"


def _activate(chain: _Chain, op: Op, target: str) -> None:
    chain.lines += _activation(op.params.act, chain.value, target)


def _activation(act: str, value: str, target: str) -> list[str]:
    *lines, last = (line.format(value) for line in ACTIVATIONS[act])
    return [*lines, f"{target} = {last}"]


def _glu(chain: _Chain, op: Op, target: str) -> None:
    group, tile = op.params.interleave, chain.tile
    if not group:
        raise chain.refuse(
            op,
            "gate and up lie in different tiles",
            "Let the weight's rows alternate (`interleave`), or give the op its own kernel.",
        )
    if chain.width != chain.num_rows or chain.width % (2 * group):
        raise chain.refuse(op, f"its {chain.width} features are not groups of {2 * group}")
    groups, axis = f"BLOCK_N // {2 * group}", tile.feature_axis
    split_axes = [*tile.axes[:axis], groups, "2", str(group), *tile.axes[axis + 1 :]]
    order = [i for i in range(len(split_axes)) if i != axis + 1] + [axis + 1]
    sizes = tile.sizes("BLOCK_N // 2")
    shape = f"({sizes})" if len(tile.axes) > 1 else f"({sizes},)"
    columns = f"pid_n * (BLOCK_N // 2) + {tile.index('tl.arange(0, BLOCK_N // 2)')}"
    place = [] if tile.is_gluon else [f"column = {columns}"]
    if tile.is_narrow:
        # Each thread takes whole groups of a row: a gate and its up.
        threads = f"[{64 * group} // BLOCK_N, {groups}]"
        chain.lines += [
            f"{chain.value} = gl.convert_layout(",
            f"    {chain.value},",
            f"    gl.BlockedLayout([1, {2 * group}], {threads}, [WARPS, 1], [1, 0]),",
            ")",
        ]
    chain.lines += [
        f"pairs = tl.reshape({chain.value}, ({', '.join(split_axes)}))",
        f"gate, up = tl.split(tl.permute(pairs, ({', '.join(map(str, order))})))",
        *_gate(op.params),
        f"{target} = tl.reshape(gate * up, {shape})  # [{sizes}]",
        *place,
    ]
    chain.column = "column"
    chain.width //= 2
    chain.multiple = 2 * group


def _gate(params: GluParams) -> list[str]:
    """Write what becomes of gate and up before they are multiplied."""
    lines = _activation(params.act, "gate", "gate")
    if params.sharpness != 1.0:
        lines = [
            f"gate = gate * {params.sharpness!r}",
            *lines,
            f"gate = gate * {1.0 / params.sharpness!r}",
        ]
    if params.limit:
        limit = params.limit
        lines = [
            f"gate = tl.minimum(gate, {limit!r})",
            f"up = tl.minimum(tl.maximum(up, {-limit!r}), {limit!r})",
            *lines,
        ]
    return [*lines, f"up = up + {params.up_offset!r}"] if params.up_offset else lines


Step = Callable[[_Chain, Op, str], None]
POINTWISE: dict[str, Step] = {
    "activate": _activate,
    "add": _add,
    "combine": _combine,
    "glu": _glu,
    "row_gate": _row_gate,
    "scale": _scale,
    "soft_cap": _soft_cap,
}


# --- names --------------------------------------------------------------------------------------

# What hook lines call their own temporaries; a graph's value of that name gets an underscore.
_TEMPORARIES = {"bias", "column", "gate", "inside", "mean_square", "norm_weight", "pairs"}
_TEMPORARIES |= {
    "features",
    "residual",
    "residual_ptrs",
    "row_gate",
    "squares",
    "tokens",
    "twice_z",
    "up",
    "y",
}


def _local(chain: _Chain, op: Op) -> str:
    """Name an op's result as its author did, without the scope: all layers give the same text."""
    name = re.sub(r"\W", "_", _plain(op.outputs[0]))
    taken = name in _TEMPORARIES or name in chain.identifiers or not name.isidentifier()
    return f"{name}_" if taken else name


def _plain(name: str) -> str:
    return name.removeprefix("@").rpartition(".")[2]


def _comment(op: Op) -> list[str]:
    arguments = [_plain(name) for name in op.inputs]
    arguments += [each for each in settings(op.params) if not each.endswith("=''")]
    call = f"{op.kind}({', '.join(arguments)})"
    text = f"{_plain(op.outputs[0])} = {call}"
    return textwrap.wrap(text, 80, initial_indent="# ", subsequent_indent="#   ")
