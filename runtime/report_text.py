"""A report on the terminal. Called by the command `report`; knows rich and the report's data."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from treadle.runtime.report import Change, Report, Row

FOLDED_SHARE = 0.01  # rows below it are told by their number
COLUMNS = (
    "kernel",
    "×",
    "share",
    "winner",
    "µs (p10–p90)",
    "margin",
    "vs default",
    "GB/s (roof)",
    "TFLOP/s (roof)",
    "bound",
    "regs",
    "spills",
    "smem",
    "occ.",
    "tried/failed",
)

# On a narrower terminal these are left out; the page and the JSON have all.
WIDE_ENOUGH = 180
LEFT_OUT = ("×", "TFLOP/s (roof)", "regs", "spills", "smem", "occ.", "tried/failed")


def cells(report: Report, row: Row) -> tuple[str, ...]:
    """Give the columns of a row as text; a dash where nothing was measured."""
    share, margin, default_us = report.share(row), row.margin, row.default_us
    moved, computed = report.rates(row)
    of_memory, of_compute = report.of_roofs(row)
    winner = row.winner
    return (
        row.kernel,
        str(row.launches),
        percent(share),
        winner.schedule,
        "–" if row.us is None else f"{row.us:.2f} ({row.us_low:.2f}–{row.us_high:.2f})",
        "–" if margin is None else percent(margin) + (" ~" if row.margin_is_noise else ""),
        "–" if default_us is None or not row.us else f"{default_us / row.us:.2f}×",
        f"{moved / 1e9:,.0f} ({percent(of_memory)})" if moved else "–",
        f"{computed / 1e12:.1f} ({percent(of_compute)})" if computed else "–",
        report.bound(row) or "–",
        str(winner.registers or "–"),
        str(winner.spill_bytes),
        f"{winner.shared_bytes / 1024:.0f} k" if winner.shared_bytes else "0",
        percent(report.occupancy(row)),
        f"{len(row.attempts)}/{len(row.failed)}",
    )


def percent(value: float | None) -> str:
    """Write a share: `31 %`, `0.6 %`, a dash for none."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def render(report: Report, width: int, *, color: bool = False) -> str:
    """Write the report as text of this width."""
    console = _console(width, color)
    header = dict(report.header)
    if report.bytes_per_s:
        roofs = f"{report.bytes_per_s / 1e9:,.0f} GB/s, {report.flops_per_s / 1e12:,.0f} TFLOP/s"
        header["measured roofs"] = roofs
    longest = max(map(len, header), default=0)
    for name, value in header.items():
        console.print(f"{name.ljust(longest)}  {value}")
    console.print()
    for line in report.verdict():
        console.print(line)
    for program, rows in report.programs().items():
        console.print()
        console.print(program, style="bold")
        shares = [(row, report.share(row)) for row in rows]
        shown = [row for row, share in shares if share is None or share >= FOLDED_SHARE]
        console.print(_table([cells(report, row) for row in shown], width))
        if len(shown) < len(rows):
            console.print(f"{len(rows) - len(shown)} more below {percent(FOLDED_SHARE)} each.")
        for row in rows:
            for attempt in row.failed:
                reason = f"  failed: {row.kernel}, {attempt.schedule}: {attempt.failure}"
                console.print(reason, soft_wrap=True)
    for key in report.changed:
        console.print(f"changed winner: {key}", soft_wrap=True)
    console.print("\n~ the margin is inside the spread: either choice is fine.")
    return _text(console)


def render_diff(changes: Sequence[Change], width: int, *, color: bool = False) -> str:
    """Write what changed between two reports; what did not is counted."""
    console = _console(width, color)
    table = Table("", "program", "kernel", "before µs", "after µs", "ratio", "winner")
    table.box = None
    quiet = 0
    for change in changes:
        if change.kind in ("same", "noise") and not change.winner_changed:
            quiet += 1
            continue
        table.add_row(change.kind, change.program, change.kernel, *_diff_cells(change))
    if quiet < len(changes):
        console.print(table)
    console.print(f"{quiet} kernels are as they were, or differ by less than their spread.")
    return _text(console)


def _diff_cells(change: Change) -> tuple[str, ...]:
    def one(row: Row | None) -> str:
        return "–" if row is None or row.us is None else f"{row.us:.2f}"

    def uses(row: Row) -> str:
        used = row.winner
        return f"{used.schedule} ({used.registers} regs, {used.spill_bytes} spilled)"

    both = [row for row in (change.before, change.after) if row is not None]
    schedules = " → ".join(dict.fromkeys(uses(row) for row in both))
    ratio = "–" if change.ratio is None else f"{change.ratio:.3f}×"
    return one(change.before), one(change.after), ratio, schedules


def _table(rows: Sequence[tuple[str, ...]], width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    kept = [name for name in COLUMNS if width >= WIDE_ENOUGH or name not in LEFT_OUT]
    for name in kept:
        left = name in ("kernel", "winner", "bound")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell for name, cell in zip(COLUMNS, row, strict=True) if name in kept))
    return table


def _console(width: int, color: bool) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
