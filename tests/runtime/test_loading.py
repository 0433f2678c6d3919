"""What loading watches for: kernels that are compiled though all should be there."""

from __future__ import annotations

import pytest
import triton

from treadle.runtime.loading import count_compiles


def test_a_kernel_compiled_while_serving_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    count = count_compiles()
    tell = triton.knobs.compilation.listener
    assert tell is not None
    tell(src=None, metadata={"name": "gemv"}, metadata_group={}, times=None, cache_hit=True)
    assert count() == 0 and not caplog.records
    tell(src=None, metadata={"name": "gemv"}, metadata_group={}, times=None, cache_hit=False)
    assert count() == 1
    assert "compiled while serving: kernel gemv" in caplog.text
