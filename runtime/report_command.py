"""The body of `report`: find the figures, choose the form, compare two.

Called by the command line only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from treadle.ir import knobs
from treadle.ir.errors import ConfigError, RegressionError
from treadle.ir.files import write_whole
from treadle.runtime import report_csv, report_html, report_text
from treadle.runtime.artifact import is_artifact, open_artifact, write_error
from treadle.runtime.console import print_json
from treadle.runtime.report import (
    Report,
    diff,
    from_artifact,
    from_log,
    read_json,
    regressions,
    to_json,
)
from treadle.runtime.tables import log_path
from treadle.runtime.timings import read_log

WIDE = 220  # columns in a pipe: nothing is folded


def run_report(
    sources: Sequence[str],
    html: Path | None,
    csv: Path | None,
    fail_on_regression: str,
    as_json: bool,
) -> None:
    """Print one report, or what changed between two.

    Raises: RegressionError: a kernel became slower than allowed. ConfigError, ArtifactError.
    """
    if sources[0] == "diff":
        if len(sources) != 3:
            raise ConfigError("`report diff` takes two reports: A before, B after.")
        if html or csv:
            raise ConfigError("--html and --csv write one report, not a comparison.")
        _compare(sources[1], sources[2], fail_on_regression, as_json)
        return
    if len(sources) != 1 or fail_on_regression:
        raise ConfigError(
            "Expected one ARTIFACT or FILE.",
            remedy="To compare two: treadle report diff A B --fail-on-regression 5%.",
        )
    report = load(sources[0])
    pages = {html: report_html.render, csv: report_csv.render}
    for path, render in pages.items():
        if path is None:
            continue
        try:
            write_whole(path, render(report))
        except OSError as error:
            raise write_error(path, error) from error
    if as_json:
        print_json(to_json(report))
        return
    width, color = _terminal()
    print(report_text.render(report, width, color=color), end="")
    if html:
        print(f"page: {html}")
    if csv:
        print(f"table: {csv}")


def load(source: str) -> Report:
    """Make the report of an artifact, a log of timings or a report's JSON. Raises: ConfigError."""
    path = Path(source)
    if is_artifact(path):
        artifact = open_artifact(path)
        log = log_path(artifact.manifest.gpu)
        known = log.is_file() and bool(artifact.manifest.gpu)
        return from_artifact(artifact, list(read_log(log)) if known else [])
    if not path.is_file():
        raise ConfigError(
            f"There is no artifact and no file `{source}`.",
            remedy="`treadle tune` tells where its log of timings is.",
        )
    return from_log(list(read_log(path))) if path.suffix == ".jsonl" else read_json(path)


def parse_share(text: str) -> float:
    """Read `5%` or `0.05`. Raises: ConfigError: it is neither."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ConfigError(f"--fail-on-regression is a share like 5% or 0.05, not `{text}`.")
    return value


def _compare(before: str, after: str, fail_on_regression: str, as_json: bool) -> None:
    threshold = parse_share(fail_on_regression) if fail_on_regression else None
    old, new = load(before), load(after)
    changes = diff(old, new)
    if as_json:
        records = [asdict(c) | {"winner_changed": c.winner_changed} for c in changes]
        print_json({"before": dict(old.header), "after": dict(new.header), "changes": records})
    else:
        width, color = _terminal()
        for name, report in (("before", old), ("after", new)):
            said = [report.header.get(key, "") for key in ("gpu", "torch", "triton", "began")]
            print(f"{name:>8}  {', '.join(filter(None, said))}")
        print(report_text.render_diff(changes, width, color=color), end="")
    if threshold is None:
        return
    found = regressions(changes, threshold)
    if found:
        worst = max(found, key=lambda change: change.ratio or 0.0)
        raise RegressionError(
            f"{len(found)} kernels are slower by more than {100 * threshold:g} % and their spread; "
            f"the worst is {worst.kernel} in {worst.program}: {worst.ratio:.3f}×.",
            remedy="Compare the winners, registers and versions above.",
        )


def _terminal() -> tuple[int, bool]:
    """Give width and colour of stdout."""
    if not sys.stdout.isatty():
        return WIDE, False
    return Console().width, not knobs.no_color()
