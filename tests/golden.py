"""Golden texts: files under tests/golden/ that a test's output must equal.

Knows files and text only. `conftest.py` makes the fixture `golden`; `make golden` rewrites files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN_DIR = Path(__file__).parent / "golden"


class Golden(str):
    """The text of a golden file whose `==` compares with what a test made, or rewrites the file.

    A plain string to pytest, so a difference prints as a diff. As a subclass of `str` its `==` also
    answers for `made == golden(...)`, whichever side it stands on.
    """

    path: Path
    updating: bool
    exists: bool

    @staticmethod
    def open(name: str, *, updating: bool, folder: Path = GOLDEN_DIR) -> Golden:
        """Open the golden file of this name, relative to the golden folder.

        Raises: ValueError: the name leaves the folder.
        """
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"A golden's name is a path below `{folder}`; found {name!r}.")
        exists = path.is_file()
        golden = Golden(path.read_text(encoding="utf-8") if exists else "")
        golden.path, golden.updating, golden.exists = path, updating, exists
        return golden

    def __eq__(self, made: object) -> bool:
        if not isinstance(made, str):
            raise TypeError(f"A golden compares with text; found `{type(made).__name__}`.")
        if self.updating:
            self._write(str(made))
            return True
        if not self.exists:
            pytest.fail(f"There is no golden file `{self.path}`. Write it with `make golden`.")
        return str.__eq__(self, made)

    def __ne__(self, made: object) -> bool:
        return not self == made

    __hash__ = str.__hash__

    def _write(self, text: str) -> None:
        if self.exists and str.__eq__(self, text):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8", newline="\n")
