"""What a step's plan becomes on the device: packed inputs, padding, rows, pages, host buffers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from treadle.runtime.batch import PENDING_TOKEN, RING_SIZE, BatchWriter, HostRing
from treadle.runtime.config import EngineConfig
from treadle.runtime.pages import PageTable
from treadle.runtime.request import SamplingParams
from treadle.runtime.sequences import SequenceState
from treadle.runtime.state import PADDING_ROW, DeviceState, allocate_state
from treadle.runtime.steps import Decodes, Slice, StepPlan

CONFIG = EngineConfig(
    "reference", "f32", page_size=16, max_rows=8, max_step_tokens=64, max_context_tokens=128
)
UNTOUCHED = 77  # what tensors hold before the writer under test comes


def make_state() -> DeviceState:
    return allocate_state([], CONFIG, 16, torch.device("cpu"))


def make_sequence(tokens: Sequence[int] = (), *, arrival: int = 0, **params: Any) -> SequenceState:
    name, ids = f"request-{arrival}", tuple(tokens)
    return SequenceState(
        name,
        ids,
        SamplingParams(**params),
        max_total_tokens=128,
        stop_ids=frozenset(),
        table=PageTable(name),
        arrival=arrival,
        token_ids=list(ids),
    )


def make_plan(
    *,
    decodes: Sequence[tuple[int, int]] = (),
    chunks: Sequence[Slice] = (),
    new_rows: Sequence[int] = (),
    updates: Sequence[tuple[int, int, int]] = (),
    composition: int = 1,
) -> StepPlan:
    """Plan a step; `decodes` are (row, position)."""
    rows = (*(row for row, _ in decodes), *(chunk.row for chunk in chunks))
    return StepPlan(
        0,
        composition,
        Decodes(
            tuple(make_sequence(arrival=row) for row, _ in decodes),
            np.array([row for row, _ in decodes], np.int64),
        ),
        np.array([position for _, position in decodes], np.int64),
        tuple(chunks),
        rows,
        tuple(new_rows),
        tuple(updates),
    )


def random_mixed_plan(generator: random.Random) -> StepPlan:
    rows = generator.sample(range(8), generator.randint(1, 8))
    num_decode = generator.randint(0, len(rows) - 1)
    decodes = [(row, generator.randrange(100)) for row in rows[:num_decode]]
    chunks = []
    for row in rows[num_decode:]:
        tokens = [generator.randrange(320) for _ in range(generator.randint(1, 30))]
        start = generator.randrange(len(tokens))
        stop = min(generator.randint(start + 1, len(tokens)), start + 7)
        sequence = make_sequence(tokens, arrival=row)
        chunks.append(Slice(sequence, row, start, stop, generator.random() < 0.5))
    return make_plan(decodes=decodes, chunks=chunks)


def used(state: DeviceState, name: str, count: int) -> list[int]:
    return state.tensors[name][:count].tolist()


def test_a_mixed_step_lays_its_slices_one_after_the_other(rng_seed: int) -> None:
    generator = random.Random(rng_seed)
    for _ in range(50):
        state, plan = make_state(), random_mixed_plan(generator)
        BatchWriter(state).write_mixed(plan)
        # The same said slowly: a token at a time.
        tokens, positions, token_seq, ends, samples = [], [], [], [0], []
        for start in plan.starts:
            tokens.append(PENDING_TOKEN)
            positions.append(start)
            token_seq.append(len(ends) - 1)
            ends.append(len(tokens))
            samples.append(len(tokens) - 1)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                tokens.append(chunk.sequence.token_ids[position])
                positions.append(position)
                token_seq.append(len(ends) - 1)
            ends.append(len(tokens))
            samples.append(len(tokens) - 1 if chunk.samples else -1)
        contexts = [positions[end - 1] + 1 for end in ends[1:]]
        assert used(state, "token_ids", plan.num_tokens) == tokens
        assert used(state, "positions", plan.num_tokens) == positions
        assert used(state, "token_seq", plan.num_tokens) == token_seq
        assert used(state, "query_start", len(plan.rows) + 1) == ends
        assert used(state, "context_lens", len(plan.rows)) == contexts
        assert used(state, "sample_index", len(plan.rows)) == samples
        assert used(state, "seq_rows", len(plan.rows)) == list(plan.rows)


def test_a_mixed_step_sets_the_lengths_of_its_rows_and_of_no_other() -> None:
    state = make_state()
    state.tensors["length"].fill_(UNTOUCHED)
    chunk = Slice(make_sequence(range(20)), 2, 8, 20, True)
    BatchWriter(state).write_mixed(make_plan(decodes=[(5, 40)], chunks=[chunk]))
    expected = [UNTOUCHED] * 8
    expected[5], expected[2] = 41, 20
    assert state.tensors["length"].tolist() == expected


def test_a_decode_step_pads_its_bucket_with_rows_that_write_nothing() -> None:
    state = make_state()
    state.tensors["seq_rows"].fill_(UNTOUCHED)
    BatchWriter(state).write_decode(make_plan(decodes=[(6, 1), (0, 9), (3, 4)]), bucket=4)
    assert state.tensors["seq_rows"].tolist() == [6, 0, 3, *[PADDING_ROW] * 5]


def test_the_rows_of_an_unchanged_decode_step_are_not_sent_again() -> None:
    state = make_state()
    writer = BatchWriter(state)
    plan = make_plan(decodes=[(1, 5)], composition=3)
    writer.write_decode(plan, bucket=1)
    state.tensors["seq_rows"].fill_(UNTOUCHED)
    writer.write_decode(make_plan(decodes=[(1, 6)], composition=3), bucket=1)
    assert state.tensors["seq_rows"].tolist() == [UNTOUCHED] * 8


@pytest.mark.parametrize("change", ["composition", "bucket", "mixed step between"])
def test_the_rows_of_a_changed_decode_step_are_sent(change: str) -> None:
    state = make_state()
    writer = BatchWriter(state)
    plan = make_plan(decodes=[(1, 5)], composition=3)
    writer.write_decode(plan, bucket=1)
    if change == "mixed step between":
        writer.write_mixed(make_plan(chunks=[Slice(make_sequence([7]), 4, 0, 1, True)]))
    state.tensors["seq_rows"].fill_(UNTOUCHED)
    if change == "composition":
        plan = make_plan(decodes=[(1, 5)], composition=4)
    writer.write_decode(plan, bucket=2 if change == "bucket" else 1)
    assert state.tensors["seq_rows"].tolist() == [1, *[PADDING_ROW] * 7]


def test_new_pages_are_added_to_the_block_table_and_the_others_stay(rng_seed: int) -> None:
    generator = random.Random(rng_seed)
    state = make_state()
    writer = BatchWriter(state)
    width = CONFIG.pages_per_row
    expected = torch.zeros((8, width), dtype=torch.int32)
    for _ in range(20):
        places = generator.sample([(row, index) for row in range(8) for index in range(width)], 5)
        updates = [(row, index, generator.randrange(16)) for row, index in places]
        for row, index, page in updates:
            expected[row, index] = page
        writer.write_rows(make_plan(decodes=[(0, 1)], updates=updates))
        assert torch.equal(state.tensors["block_table"], expected)


def test_a_step_without_news_sends_nothing_about_rows() -> None:
    state = make_state()
    writer = BatchWriter(state)
    names = ("block_table", "temperature", "top_k", "top_p", "min_p", "seed")
    for name in names:
        state.tensors[name].fill_(UNTOUCHED)
    writer.write_rows(make_plan(decodes=[(1, 5)]))
    assert all((state.tensors[name] == UNTOUCHED).all() for name in names)


def test_a_new_row_gets_its_sampling_parameters_and_the_others_keep_theirs() -> None:
    state = make_state()
    writer = BatchWriter(state)
    first = make_sequence(
        [1], arrival=1, temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, seed=11
    )
    second = make_sequence([2], arrival=2, temperature=0.0, seed=12)
    writer.write_rows(make_plan(chunks=[Slice(first, 3, 0, 1, True)], new_rows=[3]))
    # A row that goes on with a later chunk of its prompt is not new.
    chunks = [Slice(first, 3, 0, 1, True), Slice(second, 6, 0, 1, True)]
    writer.write_rows(make_plan(chunks=chunks, new_rows=[6]))
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    rows = [[state.tensors[name][row].item() for name in names] for row in (3, 6)]
    assert rows == [[0.5, 7, 0.75, 0.125, 11], [0.0, 0, 1.0, 0.0, 12]]


@pytest.mark.parametrize(
    ("seed", "stored"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_a_seed_of_64_bits_keeps_all_of_them(seed: int, stored: int) -> None:
    state = make_state()
    chunk = Slice(make_sequence([1], seed=seed), 0, 0, 1, True)
    BatchWriter(state).write_rows(make_plan(chunks=[chunk], new_rows=[0]))
    assert state.tensors["seed"][0].item() == stored


def test_requests_without_a_seed_draw_from_streams_of_their_own() -> None:
    seeds = set()
    for _ in range(2):  # two engines
        state = make_state()
        chunks = [Slice(make_sequence([1], arrival=n), n, 0, 1, True) for n in range(4)]
        BatchWriter(state).write_rows(make_plan(chunks=chunks, new_rows=range(4)))
        seeds |= set(state.tensors["seed"][:4].tolist())
    assert len(seeds) == 8


def test_a_host_buffer_comes_again_only_after_all_the_others() -> None:
    assert RING_SIZE >= 3  # two steps may be in flight while a third is written
    ring = HostRing(torch.zeros(3, 2, dtype=torch.int32))
    taken = [ring.take() for _ in range(3 * RING_SIZE)]
    assert len({buffer.data_ptr() for buffer in taken[:RING_SIZE]}) == RING_SIZE
    for early, late in zip(taken, taken[RING_SIZE:], strict=False):
        assert early is late
    assert {(buffer.shape, buffer.dtype) for buffer in taken} == {((3, 2), torch.int32)}


def test_the_step_in_flight_keeps_its_buffer_while_the_next_is_written() -> None:
    sources: list[torch.Tensor] = []

    class SlowTensor(torch.Tensor):
        """A tensor of a device that takes its time: it notes what to copy and copies nothing."""

        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            sources.append(source)
            return self

    state = make_state()
    slow = state.tensors["block_table"].as_subclass(SlowTensor)
    writer = BatchWriter(replace(state, tensors={**state.tensors, "block_table": slow}))
    for page in range(RING_SIZE):
        writer.write_rows(make_plan(decodes=[(0, 1)], updates=[(0, 0, page)]))
    assert [int(source[0, 0]) for source in sources] == list(range(RING_SIZE))
