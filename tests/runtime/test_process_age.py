"""How long a process has existed, as the system tells it or as can be known without it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from treadle.runtime import process_age
from treadle.runtime.process_age import process_age_s


def write_stat(folder: Path, age_s: float) -> Path:
    """Write a file as the system has it, of a process of this age."""
    started = (time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * os.sysconf("SC_CLK_TCK")
    words = ["S", *["0"] * 18, str(int(started)), "0", "0"]
    (folder / "stat").write_text(f"1 (a (b) c) {' '.join(words)}")
    return folder / "stat"


def loaded_s() -> float:
    return time.perf_counter() - process_age._loaded_at_s


def test_a_process_is_older_than_what_it_has_loaded_and_ages_as_time_goes() -> None:
    first_s = process_age_s()
    assert first_s >= loaded_s() - 0.1
    began_s = time.perf_counter()
    time.sleep(0.2)
    passed_s = time.perf_counter() - began_s
    assert process_age_s() - first_s == pytest.approx(passed_s, abs=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell")
def test_what_came_before_the_first_line_counts(tmp_path: Path) -> None:
    age_s = loaded_s() + 5
    assert process_age_s(write_stat(tmp_path, age_s)) == pytest.approx(age_s, abs=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell")
@pytest.mark.parametrize("off_s", [-5.0, 1e6])
def test_an_age_that_can_not_be_is_not_believed(tmp_path: Path, off_s: float) -> None:
    stat = write_stat(tmp_path, loaded_s() + off_s)
    assert process_age_s(stat) == pytest.approx(loaded_s(), abs=0.1)


@pytest.mark.parametrize("text", ["", "1 (python) S 0", "1 (python) S " + "x " * 40])
def test_where_the_system_does_not_tell_it_is_the_time_since_loading(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "stat").write_text(text)
    for stat in (tmp_path / "stat", tmp_path / "absent"):
        assert process_age_s(stat) == pytest.approx(loaded_s(), abs=0.1)
