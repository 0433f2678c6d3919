"""Results on stdout: the same columns on a terminal and in a pipe, or JSON.

Called by the bodies of commands. Must not know what it prints.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Print a result for a machine to read."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns that line up; the last one is as long as it likes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def program_name() -> str:
    """Give what to type to run this program again, as it was called this time."""
    called = Path(sys.argv[0])
    if called.name == "cli.py":
        return f"python {called}"
    if called.name == "treadle" and shutil.which("treadle") != str(called.absolute()):
        return str(called)
    return "treadle"
