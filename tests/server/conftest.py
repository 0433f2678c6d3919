"""Servers for tests: on a real engine with a tiny checkpoint, or on the fake engine.

Must not import torch or triton at the top: pytest reads this before `tests/conftest.py` is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .fake_engine import FakeEngine
from .live import LiveServer

StartServer = Callable[..., LiveServer]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_byte_level(tmp_path_factory.mktemp("tokenizer"), adds_bos=True)


@pytest.fixture(scope="session")
def eos(tokenizer_folder: Path) -> int:
    return 257  # 256 bytes, then BOS and EOS


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Give `start(make_engine, **options)`: a live server, ended with the module."""
    servers: list[LiveServer] = []

    def start(make_engine: Callable[[], Any], **options: Any) -> LiveServer:
        servers.append(LiveServer(make_engine, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def start_fake(start_server: StartServer, tokenizer_folder: Path) -> StartServer:
    """Give `start(engine fields, server={server options})`: a server on the fake engine."""

    def start(server: dict[str, Any] | None = None, **fields: Any) -> LiveServer:
        return start_server(lambda: FakeEngine(tokenizer_folder, **fields), **(server or {}))

    return start


@pytest.fixture(scope="module")
def start_model(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Give `start(checkpoint folder)`: a server on the real engine, compiled for the reference."""
    from tests.runtime.serving import compile_tiny
    from treadle.runtime.engine import Engine
    from treadle.runtime.loading import ServeOptions, load_model

    def start(folder: Path, **options: Any) -> LiveServer:
        artifact = compile_tiny(folder, tmp_path_factory.mktemp("compiled") / "artifact")
        return start_server(
            lambda: Engine("tiny", lambda report: load_model(artifact, ServeOptions(), report)),
            **options,
        )

    return start
