"""The tutorial and the pages that go on from it: their files are written, their commands are run.

In a copy of the sources, on the reference target and in Triton's interpreter; what a command prints
must be what its page shows. A page can't rot without a failure here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# In this order: the later pages use what the tutorial has made, and its server.
PAGES = ("tutorial.md", "kernels.md", "serving.md", "pipeline.md")
SOURCES = (".import", "ir", "kernels", "models", "runtime", "server", "cli.py")
PORT = "8000"
LIMIT_S = 300.0
FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELLIPSIS = "…"

# One process runs many commands: importing torch and transformers takes longer than most of them.
DRIVER = """
import contextlib, io, json, runpy, sys
from treadle import cli
for line in sys.stdin:
    sys.argv = arguments = json.loads(line)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if arguments[0] == "cli.py":
            code = cli.run(arguments[1:])
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file it belongs to, and its text."""

    page: str
    language: str
    file: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a page and the lines that the page shows below it."""

    page: str
    text: str
    shown: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.removesuffix('.md')}: {self.text.splitlines()[0]}"


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def read_blocks(page: str) -> list[Block]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [Block(page, *found) for found in FENCE.findall(text)]


def commands_of(block: Block) -> list[Command]:
    """Cut a console block into commands, each with the output shown below it."""
    commands: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append(([line.removeprefix("$ ")], []))
        elif commands[-1][0][-1].endswith("\\"):
            commands[-1][0].append(line)
        else:
            commands[-1][1].append(line)
    return [Command(block.page, "\n".join(text), tuple(shown)) for text, shown in commands]


def plain(line: str) -> str:
    return " ".join(line.split())


def mismatch(shown: Sequence[str], printed: Sequence[str]) -> str:
    """Say which shown line is not printed, or nothing.

    A line `…` stands for any lines, `…` inside a line for any text; other lines follow each other.
    """
    at, is_free = 0, False
    for line in shown:
        if line.strip() == ELLIPSIS:
            is_free = True
            continue
        pattern = ".*".join(re.escape(part) for part in plain(line).split(ELLIPSIS))
        rest = range(at, len(printed)) if is_free else range(at, min(at + 1, len(printed)))
        found = next((i for i in rest if re.fullmatch(pattern, plain(printed[i]))), None)
        if found is None:
            return f"not printed in its place: {line!r}"
        at, is_free = found + 1, False
    if at < len(printed) and not is_free:
        return f"printed and not shown: {printed[at]!r}"
    return ""


class Workshop:
    """A copy of the sources in which the pages are followed, and the processes that do it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
            else:
                shutil.copy2(source, folder / name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        self.environment = dict(os.environ) | {
            "PYTHONPATH": str(folder / ".import"),
            "TREADLE_CACHE_DIR": str(folder / "cache"),
            "TREADLE_TARGET": "reference",
            "TRITON_INTERPRET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        self._driver: subprocess.Popen[str] | None = None
        self._server: subprocess.Popen[str] | None = None

    def write(self, block: Block) -> None:
        self.forget()
        (self.folder / block.file).write_text(self.with_port(block.text), encoding="utf-8")

    def edit(self, block: Block) -> None:
        """Apply a diff without line numbers: its old lines must be in the file just once."""
        self.forget()
        lines = block.text.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in "- ")
        new = "".join(line[1:] for line in lines if line[0] in "+ ")
        path = self.folder / block.file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{block.page}: {block.file} has no such lines:\n{old}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def with_port(self, text: str) -> str:
        return text.replace(f":{PORT}", f":{self.port}").replace(
            f"--port {PORT}", f"--port {self.port}"
        )

    def run(self, command: Command) -> Ran | None:
        """Run a command; None says that this machine does not have it."""
        arguments = shlex.split(self.with_port(command.text).replace("\\\n", " "))
        if arguments[:3] == ["python", "cli.py", "serve"]:
            return self.serve(arguments[1:])
        if arguments[0] == "python":
            return self.drive(arguments[1:])
        if shutil.which(arguments[0]) is None:
            return None
        done = subprocess.run(
            arguments, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def drive(self, arguments: list[str]) -> Ran:
        """Run a command in the driver, which is started where there is none."""
        if self._driver is None:
            self._driver = self.start(["-c", DRIVER])
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(arguments) + "\n")
        self._driver.stdin.flush()
        answer = self._driver.stdout.readline()
        assert answer, f"the process that runs commands ended at {arguments}"
        return Ran(*json.loads(answer))

    def serve(self, arguments: list[str]) -> Ran:
        """Start the server and give what it prints until it is ready."""
        self._server = self.start(arguments)
        assert self._server.stdout is not None
        lines: list[str] = []
        for line in self._server.stdout:
            lines.append(line)
            if line.startswith("ready"):
                return Ran(0, "".join(lines), "")
        return Ran(self._server.wait(), "".join(lines), "the server ended")

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # Whatever hangs ends, and the line that is waited for is missing then.
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.daemon = True
        timer.start()
        return process

    def forget(self) -> None:
        """End the driver: it has imported sources that are about to change."""
        if self._driver is not None:
            self._driver.communicate(timeout=60)
            self._driver = None

    def close(self) -> int:
        """End everything; give the server's exit code after SIGTERM."""
        self.forget()
        if self._server is None:
            return 0
        self._server.send_signal(signal.SIGTERM)
        self._server.communicate(timeout=60)
        return self._server.returncode


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
COMMANDS = [
    command for block in BLOCKS if block.language == "console" for command in commands_of(block)
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Command, Ran]]:
    """Follow the pages from top to bottom, and give what each command did."""
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    results: dict[Command, Ran] = {}
    try:
        for block in BLOCKS:
            if block.language == "diff":
                workshop.edit(block)
            elif block.file:
                workshop.write(block)
            elif block.language == "console":
                for command in commands_of(block):
                    done = workshop.run(command)
                    if done is not None:
                        out = done.out.replace(f":{workshop.port}", f":{PORT}")
                        results[command] = Ran(done.code, out, done.err)
    finally:
        code = workshop.close()
    yield results
    assert code == 0, "the server did not end well after SIGTERM"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_prints_what_its_page_shows(command: Command, ran: dict[Command, Ran]) -> None:
    if command not in ran:
        pytest.skip(f"`{command.text.split()[0]}` is not installed")
    done = ran[command]
    is_refused = bool(command.shown) and command.shown[0].startswith("Error:")
    assert (done.code != 0) == is_refused, done.err
    printed = done.err if is_refused else done.out
    assert mismatch(command.shown, printed.splitlines()) == "", printed


def test_the_tutorial_has_a_spec_and_both_clients() -> None:
    files = {block.file for block in read_blocks("tutorial.md")}
    texts = [command.text for command in COMMANDS]
    assert {"models/parallel.py", "ask_tiny.py"} <= files
    for part in ("new-model", "show", "explain", "verify", "compile", "serve", "curl"):
        assert any(part in text for text in texts), part


def test_no_block_of_the_tutorial_is_left_out() -> None:
    left_out = [
        block.text
        for block in read_blocks("tutorial.md")
        if block.language != "console" and not block.file
    ]
    assert left_out == []


@pytest.mark.parametrize(
    ("shown", "printed", "reason"),
    [
        (["a", "b"], ["a", "b"], ""),
        (["a", "…", "d"], ["a", "b", "c", "d"], ""),
        (["x … z", "…"], ["x  y z", "more"], ""),
        (["b"], ["a", "b"], "not printed in its place: 'b'"),
        (["a"], ["a", "b"], "printed and not shown: 'b'"),
        (["a", "…", "c"], ["a", "b"], "not printed in its place: 'c'"),
    ],
)
def test_a_difference_in_output_is_found(shown: list[str], printed: list[str], reason: str) -> None:
    assert mismatch(shown, printed) == reason
