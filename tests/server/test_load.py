"""Many streams at once on a real engine, with clients that vanish: nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from typing import Any

import aiohttp
import pytest

from tests.checkpoints import EOS, make_script

from .live import LiveServer

WORDS = [*(f"w{i} " for i in range(40)), EOS]


@pytest.fixture(scope="module")
def server(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    return start_model(make_script(tmp_path_factory.mktemp("load"), {"[[words]]": WORDS}).path)


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_tasks(server: LiveServer) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), server._loop).result(30)


async def flood(url: str, streams: int, seconds: float, seed: int) -> tuple[int, int]:
    """Keep streams running; one in five clients goes away in the middle. Count whole and gone."""
    random_ = random.Random(seed)
    end_s = time.monotonic() + seconds
    counts = [0, 0]
    body = {"model": "tiny", "prompt": "[[words]]", "max_tokens": 48, "stream": True}

    async def client() -> None:
        while time.monotonic() < end_s:
            vanishes = random_.random() < 0.2
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    if response.status == 429:
                        await asyncio.sleep(float(response.headers["Retry-After"]) / 10)
                        continue
                    assert response.status == 200
                    text = b""
                    async for piece in response.content.iter_any():
                        text += piece
                        if vanishes:
                            break
                if vanishes:
                    counts[1] += 1
                else:
                    assert text.endswith(b"data: [DONE]\n\n"), text[-300:]
                    counts[0] += 1

    await asyncio.gather(*(client() for _ in range(streams)))
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("streams", "seconds"), [(24, 3), pytest.param(1000, 120, marks=pytest.mark.slow)]
)
def test_a_flood_leaves_nothing_behind(
    server: LiveServer, streams: int, seconds: float, rng_seed: int
) -> None:
    # The first flood makes what stays: thread pools, compiled regular expressions, caches.
    asyncio.run(flood(server.url, streams, 1, rng_seed))
    server.wait_for(server.is_idle)
    gc.collect()
    before = count_open_files(), count_tasks(server), rss_bytes()
    whole, gone = asyncio.run(flood(server.url, streams, seconds, rng_seed))
    assert whole > 0
    server.wait_for(server.is_idle)
    server.wait_for(lambda: count_open_files() <= before[0])
    server.wait_for(lambda: count_tasks(server) <= before[1] + 1)
    gc.collect()
    grown_bytes = rss_bytes() - before[2]
    print(
        f"{streams} streams, {seconds} s: {whole} whole, {gone} clients gone; now "
        f"{count_open_files() - before[0]:+} files, {count_tasks(server) - 1 - before[1]:+} tasks, "
        f"{grown_bytes / 2**20:+.1f} MiB"
    )
    assert grown_bytes < 64 * 2**20
    assert server.engine._generations == {}
    assert gone > 0 or whole < 10
    scheduler = server.engine.model.scheduler
    scheduler.check_integrity()
    assert scheduler.pool.num_available == scheduler.pool.num_pages
