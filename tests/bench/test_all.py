"""All benchmarks in a row: one that fails or takes too long leaves the others alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.bench import all as all_benchmarks


def test_each_end_is_told_and_the_time_is_kept(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("import sys; open(sys.argv[-1], 'w').write(sys.argv[1])")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    steps = {"bad": [], "good": ["a"], "slow": [], "good-again": ["b"]}
    more = ["--out", str(tmp_path / "out")]
    ends = all_benchmarks.run_steps(steps, 6.0, more, tmp_path)
    words = {name: end.partition(" after")[0] for name, end in ends.items()}
    assert words == {
        "bad": "exit code 3",
        "good": "done",
        "slow": "cut off: no time",
        "good-again": "left out: no time",
    }
    assert (tmp_path / "out").read_text() == "a"


def test_every_step_has_its_program() -> None:
    folder = Path(all_benchmarks.__file__).parent
    for name in all_benchmarks.STEPS:
        assert (folder / f"{name.partition('-')[0]}.py").is_file()


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        all_benchmarks.main(["--only", "sleep"])
    assert "there is no sleep" in capsys.readouterr().err
