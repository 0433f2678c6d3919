"""Reports from a recorded log: what they say, how they look, and what a comparison finds."""

from __future__ import annotations

import copy
import csv
import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.checkpoints import make_random
from tests.golden import Golden
from treadle import cli
from treadle.ir.errors import ConfigError
from treadle.kernels.occupancy import occupancy
from treadle.kernels.tuned import read_table
from treadle.runtime import report_csv, report_html, report_text
from treadle.runtime.report import (
    Attempt,
    Report,
    Row,
    diff,
    from_json,
    from_log,
    regressions,
    to_json,
)
from treadle.runtime.report_command import load, parse_share
from treadle.runtime.timings import read_log

LOG = Path(__file__).parent / "data" / "tuning.jsonl"


@pytest.fixture
def report() -> Report:
    return from_log(list(read_log(LOG)))


def find(report: Report, kernel: str, step: str = "decode") -> Row:
    return next(row for row in report.rows if (row.kernel, row.step) == (kernel, step))


def slowed(report: Report, kernel: str, factor: float) -> Report:
    """Give the report with one kernel slower."""
    rows = tuple(
        replace(
            row,
            us=(row.us or 0) * factor,
            us_low=row.us_low * factor,
            us_high=row.us_high * factor,
        )
        if row.kernel == kernel
        else row
        for row in report.rows
    )
    return replace(report, rows=rows)


def test_shares_of_a_program_add_up_to_one(report: Report) -> None:
    for rows in report.programs().values():
        assert sum(report.share(row) or 0 for row in rows) == pytest.approx(1)


def test_launches_are_the_whole_model_s(report: Report) -> None:
    assert find(report, "linear").launches == 32
    assert find(report, "sample").launches == 1


def test_a_row_knows_its_winner_margin_and_default(report: Report) -> None:
    row = find(report, "linear")
    assert row.winner.schedule.startswith("matmul_skinny_tma ")
    assert row.margin == pytest.approx((628.1 - 620.3) / 4 / 13.9)
    assert row.default_us == pytest.approx(13.9 + (628.1 - 620.3) / 4)
    assert not row.margin_is_noise
    assert [attempt.failure[:15] for attempt in row.failed] == ["out of resource"]


def test_a_kernel_without_a_choice_tells_what_it_uses(report: Report) -> None:
    row = find(report, "sample")
    assert (row.winner.schedule, row.winner.registers, row.default_us) == ("only one", 62, None)


def test_a_margin_inside_the_spread_is_marked(report: Report) -> None:
    row = find(report, "linear__glu")
    assert row.margin_is_noise
    assert "~" in report_text.cells(report, row)[report_text.COLUMNS.index("margin")]


def test_rates_are_of_the_measured_roofs(report: Report) -> None:
    row = find(report, "linear__glu")
    moved, _ = report.rates(row)
    assert moved == pytest.approx(235339776 / 57.2e-6)
    assert report.of_roofs(row)[0] == pytest.approx(moved / 4.4e12)
    bounds = [report.bound(find(report, name)) for name in ("linear__glu", "sample")]
    assert [*bounds, report.bound(find(report, "linear", "mixed"))] == [
        "memory",
        "latency",
        "compute",
    ]


def test_the_verdict_tells_gain_changes_and_failures(report: Report) -> None:
    gain, changed, failed = report.verdict()
    assert re.search(r"decode 8x1024 bf16 1\.0\d+×", gain)
    assert changed.endswith(": 1.")
    assert failed == "Candidates tried: 11, failed: 2."


def test_models_in_one_log_are_told_apart(report: Report) -> None:
    records = list(read_log(LOG))
    names = ("program", "model")
    other = [
        {name: f"other {value}" if name in names else value for name, value in record.items()}
        for record in records
    ]
    both = from_log([*records, *other])
    assert both.header["model"] == "other tiny-llama, tiny-llama"
    assert len(both.rows) == 2 * len(report.rows)
    assert sum(title.startswith("other tiny-llama ") for title in both.programs()) == 2
    assert {row.step for row in both.rows} == {"decode", "mixed"}


def test_a_row_tells_how_much_of_a_multiprocessor_it_fills(report: Report) -> None:
    row = find(report, "linear")
    share = report.occupancy(row)
    assert share is not None and 0 < share <= 1
    shown = report_text.cells(report, row)[report_text.COLUMNS.index("occ.")]
    assert shown == report_text.percent(share)
    assert report.occupancy(find(report, "sample")) is None  # its warps are not in the log


@pytest.mark.parametrize(
    ("uses", "share"),
    [
        ((32, 0, 4), 1.0),  # 64 warps of 1,024 registers each are all there are
        ((33, 0, 4), 48 / 64),  # 1,280 registers a warp: 12 a partition
        ((96, 48 * 1024, 4), 16 / 64),  # four programs by shared memory
        ((255, 0, 8), 8 / 64),
        ((32, 0, 1), 32 / 64),  # as many programs as there may be
    ],
)
def test_occupancy_is_that_of_the_scarcest_resource(
    uses: tuple[int, int, int], share: float
) -> None:
    registers, shared_bytes, num_warps = uses
    found = occupancy("sm_90", registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    assert found == share


def test_a_winner_can_be_pinned_by_what_the_page_says(report: Report, tmp_path: Path) -> None:
    row = find(report, "linear")
    (tmp_path / "pin.json").write_text(json.dumps(report.pin(row)))
    table = read_table(tmp_path / "pin.json")
    assert table.gpu == "GPU of tests" and list(table.choices) == [row.key]
    assert table.choices[row.key].template == "matmul_skinny_tma"
    assert html.escape(json.dumps(report.pin(row))) in report_html.render(report)


def test_csv_has_a_line_per_kernel_and_reads_back(report: Report) -> None:
    lines = list(csv.DictReader(report_csv.render(report).splitlines()))
    assert len(lines) == len(report.rows)
    line = next(line for line in lines if line["key"] == find(report, "linear").key)
    assert float(line["us"]) == 13.9 and line["bound"] == "memory"
    assert float(line["occupancy"]) == report.occupancy(find(report, "linear"))


def test_json_reads_back_equal(report: Report) -> None:
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


def test_an_empty_log_is_an_empty_report() -> None:
    empty = from_log([])
    assert empty.rows == ()
    assert "not timed" in report_text.render(empty, 80)
    assert "<svg" not in report_html.render(empty)


def test_a_narrow_terminal_has_fewer_columns(report: Report) -> None:
    text = report_text.render(report, 120)
    assert "winner" in text and "TFLOP/s (roof)" not in text
    assert max(len(line) for line in text.splitlines() if "failed" not in line) <= 120


def test_the_terminal_s_table(report: Report, golden: Callable[[str], Golden]) -> None:
    assert report_text.render(report, 220) == golden("report/report.txt")


def test_the_page(report: Report, golden: Callable[[str], Golden]) -> None:
    assert report_html.render(report) == golden("report/report.html")


def test_the_comparison(report: Report, golden: Callable[[str], Golden]) -> None:
    changes = diff(report, slowed(report, "attention_decode", 1.2))
    assert report_text.render_diff(changes, 200) == golden("report/diff.txt")


def test_the_page_needs_nothing_else_and_is_well_formed(report: Report) -> None:
    page = report_html.render(report)
    assert not re.findall(r"(?:src|href|url\(|@import|<script|<link)", page)
    assert 'name="viewport"' in page
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)


def test_names_are_escaped_in_the_page(report: Report) -> None:
    odd = replace(report, header={"model": "<script>alert(1)</script>"})
    assert "<script" not in report_html.render(odd)


def test_brackets_are_no_markup_in_the_terminal(report: Report) -> None:
    attempt = Attempt("x", failure="expected [16, 16], found [bold]")
    row = Row("decode 1", "decode", "k", "k", 1, attempts=(attempt,))
    text = report_text.render(replace(report, rows=(row,)), 200)
    assert "expected [16, 16], found [bold]" in text


def test_a_slower_kernel_is_a_regression_beyond_threshold_and_spread(report: Report) -> None:
    slower = diff(report, slowed(report, "attention_decode", 1.2))
    assert [change.kernel for change in regressions(slower, 0.05)] == ["attention_decode"]
    assert regressions(slower, 0.25) == []
    within = diff(report, slowed(report, "attention_decode", 1.01))
    assert {change.kind for change in within} == {"same", "noise"}


def test_new_gone_and_changed_are_told(report: Report) -> None:
    fewer = replace(report, rows=report.rows[1:])
    assert [c.kind for c in diff(report, fewer)].count("gone") == 1
    assert [c.kind for c in diff(fewer, report)].count("new") == 1
    row = report.rows[0]
    others = tuple(replace(a, is_winner=not a.is_winner) for a in row.attempts[:2])
    other = replace(report, rows=(replace(row, attempts=others), *report.rows[1:]))
    assert [change.winner_changed for change in diff(report, other)].count(True) == 1


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_a_share_is_read(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["much", "-1%", "nan"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_share(text)


def test_the_commands_from_log_to_regression(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert cli.run(["report", str(LOG), "--html", str(page), "--json"]) == 0
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    assert page.read_text() == report_html.render(report)
    after = tmp_path / "after.json"
    data = copy.deepcopy(to_json(slowed(report, "linear__glu", 1.5)))
    after.write_text(json.dumps(data))
    compare = ["report", "diff", str(before), str(after)]
    assert cli.run(compare) == 0
    assert cli.run([*compare, "--fail-on-regression", "60%"]) == 0
    capsys.readouterr()
    assert cli.run([*compare, "--fail-on-regression", "5%"]) == 1
    assert "the worst is linear__glu" in capsys.readouterr().err
    assert cli.run(["report", "diff", str(after), str(before), "--fail-on-regression", "5%"]) == 0


def test_an_artifact_lists_every_kernel_of_its_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_random(tmp_path / "model", num_layers=1)
    out = str(tmp_path / "artifact")
    sizes = ["--max-rows", "2", "--max-step-tokens", "16", "--max-context-tokens", "64"]
    assert cli.run(["compile", str(model), "-o", out, "--target", "interpret", *sizes]) == 0
    capsys.readouterr()
    assert cli.run(["report", out, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    plan = json.loads((tmp_path / "artifact" / "plan.json").read_text())
    launched = sum(len(program["launches"]) for program in plan["programs"])
    assert sum(row["launches"] for row in rows) == launched
    assert {row["us"] for row in rows} == {None}
    assert cli.run(["report", out]) == 0
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "absent"],
        ["report", "diff", "one"],
        ["report", str(LOG), "--fail-on-regression", "5%"],
        ["report", __file__],
    ],
)
def test_what_is_no_report_is_refused(arguments: list[str]) -> None:
    assert cli.run(arguments) == 2


def test_a_log_is_loaded_by_its_name() -> None:
    assert load(str(LOG)).header["gpu"] == "GPU of tests"
