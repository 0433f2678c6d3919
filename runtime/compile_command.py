"""The body of the command `compile`, for what is not current: see `compile_answer.py` for the rest.

The parameters are the options' names. Commands that are given a model instead of an artifact have
it compiled here, too.
"""

from __future__ import annotations

from pathlib import Path

from treadle.runtime.compile_answer import read_options, report_result
from treadle.runtime.compile_key import CompileOptions, cached_artifact_path
from treadle.runtime.compiler import compile_model
from treadle.runtime.config import read_kv_dtypes
from treadle.runtime.progress import Progress
from treadle.runtime.tune_command import BUDGET_S, tune_for_compile


def run_compile(
    source: str,
    out: Path,
    target: str,
    arch: str,
    dtype: str | None,
    page_size: int,
    max_rows: int,
    max_step_tokens: int,
    max_context_tokens: int,
    kv_dtype: str,
    quant_policy: int | None,
    dump: Path | None,
    autotune: str,
    pin: Path | None,
    progress: str,
    as_json: bool,
) -> None:
    """Compile a model source into an artifact and say what it is."""
    options = read_options(
        target=target,
        arch=arch,
        dtype=dtype,
        page_size=page_size,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_context_tokens=max_context_tokens,
        kv_dtype=kv_dtype,
        quant_policy=quant_policy,
        dump=dump,
        autotune=autotune,
        pin=pin,
    )
    with Progress(progress) as shown:
        # Before the long part, so that nobody waits for a result in the wrong place.
        shown.note(f"output: {out}")
        with shown.phases() as report:
            if autotune in BUDGET_S:
                tune_for_compile(source, options, report)
            result = compile_model(source, out, options, report)
    report_result(result.artifact, was_current=result.was_current, as_json=as_json)


def compile_into_cache(source: str, target: str, kv_dtype: str, progress: str) -> Path:
    """Compile a model source into the cache, unless that is current, and give the artifact."""
    options = CompileOptions(target=target, kv_formats=read_kv_dtypes(kv_dtype))
    out = cached_artifact_path(source, options)
    with Progress(progress) as shown, shown.phases() as report:
        return compile_model(source, out, options, report).artifact.path
