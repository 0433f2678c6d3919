"""Serve fake engines in processes of their own, for tests that send signals.

Imports everything once and forks for each server: importing takes longer than all the tests. Reads
one JSON list per line, and answers each with one line:
["start", TOKENIZER_FOLDER, OUTPUT_FILE, OPTIONS] → the process id; ["wait", ID] → the exit status.
Options are `drain_s`, `port`, the fake engine's fields, and `blocking_load_s`, which loads in a
thread that nothing can stop, as reading weights does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, letters

from treadle.ir.errors import TreadleError
from treadle.server.app import run_server


class SlowEngine(FakeEngine):
    """Load and close as the real engine does: in a thread, and by waiting for it."""

    blocking_load_s = 0.0
    _loader: threading.Thread | None = None

    async def start(self) -> None:
        self._loader = threading.Thread(
            target=time.sleep, args=(self.blocking_load_s,), daemon=True
        )
        self._loader.start()
        await asyncio.to_thread(self._loader.join)
        await super().start()

    async def close(self) -> None:
        if self._loader is not None:
            await asyncio.to_thread(self._loader.join)
        await super().close()


def serve(folder: str, options: dict[str, Any]) -> int:
    """Do what the command line does; give the exit status."""
    drain_s, port = options.pop("drain_s", 10.0), options.pop("port", 0)
    SlowEngine.blocking_load_s = options.pop("blocking_load_s", 0.0)
    engine = SlowEngine(Path(folder), next_token=letters, **options)
    try:
        run_server(
            engine, port=port, drain_s=drain_s, on_listening=lambda url: print(url, flush=True)
        )
    except TreadleError as error:
        print(error, flush=True)
        return error.exit_code
    print("drained", flush=True)
    return 0


def start(folder: str, output: str, options: dict[str, Any]) -> int:
    """Fork a server whose output goes to a file; give its process id."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            status = serve(folder, options)
        finally:
            os._exit(status)
    return child


def main() -> None:
    """Serve the tests until their end closes our input."""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "start":
            print(start(*arguments), flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(*arguments, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
