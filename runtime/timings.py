"""The log of timings: one JSON line per event, only ever appended, by GPU, in the user's cache.

What was timed is known after a crash or a stop, and no candidate is timed twice. Called by the
tuner, which writes, and by the report, which reads. Must not know kernels or graphs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.ir.errors import ConfigError

Record = dict[str, Any]


class TimingLog:
    """Append records to a file and find those that are there; with no path, keep them in memory.

    Raises: ConfigError: the file holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[Record] = list(read_log(path)) if path and path.is_file() else []
        self._timed = {
            (record["context"], record["module"]): record
            for record in self.records
            if record["record"] == "timing"
        }

    def append(self, kind: str, **values: Any) -> Record:
        """Add a record and write its line at once. Raises: OSError."""
        record = {"record": kind, **values}
        self.records.append(record)
        if kind == "timing":
            self._timed[values["context"], values["module"]] = record
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(record, ensure_ascii=False) + "\n"
            # One write in append mode: lines of two processes don't mix.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        return record

    def timed(self, context: str, module: str) -> Record | None:
        """Find the timing of a kernel among these neighbours."""
        return self._timed.get((context, module))

    def of_program(self, program: str, kind: str) -> list[Record]:
        """Find a program's records of one kind, the oldest first."""
        return [r for r in self.records if r["record"] == kind and r.get("program") == program]


def read_log(path: Path) -> Iterator[Record]:
    """Read a log's records; a last line that was cut off while it was written is left out.

    Raises: ConfigError: a line is not a record; names it.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line else None
            if record is not None and not isinstance(record.get("record"), str):
                raise ValueError("expected an object with the field `record`")
        except (ValueError, AttributeError) as error:
            if number == len(lines):
                return
            raise ConfigError(
                f"{path}:{number} is no record of timings: {error}.",
                remedy="Remove the line, or the file to tune anew.",
            ) from None
        if record is not None:
            yield record


def schedule_text(template: str, schedule: Mapping[str, object]) -> str:
    """Write a candidate short: `gemv N16 K512 pdl w8 s1`."""
    words = [template]
    short = {"num_warps": "w", "num_stages": "s"}
    for name, value in schedule.items():
        if name in short:
            words.append(f"{short[name]}{value}")
        elif value is True or value is False:
            words += [name.lower().removeprefix("use_")] if value else []
        else:
            words.append(f"{name.removeprefix('BLOCK_')}={value}")
    return " ".join(words)
