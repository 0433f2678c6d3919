"""The kernels of mixtures of experts against the reference, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treadle.ir.ops.experts import RouteParams
from treadle.kernels.cross_compile import Job, compile_many
from treadle.kernels.emit import TEMPLATE_DIR, Fact
from treadle.kernels.reference.experts import combine, route, sort_by_expert
from treadle.kernels.reference.linears import linear

from ..golden import Golden
from .expert_cases import EMITTED, ExpertCase, choices_of, draw
from .linear_cases import DTYPES, assert_matches
from .private_template import load_template

# --- the router -----------------------------------------------------------------------------------

ROUTES: dict[str, dict[str, Fact]] = {
    "softmax": {},
    "normalised": {"normalise": True},
    "sigmoid, scaled": {"score": "sigmoid", "normalise": True, "scaling": 2.5},
    "groups by their best": {"num_groups": 4, "kept_groups": 2, "scaling": 16.0},
    "groups by their best two": {
        "score": "sigmoid",
        "num_groups": 3,
        "kept_groups": 2,
        "group_top": 2,
    },
    "one": {"top_k": 1},
}


def run_router(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    route: dict[str, Fact],
    **schedule: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by the template; rows past the last token must stay as they are."""
    params = vars(RouteParams(**{"top_k": 3, **route}))  # type: ignore[arg-type]
    template = load_template(
        "router",
        shape={
            "NUM_EXPERTS": w.shape[0],
            "K": w.shape[1],
            "BIAS": bias is not None,
            "CORRECTION": correction is not None,
            **{name.upper(): value for name, value in params.items()},
        },
        schedule=dict(schedule),
    )
    num_tokens, top_k = x.shape[0], params["top_k"]
    experts = torch.full((num_tokens + 2, top_k), -7, dtype=torch.int32)
    scales = torch.full((num_tokens + 2, top_k), torch.nan)
    partials = torch.full((schedule["SPLIT_K"] * num_tokens * 64,), torch.nan)
    counters = torch.zeros(num_tokens, dtype=torch.int32)
    for _ in range(2):  # the second launch finds the counters as the first one left them
        template.launch(x, w, bias, correction, experts, scales, partials, counters, num_tokens)
    assert (counters == 0).all()
    assert (experts[num_tokens:] == -7).all() and scales[num_tokens:].isnan().all()
    return experts[:num_tokens], scales[:num_tokens]


@pytest.mark.parametrize("router", ROUTES)
@pytest.mark.parametrize(
    ("num_tokens", "schedule"),
    [
        (1, {"BLOCK_M": 1, "BLOCK_K": 32, "SPLIT_K": 3}),
        (5, {"BLOCK_M": 16, "BLOCK_K": 32, "SPLIT_K": 2}),
        (33, {"BLOCK_M": 32, "BLOCK_K": 64, "SPLIT_K": 1}),
    ],
)
def test_the_router_chooses_as_the_reference(
    router: str, num_tokens: int, schedule: dict[str, int], rng_seed: int
) -> None:
    settings, num_experts, num_inputs = ROUTES[router], 12, 72
    x, w = draw(rng_seed, num_tokens, num_inputs), draw(rng_seed + 1, num_experts, num_inputs) / 8
    bias, correction = draw(rng_seed + 2, num_experts), 0.1 * draw(rng_seed + 3, num_experts)
    experts, scales = run_router(x, w, bias, correction, settings, **schedule)
    logits = linear(x, w, bias)
    expected = route(logits, correction, **{"top_k": 3, **settings})  # type: ignore[arg-type]
    assert torch.equal(experts, expected[0])
    torch.testing.assert_close(scales, expected[1], rtol=1e-5, atol=1e-6)


def test_the_router_takes_the_lower_of_equal_experts() -> None:
    x, w = torch.ones(2, 16), torch.zeros(20, 16)
    w[[4, 11]] = 1.0
    experts, scales = run_router(x, w, None, None, {"top_k": 5}, BLOCK_M=16, BLOCK_K=16, SPLIT_K=1)
    assert experts.tolist() == [[4, 11, 0, 1, 2]] * 2
    assert torch.equal(scales[:, 0], scales[:, 1])


def test_experts_are_numbers_of_experts_whatever_the_row_holds() -> None:
    x = torch.full((2, 16), torch.nan)
    x[1] = torch.inf
    w = torch.ones(12, 16)
    experts, _ = run_router(x, w, None, None, {}, BLOCK_M=16, BLOCK_K=16, SPLIT_K=1)
    assert ((experts >= 0) & (experts < 12)).all()


# --- sorting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["any", "few", "same"])
@pytest.mark.parametrize(
    ("num_tokens", "one_block"), [(1, True), (7, True), (7, False), (50, False)]
)
def test_choices_are_sorted_by_expert_and_stay_in_order(
    kind: str, num_tokens: int, one_block: bool, rng_seed: int
) -> None:
    top_k, num_experts = 3, 13
    experts = choices_of(kind, num_tokens, top_k, num_experts, rng_seed)
    template = load_template(
        "sort_by_expert",
        shape={"NUM_EXPERTS": num_experts, "TOP_K": top_k},
        schedule={"BLOCK_CHOICES": 32, "CHUNK": 16, "ONE_BLOCK": one_block},
    )
    order = torch.full((num_tokens * top_k + 2,), -7, dtype=torch.int32)
    starts = torch.full((num_experts + 1,), -7, dtype=torch.int32)
    template.launch(experts, order, starts, torch.full((999,), -7, dtype=torch.int32), num_tokens)
    expected = sort_by_expert(experts, num_experts=num_experts)
    assert torch.equal(order[:-2], expected[0]) and (order[-2:] == -7).all()
    assert torch.equal(starts, expected[1])


# --- products -------------------------------------------------------------------------------------


def check(
    template: str, case: ExpertCase, kind: str, seed: int, folder: Path, **schedule: Fact
) -> None:
    tensors = case.tensors(kind, seed)
    found = case.run(template, tensors, folder, **schedule)
    assert_matches(found, case.expected(tensors), DTYPES[case.dtype])


GROUPED: dict[str, dict[str, Fact]] = {
    "grouped_skinny": {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32},
    "grouped_matmul": {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32},
}


@pytest.mark.parametrize("form", ["", "bias", "glu", "bias glu clamped"])
@pytest.mark.parametrize("template", GROUPED)
def test_a_product_by_expert_equals_the_reference(
    template: str, form: str, rng_seed: int, tmp_path: Path
) -> None:
    case = ExpertCase(form, by_expert=True, num_tokens=19)
    check(template, case, "any", rng_seed, tmp_path, **GROUPED[template])


@pytest.mark.parametrize("template", GROUPED)
@pytest.mark.parametrize("row_per_choice", [False, True])
@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "any"), (40, "same"), (6, "few")])
def test_experts_without_a_token_and_with_all_of_them(
    template: str,
    row_per_choice: bool,
    num_tokens: int,
    kind: str,
    rng_seed: int,
    tmp_path: Path,
) -> None:
    case = ExpertCase(
        "", True, num_tokens, num_experts=11, N=50, K=72, row_per_choice=row_per_choice
    )
    check(template, case, kind, rng_seed, tmp_path, **GROUPED[template])


@pytest.mark.parametrize("form", ["", "bias", "glu", "bias glu clamped"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_product_of_each_choice_equals_the_reference(
    form: str, num_tokens: int, rng_seed: int, tmp_path: Path
) -> None:
    case = ExpertCase(form, False, num_tokens, top_k=3, K=72)
    check("expert_gemv", case, "any", rng_seed, tmp_path, BLOCK_N=32, BLOCK_K=32)


def test_a_product_of_each_choice_may_read_a_row_of_its_own(rng_seed: int, tmp_path: Path) -> None:
    case = ExpertCase("", False, 3, N=50, row_per_choice=True)
    check("expert_gemv", case, "any", rng_seed, tmp_path, BLOCK_N=32, BLOCK_K=64)


@pytest.mark.parametrize("form", ["combine", "combine add", "bias combine", "bias combine add"])
@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(1, 72), (3, 64)])
def test_products_of_a_token_are_added_up_in_one_kernel(
    form: str, num_tokens: int, num_inputs: int, rng_seed: int, tmp_path: Path
) -> None:
    case = ExpertCase(form, False, num_tokens, top_k=3, N=50, K=num_inputs, row_per_choice=True)
    check("expert_gemv_combine", case, "any", rng_seed, tmp_path, BLOCK_N=16, BLOCK_K=32)


@pytest.mark.parametrize("template", [*GROUPED, "expert_gemv"])
def test_products_of_experts_in_16_bit(template: str, rng_seed: int, tmp_path: Path) -> None:
    schedule = GROUPED.get(template, {"BLOCK_N": 32, "BLOCK_K": 32})
    case = ExpertCase("glu", template in GROUPED, dtype="f16")
    check(template, case, "any", rng_seed, tmp_path, **schedule)


# --- adding up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), [(1, 1, 40), (5, 3, 72), (9, 8, 64)])
def test_results_of_experts_are_added_up(
    num_tokens: int, top_k: int, width: int, has_residual: bool, rng_seed: int
) -> None:
    rows, scales = draw(rng_seed, num_tokens * top_k, width), draw(rng_seed + 1, num_tokens, top_k)
    residual = draw(rng_seed + 2, num_tokens, width)
    y = torch.full((num_tokens + 2, width), torch.nan)
    template = load_template(
        "combine",
        shape={"WIDTH": width, "TOP_K": top_k, "ADD_RESIDUAL": has_residual},
        schedule={"BLOCK_T": 4, "BLOCK_E": 64},
    )
    template.launch(rows, scales, residual if has_residual else None, y, num_tokens)
    expected = combine(rows, scales)
    expected = expected + residual if has_residual else expected
    torch.testing.assert_close(y[:num_tokens], expected, rtol=1e-5, atol=1e-5)
    assert y[num_tokens:].isnan().all()


def test_results_do_not_depend_on_the_neighbours(rng_seed: int, tmp_path: Path) -> None:
    """A token's sum is bit for bit the same whoever shares its experts, and in which order."""
    case = ExpertCase("", True, 20, row_per_choice=False)
    tensors = case.tensors("any", rng_seed)
    whole = case.run("grouped_skinny", tensors, tmp_path / "whole", **GROUPED["grouped_skinny"])
    alone = ExpertCase("", True, 1)
    for token in (0, 7):
        experts = tensors["experts"][token : token + 1]
        order, starts = sort_by_expert(experts, num_experts=case.num_experts)
        own = {**tensors, "x": tensors["x"][token : token + 1], "order": order, "starts": starts}
        folder = tmp_path / f"token {token}"
        found = alone.run("grouped_skinny", own, folder, **GROUPED["grouped_skinny"])
        assert torch.equal(found, whole[2 * token : 2 * token + 2])


# --- texts and other machines ---------------------------------------------------------------------


@pytest.mark.parametrize("template", EMITTED)
def test_emitted_products_of_experts_are_golden(
    template: str, golden: Callable[[str], Golden]
) -> None:
    fused = EMITTED[template]
    plain = replace(fused, form="combine" if fused.has("combine") else "")
    assert plain.emit(template)[0].replace("__combine", "") == golden(f"triton/{template}.py")
    name = "__".join([template, *fused.form.split()])
    assert fused.emit(template)[0] == golden(f"triton/{name}.py")


@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
def test_what_only_large_steps_launch_compiles_without_spills(target: str, tmp_path: Path) -> None:
    """The rest is compiled with the family that uses it first."""
    case, rows = replace(EMITTED["grouped_matmul"], form="glu"), 8 * 4096
    stages = {"num_stages": 2} if target == "gfx942" else {}
    (tmp_path / "grouped_matmul__glu.py").write_text(case.emit("grouped_matmul", **stages)[0])
    sort = (TEMPLATE_DIR / "sort_by_expert.py").read_text()
    (tmp_path / "sort_by_expert.py").write_text(sort.replace("ONE_BLOCK=True", "ONE_BLOCK=False"))
    product = ["bf16[4096, 2048]", "bf16[128, 1536, 2048]", f"i32[{rows}]", "i32[129]"]
    jobs = [
        Job(
            str(tmp_path / "grouped_matmul__glu.py"),
            target,
            (*product, f"bf16[{rows}, 768]", 4096),
        ),
        Job(
            str(tmp_path / "sort_by_expert.py"),
            target,
            ("i32[4096, 8]", f"i32[{rows}]", "i32[129]", "i32[4096]", 4096),
        ),
    ]
    found = {Path(outcome.job.path).stem: outcome for outcome in compile_many(jobs)}
    for outcome in found.values():
        assert not outcome.error, outcome.error
        assert all(kernel.spill_bytes == 0 for kernel in outcome.kernels)
    names = [kernel.kernel for kernel in found["sort_by_expert"].kernels]
    assert names == ["sort_by_expert_count", "sort_by_expert_place"]
