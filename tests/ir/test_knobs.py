"""The environment variables: read when asked, strict, documented, and secret where they must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.ir import errors, knobs


def test_an_unset_or_empty_variable_gives_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_DEBUG", raising=False)
    assert knobs.debug() == 0
    monkeypatch.setenv("TREADLE_DEBUG", "")
    assert knobs.debug() == 0


def test_a_value_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_DEBUG", "1")
    assert knobs.debug() == 1
    monkeypatch.setenv("TREADLE_DEBUG", "3")
    assert knobs.debug() == 3


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (knobs.debug, "6"),
        (knobs.debug, "-1"),
        (knobs.target, "tpu"),
        (knobs.triton_interpret, "perhaps"),
        (knobs.api_keys, "one,,two"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, knob: knobs.Knob[object], value: str
) -> None:
    monkeypatch.setenv(knob.variable, value)
    with pytest.raises(errors.ConfigError, match=f"`{knob.variable}`"):
        knob()


def test_a_bad_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEYS", "sesame,")
    with pytest.raises(errors.ConfigError) as caught:
        knobs.api_keys()
    assert "sesame" not in str(caught.value)


def test_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEYS", "one, two")
    assert knobs.api_keys() == ("one", "two")


def test_the_cache_follows_the_convention_for_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TREADLE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert knobs.cache_dir() == tmp_path / "treadle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert knobs.cache_dir() == tmp_path / ".cache" / "treadle"


def test_a_tilde_in_a_folder_is_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TREADLE_CACHE_DIR", "~/elsewhere")
    assert knobs.cache_dir() == tmp_path / "elsewhere"


def test_a_childs_environment_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_DEBUG", "1")
    monkeypatch.setenv("CC", "gcc")
    child = knobs.child_environment(TREADLE_DEBUG=None, CC="clang")
    assert ("TREADLE_DEBUG" in child, child["CC"]) == (False, "clang")


def test_every_knob_is_listed() -> None:
    defined = {value for value in vars(knobs).values() if isinstance(value, knobs.Knob)}
    assert defined == set(knobs.ALL)
