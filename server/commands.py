"""The body of the command `serve`: an artifact, an engine for it, and the server around both.

Called by the command line only; the parameters are the options' names.
"""

from __future__ import annotations

import logging
import sys

from treadle.ir import knobs
from treadle.ir.errors import ConfigError
from treadle.runtime.commands import artifact_of, make_engine
from treadle.runtime.console import print_table
from treadle.runtime.engine import LoadedModel
from treadle.runtime.loading import ServeOptions
from treadle.server.app import run_server
from treadle.server.state import ServerOptions


def run_serve(
    source: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    drain_s: float,
    max_body: int,
    open_metrics: bool,
    cors_origin: tuple[str, ...],
    tool_parser: str,
    reasoning_parser: str,
    kv_memory: int,
    num_pages: int,
    prefix_cache: bool,
    max_waiting: int,
    model_path: str,
    target: str,
    progress: str,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let the running answers end."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    if kv_memory and num_pages:
        raise ConfigError(
            "--kv-memory and --num-pages both say how large the KV cache is.",
            remedy="Leave one of them out.",
        )
    path = artifact_of(source, target, progress)
    serve_options = ServeOptions(
        kv_bytes=kv_memory,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        max_waiting=max_waiting,
        model_path=model_path,
    )
    server_options = ServerOptions(
        api_keys=api_key or knobs.api_keys(),
        client_max_size_bytes=max_body,
        open_metrics=open_metrics,
        cors_origins=cors_origin,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    addresses: list[str] = []

    def on_listening(url: str) -> None:
        addresses.append(url)
        print(f"listening at {url}; {url}/ready says when the model is loaded", flush=True)

    def on_ready(model: LoadedModel) -> None:
        keys = "needed" if server_options.api_keys else "none: anyone who reaches it may use it"
        rows = [*model.summary.items(), ("API key", keys), ("ready", f"{addresses[0]}/v1")]
        print_table(rows)
        sys.stdout.flush()

    engine = make_engine(path, serve_options, progress, on_ready)
    run_server(engine, host, port, drain_s, options=server_options, on_listening=on_listening)
