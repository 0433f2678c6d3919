"""The pages: what they are made of, and, where there is a browser, what they do."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.server import webpages

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer
from .test_tools import CALL, TEMPLATE, TOOL

ANSWER = f"<think>\nHm.\n</think>\n\nThe <b>sky</b>.\n{CALL}"


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory, eos: int) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("pages"), template=TEMPLATE)
    return start_server(
        lambda: FakeEngine(folder, say(ANSWER, then=eos), max_model_len=4096, step_s=0.004),
        api_keys=(),
    )


@pytest.mark.parametrize("path", ["/", "/docs", "/pages/status.html"])
def test_a_page_and_all_it_asks_for_come_from_this_server(server: LiveServer, path: str) -> None:
    reply = server.get(path)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'self'")
    asked = re.findall(r'(?:src|href)="([^"]+)"', reply.body.decode())
    files = [link for link in asked if link.startswith("/pages/")]
    assert files and all(server.get(link).status == 200 for link in files)
    assert all(link.startswith(("/", "data:,")) for link in asked)


@pytest.mark.parametrize("path", sorted(webpages.FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_file_names_another_host_or_writes_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//\w+\.\w+|innerHTML|insertAdjacentHTML|eval\(", text)
    assert path.suffix in webpages.TYPES


def test_a_file_that_is_not_there_is_a_404(server: LiveServer) -> None:
    for name in ("x.js", "..%2fapp.py", "%2e%2e"):
        assert server.get(f"/pages/{name}").status == 404


def test_pages_need_no_key_and_what_they_show_does(
    start_server: Any, tokenizer_folder: Path
) -> None:
    server = start_server(lambda: FakeEngine(tokenizer_folder), api_keys=("key",))
    for path in ("/", "/docs", "/openapi.json", "/pages/chat.js", "/pages/status.html"):
        assert server.get(path).status == 200
    for path in ("/status", "/report", "/metrics", "/v1/models"):
        assert server.get(path).status == 401


# --- in a browser ---------------------------------------------------------------------------------


class Browser:
    """Drive headless Chromium by the WebDriver protocol, as far as these tests need it."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def resize(self, width: int, height: int) -> None:
        rect = {"width": width, "height": height}
        self._call("POST", f"{self._session}/window/rect", rect)

    def type(self, selector: str, text: str) -> None:
        found = self._call(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        (element,) = found.values()
        self._call("POST", f"{self._session}/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def wait(self, script: str) -> None:
        end_s = time.monotonic() + 30
        while not self.run(f"return {script}"):
            assert time.monotonic() < end_s, f"never: {script}"
            time.sleep(0.05)

    def close(self) -> None:
        self._call("DELETE", self._session)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver here: the page is not tried in a browser")
    port = 9515 + time.time_ns() % 1000
    log = (tmp_path / "driver.log").open("w")
    process = subprocess.Popen([driver, f"--port={port}"], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                http.client.HTTPConnection("127.0.0.1", port, timeout=1).connect()
                break
            except OSError:
                time.sleep(0.1)
        opened = Browser(port)
        yield opened
        opened.close()
    finally:
        process.terminate()
        process.wait()
        log.close()


IDLE = "!document.querySelector('#send').hidden"
BUSY = "document.querySelector('#send').hidden"


@pytest.mark.slow
def test_the_page_sends_streams_stops_and_remembers(
    server: LiveServer, browser: Browser, eos: int
) -> None:
    browser.resize(1200, 900)
    browser.open(server.url)
    browser.wait("document.querySelector('#model').innerText === 'tiny'")
    browser.type("[name=temperature]", "0.5")
    browser.type("[name=system]", "Be brief.")
    browser.run("document.querySelector('[name=tools]').value = arguments[0]", json.dumps([TOOL]))
    browser.type("#text", "hi\ue007")  # Enter
    browser.wait(BUSY)
    browser.wait(f"{IDLE} && document.querySelectorAll('li').length === 2")
    _, params = server.engine.seen[-1]
    assert params.temperature == 0.5
    # What the model writes is text, whatever it looks like.
    assert browser.text("li.assistant > .text") == "The <b>sky</b>."
    assert browser.text("li.assistant .call summary") == "calls get_w"
    assert '"Bern"' in browser.text("li.assistant .call pre")
    assert browser.run("return document.querySelector('li.assistant details').open") is False
    assert "tokens/s" in browser.text("#speed")
    assert "requests running" in browser.text("#gauges")

    server.engine.next_token = lambda generated, seed: ord("x")
    browser.type("#text", "more\ue007")
    browser.wait("document.querySelectorAll('li.assistant').length === 2")
    browser.wait("document.querySelector('li:last-child .text')?.innerText.length > 5")
    browser.type("#text", "\ue00c")  # Escape
    browser.wait(IDLE)
    assert browser.text("li:last-child .note") == "stopped"
    server.wait_for(server.is_idle)

    browser.open(server.url)  # a reload: conversation and settings are still there
    browser.wait("document.querySelectorAll('li').length === 4")
    assert browser.run("return document.querySelector('[name=temperature]').value") == "0.5"
    browser.resize(400, 800)
    browser.click("#toggle")
    browser.wait("document.querySelector('#side').classList.contains('open')")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    browser.click("#clear")
    assert browser.run("return document.querySelectorAll('li').length") == 0
    server.engine.next_token = say(ANSWER, then=eos)


@pytest.mark.slow
def test_the_interfaces_page_lists_routes_and_fields(server: LiveServer, browser: Browser) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait("document.querySelectorAll('article').length > 20")
    browser.type("#search", "reasoning_effort")
    browser.wait("[...document.querySelectorAll('article')].filter(a => !a.hidden).length < 5")
    browser.run("document.querySelector('article:not([hidden]) details').open = true")
    assert "reasoning_effort" in browser.text("article:not([hidden])")


@pytest.mark.slow
def test_the_status_page_asks_for_a_key_and_goes_on(
    start_server: Any, tokenizer_folder: Path, browser: Browser
) -> None:
    server = start_server(lambda: FakeEngine(tokenizer_folder), api_keys=("secret",))
    browser.open(f"{server.url}/pages/status.html")
    browser.wait("!document.querySelector('#locked').hidden")
    assert "Bearer" in browser.text("#phase")
    browser.type("#key", "secret\ue007")
    browser.wait("document.querySelector('#model').innerText === 'tiny'")
    browser.wait("/requests running\\s+0/.test(document.querySelector('#rows').innerText)")
    assert "kv pages free" in browser.text("#rows")
