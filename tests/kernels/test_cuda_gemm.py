"""Every matmul template with every fused form against the reference, on a GPU with TMA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .linear_cases import Case, emit_case, expected, load_text, make_inputs, workspace
from .test_gemm import FORMS, NORM_FORMS

SCHEDULES: dict[str, dict[str, int | bool]] = {
    "gemv": {"BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4},
    "matmul": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4},
    "matmul_tma": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "NUM_PROGRAMS": 16},
    "matmul_skinny": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLIT_K": 2},
    "matmul_skinny_tma": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLIT_K": 2},
    "matmul_stream": {"BLOCK_M": 64, "BLOCK_N": 32, "USE_PDL": True},
    "matmul_gluon": {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 4, "NUM_PROGRAMS": 8},
}


def check(
    template: str,
    form: str,
    num_tokens: int,
    device: str,
    seed: int,
    folder: Path,
    **settings: int | bool,
) -> None:
    if device != "cuda":
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0: run with --device cuda")
    case = Case(form, N=1056, K=520, dtype="bf16", interleave=16)
    schedule = SCHEDULES[template] | ({"ROWS": num_tokens} if template == "gemv" else {}) | settings
    text, fused = emit_case(template, case, **schedule)
    tensors = make_inputs(case, num_tokens, seed)
    wanted = expected(case, tensors)
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    dtype = torch.float32 if case.has("f32") else torch.bfloat16
    y = torch.full((num_tokens + 3, case.width), torch.nan, dtype=dtype, device="cuda")
    module = load_text(text, folder)
    more = [tensor.cuda() for tensor in workspace(module, num_tokens)]
    module.launch(*(on_gpu[name] for name in fused.inputs), y, *more, num_tokens)
    assert y[num_tokens:].isnan().all(), "rows past the last token were written"
    error = (y[:num_tokens].float().cpu() - wanted).norm() / wanted.norm()
    assert error <= 1e-2, f"relative error {error:.2e}"


# What these keep back from a gate lies otherwise than a residual: they refuse the form.
WITHOUT_ADD_BEHIND_GLU = ("matmul_stream", "matmul_gluon")
TILED = [
    (template, form)
    for template in SCHEDULES
    for form in FORMS
    if template != "gemv" and not (template in WITHOUT_ADD_BEHIND_GLU and "glu add" in form)
]


@pytest.mark.parametrize(("template", "form"), TILED)
def test_a_fused_form_equals_the_reference(
    template: str, form: str, device: str, rng_seed: int, tmp_path: Path
) -> None:
    check(template, form, 33, device, rng_seed, tmp_path)


@pytest.mark.parametrize("form", FORMS + NORM_FORMS)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_gemv_equals_the_reference(
    num_tokens: int, form: str, device: str, rng_seed: int, tmp_path: Path
) -> None:
    check("gemv", form, num_tokens, device, rng_seed, tmp_path)


@pytest.mark.parametrize("form", ["", "bias add", "glu", "f32"])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_few_tokens_stream(
    num_tokens: int, form: str, device: str, rng_seed: int, tmp_path: Path
) -> None:
    check("matmul_stream", form, num_tokens, device, rng_seed, tmp_path)


@pytest.mark.parametrize("form", ["", "bias add", "glu", "f32"])
@pytest.mark.parametrize(
    "settings",
    [
        {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64, "PARTS": 7, "STAGES": 6},
        {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "PARTS": 3, "STAGES": 3, "num_warps": 2},
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "PARTS": 4, "STAGES": 4, "num_warps": 8},
    ],
    ids=["7 of 32", "3 of 32", "4 of 64"],
)
def test_parts_of_a_program_stream(
    settings: dict[str, int | bool], form: str, device: str, rng_seed: int, tmp_path: Path
) -> None:
    check("matmul_stream", form, 33, device, rng_seed, tmp_path, **settings)
