"""The sampling template against the reference: the same token for the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from treadle.kernels import cross_compile, emit
from treadle.kernels.reference.sampling import FAULT_TOKEN, philox_uniform, sample

from .private_template import load_template

UNTOUCHED = -7


@dataclass
class Batch:
    """Hold sampling inputs; each row setting is one value for all rows, or a list.

    Unless told otherwise, sequence i is row i and wants a token.
    """

    logits: torch.Tensor
    temperature: float | list[float] = 1.0
    top_k: int | list[int] = 0
    top_p: float | list[float] = 1.0
    min_p: float | list[float] = 0.0
    seed: int | list[int] = 0
    length: int | list[int] = 0
    seq_rows: list[int] | None = None
    sample_index: list[int] | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Give the arguments that the reference and the template share."""
        num_seqs = self.logits.shape[0]
        seq_rows = list(range(num_seqs)) if self.seq_rows is None else self.seq_rows
        num_rows = max(*seq_rows, num_seqs - 1) + 1
        index = list(range(num_seqs)) if self.sample_index is None else self.sample_index
        settings = []
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "length"):
            value = getattr(self, name)
            values = value if isinstance(value, list) else [value] * num_rows
            dtype = {"seed": torch.int64, "top_k": torch.int32, "length": torch.int32}.get(name)
            settings.append(torch.tensor(values, dtype=dtype or torch.float32))
        last_token = torch.full((num_rows,), UNTOUCHED, dtype=torch.int32)
        int32 = (torch.tensor(values, dtype=torch.int32) for values in (seq_rows, index))
        return (self.logits, *int32, *settings, last_token)


def sample_on_device(batch: Batch, device: str, block_v: int = 1024) -> tuple[list[int], list[int]]:
    """Give the template's tokens and last tokens; it must write no further token."""
    vocab = batch.logits.shape[1]
    if device == "cuda":
        if vocab == 1:
            pytest.skip("Triton 3.6 can't compile loops of one round; see `sample_schedules`")
        block_v = min(block_v, 1 << (vocab - 1).bit_length() - 1)
    template = load_template("sample", shape={"VOCAB": vocab}, schedule={"BLOCK_V": block_v})
    tensors = [tensor.to(device) for tensor in batch.tensors()]
    num_seqs = batch.logits.shape[0]
    tokens = torch.full((num_seqs + 1,), -99, dtype=torch.int32, device=device)
    template.launch(*tensors, tokens, num_seqs)
    assert int(tokens[num_seqs]) == -99, "a token past the last sequence was written"
    return tokens[:num_seqs].tolist(), tensors[-1].tolist()


def check(batch: Batch, device: str, block_v: int = 1024) -> list[int]:
    """Check that template and reference agree, but for rounding; give the template's tokens."""
    tensors = batch.tensors()
    expected, last_token = sample(*tensors).tolist(), tensors[-1]
    tokens, found_last_token = sample_on_device(batch, device, block_v)
    for seq, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            assert token >= 0 and wanted >= 0, f"sequence {seq}: {token} instead of {wanted}"
            check_rounding(seq, token, *tensors)
            last_token[tensors[1][seq]] = token
    assert found_last_token == last_token.tolist()
    return tokens


def check_rounding(seq: int, token: int, logits: torch.Tensor, *state: torch.Tensor) -> None:
    """Check that a token's share of the distribution begins or ends within rounding of u."""
    row = int(state[0][seq])
    temperature, top_k, top_p, min_p, _, length = (float(t[row]) for t in state[2:8])
    scaled = logits[seq].double() / max(temperature, 1e-5)
    weights = (scaled - scaled.max()).exp()
    if 0 < top_k < weights.numel():
        weights[logits[seq] < logits[seq].topk(int(top_k)).values[-1]] = 0.0
    if top_p < 1.0:
        ordered = weights.sort(descending=True).values
        reached = int((ordered.cumsum(0) < top_p * weights.sum() * (1 - 1e-6)).sum())
        weights[weights < ordered[reached] * (1 - 1e-6)] = 0.0
    weights[weights < min_p * (1 - 1e-6)] = 0.0
    ends = weights.cumsum(0) / weights.sum()
    start, end = float(ends[token] - weights[token] / weights.sum()), float(ends[token])
    uniform = philox_uniform(int(state[6][row]), int(length))
    assert start - 1e-5 <= uniform <= end + 1e-5, (
        f"sequence {seq}: token {token} covers {start} to {end}, but u = {uniform}"
    )


def peaked(num_seqs: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    """Draw logits like a model's: a few tokens hold most of the mass."""
    return torch.randn(num_seqs, vocab) * scale - 5.0


# --- greedy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "block_v"), [(1, 16), (320, 128), (1000, 1024), (49152, 16384)])
def test_greedy_takes_the_largest(vocab: int, block_v: int, device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    logits = torch.randn(2, vocab)
    tokens = check(Batch(logits, temperature=0.0), device, block_v)
    assert tokens == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_index_on_ties(device: str) -> None:
    logits = torch.full((3, 300), -1.0)
    logits[0, [250, 7, 135]] = 2.0  # one lane's second block, another's first
    logits[1, [128, 129]] = 2.0
    assert check(Batch(logits, temperature=0.0), device, block_v=128) == [7, 128, 0]


def test_greedy_of_all_but_one_masked(device: str) -> None:
    logits = torch.full((1, 300), -math.inf)
    logits[0, 299] = -1e30
    assert check(Batch(logits, temperature=0.0), device, block_v=128) == [299]


# --- draws --------------------------------------------------------------------------------------

SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 1e-39},  # its reciprocal is no fp32
    "top_k": {"top_k": 20},
    "top_k 1": {"top_k": 1},
    "top_k above lanes": {"top_k": 300},
    "top_k of nearly all": {"top_k": 900, "temperature": 50.0},
    "top_k above vocab": {"top_k": 5000},
    "top_p": {"top_p": 0.9},
    "top_p low": {"top_p": 0.1},
    "top_p 0": {"top_p": 0.0},
    "top_p almost 1": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("vocab", "block_v"), [(1000, 256), (320, 512)])
def test_draws_what_the_reference_draws(
    vocab: int, block_v: int, settings: str, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (3,)).tolist()
    lengths = torch.randint(0, 2**31 - 1, (3,)).tolist()
    batch = Batch(peaked(3, vocab), **SETTINGS[settings], seed=seeds, length=lengths)
    check(batch, device, block_v)


def test_draws_from_a_large_vocabulary(device: str, rng_seed: int) -> None:
    torch.manual_seed(rng_seed)
    batch = Batch(
        peaked(4, 49152),
        temperature=[1.0, 0.8, 1.0, 0.6],
        top_k=[0, 50, 0, 50],
        top_p=[1.0, 1.0, 0.95, 0.9],
        seed=[1, 2, 3, 4],
        length=1000,
    )
    check(batch, device, block_v=16384)


def test_uniform_numbers_are_those_of_the_reference(device: str) -> None:
    # Of equal logits token floor(u * V) is drawn, which shows the leading bits of u.
    positions, seeds = [0, 1, 2**31 - 1, 77, 5], [0, 2**40 + 3, -1, 2**63 - 1, 2**31]
    batch = Batch(torch.zeros(5, 4096), seed=seeds, length=positions)
    expected = [
        int(philox_uniform(seed, position) * 4096)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert sample_on_device(batch, device, block_v=1024)[0] == expected


def test_draws_follow_the_softmax(device: str) -> None:
    row, count = torch.tensor([1.0, 0.0, 0.5, 1.5, -math.inf]), 150
    batch = Batch(row.expand(count, -1).contiguous(), seed=42, length=list(range(count)))
    observed = torch.tensor(sample_on_device(batch, device, block_v=8)[0]).bincount(minlength=5)
    expected = row.softmax(0) * count
    assert observed[4] == 0
    chi_square = ((observed - expected)[:4] ** 2 / expected[:4]).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by one seed in a thousand


def test_a_request_draws_the_same_whatever_its_row_and_neighbours(
    device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    logits = peaked(3, 320)
    alone = Batch(logits[2:], top_p=0.9, seed=11, length=30)
    together = Batch(
        logits,
        temperature=[0.0, 1.0, 0.5, 1.0, 1.0],
        top_k=[0, 0, 9, 0, 0],
        top_p=[1.0, 0.9, 1.0, 1.0, 1.0],
        seed=[1, 11, 3, 4, 5],
        length=[3, 30, 5, 6, 7],
        seq_rows=[4, 2, 1],
    )
    first = sample_on_device(alone, device, block_v=512)[0]
    assert sample_on_device(together, device, block_v=512)[0][2:] == first


# --- cuts ---------------------------------------------------------------------------------------


def spread_positions(count: int) -> list[int]:
    """Find positions whose uniform numbers for seed 0 are about (i + 1/2) / count."""
    numbers = torch.tensor([philox_uniform(0, position) for position in range(2000)])
    return [int((numbers - (i + 0.5) / count).abs().argmin()) for i in range(count)]


def kept(row: torch.Tensor, device: str, **settings: float) -> set[int]:
    """Give the tokens that are drawn; any with more than a tenth of the kept mass is among them."""
    positions = spread_positions(10)
    batch = Batch(row.expand(10, -1).contiguous(), length=positions, **settings)  # type: ignore[arg-type]
    return set(check(batch, device, block_v=8))


def test_top_k_keeps_all_that_tie_with_the_k_th(device: str) -> None:
    row = torch.tensor([1.0, 2.0, 1.0, 0.9999999, 1.0])
    assert kept(row, device, top_k=2) == {0, 1, 2, 4}


def test_top_k_tells_neighbouring_floats_apart(device: str) -> None:
    low = torch.tensor(0.3)
    high = torch.nextafter(low, torch.tensor(1.0))
    row = torch.stack([low, high, low, high, low, low, low, low, low])
    assert kept(row, device, top_k=2) == {1, 3}


@pytest.mark.parametrize("offset", [0.0, -30.0, 30.0])
def test_top_p_keeps_the_fewest_that_reach_it(offset: float, device: str) -> None:
    row = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1]).log() + offset
    assert kept(row, device, top_p=0.39) == {1}
    assert kept(row, device, top_p=0.69) == {1, 3}


def test_top_p_keeps_all_that_tie_with_the_smallest_kept(device: str) -> None:
    row = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert kept(row, device, top_p=0.5) == {0, 1, 2, 3}


def test_top_p_counts_of_what_top_k_has_left(device: str) -> None:
    row = torch.tensor([0.3, 0.4, 0.2, 0.1]).log()
    assert kept(row, device, top_k=2, top_p=0.5) == {1}


@pytest.mark.parametrize("min_p", [1.0, 7.0])
def test_min_p_keeps_the_largest_at_least(min_p: float, device: str) -> None:
    assert kept(torch.tensor([0.0, 1.0, 0.9, 1.0]), device, min_p=min_p) == {1, 3}


def test_zeros_of_either_sign_tie(device: str) -> None:
    row = torch.tensor([0.0, -0.0, -1.0, -0.0])
    assert kept(row, device, top_k=1) == {0, 1, 3}


def test_cuts_of_logits_that_span_all_floats(device: str) -> None:
    row = torch.tensor([1e-40, 3e38, -3e38, 1e-30, -math.inf, 0.0, -1e-35, 1.0])
    assert kept(row, device, top_k=3) == {1}
    assert kept(row[[0, 2, 3, 4, 5, 6]], device, top_k=2) == {0, 2}
    assert kept(row[[0, 2, 3, 4, 5, 6]], device, top_k=4) == {0, 2, 4, 5}


def test_top_p_of_equal_logits_keeps_them_all(device: str) -> None:
    batch = Batch(torch.full((4, 320), -2.5), top_p=0.3, seed=[1, 2, 3, 4])
    check(batch, device, block_v=128)


# --- no token, faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequences_that_want_no_token_store_nothing(
    temperature: float, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    logits = torch.randn(4, 40)
    logits[1] = math.nan
    batch = Batch(
        logits, temperature=temperature, seq_rows=[3, -1, 0, 1], sample_index=[0, 1, -1, 9]
    )
    tokens, last_token = sample_on_device(batch, device, block_v=64)
    assert tokens[1:3] == [-1, -1]
    assert last_token == [UNTOUCHED, tokens[3], UNTOUCHED, tokens[0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [0, 199])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_a_fault_of_their_sequence_only(
    bad: float, where: int, temperature: float, device: str, rng_seed: int
) -> None:
    torch.manual_seed(rng_seed)
    logits = torch.randn(3, 200)
    logits[1, where] = bad
    batch = Batch(logits, temperature=temperature, top_k=5, top_p=0.9)
    tokens = check(batch, device, block_v=64)
    assert tokens[1] == FAULT_TOKEN
    assert min(tokens[0], tokens[2]) >= 0


def test_logits_that_allow_no_token_are_a_fault(device: str) -> None:
    batch = Batch(torch.full((2, 200), -math.inf), temperature=[0.0, 1.0])
    assert check(batch, device, block_v=64) == [FAULT_TOKEN] * 2


# --- compilation --------------------------------------------------------------------------------


def test_template_compiles_for_every_target_without_spills(tmp_path: Path) -> None:
    arguments = (
        *("f32[8, 49152]", "i32[8]", "i32[8]", "f32[9]", "i32[9]", "f32[9]", "f32[9]"),
        *("i64[9]", "i32[9]", "i32[9]", "i32[8]", 8),
    )
    jobs = [
        cross_compile.Job(str(emit.TEMPLATE_DIR / "sample.py"), target, arguments)
        for target in ("sm_80", "sm_90", "gfx942")
    ]
    outcomes = list(cross_compile.compile_many(jobs, triton_cache=tmp_path))
    assert len(outcomes) == len(jobs)
    for outcome in outcomes:
        assert not outcome.error, f"{outcome.job.target}: {outcome.error}"
        (kernel,) = outcome.kernels
        print(f"{outcome.job.target}: {kernel.registers} registers, {kernel.spill_bytes} spilled")
        assert kernel.spill_bytes == 0, outcome.job.target
