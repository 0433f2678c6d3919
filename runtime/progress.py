"""Progress of long work: bars on a terminal, lines in a pipe, a heartbeat, or nothing.

Writes to stderr, so that stdout stays for results. Must not know what the work is. The command line
makes one `Progress` and hands it down.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, TextIO

from rich import progress as rich_progress
from rich.console import Console

from treadle.ir import knobs
from treadle.ir.errors import ConfigError

MODES: Final = ("auto", "bar", "log", "none")
HEARTBEAT_S: Final = 30.0
# Ten lines within a second tell a reader nothing.
_MIN_LINE_GAP_S: Final = 2.0
# A phase as short as this has said enough by its first line.
_QUICK_S: Final = 1.0


class Phase:
    """Count the done units of one phase. Safe to advance from several threads."""

    def __init__(
        self, owner: Progress, title: str, total: int | None, unit: str, now_s: float
    ) -> None:
        self._owner = owner
        self.title = title
        self.total = total
        self.unit = unit
        self.done = 0
        self.detail = ""
        self.started_s = now_s
        self.last_line_s = now_s
        self._tenths = 0
        self._task: rich_progress.TaskID | None = None

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Add `count` done units; `detail` says what was just done."""
        self._owner._advance(self, count, detail)

    def state(self, now_s: float) -> str:
        """Say how far the phase is, and how long it will take where that can be told."""
        elapsed_s = now_s - self.started_s
        unit = f" {self.unit}" if self.unit else ""
        if self.total:
            text = f"{self.done} of {self.total}{unit} ({100 * self.done // self.total} %)"
        elif self.done:
            text = f"{self.done}{unit}"
        else:
            text = "working"
        text += f", {duration(elapsed_s)} so far"
        if self.total and 0 < self.done < self.total:
            remaining_s = elapsed_s / self.done * (self.total - self.done)
            text += f", about {duration(remaining_s)} left"
        return text + (f" ({self.detail})" if self.detail else "")

    def reaches_next_tenth(self) -> bool:
        """Say whether the phase has passed another 10 % since it last said so."""
        tenths = 10 * self.done // self.total if self.total else 0
        passed = tenths > self._tenths
        self._tenths = max(self._tenths, tenths)
        return passed


class Progress:
    """Show phases of work. Use as a context manager around the whole command.

    `mode` auto means bars on a terminal, and lines in a pipe, under CI or on a terminal that can't
    move its cursor.

    Raises: ConfigError: an unknown mode.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        stream: TextIO | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"Progress is one of {', '.join(f'`{word}`' for word in MODES)}; found `{mode}`."
            )
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(
            file=self._stream,
            no_color=knobs.no_color(),
            force_terminal=True if mode == "bar" else None,
        )
        if mode == "auto":
            can_redraw = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "bar" if can_redraw and not knobs.ci() else "log"
        self.mode = mode
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._bars: rich_progress.Progress | None = None

    def __enter__(self) -> Progress:
        if self.mode == "bar":
            self._bars = rich_progress.Progress(
                rich_progress.SpinnerColumn(),
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.fields[state]}"),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._bars.start()
        elif self.mode == "log":
            self._thread = threading.Thread(
                target=self._beat, name="progress heartbeat", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def phase(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Run the body as one phase of `total` units, where their number is known.

        Use: with progress.phase("tune", total=12, unit="kernels") as phase: phase.advance()
        """
        phase = Phase(self, title, total, unit, self._clock())
        with self._lock:
            self._phases.append(phase)
            if self._bars is not None:
                phase._task = self._bars.add_task(title, total=total, state="")
            self._line(f"{title} ...")
        finished = False
        try:
            yield phase
            finished = True
        finally:
            with self._lock:
                self._phases.remove(phase)
                took = duration(self._clock() - phase.started_s)
                verdict = f"done in {took}" if finished else f"stopped after {took}"
                if self._bars is not None and phase._task is not None:
                    # A phase of unknown length has a pulsing bar until it gets a total.
                    total = phase.total or max(phase.done, 1)
                    completed = total if finished else phase.done
                    self._bars.update(phase._task, total=total, completed=completed, state=verdict)
                if phase.done:
                    self._line(f"{title}: {phase.done} {phase.unit}".rstrip() + f", {verdict}")
                elif not finished or self._clock() - phase.started_s >= _QUICK_S:
                    self._line(f"{title}: {verdict}")

    @contextmanager
    def phases(self) -> Iterator[Callable[[str], None]]:
        """Give `report(title)`: each call ends the phase before it and begins the next.

        For work that only says what it does now. `report` may be called from another thread.
        """
        with ExitStack() as current:

            def report(title: str) -> None:
                current.close()
                current.enter_context(self.phase(title))

            yield report

    def note(self, text: str) -> None:
        """Show one line that stays."""
        with self._lock:
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False)
            self._line(text)

    def _advance(self, phase: Phase, count: int, detail: str) -> None:
        with self._lock:
            phase.done += count
            phase.detail = detail
            now_s = self._clock()
            if self._bars is not None and phase._task is not None:
                shown = f"{phase.done}/{phase.total} {phase.unit}" if phase.total else detail
                self._bars.update(phase._task, completed=phase.done, state=shown)
            if phase.reaches_next_tenth() and now_s - phase.last_line_s >= _MIN_LINE_GAP_S:
                self._line(f"{phase.title}: {phase.state(now_s)}", phase)

    def _line(self, text: str, phase: Phase | None = None) -> None:
        if self.mode == "log":
            print(text, file=self._stream, flush=True)
        if phase is not None:
            phase.last_line_s = self._clock()

    def _beat(self) -> None:
        """Say that a phase is alive when nothing has been heard of it for the heartbeat's time."""
        while not self._stopped.wait(min(1.0, self._heartbeat_s / 4)):
            with self._lock:
                now_s = self._clock()
                # The innermost phase is the one that is at work.
                for phase in self._phases[-1:]:
                    if now_s - phase.last_line_s >= self._heartbeat_s:
                        self._line(f"{phase.title}: {phase.state(now_s)}", phase)


def duration(seconds: float) -> str:
    """Format a time for a person: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
