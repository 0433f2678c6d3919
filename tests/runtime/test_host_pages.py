"""Host memory behind the KV cache: what is kept, its bytes, answers, errors, figures."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.checkpoints import make_family, make_llama
from tests.models.test_deepseek_v2 import EXPERTS, LATENT
from tests.runtime.serving import answer, compile_tiny, serving
from tests.runtime.test_traces import Answer, is_same_up_to_a_tie
from treadle.ir.errors import ConfigError, MachineError
from treadle.ir.kv_cache import KV_FORMATS
from treadle.runtime import host_memory, host_pages, loading
from treadle.runtime.engine import Engine
from treadle.runtime.executor import Executor
from treadle.runtime.host_pages import HostPages, HostStats, PageCopies, Rate, is_fetch_faster
from treadle.runtime.loading import LoadedArtifact, ServeOptions, load_artifact, load_model
from treadle.runtime.page_copies import PageCopier
from treadle.runtime.pages import PagePool, PageTable
from treadle.runtime.pipeline import pipeline
from treadle.runtime.pipeline_config import EngineConfig
from treadle.runtime.request import FinishReason, SamplingParams
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequences import SequenceState

FORMATS = ("", *sorted(KV_FORMATS))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One artifact for every format."""
    model = make_llama(tmp_path_factory.mktemp("checkpoint") / "model", seed=7)
    return compile_tiny(model, tmp_path_factory.mktemp("made") / "artifact", kv_formats=FORMATS)


@pytest.fixture(scope="module")
def latent_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    model = make_family(folder / "model", "deepseek_v2", **LATENT, **EXPERTS)
    return compile_tiny(model, folder / "artifact")


@pytest.fixture
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch whatever is there: how fast this machine is while it tests, nobody knows."""
    monkeypatch.setattr(host_pages, "is_fetch_faster", lambda *what, **rates: True)


# --- The decision


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens", "copy_bytes_per_s", "prefill_tokens_per_s", "faster"),
    [
        (1_000_000, 64, 1e9, 1e4, True),  # 1 ms against 6.4 ms
        (1_000_000, 64, 1e9, 1e5, False),  # 1 ms against 0.64 ms
        (1_000_000, 64, 1e8, 1e4, False),  # 10 ms against 6.4 ms
        (1_000_000, 1000, 1e9, 1e6, False),  # equal: then it is left alone
        (1_000_000, 64, 1e9, 0.0, True),  # nothing was computed yet
        (1_000_000, 64, 0.0, 1e4, False),  # nothing was copied yet
        (1_000_000, 64, 0.0, 0.0, False),
    ],
)
def test_a_fetch_is_weighed_against_computing_by_the_measured_rates(
    num_bytes: int,
    num_tokens: int,
    copy_bytes_per_s: float,
    prefill_tokens_per_s: float,
    faster: bool,
) -> None:
    found = is_fetch_faster(
        num_bytes,
        num_tokens,
        copy_bytes_per_s=copy_bytes_per_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    assert found is faster


def test_host_pages_decide_by_their_own_rates() -> None:
    host = HostPages(4, page_bytes=1000)
    host.copies.add(1e6, 1.0)
    host.prefills.add(100, 1.0)
    assert host.is_worth_fetching(2, 32)  # 2 ms against 320 ms
    for _ in range(100):
        host.prefills.add(1e6, 1.0)
    assert not host.is_worth_fetching(2, 32)


def test_a_rate_follows_what_is_measured() -> None:
    rate = Rate()
    assert rate.per_s == 0
    rate.add(10, 2.0)
    assert rate.per_s == 5
    rate.add(7, 0.0)  # a clock that did not move
    assert rate.per_s == 5
    for _ in range(100):
        rate.add(300, 1.0)
    assert rate.per_s == pytest.approx(300, rel=0.01)


# --- What is kept


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def kept(host: HostPages, text: str) -> str:
    return "".join(letter for letter in text if letter.encode() in host)


def test_the_least_recently_used_content_is_given_up_first() -> None:
    host = HostPages(3, 10)
    for page, key in enumerate(keys("abc")):
        host.keep(key, page)
    host.keep(b"a", 7)  # evicted once more: `b` is the oldest now, and nothing is copied
    host.keep(b"d", 8)
    assert (kept(host, "abcd"), host.evictions_total) == ("acd", 1)
    copies = host.take_copies()
    assert copies is not None
    assert copies.pages_out == ((0, 0), (1, 1), (2, 2), (8, 1))
    host.check_integrity()


def test_what_was_fetched_is_given_up_last_and_its_tail_before_its_head() -> None:
    host = HostPages(3, 10)
    for page, key in enumerate(keys("abc")):
        host.keep(key, page)
    host.lend(keys("ab"))
    host.fetch(b"a", 5)
    host.fetch(b"b", 6)
    host.take_copies()
    host.keep(b"d", 7)
    assert kept(host, "abcd") == "abd"
    host.keep(b"e", 8)
    assert kept(host, "abcde") == "ade"


def test_a_content_that_is_being_fetched_is_not_given_up() -> None:
    host = HostPages(2, 10)
    for page, key in enumerate(keys("ab")):
        host.keep(key, page)
    host.take_copies()
    host.lend(keys("ab"))
    host.keep(b"c", 3)  # there is no room for it
    host.fetch(b"a", 3)
    host.fetch(b"b", 4)
    host.check_integrity()
    copies = host.take_copies()
    assert copies == PageCopies((), ((3, 0), (4, 1)))
    assert kept(host, "abc") == "ab"


def test_no_copies_are_due_where_nothing_moved() -> None:
    assert HostPages(2, 10).take_copies() is None


def test_the_check_finds_a_lost_page() -> None:
    host = HostPages(2, 10)
    host._free.pop()
    with pytest.raises(AssertionError, match=r"\[1\] are free, kept or lent, expected each of 2"):
        host.check_integrity()


def test_the_pool_s_check_looks_at_host_memory() -> None:
    host = HostPages(2, 10)
    pool = PagePool(4, 4, host=host)
    host._free.pop()
    with pytest.raises(AssertionError, match="host pages"):
        pool.check_integrity()


@pytest.mark.parametrize(("num_pages", "page_bytes"), [(0, 10), (4, 0)])
def test_host_memory_of_no_size_is_refused(num_pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        HostPages(num_pages, page_bytes)


# --- The bytes


def clone_pages(loaded: LoadedArtifact, pages: Sequence[int]) -> list[torch.Tensor]:
    """Give all parts of some pages, as bytes."""
    return [
        plane[list(pages)].clone().view(torch.uint8)
        for planes in loaded.state.caches.values()
        for plane in planes
    ]


@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])  # a page at a time, and all at once
@pytest.mark.parametrize("kind", [*FORMATS, "latent"])
def test_pages_come_back_bit_for_bit(
    artifact: Path,
    latent_artifact: Path,
    kind: str,
    staging_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treadle.runtime.page_copies.STAGING_BYTES", staging_bytes)
    options = ServeOptions(num_pages=8, kv_dtype="" if kind == "latent" else kind or "auto")
    loaded = load_artifact(latent_artifact if kind == "latent" else artifact, options)
    copier = PageCopier(loaded.state, HostPages(5, loaded.state.page_bytes))
    loaded.state.fill_caches()
    pages, host_pages, others = (1, 4, 6), (3, 0, 4), (7, 1, 2)
    before = clone_pages(loaded, pages)
    untouched = clone_pages(loaded, (0, 3, 5))
    copier.run(PageCopies(tuple(zip(pages, host_pages, strict=True)), ()))
    for planes in loaded.state.caches.values():
        for plane in planes:
            plane[list(pages)] = 0
    copier.run(PageCopies((), tuple(zip(others, host_pages, strict=True))))
    for found, expected in zip(clone_pages(loaded, others), before, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(clone_pages(loaded, (0, 3, 5)), untouched, strict=True):
        assert torch.equal(found, expected)


def test_a_page_may_leave_and_another_come_in_its_place_at_once(artifact: Path) -> None:
    loaded = load_artifact(artifact, ServeOptions(num_pages=4))
    copier = PageCopier(loaded.state, HostPages(2, loaded.state.page_bytes))
    loaded.state.fill_caches()
    first, second = clone_pages(loaded, [0]), clone_pages(loaded, [1])
    copier.run(PageCopies(((0, 0),), ()))
    copier.run(PageCopies(((1, 1),), ((1, 0),)))
    copier.run(PageCopies((), ((2, 1),)))
    for found, expected in zip(
        clone_pages(loaded, [1, 2]), zip(first, second, strict=True), strict=True
    ):
        assert torch.equal(found, torch.cat(expected))


def test_a_first_copy_is_timed_and_leaves_the_pages_as_they_are(artifact: Path) -> None:
    loaded = load_artifact(artifact, ServeOptions(num_pages=4))
    loaded.state.fill_caches()
    before = clone_pages(loaded, range(4))
    host = HostPages(2, loaded.state.page_bytes)
    PageCopier(loaded.state, host)
    assert host.copies.per_s > 0
    for found, expected in zip(clone_pages(loaded, range(4)), before, strict=True):
        assert torch.equal(found, expected)


def test_copies_of_many_pages_are_timed_and_those_of_few_are_not(artifact: Path) -> None:
    loaded = load_artifact(artifact, ServeOptions(num_pages=16))
    host = HostPages(16, loaded.state.page_bytes)
    copier = PageCopier(loaded.state, host)
    at_start = host.copies.per_s
    copier.run(PageCopies(((0, 0),), ((1, 0),)))
    assert host.copies.per_s == at_start
    copier.run(PageCopies(tuple((page, page) for page in range(8)), ()))
    assert host.copies.per_s != at_start


# --- Answers


def draw_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(320) for _ in range(length)] for _ in range(count)]


async def send_in_turn(engine: Engine, prompts: Sequence[list[int]]) -> list[tuple[Answer, int]]:
    """Answer one after another; give tokens with log probabilities, and cached tokens."""
    found = []
    for prompt in prompts:
        delta = await answer(
            engine, prompt, temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0
        )
        tokens = [(each.token_id, each.logprob) for each in delta.logprobs]
        found.append((tokens, delta.usage.cached_tokens))
    return found


@pytest.mark.parametrize("kind", [*FORMATS, "latent"])
def test_answers_from_host_memory_are_those_from_the_cache(
    artifact: Path, latent_artifact: Path, kind: str, always_fetch: None
) -> None:
    """The same tokens are computed on the same bytes, so the answers are the same to the bit."""
    chosen = latent_artifact if kind == "latent" else artifact
    kv_dtype = "" if kind == "latent" else kind or "auto"
    prompts = draw_prompts(1, 2, 50) * 3

    async def run(**options: object) -> tuple[list[tuple[Answer, int]], HostStats]:
        async with serving(chosen, kv_dtype=kv_dtype, **options) as engine:
            return await send_in_turn(engine, prompts), engine.stats().host

    roomy, none = asyncio.run(run(num_pages=20))
    tight, counted = asyncio.run(run(num_pages=4, kv_host_bytes=1 << 20))
    assert tight == roomy
    assert [cached for _, cached in tight] == [0, 0, 48, 48, 48, 48]
    assert none == HostStats()
    assert counted.hit_tokens_total == 4 * 48
    assert counted.pages_in_total == 12


def test_the_rates_are_measured_while_serving(artifact: Path) -> None:
    async def run() -> None:
        async with serving(artifact, num_pages=4, kv_host_bytes=1 << 20) as engine:
            host = engine.model.scheduler.pool.host
            assert host is not None
            assert (host.copies.per_s > 0, host.prefills.per_s) == (True, 0)
            await send_in_turn(engine, draw_prompts(2, 1, 8))
            assert host.prefills.per_s == 0  # less than a page says little
            await send_in_turn(engine, draw_prompts(2, 1, 50))
            assert host.prefills.per_s > 0

    asyncio.run(run())


def test_prefixes_are_computed_where_that_is_faster(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "is_fetch_faster", lambda *what, **rates: False)

    async def run() -> tuple[list[tuple[Answer, int]], HostStats]:
        async with serving(artifact, num_pages=4, kv_host_bytes=1 << 20) as engine:
            return await send_in_turn(engine, draw_prompts(1, 2, 50) * 2), engine.stats().host

    found, counted = asyncio.run(run())
    assert [cached for _, cached in found] == [0, 0, 0, 0]
    assert counted.pages_out_total > 0 == counted.pages_in_total


# --- What a user is told


def test_the_start_up_box_tells_bytes_pages_and_tokens(artifact: Path) -> None:
    page_bytes = load_artifact(artifact, ServeOptions(num_pages=4)).state.page_bytes
    options = ServeOptions(num_pages=4, kv_host_bytes=130 * page_bytes + 1)
    told = load_model(artifact, options).summary["KV host memory"]
    assert told.startswith(f"{130 * page_bytes / 2**20:.0f} MiB = 130 pages, 2080 tokens, ")
    assert "KV host memory" not in load_model(artifact, ServeOptions(num_pages=4)).summary


def test_host_memory_needs_the_prefix_cache(artifact: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-host-memory .* prefix cache, which is off"):
        ServeOptions(kv_host_bytes=1 << 30, prefix_cache=False)
    config = EngineConfig(kv_host_memory_bytes=1 << 30, prefix_cache=False)
    with pytest.raises(ConfigError, match="prefix cache, which is off"):
        pipeline(artifact, config, progress="none")


def test_more_memory_than_the_machine_has_is_refused_with_both_numbers(artifact: Path) -> None:
    options = ServeOptions(num_pages=4, kv_host_bytes=1 << 50)
    with pytest.raises(MachineError, match=r"1048576\.0 GiB, \d+\.\d GiB of this .* are free"):
        load_model(artifact, options)


def test_less_than_a_page_is_refused_with_both_numbers(artifact: Path) -> None:
    page_bytes = load_artifact(artifact, ServeOptions(num_pages=4)).state.page_bytes
    with pytest.raises(ConfigError, match=rf"100 bytes is less than one page of {page_bytes} byt"):
        load_model(artifact, ServeOptions(num_pages=4, kv_host_bytes=100))


def test_a_machine_that_does_not_tell_its_memory_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "find_free_memory", lambda: None)
    loading.check_host_memory(1 << 50)


def test_free_memory_is_the_container_s_where_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree:  9 kB\nMemAvailable:   8000 kB\n")
    assert host_memory.find_free_memory(meminfo, tmp_path) == (8_192_000, False)
    for name, text in {
        "memory.max": "5000000\n",
        "memory.current": "4000000\n",
        "memory.stat": "anon 1000000\ninactive_file 3000000\n",  # the kernel gives these back
    }.items():
        (tmp_path / name).write_text(text)
    assert host_memory.find_free_memory(meminfo, tmp_path) == (4_000_000, True)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.find_free_memory(meminfo, tmp_path) == (8_192_000, False)


def test_counters_go_on_after_a_sleep_and_gauges_do_not(artifact: Path, always_fetch: None) -> None:
    async def run() -> None:
        async with serving(artifact, num_pages=4, kv_host_bytes=1 << 20) as engine:
            await send_in_turn(engine, draw_prompts(1, 2, 50) * 2)
            before = engine.stats().host
            assert before.pages_total > 0 < before.pages_in_total
            await engine.sleep()
            asleep = engine.stats().host
            assert (asleep.pages_total, asleep.pages_free) == (0, 0)
            assert asleep.pages_in_total == before.pages_in_total
            await engine.wake()
            await send_in_turn(engine, draw_prompts(1, 2, 50) * 2)
            after = engine.stats().host
            assert after.pages_total == before.pages_total
            assert after.pages_in_total == 2 * before.pages_in_total
            assert after.bytes_in_total == 2 * before.bytes_in_total > 0

    asyncio.run(run())


# --- Everything at once, on real tokens

NUM_PAGES, NUM_HOST_PAGES = 8, 5
STEMS = draw_prompts(5, 2, 60)


@functools.cache
def load_once() -> LoadedArtifact:
    """Load a model that every example plays on: of it only pages and rows change."""
    with tempfile.TemporaryDirectory() as name:
        model = make_llama(Path(name) / "model", seed=11)
        artifact = compile_tiny(model, Path(name) / "artifact", max_rows=3)
        return load_artifact(artifact, ServeOptions(num_pages=NUM_PAGES))


class Bench:
    """A scheduler and an executor, driven step by step."""

    def __init__(self, host: HostPages | None, max_in_flight: int = 1) -> None:
        loaded = load_once()
        config = loaded.engine
        self.host = host
        self.pool = PagePool(NUM_PAGES, config.page_size, prefix_cache=host is not None, host=host)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_model_len=config.max_context_tokens,
            max_in_flight=max_in_flight,
        )
        steps, resamples = (
            {
                step: {bucket: made for (of, bucket), made in programs.items() if of == step}
                for step in ("decode", "mixed")
            }
            for programs in (loaded.programs, loaded.resamples)
        )
        copier = None if host is None else PageCopier(loaded.state, host)
        self.executor = Executor(loaded.state, steps, resamples, copier)
        self.answers: dict[str, Answer] = {}
        self.sequences: dict[str, SequenceState] = {}

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        name = f"request {len(self.sequences)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0)
        self.sequences[name] = self.scheduler.add(name, prompt, params)
        self.answers[name] = []

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None, "there is work, but no step"
        result = self.executor.launch(plan)
        events = self.scheduler.complete(plan, result.tokens())
        logprobs = result.logprobs()
        for sequence, token, _ in events:
            name = sequence.request_id
            self.answers[name].append((token, logprobs[name].logprob))

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()


@functools.cache
def answer_alone(prompt: tuple[int, ...], max_tokens: int) -> Answer:
    bench = Bench(None)
    bench.add(prompt, max_tokens)
    bench.run()
    return bench.answers["request 0"]


class HostMachine(RuleBasedStateMachine):
    """Random requests, steps, ends and evictions, with host memory of five pages or fewer."""

    @initialize(
        num_host_pages=st.integers(1, NUM_HOST_PAGES),
        fetches=st.sampled_from(["always", "always", "at times"]),
        seed=st.integers(0, 2**16),
    )
    def start(self, num_host_pages: int, fetches: str, seed: int) -> None:
        rng = random.Random(seed)
        host = HostPages(num_host_pages, load_once().state.page_bytes)
        self.bench = Bench(host)
        host.is_worth_fetching = (  # type: ignore[method-assign]
            lambda *what: fetches == "always" or rng.random() < 0.5
        )

    @rule(
        stem=st.sampled_from(STEMS),
        num_shared=st.sampled_from([0, 15, 16, 17, 33, 48, 50]),
        tail=st.integers(1, 3),
        max_tokens=st.sampled_from([1, 2, 6, 20]),
    )
    def submit(self, stem: list[int], num_shared: int, tail: int, max_tokens: int) -> None:
        self.bench.add((*stem[:num_shared], *range(tail)), max_tokens)

    @precondition(lambda self: not self.bench.scheduler.is_idle)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.bench.scheduler.is_idle:
                self.bench.step()

    @precondition(lambda self: self.bench.scheduler.live_request_ids)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.bench.scheduler.live_request_ids))
        self.bench.scheduler.finish(name, FinishReason.ABORT)

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        pool = self.bench.pool
        count = min(num_pages, pool.num_available)
        if count:
            stranger = PageTable("stranger", (("salt", "stranger"),))
            pool.allocate(stranger, [0] * (count * pool.page_size), count=False)
            pool.free(stranger)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.run()
        assert bench.host is not None
        assert bench.pool.num_owned == 0
        assert bench.host.num_free + bench.host.num_kept == bench.host.num_pages
        for name, sequence in bench.sequences.items():
            found = bench.answers[name]
            alone = answer_alone(sequence.prompt_ids, sequence.params.max_tokens or 0)
            if sequence.finish_reason is FinishReason.ABORT:
                alone = alone[: len(found)]
            is_same_up_to_a_tie(found, alone, name)


HostMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestRandomUse = HostMachine.TestCase
