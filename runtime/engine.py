"""The engine: one worker thread that schedules, launches and completes steps; asyncio in front.

Server, pipeline and command line all use this one. The worker owns executor and scheduler; the
event loop owns the generations, where tokens become text. Between them: a queue of commands one
way, one callback per step the other way.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from treadle.ir.errors import KernelError, QueueFullError, RequestError, TreadleError
from treadle.runtime.executor import Executor, StepResult
from treadle.runtime.host_pages import HostStats
from treadle.runtime.host_times import COMMANDS, COMPLETE, IDLE, PUBLISH, SCHEDULE, WAIT
from treadle.runtime.request import Delta, FinishReason, SamplingParams, TokenLogprobs, Usage
from treadle.runtime.scheduler import Scheduler
from treadle.runtime.sequences import SequenceState
from treadle.runtime.steps import StepPlan, TokenEvents
from treadle.runtime.structure import GrammarCompiler, TokenConstraint
from treadle.runtime.text import TextStep, TextStream
from treadle.runtime.tokenizer import Tokenizer

IDLE_WAIT_S = 0.5
# How long one thread may keep Python's lock while the worker wants it to launch a step. Python's
# own 5 ms are longer than a step of a small model.
SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True)
class LoadedModel:
    """Everything the worker needs to serve; made by `loading.py`."""

    name: str
    tokenizer: Tokenizer
    executor: Executor
    scheduler: Scheduler
    max_model_len: int
    vocab_size: int
    hidden_size: int
    summary: dict[str, str]
    count_jit_compiles: Callable[[], int]
    # How hidden states become an embedding: last, mean, or empty where the model declares neither.
    pooling: str = ""
    # Called when nothing refers to the model any more: gives freed memory back to the system.
    release_memory: Callable[[], None] = lambda: None


class EngineStats(NamedTuple):
    """Give the engine's gauges and counters at one moment.

    `last_step_age_s` is the time since a step was completed, `step_in_flight_s` the time that the
    worker has waited for the one it waits for now; 0 while it waits for none.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    steps_total: int = 0
    last_step_age_s: float = 0.0
    step_in_flight_s: float = 0.0
    jit_compiles_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    host: HostStats = HostStats()


@dataclass(frozen=True)
class _Ending:
    """The end of a generation as the worker tells it."""

    reason: FinishReason
    stop_reason: str | int | None
    error: TreadleError | None = None


class _News(NamedTuple):
    """What the worker tells about a request: its next token, or its end, or both.

    With `logprobs` and neither, they are those of the prompt's next token.
    """

    request_id: str
    token: int | None
    cached_tokens: int
    ending: _Ending | None
    logprobs: TokenLogprobs | None = None


class Generation:
    """One running answer. Iterate it for deltas, from one task; `abort` gives it up."""

    def __init__(
        self, engine: Engine, request_id: str, prompt_tokens: int, params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._engine = engine
        self._stream = TextStream(engine.tokenizer, params)
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._ending: _Ending | None = None
        self._arrived = asyncio.Event()
        self._cached_tokens = 0
        self._over = False

    def _push(
        self,
        token: int | None,
        cached_tokens: int,
        ending: _Ending | None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Take what a step brought; called on the event loop."""
        if token is not None:
            self._tokens.append((token, logprobs))
        elif logprobs is not None:
            self._prompt_logprobs.append(logprobs)
        self._cached_tokens = cached_tokens
        self._ending = ending or self._ending
        self._arrived.set()

    @property
    def has_more(self) -> bool:
        """Say whether the next delta can be had without waiting."""
        return bool(self._tokens) or self._ending is not None

    def abort(self) -> None:
        """Stop the answer and free its row and pages. Harmless when it has ended."""
        if not self._over:
            self._over = True
            self._engine._forget(self.request_id, FinishReason.ABORT, None)
            self._push(None, self._cached_tokens, _Ending(FinishReason.ABORT, None))

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        """Yield a delta per token, however late they are read; raises the engine's error, if any.

        A slow reader thus gets the very deltas that a fast one gets.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._tokens:
                token, logprobs = self._tokens.popleft()
                step = self._stream.push((token,))
                if step.finish_reason is not None:
                    self._over = True
                    if self._ending is None:
                        # Text ended it, by a stop string: the worker doesn't know yet.
                        self._engine._forget(self.request_id, step.finish_reason, step.stop_reason)
                yield self._delta(step, logprobs)
                if step.finish_reason is not None:
                    return
            if self._ending is not None:
                self._over = True
                if self._ending.error is not None:
                    raise self._ending.error
                yield self._delta(self._stream.finish(self._ending.reason))
                return

    def _delta(self, step: TextStep, logprobs: TokenLogprobs | None = None) -> Delta:
        told = () if logprobs is None else (logprobs,)
        usage = Usage(self.prompt_tokens, self._stream.completion_tokens, self._cached_tokens)
        scored, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Delta(
            step.text, step.token_ids, step.finish_reason, step.stop_reason, usage, told, scored
        )


class Engine:
    """Serve one loaded model; `load` runs in the worker and reports what it does, phase by phase.

    `on_ready` is told of the model once requests are accepted, also in the worker.
    Raises from `start`: whatever `load` raised.
    """

    def __init__(
        self,
        model_name: str,
        load: Callable[[Callable[[str], None]], LoadedModel],
        on_ready: Callable[[LoadedModel], None] = lambda model: None,
    ) -> None:
        self.model_name = model_name
        self.phase = "starting"
        self.failure: TreadleError | None = None
        self._load = load
        self._on_ready = on_ready
        self._model: LoadedModel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: threading.Thread | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._sleeping = False
        self._changing_sleep = asyncio.Lock()
        # What was counted before the model was last loaded.
        self._counted = EngineStats()
        self._generations: dict[str, Generation] = {}
        self._numbers = itertools.count()
        self._stats = EngineStats()
        self._last_step_at = time.monotonic()
        self._waits_since: float | None = None  # for a step, while one is in flight
        self._all_done = asyncio.Event()
        # What the worker has not told yet of the step that it completed last.
        self._news: list[_News] = []
        self._tokens = TokenEvents()

    # --- the face towards front ends ------------------------------------------------------------

    @property
    def model(self) -> LoadedModel:
        """The loaded model. Raises: TreadleError: the engine is not ready."""
        if self._model is None and self._sleeping:
            raise _asleep()
        if self._model is None:
            raise TreadleError(f"The engine is not ready: {self.phase}.", remedy="Wait for /ready.")
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def max_model_len(self) -> int:
        """The window in tokens."""
        return self.model.max_model_len

    @property
    def vocab_size(self) -> int:
        """The number of token ids the model knows."""
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        """The features of a token's hidden state."""
        return self.model.hidden_size

    @property
    def pooling(self) -> str:
        """Say how hidden states become an embedding: last, mean, or empty for not at all."""
        return self.model.pooling

    @property
    def ready(self) -> bool:
        """Say whether requests are accepted and can be served."""
        is_taken = self._draining or self._sleeping
        return self._model is not None and not is_taken and self.failure is None

    @property
    def is_sleeping(self) -> bool:
        """Say whether the model's memory is given back, or soon will be."""
        return self._sleeping

    async def start(self) -> None:
        """Load the model and begin to serve; returns when ready."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._worker = threading.Thread(
            target=self._work, args=(started,), name="treadle-engine", daemon=True
        )
        self._worker.start()
        await started

    async def sleep(self) -> None:
        """Let running answers end, take no new ones, and give the model's memory back.

        Raises: TreadleError: what broke the engine, perhaps meanwhile.
        """
        async with self._changing_sleep:
            if self._model is None:
                return
            self._sleeping = True
            self.phase = "falling asleep"
            if self._generations:
                await self._all_done.wait()
            if self.failure is not None:
                raise self.failure
            await self._stop_worker()
            release_memory, self._counted = self._model.release_memory, self._stats
            self._model = None
            await asyncio.to_thread(release_memory)
            host = self._counted.host._replace(pages_total=0, pages_free=0)
            self._stats = self._counted._replace(pages_total=0, pages_free=0, host=host)
            self.phase = "sleeping"

    async def wake(self) -> None:
        """Load the model again. Harmless when awake. Raises: TreadleError: it can't be loaded."""
        async with self._changing_sleep:
            if not self._sleeping:
                return
            self._commands.clear()
            self._stopping = False
            await self.start()
            self._sleeping = False

    async def _stop_worker(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.join)
            self._worker = None

    async def close(self) -> None:
        """Abort what runs, stop the worker and wait for it."""
        for generation in tuple(self._generations.values()):
            generation.abort()
        await self._stop_worker()
        self.phase = "closed"

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """Give parameters that can be submitted: words as tokens, structure as a grammar.

        Raises: RequestError: the structure can't be enforced; names what in it can't.
        """
        params.validate()
        if not params.bad_words and params.structure is None:
            return params
        return await asyncio.to_thread(self._prepare, params)

    def _prepare(self, params: SamplingParams) -> SamplingParams:
        grammar = None
        if params.structure is not None:
            grammar = self._grammars.compile(params.structure)
        found = {
            tuple(self.tokenizer.encode(lead + word, add_special_tokens=False))
            for word in params.bad_words
            # A word may begin the answer, or follow a space that is part of its first token.
            for lead in ("", " ")
        }
        singles = {ids[0] for ids in found if len(ids) == 1}
        return replace(
            params,
            grammar=grammar,
            bad_token_ids=tuple(sorted({*params.bad_token_ids, *singles})),
            bad_sequences=tuple(sorted(ids for ids in found if len(ids) > 1)),
        ).validate()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Generation:
        """Queue a request. Call on the event loop.

        Raises: RequestError: it can never run. QueueFullError: too many wait, or the engine drains.
        """
        if self.failure is not None:
            raise self.failure
        if self._draining or self._stopping:
            raise QueueFullError(
                "The server is shutting down and takes no new requests.",
                retry_after_s=5.0,
                code="draining",
            )
        if self._sleeping:
            raise _asleep()
        params.validate()
        assert params.structure is None or params.grammar is not None, "`prepare` compiles it"
        params.check_vocabulary(self.vocab_size)
        prompt = tuple(prompt_ids)
        check_token_ids(prompt, self.vocab_size)
        name = request_id or f"request-{next(self._numbers)}"
        scheduler = self.model.scheduler
        if len(self._generations) >= scheduler.max_rows + scheduler.max_waiting:
            raise QueueFullError(
                f"{len(self._generations)} requests run or wait, which is the most that may.",
                remedy="Retry later.",
            )
        # The scheduler belongs to the worker; only its checks are safe to run from here.
        scheduler.check_request(name, prompt, params)
        if name in self._generations:
            raise RequestError(f"The request id `{name}` is in use.", code="duplicate_request_id")
        constraint = None
        if params.grammar is not None or params.bad_sequences:
            matcher = None if params.grammar is None else params.grammar.start()
            tokenizer = self.tokenizer
            constraint = TokenConstraint(
                params,
                tokenizer.eos_token_ids,
                matcher,
                token_bytes=lambda token: tokenizer.token_text(token)[1],
            )
        namespace = () if params.cache_salt is None else (("salt", params.cache_salt),)
        generation = Generation(self, name, len(prompt), params)
        self._generations[name] = generation
        self._all_done.clear()

        def add() -> None:
            try:
                self.model.scheduler.add(
                    name, prompt, params, namespace=namespace, constraint=constraint
                )
            except TreadleError as error:
                self._publish([_News(name, None, 0, _Ending(FinishReason.ERROR, None, error))])

        self._send(add)
        return generation

    def stats(self) -> EngineStats:
        """Give the counters as of the last step, and its age as of now: the worker may hang."""
        now_s, waits_since = time.monotonic(), self._waits_since
        return self._stats._replace(
            last_step_age_s=now_s - self._last_step_at,
            step_in_flight_s=0.0 if waits_since is None else now_s - waits_since,
        )

    async def drain(self, deadline_s: float) -> None:
        """Refuse new requests, let the running ones end, abort those left after `deadline_s`."""
        self._draining = True
        self.phase = "draining"
        if self._generations:
            try:
                await asyncio.wait_for(self._all_done.wait(), deadline_s)
            except TimeoutError:
                for generation in tuple(self._generations.values()):
                    generation.abort()

    # --- between event loop and worker ----------------------------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _forget(self, name: str, reason: FinishReason, stop_reason: str | int | None) -> None:
        """End a request from the event loop's side."""
        if self._generations.pop(name, None) is not None:
            self._send(lambda: self._finish(name, reason, stop_reason))
        if not self._generations:
            self._all_done.set()

    def _finish(self, name: str, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.model.scheduler.finish(name, reason, stop_reason)

    def _publish(self, news: list[_News], tokens: TokenEvents | None = None) -> None:
        assert self._loop is not None, "the worker runs only after start()"
        self._loop.call_soon_threadsafe(self._deliver, news, tokens or TokenEvents())

    def _deliver(self, news: list[_News], tokens: TokenEvents) -> None:
        """Give generations what a step brought."""
        for sequence, token, reason in tokens:
            if reason is not None:
                news.append(_describe(sequence, token, reason))
                continue
            # Most tokens need no more word about them, and there are hundreds a step.
            generation = self._generations.get(sequence.request_id)
            if generation is not None:
                generation._push(token, sequence.cached_tokens or 0, None)
        for each in news:
            generation = self._generations.get(each.request_id)
            if generation is None:
                continue
            generation._push(each.token, each.cached_tokens, each.ending, each.logprobs)
            if each.ending is not None:
                del self._generations[each.request_id]
        if not self._generations:
            self._all_done.set()

    # --- the worker -----------------------------------------------------------------------------

    def _work(self, started: asyncio.Future[None]) -> None:
        loop = self._loop
        assert loop is not None, "start() sets the loop before the thread"
        # Before the load: its threads too would wait for each other at each of their system calls.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        try:
            self._model = self._load(self._set_phase)
            self._grammars = GrammarCompiler(self._model.tokenizer, self._model.vocab_size)
            self.phase = "ready"
            self._update_stats()
            self._on_ready(self._model)
        except BaseException as error:  # reported through start(), which re-raises it
            self.phase = "failed"
            loop.call_soon_threadsafe(_fail, started, error)
            return
        loop.call_soon_threadsafe(_succeed, started)
        try:
            with self._model.executor.on_stream():
                self._serve()
        except Exception as error:  # the boundary of the engine: every request learns of it
            self._break(error)

    def _set_phase(self, phase: str) -> None:
        self.phase = phase

    def _serve(self) -> None:
        scheduler, executor = self.model.scheduler, self.model.executor
        lap = executor.times.lap
        in_flight: deque[tuple[StepPlan, StepResult, float]] = deque()
        while True:
            while self._commands:
                self._commands.popleft()()
            lap(COMMANDS)
            if self._stopping and not in_flight:
                return
            plan = None
            if not self._stopping and len(in_flight) < scheduler.max_in_flight:
                plan = scheduler.schedule()
                lap(SCHEDULE)
            if plan is not None:
                began_s = time.monotonic()
                self._waits_since = self._waits_since or began_s
                in_flight.append((plan, executor.launch(plan), began_s))
                if len(in_flight) < scheduler.max_in_flight:
                    continue
            if in_flight:
                # Only now that the device has work: the event loop takes Python's lock for it.
                self._publish_step()
                self._complete(*in_flight.popleft())
                self._waits_since = self._last_step_at if in_flight else None
                if not in_flight:
                    self._publish_step()
            elif not self._commands:
                self._update_stats()
                self._wake.wait(IDLE_WAIT_S)
                self._wake.clear()
                lap(IDLE)

    def _complete(self, plan: StepPlan, result: StepResult, began_s: float) -> None:
        lap = self.model.executor.times.lap
        tokens = result.tokens()
        lap(WAIT)
        events = self.model.scheduler.complete(plan, tokens)
        now_s = time.monotonic()
        # Of two steps in flight the later one begins when the earlier one ends.
        self._note_prefill(plan, now_s - max(began_s, self._last_step_at))
        self._last_step_at = now_s
        self._update_stats()
        logprobs = result.logprobs()
        if not logprobs:
            self._tokens = events
        else:
            self._news += [_describe(*event, logprobs) for event in events]
            self._news += [
                _News(
                    chunk.sequence.request_id,
                    None,
                    0,
                    None,
                    logprobs[chunk.sequence.request_id, chunk.stop],
                )
                for chunk in plan.chunks
                if chunk.scores
            ]
        lap(COMPLETE)

    def _note_prefill(self, plan: StepPlan, seconds: float) -> None:
        """Learn how fast prompts are computed, which fetching their pages is measured against.

        From steps of at least a page of them, as less is never fetched, that waited for no page.
        """
        pool = self.model.scheduler.pool
        if pool.host is None or (plan.page_copies is not None and plan.page_copies.pages_in):
            return
        num_tokens = sum(each.stop - each.start for each in plan.chunks if not each.scores)
        if num_tokens >= pool.page_size:
            pool.host.prefills.add(num_tokens, seconds)

    def _publish_step(self) -> None:
        """Tell the event loop what the last step brought, if anything."""
        if self._news or self._tokens:
            self._publish(self._news, self._tokens)
            self._news, self._tokens = [], TokenEvents()
            self.model.executor.times.lap(PUBLISH)

    def _update_stats(self) -> None:
        model, counted = self.model, self._counted
        scheduler, pool = model.scheduler, model.scheduler.pool
        self._stats = EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_total=pool.num_pages,
            pages_free=pool.num_available,
            steps_total=counted.steps_total + scheduler.steps_total,
            jit_compiles_total=counted.jit_compiles_total + model.count_jit_compiles(),
            prompt_tokens_total=counted.prompt_tokens_total + scheduler.prompt_tokens_total,
            generation_tokens_total=counted.generation_tokens_total
            + scheduler.generation_tokens_total,
            preemptions_total=counted.preemptions_total + scheduler.preemptions_total,
            host=counted.host if pool.host is None else pool.host.stats(counted.host),
        )

    def _break(self, error: Exception) -> None:
        """End every request after a fault of the engine itself."""
        fault = (
            error
            if isinstance(error, TreadleError)
            else KernelError(
                f"The engine failed in a step: {type(error).__name__}: {error}.",
                remedy="The process must be restarted; run with TREADLE_DEBUG=1 for the traceback.",
            )
        )
        fault.__cause__ = error
        self.failure = fault
        self.phase = "failed"
        ending = _Ending(FinishReason.ERROR, None, fault)
        self._publish_step()
        self._publish([_News(name, None, 0, ending) for name in tuple(self._generations)])


def check_token_ids(prompt: tuple[int, ...], vocab_size: int) -> None:
    """Refuse what is no token of the vocabulary. Raises: RequestError: names the first.

    A prompt may have a hundred thousand tokens, and the event loop does nothing else meanwhile: all
    are looked at at once, and each only where one of them is wrong.
    """
    kinds = set(map(type, prompt))
    if any(kind is bool or not issubclass(kind, int) for kind in kinds):
        wrong = next(t for t in prompt if isinstance(t, bool) or not isinstance(t, int))
        raise RequestError(f"A token id is a whole number, not {wrong!r}.", param="prompt")
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        outside = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(
            f"The token id {outside} is outside the vocabulary of {vocab_size} tokens.",
            param="prompt",
            code="invalid_token_id",
        )


def _describe(
    sequence: SequenceState,
    token: int,
    reason: FinishReason | None,
    logprobs: Mapping[Hashable, TokenLogprobs] | None = None,
) -> _News:
    name, cached_tokens = sequence.request_id, sequence.cached_tokens or 0
    if reason is FinishReason.ERROR:
        error = KernelError(
            f"There is no token to draw for request `{name}` at position "
            f"{len(sequence.token_ids)}: the model's logits are not finite, or the request "
            "bans every token.",
            remedy="Other requests go on. If nothing is banned, try --dtype bfloat16 or float32.",
        )
        return _News(name, None, cached_tokens, _Ending(reason, None, error))
    ending = _Ending(reason, sequence.stop_reason) if reason else None
    return _News(name, token, cached_tokens, ending, logprobs.get(name) if logprobs else None)


def _asleep() -> QueueFullError:
    return QueueFullError(
        "The engine sleeps: its model's memory is given back.",
        remedy="Wake it, by /wakeup where it is a server's.",
        retry_after_s=5.0,
        code="sleeping",
    )


def _succeed(started: asyncio.Future[None]) -> None:
    if not started.done():
        started.set_result(None)


def _fail(started: asyncio.Future[None], error: BaseException) -> None:
    if not started.done():
        started.set_exception(error)
