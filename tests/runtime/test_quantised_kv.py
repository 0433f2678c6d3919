"""Engines with a quantised KV cache: the choice of a format, answers, prefixes, preemption."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import pytest

from tests.checkpoints import make_family, make_llama
from tests.runtime.serving import answer, answers, compile_tiny, serving
from treadle.ir.errors import ArtifactError, ConfigError
from treadle.ir.kv_cache import KV_FORMATS
from treadle.runtime.config import read_kv_dtypes
from treadle.runtime.loading import ServeOptions, load_artifact, load_model
from treadle.runtime.request import Delta
from treadle.runtime.triton_program import TritonProgram
from treadle.runtime.verify import prepare_prompts, verify_program
from treadle.runtime.verify_command import run_verify

FORMATS = sorted(KV_FORMATS)
ALL = ("", *FORMATS)
# Allowed on log probabilities of a random model's likeliest tokens, which are near -2: its weights
# are so large that it magnifies what the caches' errors are, 0.6, 2.5 and 9 % of a key.
LOGPROB_ERROR = {"int8": 0.25, "fp8": 0.8, "int4": 1.2}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}


def draw_prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(320) for _ in range(length)] for length in lengths]


def assert_close(found: Delta, expected: Delta, kv_format: str) -> None:
    """Compare the likeliest tokens' log probabilities, as long as the answers are the same."""
    bound = LOGPROB_ERROR[kv_format]
    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    for count, (mine, theirs) in enumerate(pairs):
        assert abs(mine.logprob - theirs.logprob) < bound, count
        if mine.token_id != theirs.token_id:
            break  # a near tie: from here on the two answers are to different texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("checkpoint") / "model", seed=7, window=256)


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One artifact for every format."""
    return compile_tiny(model, tmp_path_factory.mktemp("made") / "artifact", kv_formats=ALL)


# --- choosing a format ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtypes", "quant_policy", "formats"),
    [
        ("", None, ()),
        ("auto", None, ("",)),
        ("int8", None, ("int8",)),
        ("auto,int4,fp8", None, ("", "int4", "fp8")),
        ("", 0, ("",)),
        ("", 4, ("int4",)),
        ("", 8, ("int8",)),
        ("", 16, ("fp8",)),
    ],
)
def test_a_dtype_or_lmdeploy_s_number_names_formats(
    kv_dtypes: str, quant_policy: int | None, formats: tuple[str, ...]
) -> None:
    assert read_kv_dtypes(kv_dtypes, quant_policy) == formats


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of auto, int8, int4, fp8, not `int2`"):
        read_kv_dtypes("int8,int2")
    with pytest.raises(ConfigError, match=r"one of 0 \(auto\), 4 \(int4\), .*not 42"):
        read_kv_dtypes("", 42)
    with pytest.raises(ConfigError, match="both say"):
        read_kv_dtypes("int8", 8)


def test_a_format_that_was_not_compiled_is_refused_with_the_command(
    model: Path, tmp_path: Path
) -> None:
    artifact = compile_tiny(model, tmp_path / "artifact", kv_formats=("int8",))
    with pytest.raises(ArtifactError, match="for a KV cache of int8, not int4") as caught:
        load_artifact(artifact, ServeOptions(num_pages=4, kv_dtype="int4"))
    assert "--kv-dtype int8,int4" in caught.value.remedy


@pytest.mark.parametrize("kv_dtype", ["", "auto", *FORMATS])
def test_the_start_up_box_tells_dtype_and_bytes_per_token(artifact: Path, kv_dtype: str) -> None:
    loaded = load_model(artifact, ServeOptions(num_pages=8, kv_dtype=kv_dtype))
    # Two layers, two KV heads of 16 in the tiny model: K and V of a token, in pages of 16.
    row_bytes = {"int8": 2 * 16 + 4 + 2, "fp8": 2 * 16 + 4 + 2, "int4": 2 * 8 + 4 + 4}
    token_kib = 2 * 2 * row_bytes.get(kv_dtype, 128) / 1024
    expected = f"{kv_dtype if kv_dtype in FORMATS else 'f32'}, {token_kib:.1f} KiB a token"
    assert loaded.summary["KV cache"].startswith(expected)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_more_pages_fit_into_the_same_memory(artifact: Path, kv_format: str) -> None:
    pages = {
        kv_dtype: load_artifact(
            artifact, ServeOptions(kv_bytes=1 << 16, kv_dtype=kv_dtype)
        ).state.dims["P"]
        for kv_dtype in ("auto", kv_format)
    }
    assert pages[kv_format] >= 3 * pages["auto"]  # of f32


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", FORMATS)
def test_answers_are_near_those_of_the_plain_cache(artifact: Path, kv_format: str) -> None:
    """Prompts in chunks, which read earlier chunks from quantised pages; then decode steps."""
    prompts = draw_prompts(1, (100, 3, 17))

    async def run(kv_dtype: str) -> list[Delta]:
        async with serving(artifact, num_pages=40, kv_dtype=kv_dtype) as engine:
            return await answers(engine, prompts, max_tokens=8, **GREEDY)

    for found, expected in zip(asyncio.run(run(kv_format)), asyncio.run(run("auto")), strict=True):
        assert_close(found, expected, kv_format)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_interpreted_kernels_are_those_of_the_references(tmp_path: Path, kv_format: str) -> None:
    """Every launch of a mixed step and of a decode step, on an engine's own state."""
    model = make_llama(tmp_path / "model", seed=3, num_layers=2)
    sizes = {"target": "interpret", "max_rows": 2, "max_step_tokens": 24}
    made = compile_tiny(model, tmp_path / "artifact", kv_formats=(kv_format,), **sizes)
    loaded = load_artifact(made, ServeOptions(num_pages=8))
    tokens, seqs = prepare_prompts(loaded, draw_prompts(2, (17, 5)))
    for step, bucket, size in (("mixed", 24, (tokens, seqs)), ("decode", 2, (2, 2))):
        program = loaded.programs[step, bucket]
        assert isinstance(program, TritonProgram)
        if step == "decode":
            loaded.state.write_decode(2)
        graph = loaded.graphs[program.plan.form]
        checks = list(verify_program(program, graph, loaded.state, *size))
        assert "kv.0" in {check.result for check in checks}
        assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_interpreted_kernels_keep_windows_and_sinks(tmp_path: Path, kv_format: str) -> None:
    """A layer with a window and one without, of prompts and answers that reach beyond it."""
    sizes = {"head_dim": 16, "intermediate_size": 32, "num_local_experts": 2, "sliding_window": 5}
    model = make_family(tmp_path / "model", "gpt_oss", num_experts_per_tok=1, **sizes)
    engine = {"target": "interpret", "max_rows": 2, "max_step_tokens": 24}
    made = compile_tiny(model, tmp_path / "artifact", kv_formats=(kv_format,), **engine)
    loaded = load_artifact(made, ServeOptions(num_pages=8))
    tokens, seqs = prepare_prompts(loaded, draw_prompts(2, (18, 5)))
    for step, bucket, size in (("mixed", 24, (tokens, seqs)), ("decode", 2, (2, 2))):
        program = loaded.programs[step, bucket]
        assert isinstance(program, TritonProgram)
        if step == "decode":
            loaded.state.write_decode(2)
        graph = loaded.graphs[program.plan.form]
        checks = list(verify_program(program, graph, loaded.state, *size))
        assert any(
            "attention" in check.kernel and "window_sinks" in check.kernel for check in checks
        )
        assert [check for check in checks if not check.passed] == []


def test_interpreted_answers_are_near_those_of_the_reference(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", seed=3, num_layers=1)
    prompts = draw_prompts(3, (20, 5))
    found = {}
    for target in ("reference", "interpret"):
        sizes = {"target": target, "max_rows": 2, "max_step_tokens": 16}
        made = compile_tiny(model, tmp_path / target, kv_formats=("int8",), **sizes)

        async def run(made: Path = made) -> list[Delta]:
            async with serving(made, num_pages=8) as engine:
                return await answers(engine, prompts, max_tokens=6, **GREEDY)

        found[target] = asyncio.run(run())
    for mine, theirs in zip(found["interpret"], found["reference"], strict=True):
        assert_close(mine, theirs, "int8")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_a_prefix_hit_on_quantised_pages(artifact: Path, kv_format: str) -> None:
    (prompt,) = draw_prompts(4, (75,))

    async def run() -> tuple[Delta, Delta]:
        async with serving(artifact, num_pages=40, kv_dtype=kv_format) as engine:
            first = await answer(engine, prompt, max_tokens=8, **GREEDY)
            return first, await answer(engine, prompt, max_tokens=8, **GREEDY)

    first, second = asyncio.run(run())
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 64)
    assert_close(second, first, kv_format)


@pytest.mark.usefixtures("admits_at_once")
@pytest.mark.parametrize("kv_format", FORMATS)
def test_case_44_preempted_answers_are_near_the_undisturbed_ones(
    artifact: Path, kv_format: str
) -> None:
    prompts = draw_prompts(5, (20, 20, 20))

    async def run(num_pages: int) -> tuple[list[Delta], int]:
        async with serving(artifact, num_pages=num_pages, kv_dtype=kv_format) as engine:
            found = await answers(engine, prompts, max_tokens=70, **GREEDY)
            return found, engine.stats().preemptions_total

    roomy, none = asyncio.run(run(40))
    tight, preemptions = asyncio.run(run(9))
    assert none == 0 < preemptions
    for mine, theirs in zip(tight, roomy, strict=True):
        assert len(mine.token_ids) == len(theirs.token_ids) == 70
        assert_close(mine, theirs, kv_format)


@pytest.mark.parametrize("kv_format", ALL)
def test_case_35_padding_of_a_bucket_leaves_idle_pages_alone(
    tmp_path: Path, kv_format: str
) -> None:
    model = make_llama(tmp_path / "model", seed=3, num_layers=1)
    sizes = {"target": "interpret", "max_rows": 4, "max_step_tokens": 32}
    made = compile_tiny(model, tmp_path / "artifact", kv_formats=(kv_format,), **sizes)
    loaded = load_artifact(made, ServeOptions(num_pages=6))
    tokens, seqs = prepare_prompts(loaded, draw_prompts(6, (15, 3, 4)))  # the first fills its page
    loaded.programs["mixed", 32].run(tokens, seqs)
    state = loaded.state
    both = (*state.caches["kv.0"], *state.open_pages.get("kv.0", ()))
    before = [tensor.clone() for tensor in both]
    state.write_decode(3)
    loaded.programs["decode", 4].run(4, 4)
    changed = [
        (tensor != old).flatten(1).any(-1).nonzero().flatten().tolist()
        for tensor, old in zip(both, before, strict=True)
    ]
    owned = state.tensors["block_table"][:3, 0].tolist()
    if kv_format:  # one page is full, all three rows have added a token to their open pages
        assert changed == [owned[:1], owned[:1], [0, 1, 2], [0, 1, 2]]
    else:
        assert changed == [sorted(owned), sorted(owned)]


@pytest.mark.parametrize("kv_format", ["", "int8"])
def test_verify_proves_a_model_with_a_quantised_cache(
    model: Path, kv_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_verify(str(model), "reference", False, kv_format, "none", True)
    found = json.loads(capsys.readouterr().out)
    assert [layer["passed"] for layer in found["layers"]] == [True, True]
    assert load_artifact(Path(found["artifact"]), ServeOptions()).engine.kv_format == kv_format


def test_a_prompt_is_scored_the_same_with_pages_that_are_quantised_on_the_way(
    artifact: Path,
) -> None:
    """Slices of one token that fill pages: none reads an open page that another has emptied."""
    (prompt,) = draw_prompts(7, (50,))
    asked = {"max_tokens": 1, "prompt_logprobs": 1, **GREEDY}

    async def run(kv_dtype: str) -> Delta:
        async with serving(artifact, num_pages=40, kv_dtype=kv_dtype) as engine:
            return await answer(engine, prompt, **asked)

    plain, found = asyncio.run(run("auto")), asyncio.run(run("int8"))
    pairs = zip(found.prompt_logprobs, plain.prompt_logprobs, strict=True)
    errors = [abs(mine.logprob - theirs.logprob) for mine, theirs in pairs]
    assert len(errors) == 49
    assert max(errors) < LOGPROB_ERROR["int8"]


def test_an_engine_s_settings_name_the_format(artifact: Path) -> None:
    loaded = load_artifact(artifact, ServeOptions(num_pages=4, kv_dtype="fp8"))
    assert loaded.engine == dataclasses.replace(loaded.artifact.manifest.engine, kv_format="fp8")
