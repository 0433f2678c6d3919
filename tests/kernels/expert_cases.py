"""Products of experts for tests: the op, random operands and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treadle.ir.graph import Op
from treadle.ir.ops.params import FusedParams, NoParams
from treadle.ir.ops.pointwise import GluParams
from treadle.ir.types import TensorType, parse_type
from treadle.kernels.emit import Fact, Header, emit_module, read_template
from treadle.kernels.epilogue import FusedLinear, lower_linear
from treadle.kernels.reference.by_kind import REFERENCES
from treadle.kernels.reference.experts import sort_by_expert

from .linear_cases import DTYPES, load_text


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choices_of(kind: str, num_tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    """Draw the experts of tokens: any of them, few of them, or the same ones for all."""
    generator = torch.Generator().manual_seed(seed)
    most = {"any": num_experts, "few": top_k + 1, "same": top_k}[kind]
    rows = [torch.randperm(most, generator=generator)[:top_k] for _ in range(num_tokens)]
    return (num_experts - 1 - torch.stack(rows)).to(torch.int32)


@dataclass(frozen=True)
class ExpertCase:
    """Name what is fused with a product of experts: any of `bias glu combine add`.

    `glu clamped` is a gated activation with a limit, sharper, its up shifted.
    """

    form: str
    by_expert: bool
    num_tokens: int = 5
    top_k: int = 2
    num_experts: int = 5
    N: int = 48
    K: int = 40
    row_per_choice: bool = False
    dtype: str = "f32"
    interleave: int = 8

    def has(self, part: str) -> bool:
        return part in self.form.split()

    @property
    def op(self) -> Op:
        """The fused op, or the plain product where nothing is fused."""
        bias = ("@bias",) if self.has("bias") else ()
        body = []
        if self.by_expert:
            inputs = ("x", "@w", "order", "starts", *bias)
            body.append(Op("grouped_linear", inputs, ("product",), NoParams()))
        else:
            inputs = ("x", "@w", "experts", *bias)
            body.append(Op("expert_linear", inputs, ("product",), NoParams()))
        if self.has("glu"):
            params = GluParams("silu", self.interleave)
            if self.has("clamped"):
                params = replace(params, limit=0.5, sharpness=1.702, up_offset=1.0)
            body.append(Op("glu", ("product",), ("gated",), params))
        if self.has("combine"):
            body.append(Op("combine", ("product", "scales"), ("routed",), NoParams()))
        if self.has("add"):
            body.append(Op("add", ("stream", "routed"), ("after",), NoParams()))
        if len(body) == 1:
            return body[0]
        return Op("fused", (), body[-1].outputs, FusedParams("kernel"), body=tuple(body))

    def tensors(self, kind: str, seed: int) -> dict[str, torch.Tensor]:
        """Draw every operand, by its name in the graph."""
        rows = self.num_tokens * (self.top_k if self.row_per_choice else 1)
        experts = choices_of(kind, self.num_tokens, self.top_k, self.num_experts, seed)
        order, starts = sort_by_expert(experts, num_experts=self.num_experts)
        floats = {
            "x": draw(seed, rows, self.K),
            "@w": draw(seed + 1, self.num_experts, self.N, self.K) * self.K**-0.5,
            "@bias": draw(seed + 2, self.num_experts, self.N),
            "stream": draw(seed + 4, self.num_tokens, self.N),
        }
        return {
            **{name: tensor.to(DTYPES[self.dtype]) for name, tensor in floats.items()},
            "experts": experts,
            "order": order,
            "starts": starts,
            "scales": draw(seed + 3, self.num_tokens, self.top_k).abs(),
        }

    @property
    def types(self) -> dict[str, TensorType]:
        k, d = self.top_k, self.dtype
        texts = {
            "x": f"{d}[{k if self.row_per_choice else ''}T, {self.K}]",
            "@w": f"{d}[{self.num_experts}, {self.N}, {self.K}]",
            "@bias": f"{d}[{self.num_experts}, {self.N}]",
            "experts": f"i32[T, {k}]",
            "scales": f"f32[T, {k}]",
            "order": f"i32[{k}T]",
            "starts": f"i32[{self.num_experts + 1}]",
            "product": f"{d}[{k}T, {self.N}]",
            "gated": f"{d}[{k}T, {self.N // 2}]",
            "routed": f"{d}[T, {self.N}]",
            "stream": f"{d}[T, {self.N}]",
            "after": f"{d}[T, {self.N}]",
        }
        return {name: parse_type(text) for name, text in texts.items()}

    def emit(self, template: str, **schedule: Fact) -> tuple[str, FusedLinear]:
        """Emit with the template's own schedule, changed by `schedule`."""
        source = read_template(template)
        fused = lower_linear(template, self.op, self.types)
        facts = {
            "TOP_K": self.top_k,
            "NUM_EXPERTS": self.num_experts,
            "ROW_PER_CHOICE": self.row_per_choice,
        }
        known = {name for name, _ in source.shape_facts}
        text = emit_module(
            source,
            name="__".join([template, *self.form.split()]),
            shape={**fused.shape, **{n: v for n, v in facts.items() if n in known}},
            schedule={**dict(source.schedule_facts), **schedule},
            header=Header("a product of a test.", ("product = expert_linear(x, w)",)),
            hooks=fused.hooks,
            operands=fused.operands,
        )
        return text, fused

    def operands(self, fused: FusedLinear) -> list[str]:
        """Name the tensors that `launch` takes before y."""
        ids = ["order", "starts"] if self.by_expert else ["experts"]
        return ["x", "@w", *ids, *(["scales"] if self.has("combine") else []), *fused.inputs[2:]]

    def run(
        self, template: str, tensors: dict[str, torch.Tensor], folder: Path, **schedule: Fact
    ) -> torch.Tensor:
        """Emit and launch; rows past the last one must stay as they are."""
        text, fused = self.emit(template, **schedule)
        rows = self.num_tokens * (1 if self.has("combine") else self.top_k)
        y = torch.full((rows + 3, fused.shape["N_OUT"]), torch.nan, dtype=DTYPES[self.dtype])
        arguments = [tensors[name] for name in self.operands(fused)]
        load_text(text, folder).launch(*arguments, y, self.num_tokens)
        assert y[rows:].isnan().all(), "rows past the last one were written"
        return y[:rows]

    def expected(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the case op by op with the reference, in f32 throughout."""
        values = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        for op in self.op.plain:
            result = REFERENCES[op.kind](*(values[n] for n in op.inputs), **vars(op.params))
            values[op.outputs[0]] = result
        return values[self.op.outputs[0]]


# Sizes of a model that people run, and everything that a template may be fused with.
SIZES = {"num_experts": 128, "top_k": 8, "N": 1536, "K": 2048, "dtype": "bf16"}
EMITTED = {
    "expert_gemv": ExpertCase("bias glu", False, **SIZES),  # type: ignore[arg-type]
    "expert_gemv_combine": ExpertCase("bias combine add", False, row_per_choice=True, **SIZES),  # type: ignore[arg-type]
    "grouped_skinny": ExpertCase("bias glu", True, **SIZES),  # type: ignore[arg-type]
    "grouped_matmul": ExpertCase("bias glu", True, **SIZES),  # type: ignore[arg-type]
}
