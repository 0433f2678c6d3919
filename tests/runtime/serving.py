"""Compile and serve tiny checkpoints in tests: one engine per `with`, driven to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from treadle.runtime.compile_key import CompileOptions
from treadle.runtime.compiler import compile_model
from treadle.runtime.engine import Engine
from treadle.runtime.loading import ServeOptions, load_model
from treadle.runtime.request import Delta, SamplingParams, collect

# Targets that need no GPU, to parametrize `target` with.
TARGETS = [
    "reference",
    pytest.param("interpret", marks=pytest.mark.interpreted),
]


def compile_tiny(model: Path, out: Path, **options: Any) -> Path:
    """Compile with small sizes; give the artifact's path."""
    sizes: dict[str, Any] = {
        "target": "reference",
        "page_size": 16,
        "max_rows": 8,
        "max_step_tokens": 64,
        "dtype": "float32",
    }
    compile_model(model, out, CompileOptions(**{**sizes, **options}))
    return out


@asynccontextmanager
async def serving(artifact: Path, **options: Any) -> AsyncIterator[Engine]:
    """Start an engine on an artifact and close it at the end, checking that nothing leaked."""
    chosen = ServeOptions(**options)
    engine = Engine("tiny", lambda report: load_model(artifact, chosen, report))
    await engine.start()
    try:
        yield engine
    finally:
        scheduler = engine.model.scheduler
        await engine.close()
        scheduler.check_integrity()
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.pool.num_available == scheduler.pool.num_pages


async def answer(engine: Engine, prompt: Sequence[int], **params: Any) -> Delta:
    """Give the whole answer to one prompt."""
    prepared = await engine.prepare(SamplingParams(**params))
    return await collect(engine.submit(prompt, prepared))


async def answers(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[Delta]:
    """Give the whole answers to prompts that are submitted together."""
    return list(await asyncio.gather(*(answer(engine, prompt, **params) for prompt in prompts)))
