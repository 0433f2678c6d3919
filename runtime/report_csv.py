"""A report as CSV: a line per kernel and program, plain numbers, times in µs, shares of 1.

Called by the command `report`; knows the report's data only.
"""

from __future__ import annotations

import csv
import io

from treadle.runtime.report import Report, Row

COLUMNS = (
    "program",
    "kernel",
    "key",
    "launches",
    "share",
    "winner",
    "us",
    "us_p10",
    "us_p90",
    "margin",
    "margin_is_noise",
    "vs_default",
    "gb_per_s",
    "of_memory_roof",
    "tflop_per_s",
    "of_compute_roof",
    "bound",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "occupancy",
    "tried",
    "failed",
)


def render(report: Report) -> str:
    """Write the rows, the largest share of each program first; what was not measured is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rows in report.programs().values():
        for row in rows:
            writer.writerow(_values(report, row))
    return file.getvalue()


def _values(report: Report, row: Row) -> tuple[object, ...]:
    moved, computed = report.rates(row)
    of_memory, of_compute = report.of_roofs(row)
    winner, is_timed = row.winner, row.us is not None
    return (
        row.program,
        row.kernel,
        row.key,
        row.launches,
        report.share(row),
        winner.schedule,
        row.us,
        row.us_low if is_timed else None,
        row.us_high if is_timed else None,
        row.margin,
        row.margin_is_noise,
        row.default_us / row.us if row.default_us and row.us else None,
        moved / 1e9 or None,
        of_memory or None,
        computed / 1e12 or None,
        of_compute or None,
        report.bound(row),
        winner.registers,
        winner.spill_bytes,
        winner.shared_bytes,
        report.occupancy(row),
        len(row.attempts),
        len(row.failed),
    )
