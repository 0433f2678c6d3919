"""Text files that are whole or absent, whatever happens while they are written.

Called by all that write caches, tables and results; must not know what the text means.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one step, and the folder for it: a reader sees the old text or the new.

    Raises: OSError: it can't be written; then nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Others may write the same file: each writes its own, and the last rename wins.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
