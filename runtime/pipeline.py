"""The offline pipeline: prompts in, answers out, in one line of a script and without a server.

The same engine as the server's, on an event loop in a thread of its own. Scripts call `pipeline`,
which `treadle` exports.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from treadle.ir.errors import ConfigError, RequestError, TreadleError
from treadle.runtime import artifact as artifacts
from treadle.runtime import compiler
from treadle.runtime.commands import make_engine
from treadle.runtime.compile_key import CompileOptions, cached_artifact_path
from treadle.runtime.config import DTYPES, read_kv_dtypes
from treadle.runtime.loading import ServeOptions
from treadle.runtime.pipeline_config import EngineConfig, GenerationConfig, Response
from treadle.runtime.progress import Progress
from treadle.runtime.request import (
    Delta,
    Engine,
    SamplingParams,
    collect,
    fit_to_window,
    show_value,
)
from treadle.runtime.tokenizer import Tokenizer

T = TypeVar("T")
Configs = GenerationConfig | Sequence[GenerationConfig] | None
# A text, a conversation, token ids, or a text with the ids that stand for it.
Prompt = str | Sequence[dict[str, Any]] | Sequence[int] | tuple[str, Sequence[int]]


def pipeline(
    model_path: str | Path, backend_config: EngineConfig | None = None, *, progress: str = "auto"
) -> Pipeline:
    """Load a model folder, a GGUF file or an artifact, and give a pipeline for it.

    A model is compiled into the cache first, unless it is there. `progress` as of the command line.
    Raises: TreadleError: it can't be compiled or loaded; the message says what to do.
    """
    config = backend_config or EngineConfig()
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"Expected `backend_config` to be an EngineConfig, found {type(config).__name__}."
        )
    if config.kv_memory_bytes and config.num_pages:
        raise ConfigError(
            "`kv_memory_bytes` and `num_pages` both say how large the KV cache is.",
            remedy="Leave one of them out.",
        )
    kv_dtype = kv_dtype_of(config)
    options = ServeOptions(
        kv_bytes=config.kv_memory_bytes,
        num_pages=config.num_pages,
        kv_host_bytes=config.kv_host_memory_bytes,
        kv_dtype=kv_dtype,
        prefix_cache=config.prefix_cache,
        max_waiting=config.max_waiting,
        model_path=config.model_path,
        weight_dtype=config.weight_dtype,
    )
    path = _artifact_for(model_path, config, kv_dtype, progress)
    max_rows = artifacts.read_manifest(path).engine.max_rows
    # As many again as run may wait in the engine, so that a row that falls free is taken at once.
    return Pipeline(
        make_engine(path, options, progress),
        max_at_once=max_rows + min(max_rows, config.max_waiting),
    )


def kv_dtype_of(config: EngineConfig) -> str:
    """Give how the KV cache is to be stored, empty where that is left open.

    Raises: ConfigError: see `read_kv_dtypes`; or there are several.
    """
    formats = read_kv_dtypes(config.kv_dtype, config.quant_policy or None)
    if len(formats) > 1:
        raise ConfigError("`kv_dtype` is one dtype.", remedy="Name the one to serve with.")
    return (formats[0] or "auto") if formats else ""


def _artifact_for(source: str | Path, config: EngineConfig, kv_dtype: str, progress: str) -> Path:
    dtype = "" if config.dtype == "auto" else config.dtype
    if artifacts.is_artifact(Path(source)):
        _check_artifact(Path(source), config, dtype)
        return Path(source)
    if config.model_path:
        raise ConfigError(
            "`model_path` says where the weights of an artifact are, and "
            f"`{source}` is not an artifact.",
            remedy="Leave it out.",
        )
    options = CompileOptions(
        target=config.target,
        dtype=dtype,
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        max_context_tokens=config.max_context_tokens,
        kv_formats=read_kv_dtypes(kv_dtype),
    )
    out = cached_artifact_path(source, options)
    with Progress(progress) as shown, shown.phases() as report:
        return compiler.compile_model(source, out, options, report).artifact.path


def _check_artifact(path: Path, config: EngineConfig, dtype: str) -> None:
    """Refuse settings that an artifact was compiled without."""
    made = artifacts.read_manifest(path).engine
    asked = {
        "target": "" if config.target == "auto" else config.target,
        "dtype": DTYPES.get(dtype, dtype),
        "page_size": config.page_size,
        "max_rows": config.max_rows,
        "max_step_tokens": config.max_step_tokens,
        "max_context_tokens": config.max_context_tokens,
    }
    for name, value in asked.items():
        if value and value != getattr(made, name):
            raise ConfigError(
                f"`{name}` {value} was asked for, and the artifact {path} was compiled with "
                f"{getattr(made, name)}.",
                remedy="Leave it out, or compile the model again.",
            )


@dataclass(frozen=True)
class _Work:
    """One answer to make: to which prompt, as which of its choices, and how."""

    index: int
    choice: int
    prompt: Any
    params: SamplingParams
    do_preprocess: bool


class _Speed:
    """Count the tokens of answers, and say how many there are a second."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._tokens = 0

    def count(self, chunk: Response) -> None:
        """Add the tokens of a piece of an answer."""
        self._tokens += len(chunk.token_ids)

    def text(self) -> str:
        """Say the mean speed since the beginning."""
        passed_s = max(time.monotonic() - self._began_s, 1e-6)
        return f"{self._tokens / passed_s:.0f} tokens/s"


class Pipeline:
    """Answer prompts with one engine. Safe to use from several threads; close it at the end."""

    def __init__(self, engine: Engine, *, max_at_once: int) -> None:
        self._engine = engine
        self._closed = False
        self._closing = threading.Lock()
        self._slots = asyncio.Semaphore(max_at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="treadle-pipeline", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._launch(engine.start()))
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """The window in tokens, prompt and answer together."""
        return self._engine.max_model_len

    def __call__(
        self,
        prompts: Any,
        gen_config: Configs = None,
        *,
        do_preprocess: bool = True,
        use_tqdm: bool = False,
    ) -> Any:
        """Do what `infer` does."""
        return self.infer(prompts, gen_config, do_preprocess=do_preprocess, use_tqdm=use_tqdm)

    def infer(
        self,
        prompts: Any,
        gen_config: Configs = None,
        *,
        do_preprocess: bool = True,
        use_tqdm: bool = False,
    ) -> Any:
        """Answer one prompt, or a list of them in its order.

        A prompt is a text, a conversation (a list of messages), a list of token ids, or a pair of a
        text and the token ids that stand for it. A text is put into the chat template as a user's
        message, where there is one; `do_preprocess` False leaves it as it is. Token ids never
        change. `gen_config`: one for all, or one each. `use_tqdm` shows on stderr how many answers
        are done, and at what speed; it has LMDeploy's name.
        Returns: a Response for one prompt, a list for a list; with `n` above 1 each prompt has a
        list of as many Responses in its place. What is wrong with one prompt is told in its
        Response and touches no other.
        Raises: RequestError: no prompts in any of these forms, or a config with a mistake.
        TreadleError: what broke the engine.
        """
        work, is_single = self._read(prompts, gen_config, do_preprocess)
        answers: list[list[Response]] = []
        for each in work:
            if each.choice == 0:
                answers.append([])
            answers[-1].append(Response(index=each.index, choice=each.choice))

        with (
            Progress("auto" if use_tqdm else "none") as shown,
            shown.phase("answer", total=len(work), unit="answers") as phase,
        ):
            speed = _Speed()

            def add(chunk: Response) -> None:
                answers[chunk.index][chunk.choice].extend(chunk)
                speed.count(chunk)
                if chunk.finish_reason is not None:
                    phase.advance(1, speed.text())

            self._wait(self._launch(self._answer_all(work, add)))
        given = [one[0] if len(one) == 1 else one for one in answers]
        return given[0] if is_single else given

    def stream_infer(
        self, prompts: Any, gen_config: Configs = None, *, do_preprocess: bool = True
    ) -> Generator[Response, None, None]:
        """Answer as `infer` does, but give each piece as it comes; `index` and `choice` say whose.

        Answers begin with the first piece that is asked for. An iterator that is closed gives up
        those that still run.
        """
        work, _ = self._read(prompts, gen_config, do_preprocess)
        return self._stream(work)

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[float]:
        """Give the mean cross-entropy of each list of tokens, in nats; not its exponential.

        The first token counts for nothing: there is nothing before it to expect it from.
        Raises: RequestError: a list of less than 2 tokens, or longer than the window.
        """
        listed: list[Any] = list(input_ids)
        if listed and isinstance(listed[0], int):
            listed = [listed]
        for one in listed:
            if len(one) < 2:
                raise RequestError(
                    f"Expected at least 2 tokens in each list, found {len(one)}.",
                    param="input_ids",
                )
        return self._wait(self._launch(self._score_all(listed)))

    async def _score_all(self, listed: Sequence[Sequence[int]]) -> list[float]:
        return list(await asyncio.gather(*map(self._score, listed)))

    async def _score(self, token_ids: Sequence[int]) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        async with self._slots:
            whole = await collect(self._engine.submit(token_ids, params))
        return -math.fsum(one.logprob for one in whole.prompt_logprobs) / (len(token_ids) - 1)

    def get_logits(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Give the model's logits after each token of each list, f32[T, V], as the model gave them.

        A list takes a slice of a step per token, and 4 V bytes per token of memory.
        Raises: RequestError: an empty list, or one longer than the window.
        """
        listed: list[Any] = list(input_ids)
        if listed and isinstance(listed[0], int):
            listed = [listed]
        return self._wait(self._launch(self._read_all(listed)))

    async def _read_all(self, listed: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return list(await asyncio.gather(*map(self._read_logits, listed)))

    async def _read_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=0, tells_logits=True
        )
        async with self._slots:
            whole = await collect(self._engine.submit(token_ids, params))
        rows = [one.logits for one in (*whole.prompt_logprobs, *whole.logprobs)]
        return torch.from_numpy(np.stack(rows))

    def session(self) -> Session:
        """Begin a conversation."""
        return Session(self)

    def chat(
        self,
        prompt: str | Sequence[dict[str, Any]],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = False,
    ) -> Any:
        """Take a turn in a conversation, a new one where none is given.

        Returns: the session, whose `response` is the answer; with `stream_response` an iterator of
        its pieces.
        Raises: RequestError: the session is closed.
        """
        session = session or self.session()
        pieces = session.take(prompt, gen_config)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return session

    def close(self) -> None:
        """Give up what runs and free everything. Harmless when closed."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- reading --------------------------------------------------------------------------------

    def _read(
        self, prompts: Any, gen_config: Configs, do_preprocess: bool
    ) -> tuple[list[_Work], bool]:
        listed, is_single = _list_prompts(prompts)
        if gen_config is None or isinstance(gen_config, GenerationConfig):
            config = gen_config or GenerationConfig()
            each = [(config.sampling(), config.n)] * len(listed)
        else:
            if len(gen_config) != len(listed):
                raise RequestError(
                    f"Expected one `gen_config`, or one for each of the {len(listed)} prompts; "
                    f"found {len(gen_config)}.",
                    param="gen_config",
                )
            each = [(config.sampling(), config.n) for config in gen_config]
        work = [
            _Work(index, choice, prompt, params.for_choice(choice), do_preprocess)
            for index, (prompt, (params, n)) in enumerate(zip(listed, each, strict=True))
            for choice in range(n)
        ]
        return work, is_single

    def _prepare(self, work: _Work) -> tuple[Sequence[int], SamplingParams]:
        """Turn a prompt into token ids and fit its answer into the window."""
        tokenizer, prompt = self._engine.tokenizer, work.prompt
        continues_text = False
        if isinstance(prompt, tuple):
            prompt = prompt[1]
        if isinstance(prompt, str) and work.do_preprocess and tokenizer.has_chat_template:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            prompt_ids = tokenizer.encode(prompt)
            if not prompt_ids and tokenizer.bos_token_id is not None:
                prompt_ids = [tokenizer.bos_token_id]
            continues_text = True
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            prompt_ids = tokenizer.encode_chat(prompt)
        elif isinstance(prompt, list | tuple):
            prompt_ids, continues_text = list(prompt), True
        else:
            raise RequestError(
                "Expected a prompt to be a text, a list of messages or a list of token ids, found "
                f"{show_value(prompt)}.",
                param="prompts",
                code="invalid_type",
            )
        if not prompt_ids:
            raise RequestError(
                "Expected a prompt, found none of a single token.", param="prompts", code="empty"
            )
        if continues_text:
            # With nothing but special tokens before it, the answer is the beginning of a text.
            continues_text = any(i not in tokenizer.special_token_ids for i in prompt_ids)
        params = fit_to_window(
            replace(work.params, max_tokens=None, continues_text=continues_text),
            len(prompt_ids),
            self._engine.max_model_len,
            default_max_tokens=work.params.max_tokens,
            prompt_param="prompts",
        )
        return prompt_ids, params

    # --- answering ------------------------------------------------------------------------------

    def _launch(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise RequestError("The pipeline is closed.", remedy="Make a new one.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, future: Future[T]) -> T:
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in this thread gives up the answers in the other one.
            future.cancel()
            raise

    def _stream(self, work: Sequence[_Work]) -> Generator[Response, None, None]:
        arrived: SimpleQueue[Response | None] = SimpleQueue()
        future = self._launch(self._answer_all(work, arrived.put))
        future.add_done_callback(lambda _: arrived.put(None))
        try:
            while (chunk := arrived.get()) is not None:
                yield chunk
            future.result()
        finally:
            future.cancel()

    async def _answer_all(self, work: Sequence[_Work], give: Callable[[Response], None]) -> None:
        await asyncio.gather(*(self._answer(each, give) for each in work))
        if self._engine.failure is not None:
            raise self._engine.failure

    async def _answer(self, work: _Work, give: Callable[[Response], None]) -> None:
        """Give one answer's pieces; a failure is the last of them."""
        input_token_len = 0
        try:
            async with self._slots:
                prompt_ids, params = await asyncio.to_thread(self._prepare, work)
                input_token_len = len(prompt_ids)
                params = await self._engine.prepare(params)
                generation = self._engine.submit(prompt_ids, params)
                try:
                    async for delta in generation:
                        give(_chunk(work, delta))
                finally:
                    generation.abort()
        except TreadleError as error:
            code = error.code if isinstance(error, RequestError) else "engine_error"
            give(
                Response(
                    index=work.index,
                    choice=work.choice,
                    input_token_len=input_token_len,
                    finish_reason="error",
                    error_code=code or "invalid_request",
                    error_message=str(error),
                )
            )

    async def _shut_down(self) -> None:
        await self._engine.close()
        # What waited for its turn is refused by the closed engine, so all of it ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()


class Session:
    """A conversation: `history` holds each turn's prompt and answer, `response` the last answer.

    Each turn sends the whole conversation; the prefix cache spares most of its work.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.history: list[tuple[str | Sequence[dict[str, Any]], str]] = []
        self.response: Response | None = None
        self._pipe = pipe
        self._aborted = False
        self._closed = False

    def __call__(
        self,
        prompt: str | Sequence[dict[str, Any]],
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = False,
    ) -> Any:
        """Do what `Pipeline.chat` does with this session."""
        return self._pipe.chat(prompt, self, gen_config, stream_response=stream_response)

    def take(
        self, prompt: str | Sequence[dict[str, Any]], gen_config: GenerationConfig | None
    ) -> Generator[Response, None, None]:
        """Yield the pieces of the answer to the next turn, which joins the history when whole."""
        if self._closed:
            raise RequestError("The session is closed.", remedy="Begin a new one.")
        if gen_config is not None and gen_config.n != 1:
            raise RequestError(
                f"A turn of a conversation has one answer: expected `n` 1, found {gen_config.n}.",
                param="n",
            )
        messages: list[dict[str, Any]] = []
        for asked, answer in self.history:
            messages += [*_messages(asked), {"role": "assistant", "content": answer}]
        messages += _messages(prompt)
        return self._follow(prompt, self._pipe.stream_infer(messages, gen_config))

    def _follow(
        self, prompt: str | Sequence[dict[str, Any]], pieces: Generator[Response, None, None]
    ) -> Generator[Response, None, None]:
        self._aborted = False
        self.response = answer = Response()
        with closing(pieces):
            for piece in pieces:
                answer.extend(piece)
                yield piece
                if self._aborted:
                    answer.finish_reason = answer.finish_reason or "abort"
                    return
        if answer.finish_reason in ("stop", "length"):
            self.history.append((prompt, answer.text))

    def abort(self) -> None:
        """Give up the answer that is being streamed; its turn does not join the history."""
        self._aborted = True

    def close(self) -> None:
        """Forget the conversation."""
        self.abort()
        self._closed = True
        self.history.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _messages(prompt: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Give the prompts as a list, and whether there was one that was not in a list."""
    if isinstance(prompts, str) or _is_pair(prompts):
        return [prompts], True
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            "Expected `prompts` to be a text, messages, token ids, or a list of them; found "
            f"{show_value(prompts)}.",
            param="prompts",
            code="invalid_type",
        )
    if prompts and (isinstance(prompts[0], dict) or type(prompts[0]) is int):
        return [prompts], True
    return list(prompts), False


def _is_pair(prompt: Any) -> bool:
    return (
        isinstance(prompt, tuple)
        and len(prompt) == 2
        and isinstance(prompt[0], str)
        and isinstance(prompt[1], list | tuple)
    )


def _chunk(work: _Work, delta: Delta) -> Response:
    scored = (*delta.prompt_logprobs, *delta.logprobs)
    return Response(
        text=delta.text,
        generate_token_len=delta.usage.completion_tokens,
        input_token_len=delta.usage.prompt_tokens,
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        token_ids=list(delta.token_ids),
        logprobs=[dict((*one.top, (one.token_id, one.logprob))) for one in delta.logprobs] or None,
        logit_rows=[one.logits for one in scored if one.logits is not None],
        hidden_rows=[one.hidden for one in scored if one.hidden is not None],
        index=work.index,
        choice=work.choice,
        cached_tokens=delta.usage.cached_tokens,
        stop_reason=delta.stop_reason,
    )
