"""Every matmul template with every fused form against the reference, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .gluon_machine import Machine
from .linear_cases import (
    DTYPES,
    Case,
    assert_matches,
    emit_case,
    expected,
    load_text,
    make_inputs,
    run_case,
    workspace,
)

# On a GPU there is `test_cuda_gemm.py`: products of f32 are others there.
pytestmark = pytest.mark.interpreted

SMALL: dict[str, dict[str, int | bool]] = {
    "gemv": {"ROWS": 2, "BLOCK_N": 32, "BLOCK_K": 64},
    "matmul": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
    "matmul_tma": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "NUM_PROGRAMS": 2},
    "matmul_skinny": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
    "matmul_skinny_tma": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
}
SPLIT = ("matmul_skinny", "matmul_skinny_tma")
FORMS = ["", "bias", "add", "glu", "bias glu", "glu add", "bias add", "f32", "bias glu add"]
FORMS += ["scale add", "bias gelu", "gelu_tanh", "silu", "relu", "scale f32", "bias glu clamped"]
NORM_FORMS = ["norm", "norm offset", "norm bias glu", "norm glu add", "norm f32"]


def check(template: str, case: Case, num_tokens: int, seed: int, folder: Path, **schedule) -> None:  # type: ignore[no-untyped-def]
    text, fused = emit_case(template, case, **{**SMALL[template], **schedule})
    tensors = make_inputs(case, num_tokens, seed)
    y = run_case(text, fused, case, tensors, folder)
    assert_matches(y, expected(case, tensors), DTYPES[case.dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", SMALL)
def test_fused_form_equals_reference(
    template: str, form: str, rng_seed: int, tmp_path: Path
) -> None:
    check(template, Case(form), 3, rng_seed, tmp_path)


@pytest.mark.parametrize("form", NORM_FORMS)
def test_norm_prologue_equals_reference(form: str, rng_seed: int, tmp_path: Path) -> None:
    check("gemv", Case(form), 3, rng_seed, tmp_path)


@pytest.mark.parametrize("template", SMALL)
@pytest.mark.parametrize(
    "case", [Case("bias", N=50, K=72), Case("glu add", N=48, K=40), Case("glu", N=144, K=200)]
)
def test_sizes_that_no_tile_divides(
    template: str, case: Case, rng_seed: int, tmp_path: Path
) -> None:
    check(template, case, 5, rng_seed, tmp_path)


@pytest.mark.parametrize("template", SMALL)
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_any_number_of_tokens(
    template: str, num_tokens: int, rng_seed: int, tmp_path: Path
) -> None:
    check(template, Case("add", N=64), num_tokens, rng_seed, tmp_path)


@pytest.mark.parametrize("template", SMALL)
@pytest.mark.parametrize("form", ["", "bias glu add", "f32"])
def test_half_precision(template: str, form: str, rng_seed: int, tmp_path: Path) -> None:
    check(template, Case(form, dtype="f16", K=160), 3, rng_seed, tmp_path)


@pytest.mark.parametrize("template", SMALL)
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_narrow_groups_of_gate_and_up(
    template: str, interleave: int, rng_seed: int, tmp_path: Path
) -> None:
    check(template, Case("glu", N=24, interleave=interleave), 2, rng_seed, tmp_path)


@pytest.mark.parametrize("template", SPLIT)
@pytest.mark.parametrize("form", ["", "bias glu add"])
@pytest.mark.parametrize(("K", "parts"), [(256, 2), (200, 3), (64, 2)])
def test_parts_of_k_are_added(
    template: str, form: str, K: int, parts: int, rng_seed: int, tmp_path: Path
) -> None:
    check(template, Case(form, N=96, K=K), 17, rng_seed, tmp_path, SPLIT_K=parts)


@pytest.mark.parametrize("template", SPLIT)
def test_counters_are_zero_again_after_a_launch(
    template: str, rng_seed: int, tmp_path: Path
) -> None:
    case = Case(N=96, K=128)
    text, fused = emit_case(template, case, **{**SMALL[template], "SPLIT_K": 2})
    module = load_text(text, tmp_path)
    tensors = make_inputs(case, 5, rng_seed)
    partials, counters = workspace(module, 5)
    results = []
    for _ in range(2):
        y = torch.empty(5, case.width)
        module.launch(*(tensors[name] for name in fused.inputs), y, partials, counters, 5)
        assert not counters.any()
        results.append(y)
    assert torch.equal(*results)


def test_every_row_count_of_a_gemv(rng_seed: int, tmp_path: Path) -> None:
    for rows in (1, 4, 8):
        check("gemv", Case("norm add", N=32), rows, rng_seed, tmp_path, ROWS=rows)


def test_zero_rows_stay_finite_under_a_norm(rng_seed: int, tmp_path: Path) -> None:
    case = Case("norm")
    text, fused = emit_case("gemv", case, **SMALL["gemv"])
    tensors = make_inputs(case, 2, rng_seed)
    tensors["x"][0] = 0.0
    y = run_case(text, fused, case, tensors, tmp_path)
    assert torch.equal(y[0], torch.zeros_like(y[0]))


@pytest.mark.parametrize(
    ("num_tokens", "N", "K", "programs", "stages", "ping_pong", "use_pdl"),
    [
        (40, 96, 80, 3, 3, False, False),
        (40, 96, 80, 3, 3, True, True),
        (70, 64, 16, 2, 2, True, True),
        (9, 128, 144, 5, 4, True, False),
        (1, 32, 64, 1, 2, False, True),
        (33, 160, 48, 2, 5, True, True),
    ],
)
def test_gluon_warps_agree_on_stages(
    num_tokens: int,
    N: int,
    K: int,
    programs: int,
    stages: int,
    ping_pong: bool,
    use_pdl: bool,
    rng_seed: int,
    tmp_path: Path,
) -> None:
    case = Case(N=N, K=K, dtype="f16")
    text, _ = emit_case(
        "matmul_gluon",
        case,
        BLOCK_M=8,
        BLOCK_N=32,
        BLOCK_K=16,
        STAGES=stages,
        GROUP_M=2,
        PING_PONG=ping_pong,
        NUM_PROGRAMS=programs,
        USE_PDL=use_pdl,
    )
    tensors = make_inputs(case, num_tokens, rng_seed)
    path = tmp_path / "kernel.py"
    path.write_text(text)
    y = torch.full((num_tokens + 3, N), torch.nan, dtype=torch.float16)
    launch = Machine().load(path)["launch"]
    launch(tensors["x"], tensors["@layers.0.weight"], y, num_tokens)
    assert y[num_tokens:].isnan().all()
    assert_matches(y[:num_tokens], expected(case, tensors), torch.float16)


@pytest.mark.parametrize(
    ("num_tokens", "N", "K", "parts", "stages", "use_pdl"),
    [
        (1, 96, 80, 1, 3, True),
        (17, 64, 16, 1, 4, False),
        (9, 160, 144, 1, 2, True),
        (33, 32, 64, 1, 4, True),
        (9, 160, 144, 3, 2, True),
        (17, 96, 80, 3, 3, False),
        (33, 64, 16, 2, 4, True),
    ],
)
def test_a_streamed_weight_is_read_in_the_order_it_arrives(
    num_tokens: int,
    N: int,
    K: int,
    parts: int,
    stages: int,
    use_pdl: bool,
    rng_seed: int,
    tmp_path: Path,
) -> None:
    case = Case(N=N, K=K, dtype="f16")
    sizes = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "PARTS": parts}
    text, _ = emit_case("matmul_stream", case, **sizes, STAGES=stages, USE_PDL=use_pdl)
    tensors = make_inputs(case, num_tokens, rng_seed)
    path = tmp_path / "kernel.py"
    path.write_text(text)
    y = torch.full((num_tokens + 3, N), torch.nan, dtype=torch.float16)
    launch = Machine().load(path)["launch"]
    launch(tensors["x"], tensors["@layers.0.weight"], y, num_tokens)
    assert y[num_tokens:].isnan().all()
    assert_matches(y[:num_tokens], expected(case, tensors), torch.float16)
