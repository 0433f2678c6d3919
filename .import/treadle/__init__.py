"""Treadle: a compiler that serves language models. Every module is imported below this name.

The offline pipeline's names are here too: the first use of one loads torch, the import doesn't.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.runtime.pipeline import Pipeline as Pipeline
    from treadle.runtime.pipeline import Session as Session
    from treadle.runtime.pipeline import pipeline as pipeline
    from treadle.runtime.pipeline_config import EngineConfig as EngineConfig
    from treadle.runtime.pipeline_config import GenerationConfig as GenerationConfig
    from treadle.runtime.pipeline_config import Response as Response

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "Pipeline": "treadle.runtime.pipeline",
    "Session": "treadle.runtime.pipeline",
    "pipeline": "treadle.runtime.pipeline",
    "EngineConfig": "treadle.runtime.pipeline_config",
    "GenerationConfig": "treadle.runtime.pipeline_config",
    "Response": "treadle.runtime.pipeline_config",
}


def __getattr__(name: str) -> Any:
    """Load an exported name when it is first asked for."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
