"""The templates that adjust logits and count tokens, against the reference and a plain history."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.ir.ops.registry import lookup
from treadle.kernels import cross_compile, emit
from treadle.kernels.reference.sampling import adjust_logits, count_tokens

from .private_template import load_template

FOREVER = 2**31 - 1
MAX_BIASES = 32
OPERANDS = lookup("adjust_logits").operands


def neutral(num_rows: int, vocab: int) -> dict[str, torch.Tensor]:
    """Give operands of which every row asks for nothing; sequence i is row i."""
    i32, rows = torch.int32, num_rows
    return {
        "logits": 4 * torch.randn(rows, vocab),
        "seq_rows": torch.arange(rows, dtype=i32),
        "sample_index": torch.zeros(rows, dtype=i32),
        "length": torch.full((rows,), 10, dtype=i32),
        "adjusted": torch.zeros(rows, dtype=i32),
        "num_biases": torch.zeros(rows, dtype=i32),
        "bias_tokens": torch.zeros(rows, MAX_BIASES, dtype=i32),
        "bias_values": torch.zeros(rows, MAX_BIASES),
        "bias_stops": torch.full((rows, MAX_BIASES), FOREVER, dtype=i32),
        "repetition_penalty": torch.ones(rows),
        "presence_penalty": torch.zeros(rows),
        "frequency_penalty": torch.zeros(rows),
        "token_counts": torch.zeros(rows, vocab, dtype=torch.int16),
        "allowed": torch.full((rows, -(-vocab // 32)), -1, dtype=i32),
    }


def randomised(num_rows: int, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Give operands of which each row asks for something else, beside old state."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    operands = neutral(num_rows, vocab)
    order = generator.sample(range(num_rows), num_rows)
    operands["seq_rows"] = torch.tensor(order, dtype=torch.int32)
    for row in range(num_rows):
        count = generator.randint(0, min(MAX_BIASES, vocab))
        operands["adjusted"][row] = generator.randrange(8)
        operands["num_biases"][row] = count
        operands["bias_tokens"][row, :count] = torch.tensor(generator.sample(range(vocab), count))
        operands["bias_values"][row] = torch.randn(MAX_BIASES) * 10
        operands["bias_values"][row, generator.randrange(MAX_BIASES)] = -math.inf
        operands["bias_stops"][row, ::3] = generator.choice([9, 10, 11])
        operands["repetition_penalty"][row] = generator.choice([0.5, 1.0, 1.7])
        operands["presence_penalty"][row] = generator.uniform(-2, 2)
        operands["frequency_penalty"][row] = generator.uniform(-2, 2)
        history = torch.randint(0, vocab, (2 * vocab,))
        operands["token_counts"][row] = 2 * history.bincount(minlength=vocab)
        operands["token_counts"][row] += torch.randint(0, 2, (vocab,), dtype=torch.int16)
        operands["allowed"][row] = torch.randint(
            -(2**31), 2**31 - 1, operands["allowed"][row].shape
        )
    return operands


def adjust_on_device(
    operands: dict[str, torch.Tensor], device: str, block_v: int = 64
) -> torch.Tensor:
    """Give the logits that the template leaves; it must change nothing else."""
    num_seqs, vocab = operands["logits"].shape
    template = load_template(
        "adjust_logits",
        shape={"VOCAB": vocab, "MAX_BIASES": MAX_BIASES},
        schedule={"BLOCK_V": block_v},
    )
    padding = torch.full((1, vocab), 7.5)
    tensors = {name: tensor.clone().to(device) for name, tensor in operands.items()}
    tensors["logits"] = torch.cat([operands["logits"], padding]).to(device)
    template.launch(*(tensors[name] for name in OPERANDS), num_seqs)
    found = tensors.pop("logits").cpu()
    assert torch.equal(found[num_seqs:], padding), "logits past the last sequence were changed"
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu(), operands[name]), f"{name} was changed"
    return found[:num_seqs]


def adjust_by_reference(operands: dict[str, torch.Tensor]) -> torch.Tensor:
    tensors = {name: tensor.clone() for name, tensor in operands.items()}
    adjust_logits(*(tensors[name] for name in OPERANDS))
    return tensors["logits"]


def check(operands: dict[str, torch.Tensor], device: str, block_v: int = 64) -> torch.Tensor:
    found, expected = adjust_on_device(operands, device, block_v), adjust_by_reference(operands)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    return found


@pytest.mark.parametrize(("vocab", "block_v"), [(1, 16), (37, 64), (200, 64), (320, 512)])
def test_rows_that_ask_for_all_kinds_of_things(
    vocab: int, block_v: int, device: str, rng_seed: int
) -> None:
    check(randomised(5, vocab, rng_seed), device, block_v)


def test_rows_that_ask_for_nothing_keep_their_logits_whatever_their_state(
    device: str, rng_seed: int
) -> None:
    operands = randomised(3, 100, rng_seed)
    operands["adjusted"][:] = 0
    assert torch.equal(check(operands, device), operands["logits"])


def test_sequences_without_a_row_or_a_token_are_left_alone(device: str, rng_seed: int) -> None:
    operands = randomised(4, 100, rng_seed)
    operands["adjusted"][:] = 7
    operands["seq_rows"] = torch.tensor([3, -1, 0, 1], dtype=torch.int32)
    operands["sample_index"] = torch.tensor([5, 5, -1, -2], dtype=torch.int32)
    found = check(operands, device)
    assert torch.equal(found[1:], operands["logits"][1:])
    assert not torch.equal(found[0], operands["logits"][0])


def test_a_bias_ends_at_its_position(device: str) -> None:
    operands = neutral(3, 40)
    operands["logits"][:] = 1.0
    operands["adjusted"][:] = 2
    operands["num_biases"][:] = 1
    operands["bias_tokens"][:, 0] = 5
    operands["bias_values"][:, 0] = -math.inf
    operands["bias_stops"][:, 0] = 10
    operands["length"] = torch.tensor([9, 10, 11], dtype=torch.int32)
    assert check(operands, device)[:, 5].tolist() == [-math.inf, 1.0, 1.0]


def test_the_last_bit_of_a_word_is_a_token_too(device: str) -> None:
    operands = neutral(1, 65)
    operands["adjusted"][:] = 4
    operands["allowed"][0] = torch.tensor([-(2**31), 1, 1], dtype=torch.int32)
    found = check(operands, device)
    assert found.isfinite().nonzero()[:, 1].tolist() == [31, 32, 64]


def test_faults_of_the_model_stay_faults(device: str) -> None:
    operands = neutral(1, 40)
    operands["adjusted"][:] = 7
    operands["logits"][0, :2] = torch.tensor([math.nan, math.inf])
    operands["repetition_penalty"][:] = 2.0
    operands["token_counts"][0, :2] = 1
    found = adjust_on_device(operands, device)
    assert found[0, 0].isnan() and found[0, 1] == math.inf


# --- penalties against a history ------------------------------------------------------------------


def penalise(
    logits: torch.Tensor,
    prompt: Sequence[int],
    answer: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """Apply the penalties token by token, as the API reference words them."""
    found = logits.clone()
    for token in {*prompt, *answer}:
        value = float(found[token])
        found[token] = value / repetition if value > 0 else value * repetition
    for token in set(answer):
        found[token] -= presence + frequency * answer.count(token)
    return found


TOKENS = st.lists(st.integers(0, 19), max_size=40)


@settings(max_examples=40, deadline=None)
@given(
    prompt=TOKENS,
    answer=TOKENS,
    repetition=st.floats(0.1, 5.0),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
    seed=st.integers(0, 2**31),
)
def test_penalties_are_those_of_the_history(
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    operands = neutral(1, 20)
    operands["adjusted"][:] = 1
    operands["repetition_penalty"][:] = repetition
    operands["presence_penalty"][:] = presence
    operands["frequency_penalty"][:] = frequency
    operands["token_counts"][0, list(set(prompt))] = 1
    counting = (operands["seq_rows"], operands["adjusted"], operands["token_counts"])
    for token in answer:
        count_tokens(torch.tensor([token], dtype=torch.int32), *counting)
    expected = penalise(operands["logits"][0], prompt, answer, repetition, presence, frequency)
    found = adjust_by_reference(operands)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- counting -------------------------------------------------------------------------------------


def test_tokens_are_counted_in_the_rows_that_need_it(device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    vocab, num_rows = 50, 7
    counts = torch.randint(0, 9, (num_rows, vocab), dtype=torch.int16)
    seq_rows = torch.tensor([6, 0, -1, 2, 3, 4], dtype=torch.int32)
    adjusted = torch.tensor([1, 0, 6, 7, 1, 1, 1], dtype=torch.int32)
    tokens = torch.tensor([49, 0, 5, 7, 7, -2], dtype=torch.int32)
    template = load_template("count_tokens", shape={"VOCAB": vocab}, schedule={"BLOCK_B": 4})
    found = counts.clone().to(device)
    template.launch(tokens.to(device), seq_rows.to(device), adjusted.to(device), found, 6)
    expected = counts.clone()
    count_tokens(tokens, seq_rows, adjusted, expected)
    assert torch.equal(found.cpu(), expected)
    changed = (expected - counts).nonzero().tolist()
    assert changed == [[0, 0], [3, 7], [6, 49]]
    assert int((expected - counts).max()) == 2


@pytest.mark.parametrize("code", [2**15 - 4, 2**15 - 3, 2**15 - 2, 2**15 - 1])
def test_a_count_never_overflows(code: int, device: str) -> None:
    template = load_template("count_tokens", shape={"VOCAB": 3}, schedule={"BLOCK_B": 4})
    counts = torch.tensor([[0, code, 0]], dtype=torch.int16)
    zero, one = (torch.tensor([value], dtype=torch.int32) for value in (0, 1))
    found = counts.clone().to(device)
    template.launch(one.to(device), zero.to(device), one.to(device), found, 1)
    count_tokens(one, zero, one, counts)
    assert torch.equal(found.cpu(), counts)
    assert counts[0].tolist() == [0, code + 2 if code < 2**15 - 2 else code, 0]


# --- compilation ----------------------------------------------------------------------------------


def test_templates_compile_for_every_target_without_spills(tmp_path: Path) -> None:
    arguments = {
        "adjust_logits": (
            *("f32[8, 49152]", "i32[8]", "i32[8]", "i32[9]", "i32[9]", "i32[9]"),
            *("i32[9, 1024]", "f32[9, 1024]", "i32[9, 1024]", "f32[9]", "f32[9]", "f32[9]"),
            *("i16[9, 49152]", "i32[9, 1536]", 8),
        ),
        "count_tokens": ("i32[8]", "i32[8]", "i32[9]", "i16[9, 49152]", 8),
    }
    jobs = [
        cross_compile.Job(str(emit.TEMPLATE_DIR / f"{name}.py"), target, arguments[name])
        for name in arguments
        for target in ("sm_80", "sm_90", "gfx942")
    ]
    outcomes = list(cross_compile.compile_many(jobs, triton_cache=tmp_path))
    assert len(outcomes) == len(jobs)
    for outcome in outcomes:
        assert not outcome.error, f"{outcome.job.target}: {outcome.error}"
        (kernel,) = outcome.kernels
        assert kernel.spill_bytes == 0, outcome.job.target
