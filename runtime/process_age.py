"""How long this process has existed: what came before the first line of ours counts too.

Called by commands that tell how long their start took; loaded early, by the command line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/self/stat")
# Where in the file's words, after the name in parentheses, the start stands: the 22nd of proc(5).
_START_WORD = 19
# Python itself starts in less; more says that the system's clocks don't fit together.
_LONGEST_START_S = 30.0
_loaded_at_s = time.perf_counter()


def process_age_s(stat: Path = STAT) -> float:
    """Give the seconds since the system started this process, or else since this was loaded.

    The latter where the system doesn't tell, or what can't be.
    """
    loaded_s = time.perf_counter() - _loaded_at_s
    try:
        words = stat.read_text().rpartition(")")[2].split()
        started_s = int(words[_START_WORD]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return loaded_s
    return age_s if loaded_s <= age_s <= loaded_s + _LONGEST_START_S else loaded_s
