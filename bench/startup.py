"""Time a start from nothing: the first compilation, and a server's way to ready with warm caches.

Run: python bench/startup.py --model llama-3.1-8b --folder /dev/shm/bench
Each step is a process of its own, as a user starts it; Python's own imports count. The file
system still has the weights in memory, because they were just written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.checkpoints import write_checkpoint  # noqa: E402
from treadle.bench.child_server import Server, run_command, running_server  # noqa: E402
from treadle.bench.random_models import CONFIGS  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Time the starts of the command line's model, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--rounds", type=int, default=3, help="warm starts; the median counts")
    parser.add_argument("--options", default="", help="more options of compile, in quotes")
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact (default: temp)")
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    stated = conditions(weights="random", target=asked.target, cores=os.cpu_count())

    def row(what: str, seconds: float, **more: object) -> Row:
        case = f"{asked.model} {what}"
        goal, peers = with_goal("startup", case)
        return Row("startup", case, seconds, "s", "lower", goal, None, peers, {**stated, **more})

    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        artifact, cache = Path(temporary) / "artifact", Path(temporary) / "cache"
        model = write_checkpoint(asked.model, folder, asked.layers)
        options = ["--target", asked.target, "--progress", "none", *asked.options.split()]
        command = ["compile", str(model), "-o", str(artifact), *options]

        def compile_twice() -> Iterator[Row]:
            yield row("first compile", run_command(command, cache))
            yield row("compile again", run_command(command, cache))

        def start_first() -> Iterator[Row]:
            with running_server(artifact, cache) as server:
                _tell(server)
                yield row("ready, first", server.ready_s, phases_s=server.phases_s)

        def start_warm() -> Iterator[Row]:
            found = []
            for _ in range(asked.rounds):
                with running_server(artifact, cache) as server:
                    found.append((server.ready_s, server.phases_s))
                    _tell(server)
            middle = statistics.median_low(seconds for seconds, _ in found)
            phases = next(phases for seconds, phases in found if seconds == middle)
            every = [seconds for seconds, _ in found]
            yield row("ready, warm", middle, all_s=every, phases_s=phases)

        cases = {"compile": compile_twice, "first start": start_first, "warm starts": start_warm}
        return play("startup", cases.items(), asked, began_s).exit_code


def _tell(server: Server) -> None:
    """Print the phases of a start, and what of it is in none of them."""
    rest_s = server.ready_s - sum(server.phases_s.values())
    for phase, seconds in {**server.phases_s, "in no phase": rest_s}.items():
        print(f"           {seconds:6.2f} s  {phase}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
