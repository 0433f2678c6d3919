"""What a compilation depends on, and the key that names it all: to tell what is current.

Called by the compiler and the command line; needs neither torch nor Triton, because an answer that
nothing is to be done should not take seconds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import treadle
from treadle.ir import knobs
from treadle.ir.errors import ConfigError
from treadle.models.config import ModelConfig
from treadle.models.registry import read_config
from treadle.runtime import machine
from treadle.runtime.artifact import Manifest
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.config import DTYPES, EngineConfig
from treadle.runtime.machine import Machine
from treadle.runtime.tables import table_for

DEFAULT_WINDOW_TOKENS = 8192  # of a model whose own window is larger, unless asked otherwise


@dataclass(frozen=True)
class CompileOptions:
    """Say how to compile. Empty or 0 means: decide from the model and the machine.

    `target` auto, cuda, interpret or reference; `architecture` the GPU to compile for (`sm_90`),
    which need not be in this machine; `dtype` the compute dtype; sizes as in `EngineConfig`;
    `kv_formats` the formats of the KV cache that the artifact may be served with, the first by
    default, none for the compute dtype alone; `autotune` off for the default schedules, else the
    tuned ones; `pin` a table that comes first.
    """

    target: str = "auto"
    architecture: str = ""
    dtype: str = ""
    page_size: int = 0
    max_rows: int = 0
    max_step_tokens: int = 0
    max_context_tokens: int = 0
    kv_formats: tuple[str, ...] = ()
    dump: Path | None = None
    autotune: str = "cached"
    pin: Path | None = None


def engine_config(config: ModelConfig, options: CompileOptions, found: Machine) -> EngineConfig:
    """Decide the engine's shape. Raises: ConfigError: an option is out of range for the model."""
    target = machine.choose_target(options.target, found)
    on_gpu = target == "cuda"
    window = options.max_context_tokens or min(
        config.max_position_embeddings, DEFAULT_WINDOW_TOKENS
    )
    if window > config.max_position_embeddings:
        raise ConfigError(
            f"--max-context-tokens {window} is more than the model's window of "
            f"{config.max_position_embeddings}.",
            remedy="Positions it was never trained on give nonsense; use at most its window.",
        )
    # Without bf16 arithmetic in silicon f32 is faster on a CPU, and exact against the oracle.
    default_dtype = config.dtype if on_gpu else "float32"
    dtype = options.dtype or default_dtype
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is one of {', '.join(DTYPES)}, not `{dtype}`.")
    max_rows = options.max_rows or (256 if on_gpu else 16)
    return EngineConfig(
        target=target,
        dtype=DTYPES[dtype],
        page_size=options.page_size or (64 if on_gpu else 16),
        max_rows=max_rows,
        max_step_tokens=options.max_step_tokens or max(8192 if on_gpu else 512, max_rows),
        max_context_tokens=window,
        kv_format=options.kv_formats[0] if options.kv_formats else "",
    )


def wanted_manifest(
    checkpoint: Checkpoint, config: ModelConfig, options: CompileOptions, found: Machine
) -> Manifest:
    """Give the manifest, without its files, of what these options make of a model on a machine.

    Raises: ConfigError: an option is out of range, or there is no GPU to compile for.
    """
    engine = engine_config(config, options, found)
    architecture = ""
    if engine.target == "cuda":
        architecture = options.architecture or found.architecture
        if not architecture:
            raise ConfigError(
                "There is no GPU here to compile for.",
                remedy="Name one with --arch, for example sm_90, or use --target reference.",
            )
    gpu = found.gpu if architecture == found.architecture else ""
    manifest = Manifest(
        key="",
        treadle=treadle.__version__,
        torch=found.torch,
        triton=found.triton,
        target=engine.target,
        architecture=architecture,
        gpu=gpu,
        model_path=str(checkpoint.path.resolve()),
        model_kind=checkpoint.kind,
        model_name=checkpoint.path.resolve().stem
        if checkpoint.kind == "gguf"
        else checkpoint.path.resolve().name,
        model_architecture=config.architecture,
        model_fingerprint=checkpoint.fingerprint(),
        engine=engine,
        kv_formats=options.kv_formats or (engine.kv_format,),
    )
    parts: dict[str, Any] = {
        name: str(getattr(manifest, name))
        for name in manifest.__dataclass_fields__
        if name != "key"
    }
    parts["source"] = source_fingerprint()
    if engine.target == "cuda":
        table = table_for(gpu, architecture, options.autotune, options.pin)
        parts["schedules"] = table.fingerprint()
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return replace(manifest, key=key)


@cache
def source_fingerprint() -> str:
    """Give one hash over Treadle's own source and tuned tables: both decide what is emitted."""
    root = Path(treadle.__file__).parent
    digest = hashlib.sha256()
    for folder in ("ir", "kernels", "models", "runtime"):
        files = [file for suffix in ("*.py", "*.json") for file in (root / folder).rglob(suffix)]
        for file in sorted(files):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cached_artifact_path(source: str | Path, options: CompileOptions) -> Path:
    """Give the place in the cache of the artifact for a source and options."""
    checkpoint = open_checkpoint(source)
    config = read_config(checkpoint.config)
    key = wanted_manifest(checkpoint, config, options, machine.look()).key
    return knobs.cache_dir() / "artifacts" / f"{checkpoint.path.stem}-{key[:16]}"
