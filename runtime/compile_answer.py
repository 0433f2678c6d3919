"""What `compile` answers; and at once where the artifact is current, without torch or Triton.

Called by the command line before it loads what compiling needs, and by `compile_command.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from treadle.ir.errors import TreadleError
from treadle.models.registry import read_config
from treadle.runtime import machine
from treadle.runtime.artifact import Artifact, is_artifact, open_artifact, read_manifest
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.compile_key import CompileOptions, wanted_manifest
from treadle.runtime.config import read_kv_dtypes
from treadle.runtime.console import print_json, print_table, program_name
from treadle.runtime.progress import Progress


def read_options(
    *, arch: str, dtype: str | None, kv_dtype: str, quant_policy: int | None, **others: Any
) -> CompileOptions:
    """Read the command's options; `others` are named as the fields are. Raises: ConfigError."""
    kv_formats = read_kv_dtypes(kv_dtype, quant_policy)
    return CompileOptions(architecture=arch, dtype=dtype or "", kv_formats=kv_formats, **others)


def answer_if_current(source: str, out: Path, progress: str, as_json: bool, **chosen: Any) -> bool:
    """Answer if `out` is what these options make of the model; say whether it was.

    Compares as the compiler does, but with a glance at the machine: in any doubt the answer is no,
    and every fault is the compiler's to find and to tell.
    """
    try:
        options = read_options(**chosen)
        if options.dump or options.autotune not in ("off", "cached") or not is_artifact(out):
            return False
        checkpoint = open_checkpoint(source)
        config = read_config(checkpoint.config)
        wanted = wanted_manifest(checkpoint, config, options, machine.glance())
        if read_manifest(out).key != wanted.key:
            return False
        artifact = open_artifact(out)
    except TreadleError:
        return False
    with Progress(progress) as shown:
        shown.note(f"output: {out}")
        if config.unknown_keys:
            shown.note(f"config keys that nothing reads: {', '.join(config.unknown_keys)}")
    report_result(artifact, was_current=True, as_json=as_json)
    return True


def report_result(artifact: Artifact, *, was_current: bool, as_json: bool) -> None:
    """Say what an artifact is, and whether there was nothing to do."""
    manifest = artifact.manifest
    if as_json:
        print_json(
            {
                "artifact": str(artifact.path),
                "was_current": was_current,
                "manifest": asdict(manifest),
            }
        )
        return
    engine = manifest.engine
    print_table(
        [
            ("artifact", f"{artifact.path}{' (was current)' if was_current else ''}"),
            ("model", f"{manifest.model_name} ({manifest.model_architecture}, {engine.dtype})"),
            ("target", f"{manifest.target} {manifest.architecture}".strip()),
            ("window", f"{engine.max_context_tokens} tokens"),
            ("KV cache", ", ".join(name or engine.dtype for name in manifest.kv_formats)),
            ("batch", f"{engine.max_rows} requests, {engine.max_step_tokens} tokens a step"),
            ("next", f"{program_name()} generate {artifact.path} 'Hello'"),
        ]
    )
