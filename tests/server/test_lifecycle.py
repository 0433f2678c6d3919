"""A server's life: it listens while it loads, drains when told to, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from treadle.ir.errors import KernelError, MachineError

from .fake_engine import FakeEngine
from .live import PATIENCE_S, LiveServer, Reply

ROOT = Path(__file__).resolve().parents[2]


class Asking:
    """Ask in a thread, and wait for the reply when it is wanted."""

    def __init__(self, ask: Callable[[], Reply]) -> None:
        self._replies: list[Reply] = []
        self._thread = threading.Thread(target=lambda: self._replies.append(ask()), daemon=True)
        self._thread.start()

    def reply(self) -> Reply:
        self._thread.join(PATIENCE_S)
        assert self._replies, "no reply came"
        return self._replies[0]


def start_slow(start_fake: Any, *, step_s: float = 0.01, **server: Any) -> LiveServer:
    return start_fake(step_s=step_s, max_model_len=4096, server=server)


# --- loading --------------------------------------------------------------------------------------


def test_a_loading_server_is_alive_and_not_ready(start_fake: Any) -> None:
    server = start_fake(load_s=60.0, server={"wait_until_ready": False})
    server.wait_for(lambda: server.engine.phase != "starting")
    health = server.get("/health")
    assert (health.status, health.json["phase"]) == (200, "loading weights")
    ready = server.get("/ready")
    assert (ready.status, ready.json["phase"]) == (503, "loading weights")
    assert ready.headers["retry-after"] == "5"
    # Clients ask for the models before they wait.
    assert server.get("/v1/models").json["data"][0]["id"] == "tiny"
    assert server.metric("treadle_ready") == 0
    reply = server.chat()
    assert (reply.status, reply.error["code"]) == (503, "loading")
    assert "loading weights" in reply.error["message"]
    assert "retry-after" in reply.headers
    start_s = time.monotonic()
    server.stop()
    assert time.monotonic() - start_s < PATIENCE_S


def test_what_the_engines_start_raises_ends_the_server(start_fake: Any) -> None:
    fault = MachineError("No GPU here.", remedy="Use --target reference.")
    server = start_fake(load_error=fault, server={"wait_until_ready": False})
    server.join()
    assert server.failure is fault


def test_a_port_in_use_is_the_machines_fault_and_nothing_is_loaded(
    start_server: Any, tokenizer_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(lambda: FakeEngine(tokenizer_folder), port=port)
        server.join()
    assert isinstance(server.failure, MachineError)
    assert server.failure.exit_code == 3
    assert f":{port}" in str(server.failure)
    assert "--port" in server.failure.remedy
    assert server.engine.phase in ("starting", "closed")


# --- serving --------------------------------------------------------------------------------------


def test_a_broken_engine_ends_the_server_and_its_requests(start_fake: Any) -> None:
    server = start_slow(start_fake)
    asking = Asking(lambda: server.complete(max_tokens=4000))
    server.wait_for(lambda: len(server.engine.live) == 1)
    fault = KernelError("The kernel `attention` failed.")
    (generation,) = server.engine.live.values()
    server.engine.failure = fault
    generation._engine.live.clear()
    server._loop.call_soon_threadsafe(generation.deltas.put_nowait, fault)
    assert (asking.reply().status, asking.reply().error["type"]) == (500, "server_error")
    server.join()
    assert server.failure is fault


def test_a_stuck_engine_is_not_alive(start_fake: Any) -> None:
    server = start_slow(start_fake)
    assert server.get("/health").status == 200
    server.engine.is_stuck = True
    # Nothing to do is not stuck.
    assert server.get("/health").status == 200
    asking = Asking(lambda: server.complete(max_tokens=5))
    server.wait_for(lambda: server.get("/health").status == 503)
    assert server.get("/health").json["status"] == "stuck"
    server.engine.is_stuck = False
    assert asking.reply().status == 200
    assert server.get("/health").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_answers(start_fake: Any, stream: bool) -> None:
    server = start_slow(start_fake)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4000, "n": 2, "stream": stream}
    connection = server.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    server.wait_for(lambda: len(server.engine.live) == 2)
    if stream:
        assert connection.getresponse().read(10)
    connection.close()
    server.wait_for(server.is_idle)
    assert server.engine.aborts == 2
    name = 'treadle_answers_total{endpoint="completions",finish_reason="abort"}'
    server.wait_for(lambda: server.metric(name) == 2)


def test_a_client_that_times_out_frees_its_answer(start_fake: Any) -> None:
    server = start_slow(start_fake)
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.2).completions.create(model="tiny", prompt="hi", max_tokens=4000)
    server.wait_for(server.is_idle)
    assert server.engine.aborts == 1


def test_a_full_queue_is_429_and_says_when_to_retry(start_fake: Any) -> None:
    server = start_fake(step_s=0.01, max_model_len=4096, max_running=1, max_waiting=1)
    askings = [Asking(lambda: server.complete(max_tokens=100)) for _ in range(2)]
    server.wait_for(lambda: len(server.engine.live) == 2)
    assert server.metric("treadle_requests_running") == 1
    assert server.metric("treadle_requests_waiting") == 1
    reply = server.complete(max_tokens=1)
    assert (reply.status, reply.error["type"]) == (429, "rate_limit_error")
    assert reply.headers["retry-after"] == "2"  # 1.5 s, in whole seconds
    assert [asking.reply().status for asking in askings] == [200, 200]


def test_choices_that_do_not_all_fit_leave_none_behind(start_fake: Any) -> None:
    server = start_fake(step_s=0.01, max_running=1, max_waiting=1)
    assert server.complete(n=3).status == 429
    assert server.is_idle()
    assert server.engine.aborts == 2


# --- draining -------------------------------------------------------------------------------------


def test_draining_lets_answers_end_and_takes_no_new_ones(start_fake: Any) -> None:
    server = start_slow(start_fake, drain_s=PATIENCE_S)
    askings = [Asking(lambda: server.complete(max_tokens=100, stream=True)) for _ in range(3)]
    server.wait_for(lambda: len(server.engine.live) == 3)
    server.ask_to_stop()
    server.wait_for(lambda: server.get("/ready").status == 503)
    assert server.get("/ready").json["phase"] == "draining"
    assert server.get("/health").status == 200
    reply = server.chat()
    assert (reply.status, reply.error["code"]) == (503, "draining")
    assert "retry-after" in reply.headers
    for asking in askings:
        events = asking.reply().events()
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    server.join()
    assert server.failure is None
    with pytest.raises(OSError):
        server.get("/health")


@pytest.mark.parametrize("drain_s", [0.0, 0.2])
def test_answers_cut_by_the_end_of_draining_look_cut(start_fake: Any, drain_s: float) -> None:
    server = start_slow(start_fake, drain_s=drain_s)
    streamed = Asking(lambda: server.complete(max_tokens=4000, stream=True))
    whole = Asking(lambda: server.complete(max_tokens=4000))
    server.wait_for(lambda: len(server.engine.live) == 2)
    server.ask_to_stop()
    events = streamed.reply().events()
    assert "error" in events[-1]
    assert "[DONE]" not in events
    assert (whole.reply().status, whole.reply().error["code"]) == (503, "draining")
    server.join()


def test_a_client_that_never_reads_does_not_hold_the_server(start_fake: Any) -> None:
    server = start_fake(max_model_len=4096, max_running=16, server={"drain_s": 0.5})
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4000, "n": 16, "stream": True}
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as hung:
        hung.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        data = json.dumps(body).encode()
        hung.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        # More than all buffers on the way can hold: the engine is done, the handler is not.
        server.wait_for(lambda: len(server.engine.seen) == 16 and not server.engine.live)
        start_s = time.monotonic()
        server.stop()
        assert time.monotonic() - start_s < PATIENCE_S / 2
    assert server.failure is None


# --- signals --------------------------------------------------------------------------------------


class Nursery:
    """Fork servers from one process that has imported everything."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/server/run_fake.py")],
            env=os.environ | {"PYTHONPATH": str(ROOT / ".import")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *command: Any) -> int:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    assert nursery.child.stdin is not None
    nursery.child.stdin.close()
    nursery.child.wait(PATIENCE_S)


@pytest.fixture
def start_process(
    nursery: Nursery, tokenizer_folder: Path, tmp_path: Path
) -> Iterator[Callable[..., Process]]:
    """Give `start(options)`: a server in a process of its own."""
    processes: list[Process] = []

    def start(**options: Any) -> Process:
        output = tmp_path / f"{len(processes)}.txt"
        number = nursery.ask("start", str(tokenizer_folder), str(output), options)
        processes.append(Process(nursery, number, output))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


class Process:
    """Talk to a server in a process of its own."""

    def __init__(self, nursery: Nursery, number: int, output: Path) -> None:
        self._nursery = nursery
        self._number = number
        self._output = output
        self._is_over = False
        end_s = time.monotonic() + PATIENCE_S
        while not self.text():
            assert time.monotonic() < end_s, "it says nothing"
            time.sleep(0.01)
        self.url = self.text().split()[0]

    def text(self) -> str:
        """Give what it has printed; the first word is its address."""
        return self._output.read_text() if self._output.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._number, number)

    def wait(self) -> tuple[int, float]:
        """Give exit status and seconds until then."""
        start_s = time.monotonic()
        # The nursery waits without a limit; a server that hangs is ended after our patience.
        guard = threading.Timer(PATIENCE_S, self.signal, [signal.SIGKILL])
        guard.start()
        status = self._nursery.ask("wait", self._number)
        guard.cancel()
        self._is_over = True
        return status, time.monotonic() - start_s

    def kill(self) -> None:
        if not self._is_over:
            self.signal(signal.SIGKILL)
            self.wait()

    def open_stream(self) -> Iterator[Any]:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="hi", max_tokens=100, stream=True, temperature=0
        )
        next(iter(stream))
        return iter(stream)

    def is_ready(self) -> bool:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0)
        try:
            client.completions.create(model="tiny", prompt="hi", max_tokens=1)
        except openai.InternalServerError:
            return False
        return True


def wait_until_ready(process: Process) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not process.is_ready():
        assert time.monotonic() < end_s, "it never became ready"
        time.sleep(0.02)


StartProcess = Callable[..., Process]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_47_a_signal_drains_and_ends_with_status_0(
    start_process: StartProcess, number: signal.Signals
) -> None:
    process = start_process(step_s=0.01, drain_s=20.0)
    wait_until_ready(process)
    streams = [process.open_stream() for _ in range(3)]
    process.signal(number)
    for stream in streams:
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert process.wait()[0] == 0
    assert process.text().split()[1:] == ["drained"]


def test_47_no_time_to_drain_cuts_streams_visibly(start_process: StartProcess) -> None:
    process = start_process(step_s=0.05, drain_s=0.0)
    wait_until_ready(process)
    stream = process.open_stream()
    process.signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="before the answer was complete"):
        list(stream)
    assert process.wait()[0] == 0


def test_47_a_second_signal_ends_at_once(start_process: StartProcess) -> None:
    process = start_process(step_s=0.5, drain_s=600.0)
    wait_until_ready(process)
    stream = process.open_stream()
    process.signal(signal.SIGTERM)
    while process.is_ready():
        time.sleep(0.02)
    process.signal(signal.SIGTERM)
    status, seconds = process.wait()
    del stream
    assert status == 128 + signal.SIGTERM
    assert seconds < 10  # of a drain of 600


def test_47_a_signal_while_loading_does_not_wait_for_the_load(start_process: StartProcess) -> None:
    process = start_process(blocking_load_s=600.0)
    assert not process.is_ready()
    process.signal(signal.SIGTERM)
    status, seconds = process.wait()
    assert status == 0
    assert seconds < 10  # of a load of 600


def test_a_port_in_use_ends_the_process_with_status_3(start_process: StartProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_process(port=taken.getsockname()[1])
        assert process.wait()[0] == 3
    assert "--port" in process.text()
