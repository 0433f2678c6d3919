"""Where the engine's worker spends its time, by phase of a step. Called by the engine, always on.

A lap costs a tenth of a microsecond. Must not know what the phases do.
"""

from __future__ import annotations

import time

# In the order of a step: what the host does for it, then what it waits for.
COMMANDS, SCHEDULE, WRITE, LAUNCH, WAIT, COMPLETE, PUBLISH, IDLE = (
    "commands",
    "schedule",
    "write",
    "launch",
    "wait",
    "complete",
    "publish",
    "idle",
)
PHASES = (COMMANDS, SCHEDULE, WRITE, LAUNCH, WAIT, COMPLETE, PUBLISH, IDLE)
WAITING = (WAIT, IDLE)  # for the device, and for requests: no work of the host


class HostTimes:
    """Add up seconds by phase: `lap` ends the phase that began with the lap before."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._began_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as this phase's."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._began_s
        self._began_s = now_s
