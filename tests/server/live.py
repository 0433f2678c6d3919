"""A server on a port of its own, in a thread of its own, and the plainest of clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai

from treadle.runtime.request import Engine
from treadle.server.app import serve
from treadle.server.state import ServerOptions

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Reply:
    """Hold what came back for one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Give the error object, having checked its form."""
        assert self.headers["content-type"].startswith("application/json"), self.body[:200]
        assert len(self.body) <= 16_000
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"] and error["code"]
        return error

    def events(self) -> list[Any]:
        """Give the data of a whole stream's events; the last is `[DONE]` as a string."""
        text = self.body.decode("utf-8")  # strict: every line is valid UTF-8
        blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
        assert all(block.startswith("data: ") for block in blocks), text
        data = [block.removeprefix("data: ") for block in blocks]
        return [d if d == "[DONE]" else json.loads(d) for d in data]


class LiveServer:
    """Run `serve` until `stop`."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        drain_s: float = 0.0,
        port: int = 0,
        wait_until_ready: bool = True,
        **options: Any,
    ) -> None:
        self._make_engine = make_engine
        self._drain_s = drain_s
        self._port = port
        self._options = ServerOptions(**options)
        self._listening = threading.Event()
        self.engine: Any = None
        self.url = ""
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._listening.wait(PATIENCE_S), "the server neither listens nor fails"
        if wait_until_ready and self.failure is None:
            self.wait_until_ready()

    async def _main(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.engine = self._make_engine()

        def on_listening(url: str) -> None:
            self.url = url
            self._listening.set()

        try:
            await serve(
                self.engine,
                stop=self._stop,
                port=self._port,
                drain_s=self._drain_s,
                options=self._options,
                on_listening=on_listening,
            )
        except BaseException as error:  # for the test to look at
            self.failure = error
        finally:
            self._listening.set()

    def ask_to_stop(self) -> None:
        """Do what the first signal does."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """End the server and wait for it."""
        if self._thread.is_alive():
            self.ask_to_stop()
        self.join()

    def join(self) -> None:
        """Wait for the server's end."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not end"

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: self.failure is not None or self.get("/ready").status == 200)
        assert self.failure is None, self.failure

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "it never became so"
            time.sleep(0.01)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json"} | headers)

    def complete(self, prompt: Any = "hi", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": "tiny", "prompt": prompt} | fields)

    def chat(self, messages: Any = "hi", **fields: Any) -> Reply:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages} | fields)

    def metric(self, name: str) -> float:
        """Read one metric; labels are part of the name."""
        text = self.get("/metrics").body.decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def is_idle(self) -> bool:
        """Say whether nothing runs or waits and every page is back."""
        busy = self.metric("treadle_requests_running") + self.metric("treadle_requests_waiting")
        return busy == 0 and self.metric("treadle_kv_pages_free") == self.metric("treadle_kv_pages")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, **options
        )
