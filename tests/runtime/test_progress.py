"""Progress: which form it takes where, what its lines say, and that silence never lasts."""

from __future__ import annotations

import io
import threading

import pytest

from treadle.ir import errors
from treadle.runtime import progress


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Watched(io.StringIO):
    """A stream that tells when a wanted text has been written."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted = wanted
        self.seen = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.wanted in self.getvalue():
            self.seen.set()
        return written


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_auto_is_lines_in_a_pipe() -> None:
    assert progress.Progress("auto", stream=io.StringIO()).mode == "log"


def test_auto_is_bars_on_a_terminal() -> None:
    assert progress.Progress("auto", stream=Terminal()).mode == "bar"


def test_auto_is_lines_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert progress.Progress("auto", stream=Terminal()).mode == "log"


def test_auto_is_lines_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert progress.Progress("auto", stream=Terminal()).mode == "log"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="`fancy`"):
        progress.Progress("fancy")


def test_none_writes_nothing() -> None:
    stream = io.StringIO()
    with progress.Progress("none", stream=stream) as shown, shown.phase("load", total=2) as phase:
        phase.advance()
        shown.note("half")
    assert stream.getvalue() == ""


def test_a_phase_writes_its_start_and_its_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with (
        progress.Progress("log", stream=stream, clock=clock) as shown,
        shown.phase("load weights", unit="tensors") as phase,
    ):
        phase.advance(7)
        clock.now_s += 3.0
    assert stream.getvalue() == "load weights ...\nload weights: 7 tensors, done in 3.0 s\n"


def test_a_failed_phase_says_that_it_stopped() -> None:
    stream = io.StringIO()
    with (
        pytest.raises(RuntimeError),
        progress.Progress("log", stream=stream, clock=Clock()) as shown,
        shown.phase("load"),
    ):
        raise RuntimeError
    assert stream.getvalue().splitlines()[-1] == "load: stopped after 0.0 s"


def test_each_tenth_is_a_line_with_an_estimate() -> None:
    stream, clock = io.StringIO(), Clock()
    with (
        progress.Progress("log", stream=stream, clock=clock) as shown,
        shown.phase("tune", total=40, unit="keys") as phase,
    ):
        for _ in range(8):
            clock.now_s += 5.0
            phase.advance()
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == [
        "tune: 4 of 40 keys (10 %), 20 s so far, about 3 min 00 s left",
        "tune: 8 of 40 keys (20 %), 40 s so far, about 2 min 40 s left",
    ]


def test_a_fast_phase_does_not_write_every_tenth() -> None:
    stream = io.StringIO()
    with (
        progress.Progress("log", stream=stream, clock=Clock()) as shown,
        shown.phase("tune", total=10) as phase,
    ):
        for _ in range(10):
            phase.advance()
    assert len(stream.getvalue().splitlines()) == 2


def test_only_a_phase_that_took_a_while_says_that_it_is_done() -> None:
    stream, clock = io.StringIO(), Clock()
    with progress.Progress("log", stream=stream, clock=clock) as shown:
        with shown.phase("quick"):
            pass
        with shown.phase("slow"):
            clock.now_s += 1.5
    assert stream.getvalue().splitlines() == ["quick ...", "slow ...", "slow: done in 1.5 s"]


def test_reported_phases_follow_one_another() -> None:
    stream = io.StringIO()
    with (
        progress.Progress("log", stream=stream, clock=Clock()) as shown,
        shown.phases() as report,
    ):
        report("read")
        report("build")
    assert stream.getvalue().splitlines() == ["read ...", "build ..."]


def test_an_error_stops_the_reported_phase() -> None:
    stream = io.StringIO()
    with (
        pytest.raises(RuntimeError),
        progress.Progress("log", stream=stream, clock=Clock()) as shown,
        shown.phases() as report,
    ):
        report("read")
        raise RuntimeError
    assert stream.getvalue().splitlines()[-1] == "read: stopped after 0.0 s"


def test_a_silent_phase_gets_a_heartbeat() -> None:
    stream = Watched("working, ")
    with (
        progress.Progress("log", stream=stream, heartbeat_s=0.02) as shown,
        shown.phase("capture graphs"),
    ):
        assert stream.seen.wait(timeout=30)


def test_the_innermost_phase_has_the_heartbeat() -> None:
    stream = Watched("inner: working")
    with (
        progress.Progress("log", stream=stream, heartbeat_s=0.02) as shown,
        shown.phase("outer"),
        shown.phase("inner"),
    ):
        assert stream.seen.wait(timeout=30)


def test_bars_show_the_title_and_the_count() -> None:
    stream = Terminal()
    with (
        progress.Progress("bar", stream=stream) as shown,
        shown.phase("tune", total=2, unit="keys") as phase,
    ):
        phase.advance()
        shown.note("a note [not markup]")
    assert "tune" in stream.getvalue()
    assert "a note [not markup]" in stream.getvalue()


def test_no_color_leaves_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with progress.Progress("bar", stream=stream) as shown, shown.phase("tune", total=1) as phase:
        phase.advance()
    assert "\x1b[3" not in stream.getvalue().replace("\x1b[3A", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.44, "0.4 s"),
        (12.2, "12 s"),
        (59.9, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text
