"""A report as one HTML page: no network, no script, readable on a phone, with a roofline plot.

Called by the command `report`; knows HTML, SVG and the report's data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from html import escape

from treadle.runtime.report import Report, Row
from treadle.runtime.report_text import COLUMNS, cells, percent

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:80rem}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem;text-align:left;white-space:nowrap;border-bottom:1px solid #8884}
td.n,th.n{text-align:right}td.w{white-space:normal;min-width:11rem}
details{margin:.4rem 0}summary{cursor:pointer;padding:.3rem 0}
.bad{color:#c33}svg{width:100%;height:auto;max-width:60rem}
svg text{fill:currentColor;font-size:13px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{opacity:.7}dd{margin:0}
code{overflow-wrap:anywhere}
"""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 800, 440, 64, 20, 16, 48
_COLORS = {"memory": "#2a78c8", "compute": "#c8642a", "latency": "#888", "": "#888"}


def render(report: Report) -> str:
    """Write the page."""
    title = f"Kernels of {report.header.get('model', 'a model')}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_header(report),
            *(f"<p>{escape(line)}</p>" for line in report.verdict()),
            *_roofline(report),
            *_programs(report),
            *_changed(report),
            "<h2>Method</h2>",
            *(f"<p>{escape(note)}</p>" for note in report.notes),
            "</body></html>",
            "",
        ]
    )


def _header(report: Report) -> Iterator[str]:
    yield "<dl>"
    for name, value in report.header.items():
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    if report.bytes_per_s:
        moved, computed = report.bytes_per_s / 1e9, report.flops_per_s / 1e12
        yield f"<dt>measured roofs</dt><dd>{moved:,.0f} GB/s, {computed:,.0f} TFLOP/s</dd>"
    yield "</dl>"


def _programs(report: Report) -> Iterator[str]:
    left = {"kernel", "winner", "bound"}
    for program, rows in report.programs().items():
        yield f"<h2>{escape(program)}</h2>"
        yield '<div class="wide"><table><thead><tr>'
        for name in COLUMNS:
            yield f"<th{'' if name in left else ' class=n'}>{escape(name)}</th>"
        yield "</tr></thead><tbody>"
        for row in rows:
            parts = []
            for name, text in zip(COLUMNS, cells(report, row), strict=True):
                kind = " class=w" if name == "winner" else "" if name in left else " class=n"
                parts.append(f"<td{kind}>{escape(text)}</td>")
            yield f"<tr>{''.join(parts)}</tr>"
        yield "</tbody></table></div>"
        yield "<p>~ marks a margin inside the spread: either choice is fine.</p>"
        for row in rows:
            if len(row.attempts) > 1:
                yield from _details(report, row)


def _details(report: Report, row: Row) -> Iterator[str]:
    """Show all that was tried for one kernel, with a strip of the times and the reasons."""
    yield f"<details><summary>{escape(row.kernel)}: all {len(row.attempts)} candidates</summary>"
    yield f"<p><code>{escape(row.key)}</code></p>"
    if pin := report.pin(row):
        yield "<p>To pin the winner, give <code>compile --pin FILE</code> a file with</p>"
        yield f"<p><code>{escape(json.dumps(pin))}</code></p>"
    yield _strip(row)
    yield '<div class="wide"><table><thead><tr><th>candidate</th><th class=n>step µs</th>'
    yield "<th class=n>spread</th><th class=n>error</th><th class=n>regs</th>"
    yield "<th class=n>spills</th><th class=n>smem</th><th>remarks</th></tr></thead><tbody>"
    for attempt in row.attempts:
        marks = [("winner", attempt.is_winner), ("default", attempt.is_default)]
        remark = ", ".join(word for word, holds in marks if holds)
        if attempt.failure:
            remark = f"failed: {attempt.failure}"
        step = "–" if attempt.step_us is None else f"{attempt.step_us:.2f}"
        numbers = (
            step,
            f"{attempt.spread_us:.2f}",
            f"{attempt.error:.1e}",
            str(attempt.registers),
            str(attempt.spill_bytes),
            str(attempt.shared_bytes),
        )
        tds = "".join(f"<td class=n>{text}</td>" for text in numbers)
        kind = " class=bad" if attempt.failure else ""
        yield f"<tr><td class=w>{escape(attempt.schedule)}</td>{tds}"
        yield f"<td class=w><span{kind}>{escape(remark)}</span></td></tr>"
    yield "</tbody></table></div></details>"


def _strip(row: Row) -> str:
    """Draw the candidates' times on one line, each with its spread."""
    times = [(a.step_us, a.spread_us, a.is_winner) for a in row.attempts if a.step_us is not None]
    if len(times) < 2:
        return ""
    low = min(time - spread / 2 for time, spread, _ in times)
    high = max(time + spread / 2 for time, spread, _ in times)
    scale = 760 / (high - low or 1.0)
    parts = []
    for time, spread, is_winner in times:
        x, reach = 20 + (time - low) * scale, spread / 2 * scale
        color = "#2a78c8" if is_winner else "#888"
        parts.append(
            f'<line x1="{x - reach:.1f}" x2="{x + reach:.1f}" y1="14" y2="14" stroke="{color}"/>'
            f'<circle cx="{x:.1f}" cy="14" r="4" fill="{color}" fill-opacity=".7"/>'
        )
    ends = f'<text x="20" y="36">{low:.1f} µs</text>'
    ends += f'<text x="780" y="36" text-anchor="end">{high:.1f} µs</text>'
    return (
        f'<svg viewBox="0 0 800 42" role="img" aria-label="step times">{"".join(parts)}{ends}</svg>'
    )


def _changed(report: Report) -> Iterator[str]:
    if report.changed:
        yield "<h2>Changed winners</h2><ul>"
        yield from (f"<li><code>{escape(key)}</code></li>" for key in report.changed)
        yield "</ul>"


# --- the roofline -------------------------------------------------------------------------------


def _roofline(report: Report) -> Iterator[str]:
    """Plot operations per byte against the rate reached: a dot per row, its area the share."""
    rows = [row for row in report.rows if row.us and row.flops and row.bytes]
    if not rows or not report.bytes_per_s or not report.flops_per_s:
        return
    ridge = report.flops_per_s / report.bytes_per_s
    exponents = [math.log10(row.intensity) for row in rows] + [math.log10(ridge)]
    low_x, high_x = math.floor(min(exponents)), math.ceil(max(exponents))
    rates = [math.log10(report.rates(row)[1]) for row in rows]
    low_y, high_y = math.floor(min(rates)), math.ceil(math.log10(report.flops_per_s))

    def x_of(intensity: float) -> float:
        part = (math.log10(intensity) - low_x) / max(high_x - low_x, 1)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y_of(rate: float) -> float:
        part = (math.log10(rate) - low_y) / max(high_y - low_y, 1)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    yield "<h2>Roofline</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline plot">'
    for exponent in range(low_x, high_x + 1):
        x = x_of(10.0**exponent)
        yield _line(x, x, _TOP, _HEIGHT - _BOTTOM, "#8883")
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{10.0**exponent:g}</text>'
    for exponent in range(low_y, high_y + 1):
        y = y_of(10.0**exponent)
        yield _line(_LEFT, _WIDTH - _RIGHT, y, y, "#8883")
        label = f"{10.0 ** (exponent - 12):g}"
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    place = f'x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle"'
    yield f"<text {place}>operations per byte</text>"
    yield f'<text x="{_LEFT + 8}" y="{_TOP + 14}">TFLOP/s</text>'
    # The memory's roof begins where it leaves the plot's floor.
    start = max(10.0**low_x, 10.0**low_y / report.bytes_per_s)
    points = [
        (x_of(start), y_of(start * report.bytes_per_s)),
        (x_of(ridge), y_of(report.flops_per_s)),
        (x_of(10.0**high_x), y_of(report.flops_per_s)),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/>'
    for row in rows:
        yield from _dot(report, row, x_of(row.intensity), y_of)
    yield "</svg>"
    yield "<p>Lines: the measured roofs. Area: share of the step. Hollow: the default schedule, "
    yield "with a line to the tuned one. Blue waits for memory, orange for arithmetic, grey for "
    yield "neither.</p>"


def _line(x1: float, x2: float, y1: float, y2: float, color: str) -> str:
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}"/>'


def _dot(report: Report, row: Row, x: float, y_of: Callable[[float], float]) -> Iterator[str]:
    rate = report.rates(row)[1]
    y, radius = y_of(rate), 4 + 22 * math.sqrt(report.share(row) or 0.0)
    color = _COLORS[report.bound(row)]
    if row.default_us and row.us and not row.winner.is_default:
        before = y_of(rate * row.us / row.default_us)
        yield f'<circle cx="{x:.1f}" cy="{before:.1f}" r="5" fill="none" stroke="{color}"/>'
        yield _line(x, x, before, y, color)
    share = percent(report.share(row))
    about = escape(f"{row.program}: {row.kernel}, {row.us:.2f} µs, {share} of the step")
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}" fill-opacity=".55">'
    yield f"<title>{about}</title></circle>"
