"""Files that are written whole: their folder, their text, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.ir.files import write_whole


def test_a_file_is_written_with_its_folder_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_whole(path, "first ü\n")
    write_whole(path, "second\n")
    assert path.read_bytes() == b"second\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_whole(path, "text")
    assert list(tmp_path.iterdir()) == [path]
