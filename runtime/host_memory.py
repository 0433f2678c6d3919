"""How much main memory this process may still have: the machine's, or its container's where less.

Called by the loader and by `check-env`, which must not import torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class FreeMemory(NamedTuple):
    """The bytes that are free, and whether a container's limit says so."""

    num_bytes: int
    in_container: bool


def find_free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> FreeMemory | None:
    """Give the free main memory, caches of files counted as free; None where no file tells."""
    available = _find_number(r"^MemAvailable:\s+(\d+) kB$", meminfo)
    if available is None:
        return None
    num_bytes = available * 1024
    limit = _find_number(r"^(\d+)$", cgroup / "memory.max")
    used = _find_number(r"^(\d+)$", cgroup / "memory.current")
    if limit is not None and used is not None:
        used -= _find_number(r"^inactive_file (\d+)$", cgroup / "memory.stat") or 0
        if limit - used < num_bytes:
            return FreeMemory(max(limit - used, 0), True)
    return FreeMemory(num_bytes, False)


def _find_number(pattern: str, file: Path) -> int | None:
    found = re.search(pattern, file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(found[1]) if found else None
