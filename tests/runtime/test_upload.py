"""Tensors read ahead in blocks: the same as those read one by one, in any number and order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_llama
from treadle.ir.errors import CheckpointError
from treadle.runtime import upload
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.upload import Uploader

BLOCK_BYTES = 1000  # most tensors take several, the last of them a part of one


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.mark.parametrize("ahead_bytes", [1, 5000, 2**30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_come_whole_and_in_order(
    tmp_path: Path,
    rng_seed: int,
    device: str,
    dtype: str,
    ahead_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "AHEAD_BYTES", ahead_bytes)
    path = make_llama(tmp_path, seed=rng_seed % 1000, shards=3, dtype=dtype, with_tokenizer=False)
    checkpoint = open_checkpoint(path)
    names = sorted(checkpoint.names())
    random.Random(rng_seed).shuffle(names)
    names.append(names[0])  # the same may be wanted twice
    with Uploader(checkpoint, torch.device(device), names, ahead=True) as uploader:
        for name in names:
            found = uploader.take(name)
            assert found.device.type == device and found.dtype == checkpoint.dtype(name)
            assert torch.equal(found.cpu(), checkpoint.tensor(name)), name


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path, rng_seed: int, device: str) -> None:
    path = make_llama(tmp_path, seed=rng_seed % 1000, with_tokenizer=False)
    checkpoint = open_checkpoint(path)
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    names = sorted(checkpoint.names())
    with (
        Uploader(checkpoint, torch.device(device), names, ahead=True) as uploader,
        pytest.raises(CheckpointError, match=f"{file.name} can't be read: it became shorter"),
    ):
        for name in names:
            uploader.take(name)


def test_a_file_that_is_gone_is_named(tmp_path: Path, rng_seed: int, device: str) -> None:
    path = make_llama(tmp_path, seed=rng_seed % 1000, with_tokenizer=False)
    checkpoint = open_checkpoint(path)
    (path / "model.safetensors").unlink()
    names = sorted(checkpoint.names())
    with (
        Uploader(checkpoint, torch.device(device), names, ahead=True) as uploader,
        pytest.raises(CheckpointError, match="No such file"),
    ):
        uploader.take(names[0])
