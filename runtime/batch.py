"""A step's plan → what the device must be told: packed inputs, row parameters, block table.

The host keeps a mirror of the rows and sends only what changed. Called by the executor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from treadle.ir.builder import SAMPLING_STATE
from treadle.ir.ops.sampling import ADJUST_BIASES, ADJUST_COUNTS
from treadle.runtime.adjustments import count_history, list_biases
from treadle.runtime.request import SamplingParams
from treadle.runtime.sequences import SequenceState
from treadle.runtime.state import PADDING_ROW, DeviceState
from treadle.runtime.steps import StepPlan

# Buffers are copied while the host goes on: one is used again only this many steps later, when the
# step that copied it is known to be complete. One more than the steps in flight.
RING_SIZE = 3
PENDING_TOKEN = -1  # of a token that the step before is still sampling
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# Row state of a number each that says how logits are adjusted; sent when one of them changed.
ADJUSTMENTS = ("adjusted", "num_biases", *PENALTIES)


class HostRing:
    """Hold a few host buffers like a device tensor, used in turn; pinned where that is on a GPU."""

    def __init__(self, like: torch.Tensor) -> None:
        pinned = like.is_cuda
        self._buffers = [
            torch.zeros(like.shape, dtype=like.dtype, pin_memory=pinned) for _ in range(RING_SIZE)
        ]
        self._next = 0

    def take(self) -> torch.Tensor:
        """Give the buffer that was used longest ago, with what was left in it."""
        self._next = (self._next + 1) % RING_SIZE
        return self._buffers[self._next]


class BatchWriter:
    """Write each step's inputs to the device state, copying only what the last step lacked."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        adjustments = [name for name in ADJUSTMENTS if name in state.tensors]
        mirrored = (*SAMPLING_STATE, *adjustments, "block_table")
        self._rings = {name: HostRing(state.tensors[name]) for name in (*mirrored, "seq_rows")}
        self._packed = HostRing(state.packed)
        self._mirror = {name: state.tensors[name].cpu().numpy().copy() for name in mirrored}
        self._changed: set[str] = set()
        self._allowed: HostRing | None = None
        self._composition = -1
        self._bucket = 0
        self._entropy = secrets.randbits(63)

    def write_rows(self, plan: StepPlan) -> None:
        """Bring block table and sampling parameters up to date for the step."""
        if plan.block_updates:
            flat = chain.from_iterable(plan.block_updates)
            rows, indices, pages = np.fromiter(flat, np.int32).reshape(-1, 3).T
            self._mirror["block_table"][rows, indices] = pages
            self._send("block_table")
        if plan.new_rows:
            new_rows = set(plan.new_rows)
            for chunk in plan.chunks:
                if chunk.row in new_rows:
                    new_rows.discard(chunk.row)
                    self._set_sampling(chunk.row, chunk.sequence.params, chunk.sequence.arrival)
                    self._set_adjustments(chunk.row, chunk.sequence)
            for name in SAMPLING_STATE:
                self._send(name)
            for name in self._changed:
                self._send(name)
            self._changed.clear()

    def _set_sampling(self, row: int, params: SamplingParams, arrival: int) -> None:
        mirror = self._mirror
        mirror["temperature"][row] = params.temperature
        mirror["top_k"][row] = params.top_k
        mirror["top_p"][row] = params.top_p
        mirror["min_p"][row] = params.min_p
        # Without a seed of its own a request draws from a stream that no other request shares.
        seed = self._entropy + arrival if params.seed is None else params.seed
        mirror["seed"][row] = _as_signed(seed)

    def _set_adjustments(self, row: int, sequence: SequenceState) -> None:
        """Say what a new sequence asks of its logits; state that it doesn't ask for is stale."""
        params, num_prompt_tokens = sequence.params, len(sequence.prompt_ids)
        if "adjusted" not in self._mirror:
            assert not sequence.adjusted, "the state was made without room for adjustments"
            return
        values: dict[str, float] = {"adjusted": sequence.adjusted}
        if sequence.adjusted & ADJUST_BIASES:
            ends = sequence.stop_ids
            if sequence.constraint is not None and sequence.constraint.matcher is not None:
                # The grammar says when the answer may end, and must.
                ends = ends - sequence.constraint.eos_token_ids
            biases = list_biases(params, ends, num_prompt_tokens)
            values["num_biases"] = len(biases)
            names = ("bias_tokens", "bias_values", "bias_stops")
            columns = zip(*biases, strict=True) if biases else ()
            for name, column in zip(names, columns, strict=False):
                entries = self._state.tensors[name][row, : len(biases)]
                entries.copy_(self._stage(np.asarray(column), entries.dtype), non_blocking=True)
        if sequence.adjusted & ADJUST_COUNTS:
            values |= {name: getattr(params, name) for name in PENALTIES}
            tokens, codes = count_history(sequence.token_ids, num_prompt_tokens)
            counts = self._state.tensors["token_counts"][row]
            device = counts.device
            counts.zero_()
            counts.index_copy_(
                0,
                self._stage(tokens, torch.int64).to(device, non_blocking=True),
                self._stage(codes, counts.dtype).to(device, non_blocking=True),
            )
        for name, value in values.items():
            if self._mirror[name][row] != value:
                self._mirror[name][row] = value
                self._changed.add(name)

    def write_allowed(self, constrained: Sequence[SequenceState]) -> None:
        """Write which tokens may be drawn for sequences whose next token is drawn in this step."""
        allowed = self._state.tensors["allowed"]
        if self._allowed is None:
            self._allowed = HostRing(allowed)
        staging = self._allowed.take()
        words = staging.numpy().view(np.uint32)
        rows = np.empty(len(constrained), np.int64)
        for index, sequence in enumerate(constrained):
            assert sequence.constraint is not None, "only constrained sequences are given"
            sequence.constraint.write_allowed(words[index], sequence.generated_ids)
            rows[index] = sequence.row
        allowed.index_copy_(
            0,
            self._stage(rows, torch.int64).to(allowed.device, non_blocking=True),
            staging[: len(constrained)].to(allowed.device, non_blocking=True),
        )

    def _stage(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Put values where they can be copied to the device without waiting."""
        staged = torch.from_numpy(values).to(dtype)
        return staged.pin_memory() if self._state.packed.is_cuda else staged

    def _send(self, name: str) -> None:
        staging = self._rings[name].take()
        staging.numpy()[...] = self._mirror[name]
        self._state.tensors[name].copy_(staging, non_blocking=True)

    def write_decode(self, plan: StepPlan, bucket: int) -> None:
        """Say which rows a decode step of `bucket` sequences advances; the rest is padding."""
        if plan.composition == self._composition and bucket == self._bucket:
            return
        self._composition, self._bucket = plan.composition, bucket
        staging = self._rings["seq_rows"].take()
        rows = staging.numpy()
        rows[:] = PADDING_ROW
        rows[: len(plan.rows)] = plan.rows
        self._state.tensors["seq_rows"].copy_(staging, non_blocking=True)

    def write_mixed(self, plan: StepPlan, sizes: tuple[int, int] | None = None) -> None:
        """Write all inputs of a step with prompt chunks, and the rows' new lengths.

        `sizes` are the tokens and sequences that the program computes, where these are more than
        the plan's: the first sequence of padding has all tokens beyond.
        """
        self._composition = -1
        staging = self._packed.take()
        packed, offsets = staging.numpy(), self._state.packed_offsets
        num_seqs, num_decode = len(plan.rows), plan.num_decode

        def field(name: str, size: int) -> np.ndarray:
            return packed[offsets[name] : offsets[name] + size]

        starts, counts = np.empty(num_seqs, np.int32), np.ones(num_seqs, np.int32)
        starts[:num_decode] = plan.starts
        starts[num_decode:] = [chunk.start for chunk in plan.chunks]
        counts[num_decode:] = [chunk.stop - chunk.start for chunk in plan.chunks]
        query_start = field("query_start", num_seqs + 1)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        num_tokens = plan.num_tokens
        token_seq = field("token_seq", num_tokens)
        token_seq[:] = np.repeat(np.arange(num_seqs, dtype=np.int32), counts)
        field("positions", num_tokens)[:] = (
            np.arange(num_tokens, dtype=np.int32) - query_start[token_seq] + starts[token_seq]
        )
        token_ids = field("token_ids", num_tokens)
        token_ids[:num_decode] = PENDING_TOKEN
        for index, chunk in enumerate(plan.chunks, start=num_decode):
            begin, end = query_start[index], query_start[index + 1]
            token_ids[begin:end] = chunk.sequence.token_ids[chunk.start : chunk.stop]
        field("context_lens", num_seqs)[:] = starts + counts
        sample_index = field("sample_index", num_seqs)
        sample_index[:] = query_start[1:] - 1
        for index, chunk in enumerate(plan.chunks, start=num_decode):
            if not (chunk.samples or chunk.scores):
                sample_index[index] = -1
        seq_rows = field("seq_rows", num_seqs)
        seq_rows[:num_decode] = plan.group.rows
        seq_rows[num_decode:] = plan.rows[num_decode:]
        if sizes is not None and sizes != (num_tokens, num_seqs):
            all_tokens, all_seqs = sizes
            query_start = field("query_start", all_seqs + 1)
            query_start[num_seqs + 1 :] = all_tokens
            of_tokens = {"token_seq": num_seqs, "positions": 0, "token_ids": 0}
            for name, padding in of_tokens.items():
                field(name, all_tokens)[num_tokens:] = padding
            of_seqs = {"context_lens": 0, "sample_index": -1, "seq_rows": PADDING_ROW}
            for name, padding in of_seqs.items():
                field(name, all_seqs)[num_seqs:] = padding
        self._state.packed.copy_(staging, non_blocking=True)
        tensors = self._state.tensors
        rows, lengths = tensors["seq_rows"][:num_seqs].long(), tensors["context_lens"][:num_seqs]
        if len(set(plan.rows)) < num_seqs:
            # Of the slices of a prompt that is scored the last one says how long its row is.
            last = {row: index for index, row in enumerate(plan.rows)}
            kept = self._stage(np.array(list(last.values())), torch.int64)
            kept = kept.to(rows.device, non_blocking=True)
            rows, lengths = rows[kept], lengths[kept]
        tensors["length"].index_copy_(0, rows, lengths)


def _as_signed(seed: int) -> int:
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
