"""Results on stdout: columns, and commands that can be copied."""

from __future__ import annotations

import shutil
import sys

import pytest

from treadle.runtime import console


def test_columns_line_up_without_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table([("a", "long one", ""), ("longer", "b", "end")])
    assert capsys.readouterr().out == "a       long one\nlonger  b         end\n"


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        ("cli.py", None, "python cli.py"),
        ("../treadle/cli.py", None, "python ../treadle/cli.py"),
        ("/opt/bin/treadle", "/opt/bin/treadle", "treadle"),
        ("/env/bin/treadle", "/opt/bin/treadle", "/env/bin/treadle"),
        ("/env/bin/treadle", None, "/env/bin/treadle"),
    ],
)
def test_a_command_to_copy_is_called_as_this_one_was(
    monkeypatch: pytest.MonkeyPatch, called: str, on_path: str | None, expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "demo"])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    assert console.program_name() == expected
