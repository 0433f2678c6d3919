"""Kernels of quantised caches compile for GPUs that are not there, at the sizes of an 8B model."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.ir.kv_cache import KV_FORMATS
from treadle.ir.types import TensorType
from treadle.kernels.cross_compile import Job, compile_many
from treadle.kernels.emit import Header, emit_module, read_template
from treadle.kernels.schedule.attention import (
    attention_decode_quantised_schedules,
    attention_prefill_quantised_gluon_schedules,
)

HEADS, KV_HEADS, HEAD_DIM, PAGE, TOKENS = 32, 8, 128, 64, 64
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "gfx942": 65536}
TEMPLATES = (
    "attention_decode_quantised",
    "attention_prefill_quantised",
    "rope_kv_write_quantised",
)
BY_WARPS = "attention_prefill_quantised_gluon"  # for Hopper alone


def job(folder: Path, template: str, kv_format: str, target: str, *, store_own: bool = True) -> Job:
    """Emit a template in bf16 with a usual schedule and ask for `target`."""
    read = read_template(template)
    is_prefill, is_amd = template == "attention_prefill_quantised", target == "gfx942"
    facts = {
        "NUM_HEADS": HEADS,
        "NUM_KV_HEADS": KV_HEADS,
        "HEAD_DIM": HEAD_DIM,
        "ROTARY_DIM": HEAD_DIM,
        "PAGE_SIZE": PAGE,
        "KV_FORMAT": kv_format,
        "STORE_OWN": store_own,
        "USE_PTX": target.startswith("sm_") and (kv_format, target) != ("fp8", "sm_80"),
        "BLOCK_TOKENS": 32 if is_prefill and is_amd else 64,
        "num_warps": 2 if not is_prefill else 4 if is_amd else 8,
        "num_stages": 2 if is_amd else 3,
    }
    if template == "attention_decode_quantised":
        sizes = {"B": TOKENS, "C": 2048}
        facts |= next(
            attention_decode_quantised_schedules(KV_HEADS, PAGE, kv_format, sizes, target)
        )
    if template == BY_WARPS:
        sizes = {"T": 8192, "B": 8, "C": 2048}
        facts |= next(
            attention_prefill_quantised_gluon_schedules(
                HEADS, KV_HEADS, HEAD_DIM, PAGE, kv_format, 2, sizes, target
            )
        )
    shape, schedule = (
        {name: facts.get(name, value) for name, value in own}
        for own in (read.shape_facts, read.schedule_facts)
    )
    text = emit_module(
        read,
        name=template,
        shape=shape,
        schedule=schedule,
        header=Header("a test."),
        hooks=dict.fromkeys(read.hooks, ()),
    )
    path = folder / f"{template}_{kv_format}_{target}_{store_own}.py"
    path.write_text(text)
    cache = TensorType((100, KV_HEADS, PAGE, HEAD_DIM), kv_format, "kv")
    caches = [str(part) for part in cache.stored_parts({"R": 64}).values()]
    heads, own = f"bf16[{TOKENS}, {HEADS * HEAD_DIM}]", f"bf16[{TOKENS}, {KV_HEADS * HEAD_DIM}]"
    ints, table = f"i32[{TOKENS}]", "i32[64, 32]"
    scratch = [f"f32[{TOKENS * HEADS * 8 * HEAD_DIM}]", f"f32[{TOKENS * HEADS * 8}]", "i32[512]"]
    arguments: dict[str, list[str | int | None]] = {
        "attention_decode_quantised": [
            heads, *caches, table, ints, ints, heads, *scratch, TOKENS,
        ],
        "attention_prefill_quantised": [
            heads, own, own, *caches, table, ints, ints, ints, heads, TOKENS, TOKENS,
        ],
        BY_WARPS: [
            f"bf16[{TOKENS}, {HEADS}, {HEAD_DIM}]", own, own, *caches, table, ints, ints, ints,
            heads, "i32[2]", TOKENS, TOKENS,
        ],
        "rope_kv_write_quantised": [
            f"bf16[{TOKENS}, {(HEADS + 2 * KV_HEADS) * HEAD_DIM}]", ints, "f32[1024, 128]", ints,
            ints, table, ints, ints, None, None, *caches, heads, own, own, TOKENS, TOKENS,
        ],
    }  # fmt: skip
    return Job(str(path), target, tuple(arguments[template]))


def check(jobs: list[Job]) -> None:
    for outcome in compile_many(jobs):
        assert not outcome.error, f"{outcome.job.path}: {outcome.error}"
        for kernel in outcome.kernels:
            assert kernel.spill_bytes == 0, outcome
            assert kernel.shared_bytes <= SHARED_LIMIT[outcome.job.target], outcome


def test_decode_attention_compiles_for_hopper(tmp_path: Path) -> None:
    check([job(tmp_path, TEMPLATES[0], kv_format, "sm_90") for kv_format in ("int8", "int4")])


def test_appending_to_open_pages_compiles_for_hopper(tmp_path: Path) -> None:
    check([job(tmp_path, TEMPLATES[2], "int8", "sm_90", store_own=False)])


def test_prompts_by_specialised_warps_compile_for_hopper(tmp_path: Path) -> None:
    check([job(tmp_path, BY_WARPS, kv_format, "sm_90") for kv_format in ("int8", "int4")])


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(SHARED_LIMIT))
def test_every_template_and_format_compiles(target: str, tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, form, target) for name in TEMPLATES for form in KV_FORMATS]
    jobs += [job(tmp_path, TEMPLATES[2], form, target, store_own=False) for form in KV_FORMATS]
    check(jobs)
