"""Run planned steps on the device: write inputs, pick the program, fetch the sampled tokens.

The same code drives all three targets; a program is whatever can `run` a step of its bucket.
Called by the engine's worker, from one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch

from treadle.runtime.batch import RING_SIZE, BatchWriter, HostRing
from treadle.runtime.host_times import LAUNCH, WRITE, HostTimes
from treadle.runtime.logprobs import PendingLogprobs, Wish
from treadle.runtime.page_copies import PageCopier
from treadle.runtime.request import SamplingParams, TokenLogprobs
from treadle.runtime.sequences import SequenceState
from treadle.runtime.state import DeviceState
from treadle.runtime.steps import StepPlan


class Program(Protocol):
    """Play one kind of step for up to its bucket's tokens."""

    def run(self, num_tokens: int, num_seqs: int) -> Mapping[str, torch.Tensor]:
        """Run a step whose inputs lie in the state; give `tokens`, `logits`, `normed` at least."""


class Mark(Protocol):
    """Tell when the device has come so far, as a CUDA event does."""

    def synchronize(self) -> None:
        """Wait for it."""


@dataclass(frozen=True)
class StepResult:
    """Hold the tokens of a step that may still be running."""

    _tokens: torch.Tensor
    _count: int
    _done: Mark | None
    _logprobs: PendingLogprobs | None = None

    def tokens(self) -> list[int]:
        """Wait for the step; give one token per slice, -1 where none was wanted, -2 for a fault."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens[: self._count].tolist()
        return tokens

    def logprobs(self) -> dict[Hashable, TokenLogprobs]:
        """Give the log probabilities that are asked for, after `tokens` has waited.

        Their keys are requests, and for tokens of prompts pairs of a request and a position.
        """
        return {} if self._logprobs is None else self._logprobs.take()


class Executor:
    """Own the device state and the programs of an engine.

    `steps` has the `decode` programs by the largest number of sequences each takes, and the `mixed`
    ones by the tokens; `resamples` has, under the same keys, what follows them when a row asks for
    adjusted logits. `padded` are mixed programs that always run at full size, by their tokens: a
    step that one has room for is filled up for it. `copier` makes the copies between device and
    host that a plan asks for.
    """

    def __init__(
        self,
        state: DeviceState,
        steps: Mapping[str, Mapping[int, Program]],
        resamples: Mapping[str, Mapping[int, Program]],
        copier: PageCopier | None = None,
        padded: Mapping[int, Program] | None = None,
    ) -> None:
        self.state = state
        self.times = HostTimes()
        self.decode = dict(sorted(steps["decode"].items()))
        self.mixed = dict(sorted(steps["mixed"].items()))
        self.padded = padded or {}
        self.resamples = resamples
        self._writer = BatchWriter(state)
        self._copier = copier
        self._stream = torch.cuda.Stream() if state.packed.is_cuda else None
        self._fetched = HostRing(state.tensors["seq_rows"])  # a token per sequence
        self._marks = cycle(
            [None if self._stream is None else torch.cuda.Event() for _ in range(RING_SIZE)]
        )
        self._composition = -1
        self._adjusts = False
        self._constrained: tuple[SequenceState, ...] = ()
        self._wishes: tuple[Wish, ...] = ()
        self._tells_hidden = False
        self._wished_slices: torch.Tensor | None = None

    def on_stream(self) -> AbstractContextManager[object]:
        """Make the steps' stream the calling thread's, once and not for each step it launches."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def launch(self, plan: StepPlan) -> StepResult:
        """Start a step and return without waiting for it (on the CPU it is done on return)."""
        num_seqs = len(plan.rows)
        if plan.page_copies is not None:
            assert self._copier is not None, "only with host memory are there copies"
            self._copier.run(plan.page_copies)
        self._writer.write_rows(plan)
        self._read_wishes(plan)
        if self._constrained:
            self._writer.write_allowed(self._constrained)
        if plan.is_decode_only:
            bucket = _smallest(self.decode, num_seqs)
            self._writer.write_decode(plan, bucket)
            self.times.lap(WRITE)
            values = self.decode[bucket].run(num_seqs, num_seqs)
        else:
            bucket = _smallest(self.mixed, plan.num_tokens)
            sizes, program = (plan.num_tokens, num_seqs), self.mixed[bucket]
            full = bucket, min(bucket, self.state.dims["B"])
            # What fills the tokens up is a sequence of padding: there must be room for one.
            if bucket in self.padded and (num_seqs < full[1] or sizes == full):
                sizes, program = full, self.padded[bucket]
            self._writer.write_mixed(plan, sizes)
            self.times.lap(WRITE)
            values = program.run(*sizes)
        wished = self._wished_slices
        # Taken out before they are adjusted in place.
        logits = None if wished is None else values["logits"][wished]
        hidden = values["normed"][wished] if self._tells_hidden else None
        if self._adjusts:
            step = "decode" if plan.is_decode_only else "mixed"
            values = self.resamples[step][bucket].run(plan.num_tokens, num_seqs)
        fetched = self._fetched.take()
        fetched[:num_seqs].copy_(values["tokens"][:num_seqs], non_blocking=True)
        logprobs = None
        if logits is not None:
            logprobs = PendingLogprobs(self._wishes, logits, values["tokens"][wished], hidden)
        done = next(self._marks)
        if done is not None:
            done.record(self._stream)
        self.times.lap(LAUNCH)
        return StepResult(fetched, num_seqs, done, logprobs)

    def _read_wishes(self, plan: StepPlan) -> None:
        """Find what the slices want beside a token; the same while the slices are the same."""
        if plan.composition == self._composition:
            return
        self._composition = plan.composition
        sampling = (*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.samples))
        self._adjusts = any(sequence.adjusted for sequence in sampling)
        self._constrained = tuple(s for s in sampling if s.constraint is not None)
        wishes = [
            _wish(index, sequence.request_id, sequence.params, sequence.params.logprobs)
            for index, sequence in enumerate(plan.decodes)
            if sequence.params.logprobs is not None
        ]
        for index, chunk in enumerate(plan.chunks, start=plan.num_decode):
            sequence, params = chunk.sequence, chunk.sequence.params
            if chunk.samples and params.logprobs is not None:
                wishes.append(_wish(index, sequence.request_id, params, params.logprobs))
            elif chunk.scores:
                assert params.prompt_logprobs is not None, "the scheduler scores for nobody else"
                target = sequence.prompt_ids[chunk.stop]
                place = (sequence.request_id, chunk.stop)
                wishes.append(_wish(index, place, params, params.prompt_logprobs, target))
        self._wishes = tuple(wishes)
        self._tells_hidden = any(wish.tells_hidden for wish in wishes)
        self._wished_slices = None
        if self._wishes:
            indices = [wish.slice_index for wish in self._wishes]
            self._wished_slices = torch.tensor(indices, device=self.state.packed.device)


def _wish(
    index: int, key: Hashable, params: SamplingParams, num_top: int, target: int = -1
) -> Wish:
    return Wish(index, key, num_top, target, params.tells_logits, params.tells_hidden)


def _smallest(programs: Mapping[int, Program], needed: int) -> int:
    return next(bucket for bucket in programs if bucket >= needed)
