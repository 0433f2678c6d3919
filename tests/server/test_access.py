"""Who gets in, and how: keys from files, certificates."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import ssl
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from treadle.ir.errors import ConfigError
from treadle.server.app import serve
from treadle.server.commands import make_ssl_context, read_keys

from .fake_engine import FakeEngine


def test_keys_come_from_a_file_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# people\n one \n\ntwo\n")
    assert read_keys(path) == ("one", "two")
    assert read_keys(None) == ()


@pytest.mark.parametrize("text", ["", "# nothing\n", None])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="API keys in"):
        read_keys(path)


def test_a_certificate_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("no certificate")
    for certificate, key in [(path, None), (tmp_path / "none", None), (None, path)]:
        with pytest.raises(ConfigError):
            make_ssl_context(certificate, key)
    assert make_ssl_context(None, None) is None


def test_a_certificate_makes_it_https(tmp_path: Path, tokenizer_folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here: no certificate can be made")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = make_ssl_context(certificate, key)
    listening, addresses = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_listening(url: str) -> None:
            addresses.append((url, lambda: loop.call_soon_threadsafe(stop.set)))
            listening.set()

        engine = FakeEngine(tokenizer_folder)
        await serve(
            engine, stop=stop, port=0, drain_s=0, ssl_context=context, on_listening=on_listening
        )

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert listening.wait(30)
    url, stop = addresses[0]
    assert url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection(urlsplit(url).netloc, timeout=10, context=trusted)
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "alive"
    connection.close()
    stop()
    thread.join(30)
    assert not thread.is_alive()
