"""The body of the command `serve`: an artifact, an engine for it, and the server around both.

Called by the command line only; the parameters are the options' names.
"""

from __future__ import annotations

import itertools
import logging
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

from treadle.ir import knobs
from treadle.ir.errors import ConfigError
from treadle.runtime import report_html
from treadle.runtime.commands import artifact_of, make_engine
from treadle.runtime.config import read_kv_dtypes
from treadle.runtime.console import print_table
from treadle.runtime.engine import LoadedModel
from treadle.runtime.loading import ServeOptions
from treadle.runtime.process_age import process_age_s
from treadle.runtime.report_command import load as load_report
from treadle.server.app import run_server
from treadle.server.state import ServerOptions


def run_serve(
    source: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    read_timeout_s: float,
    drain_s: float,
    max_body: int,
    vllm_metric_names: bool,
    allow_sleep: bool,
    open_metrics: bool,
    cors_origin: tuple[str, ...],
    tool_parser: str,
    reasoning_parser: str,
    embeddings: str | None,
    kv_memory: int,
    num_pages: int,
    kv_host_memory: int,
    kv_dtype: str,
    quant_policy: int | None,
    prefix_cache: bool,
    max_waiting: int,
    model_path: str,
    weight_dtype: str,
    target: str,
    progress: str,
    compile_model: Callable[..., Path],
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let the running answers end."""
    imported_s = process_age_s()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    if kv_memory and num_pages:
        raise ConfigError(
            "--kv-memory and --num-pages both say how large the KV cache is.",
            remedy="Leave one of them out.",
        )
    # Before anything takes long: a wrong file is known at once.
    ssl_context = make_ssl_context(ssl_certfile, ssl_keyfile)
    keys_of_file = read_keys(api_key_file)
    kv_formats = read_kv_dtypes(kv_dtype, quant_policy)
    if len(kv_formats) > 1:
        raise ConfigError("An engine has a KV cache of one --kv-dtype.")
    chosen = (kv_formats[0] or "auto") if kv_formats else ""
    serve_options = ServeOptions(
        kv_bytes=kv_memory,
        num_pages=num_pages,
        kv_host_bytes=kv_host_memory,
        kv_dtype=chosen,
        prefix_cache=prefix_cache,
        max_waiting=max_waiting,
        model_path=model_path,
        pooling=embeddings or "",
        weight_dtype=weight_dtype,
    )
    path = artifact_of(source, target, progress, compile_model, chosen)
    found_at_s = time.perf_counter()
    server_options = ServerOptions(
        api_keys=(*api_key, *keys_of_file) or knobs.api_keys(),
        client_max_size_bytes=max_body,
        open_metrics=open_metrics,
        vllm_metric_names=vllm_metric_names,
        allow_sleep=allow_sleep,
        cors_origins=cors_origin,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        read_timeout_s=read_timeout_s,
        make_report=lambda: report_html.render(load_report(str(path))),
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

    loads = itertools.count()

    def time_before() -> dict[str, float]:
        """Tell what the process did before it first loaded; waking it later begins at once."""
        if next(loads):
            return {}
        opening_s = time.perf_counter() - found_at_s
        return {"starting Python and importing": imported_s, "opening the port": opening_s}

    engine = make_engine(path, serve_options, progress, on_ready, time_before)
    run_server(
        engine,
        host,
        port,
        drain_s,
        options=server_options,
        ssl_context=ssl_context,
        on_listening=on_listening,
    )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Read API keys, one a line. Raises: ConfigError: there is no such file, or none in it."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected API keys in {path}: {error}.") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(
            f"Expected API keys in {path}, found none.",
            remedy="Write one a line, or leave --api-key-file out.",
        )
    return keys


def make_ssl_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """Load a certificate. Raises: ConfigError: it can't be used."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile beside it.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The certificate {certfile} can't be used: {error}.",
            remedy="Expected PEM files of a certificate and its private key.",
        ) from error
    return context
