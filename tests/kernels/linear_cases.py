"""Fused linears for tests: the op, random inputs and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from treadle.ir.graph import Op
from treadle.ir.ops.linears import LinearParams
from treadle.ir.ops.norms import RmsNormParams
from treadle.ir.ops.params import FusedParams, NoParams
from treadle.ir.ops.pointwise import ACTIVATIONS, ActivateParams, GluParams, ScaleParams
from treadle.ir.types import TensorType, parse_type
from treadle.kernels.emit import Fact, Header, emit_module, read_template
from treadle.kernels.epilogue import FusedLinear, lower_linear
from treadle.kernels.load import load_module, write_module
from treadle.kernels.reference.by_kind import REFERENCES

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Relative to the largest output: rounding of the result, and of sums whose order differs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """Name what is fused with a linear of these sizes: of `norm bias scale gelu glu add f32`.

    `glu clamped` is a gated activation with a limit, sharper, its up shifted.
    """

    form: str = ""
    N: int = 96
    K: int = 64
    dtype: str = "f32"
    interleave: int = 8

    def has(self, part: str) -> bool:
        return part in self.form.split()

    @property
    def width(self) -> int:
        return self.N // 2 if self.has("glu") else self.N

    @property
    def act(self) -> str:
        """The activation without a gate, or nothing."""
        return next((act for act in ACTIVATIONS if self.has(act)), "")

    @property
    def types(self) -> dict[str, TensorType]:
        d, n, k, w = self.dtype, self.N, self.K, self.width
        out = "f32" if self.has("f32") else d
        texts = {
            "x": f"{d}[T, {k}]",
            "@layers.0.norm": f"{d}[{k}]",
            "layers.0.normed": f"{d}[T, {k}]",
            "@layers.0.weight": f"{d}[{n}, {k}]",
            "@layers.0.bias": f"{d}[{n}]",
            "layers.0.product": f"{out}[T, {n}]",
            "layers.0.scaled": f"{out}[T, {n}]",
            "layers.0.activated": f"{out}[T, {n}]",
            "layers.0.gated": f"{out}[T, {w}]",
            "hidden": f"{out}[T, {w}]",
            "layers.0.after": f"{out}[T, {w}]",
        }
        return {name: parse_type(text) for name, text in texts.items()}

    @property
    def op(self) -> Op:
        """The fused op, or the plain linear where nothing is fused."""
        body, x = [], "x"
        if self.has("norm"):
            params = RmsNormParams(1e-5, 1.0 if self.has("offset") else 0.0)
            body.append(Op("rms_norm", (x, "@layers.0.norm"), ("layers.0.normed",), params))
            x = "layers.0.normed"
        bias = ("@layers.0.bias",) if self.has("bias") else ()
        result = "layers.0.product"
        linear = LinearParams("f32" if self.has("f32") else "")
        body.append(Op("linear", (x, "@layers.0.weight", *bias), (result,), linear))
        if self.has("scale"):
            body.append(Op("scale", (result,), ("layers.0.scaled",), ScaleParams(0.22)))
            result = "layers.0.scaled"
        if self.act:
            activate = ActivateParams(self.act)
            body.append(Op("activate", (result,), ("layers.0.activated",), activate))
            result = "layers.0.activated"
        if self.has("glu"):
            glu = GluParams("silu", self.interleave)
            if self.has("clamped"):
                glu = replace(glu, limit=0.5, sharpness=1.702, up_offset=1.0)
            body.append(Op("glu", (result,), ("layers.0.gated",), glu))
            result = "layers.0.gated"
        if self.has("add"):
            body.append(Op("add", ("hidden", result), ("layers.0.after",), NoParams()))
        if len(body) == 1:
            return body[0]
        return Op("fused", (), body[-1].outputs, FusedParams("kernel"), body=tuple(body))


def emit_case(template: str, case: Case, **schedule: Fact) -> tuple[str, FusedLinear]:
    """Emit a case with the template's own schedule, changed by `schedule`."""
    source = read_template(template)
    fused = lower_linear(template, case.op, case.types)
    text = emit_module(
        source,
        name="__".join([template, *case.form.split()]),
        shape=fused.shape,
        schedule={**dict(source.schedule_facts), **schedule},
        header=Header("a linear of a test.", ("product = linear(x, weight)",)),
        hooks=fused.hooks,
        operands=fused.operands,
    )
    return text, fused


def make_inputs(case: Case, num_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw every tensor of a case, by its name in the graph."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, type_ in case.types.items():
        shape = type_.bound_shape({"T": num_tokens})
        values = torch.randn(shape, generator=generator)
        if name == "@layers.0.weight":
            values *= case.K**-0.5
        tensors[name] = values.to(DTYPES[type_.dtype])
    return tensors


def expected(case: Case, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute a case op by op with the reference, in f32 throughout."""
    values = {name: tensor.float() for name, tensor in tensors.items()}
    for op in case.op.body or (case.op,):
        arguments = [values[name] for name in op.inputs]
        settings = {key: value for key, value in vars(op.params).items() if key != "out_dtype"}
        values[op.outputs[0]] = REFERENCES[op.kind](*arguments, **settings)
    return values[case.op.outputs[0]]


def load_text(text: str, folder: Path) -> ModuleType:
    """Import an emitted module from a file of its own."""
    return load_module(write_module(text, "kernel", folder), "kernel")


def run_case(
    text: str, fused: FusedLinear, case: Case, tensors: dict[str, torch.Tensor], folder: Path
) -> torch.Tensor:
    """Launch the emitted module and give y; rows past the last token must stay as they are."""
    module = load_text(text, folder)
    num_tokens = tensors["x"].shape[0]
    dtype = torch.float32 if case.has("f32") else DTYPES[case.dtype]
    y = torch.full((num_tokens + 3, case.width), torch.nan, dtype=dtype)
    arguments = [tensors[name] for name in fused.inputs]
    module.launch(*arguments, y, *workspace(module, num_tokens), num_tokens)
    assert y[num_tokens:].isnan().all(), "rows past the last token were written"
    return y[:num_tokens]


def workspace(module: ModuleType, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Allocate what the module says it needs beyond its operands."""
    if not hasattr(module, "workspace_sizes"):
        return ()
    floats, counters = module.workspace_sizes(num_tokens)
    return torch.full((max(floats, 1),), torch.nan), torch.zeros(
        max(counters, 1), dtype=torch.int32
    )


def assert_matches(y: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare relative to the largest output."""
    error = (y.float() - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"
