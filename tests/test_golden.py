"""The golden fixture itself: it must fail when texts differ and write only when asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from .golden import Golden


def test_equal_text_passes_from_both_sides(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    golden = Golden.open("a.txt", updating=False, folder=tmp_path)
    made = "one\ntwo\n"
    assert golden == made
    assert made == golden


def test_different_text_fails_from_both_sides(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    golden = Golden.open("a.txt", updating=False, folder=tmp_path)
    made = "two\n"
    assert golden != made
    assert made != golden


def test_missing_file_fails_and_names_the_command(tmp_path: Path) -> None:
    golden = Golden.open("absent.txt", updating=False, folder=tmp_path)
    with pytest.raises(pytest.fail.Exception, match="make golden"):
        assert golden == ""


def test_update_writes_the_file(tmp_path: Path) -> None:
    assert Golden.open("deep/new.txt", updating=True, folder=tmp_path) == "made\n"
    assert (tmp_path / "deep/new.txt").read_text() == "made\n"


def test_name_outside_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below"):
        Golden.open("../outside.txt", updating=True, folder=tmp_path)


def test_other_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(TypeError, match="int"):
        assert Golden.open("a.txt", updating=False, folder=tmp_path) == 1
