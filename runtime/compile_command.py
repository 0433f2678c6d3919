"""The body of the command `compile`, for what is not current: see `compile_answer.py` for the rest.

Called by the command line only; the parameters are the options' names.
"""

from __future__ import annotations

from pathlib import Path

from treadle.runtime.compile_answer import read_options, report_result
from treadle.runtime.compiler import compile_model
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
