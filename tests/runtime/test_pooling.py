"""How a model's folder declares its pooling, and what a pooled embedding is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.runtime.pooling import pool, read_pooling

LAST = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
KIND = "sentence_transformers.models."


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"path": f"{index}_{kind}", "type": KIND + kind} for index, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [(LAST, "last"), (MEAN, "mean"), ({"pooling_mode": "mean"}, "mean")],
)
def test_a_folder_declares_its_pooling(tmp_path: Path, config: Any, expected: str) -> None:
    write(tmp_path, "1_Pooling/config.json", config)
    warnings: list[str] = []
    assert read_pooling(tmp_path, warnings.append) == expected
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "Normalize"))
    assert read_pooling(tmp_path, warnings.append) == expected
    assert warnings == []


def test_modules_say_where_the_pooling_is(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", [{"path": "odd", "type": f"{KIND}Pooling"}])
    write(tmp_path, "odd/config.json", LAST)
    assert read_pooling(tmp_path, pytest.fail) == "last"


def test_a_folder_or_a_file_without_pooling_declares_none(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, pytest.fail) == ""
    assert read_pooling(tmp_path / "model.gguf", pytest.fail) == ""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "cls_token"),
        ({"1_Pooling/config.json": LAST | MEAN}, "lasttoken and mean"),
        ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": False}}, "no pooling"),
        ({"1_Pooling/config.json": "{"}, "JSONDecodeError"),
        ({"1_Pooling/config.json": LAST, "modules.json": modules("Pooling", "Dense")}, "Dense"),
        ({"1_Pooling/config.json": LAST, "modules.json": {"type": "x"}}, "TypeError"),
    ],
)
def test_what_can_not_be_followed_is_told(tmp_path: Path, files: Any, said: str) -> None:
    for name, value in files.items():
        write(tmp_path, name, value)
    warnings: list[str] = []
    assert read_pooling(tmp_path, warnings.append) == ""
    assert len(warnings) == 1 and said in warnings[0]


def test_an_embedding_is_the_mean_at_length_1() -> None:
    found = pool([np.array([1, 2], np.float32), np.array([5, 6], np.float32)])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0.6, 0.8], atol=1e-7)
    assert list(pool([np.zeros(2, np.float32)])) == [0, 0]
