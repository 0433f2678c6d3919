"""The only reader of `os.environ`: every variable Treadle listens to, typed, documented and strict.

Values are read when asked for, so tests may change them. A value that can't be parsed raises
`ConfigError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from treadle.ir.errors import ConfigError, MachineError

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """Describe one environment variable. A call gives its value, or the default where unset.

    The value of a `secret` is never shown.
    """

    variable: str
    default: Callable[[], T]
    parse: Callable[[str], T]
    doc: str
    secret: bool = False

    def __call__(self) -> T:
        text = os.environ.get(self.variable, "")
        if text == "":
            return self.default()
        try:
            return self.parse(text)
        except ValueError as error:
            shown = "set" if self.secret else repr(text)
            raise ConfigError(
                f"Environment variable `{self.variable}` is {shown}: {error}.",
                remedy=f"It means: {self.doc} Unset it for the default.",
            ) from None


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0")


def _parse_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise ValueError("expected keys with commas between them, and found an empty one")
    return keys


def _parse_level(text: str) -> int:
    if not text.isdigit() or int(text) > 5:
        raise ValueError("expected a whole number from 0 to 5")
    return int(text)


def _parse_target(text: str) -> str:
    if text not in ("auto", "cuda", "interpret", "reference"):
        raise ValueError("expected auto, cuda, interpret or reference")
    return text


def _default_cache_dir() -> Path:
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "treadle"
    try:
        return Path.home() / ".cache" / "treadle"
    except RuntimeError:  # an arbitrary user id in a container
        raise MachineError(
            "The cache needs a folder, and this user has no home folder to put it in.",
            remedy="Set TREADLE_CACHE_DIR to a folder that this user may write to.",
        ) from None


cache_dir = Knob(
    "TREADLE_CACHE_DIR",
    _default_cache_dir,
    lambda text: Path(text).expanduser(),
    "the folder for compiled kernels, tuned schedules and downloaded demo models.",
)
debug = Knob(
    "TREADLE_DEBUG",
    lambda: 0,
    _parse_level,
    "from 1 to 5: errors come with their traceback.",
)
target = Knob(
    "TREADLE_TARGET",
    lambda: "auto",
    _parse_target,
    "where to run: auto, cuda, interpret or reference.",
)
api_keys: Knob[tuple[str, ...]] = Knob(
    "TREADLE_API_KEYS",
    lambda: (),
    _parse_keys,
    "the keys that `serve` asks its clients for, with commas between them.",
    secret=True,
)
no_color = Knob(
    "NO_COLOR", lambda: False, lambda text: True, "no colours on the terminal (any value)."
)
ci = Knob(
    "CI",
    lambda: False,
    lambda text: text.lower() not in ("0", "false"),
    "running unattended: log lines, no bars.",
)
triton_interpret = Knob(
    "TRITON_INTERPRET",
    lambda: False,
    _parse_bool,
    "Triton's own switch: run kernels in its CPU interpreter.",
)

demo_wheel: Knob[Path | None] = Knob(
    "TREADLE_DEMO_WHEEL",
    lambda: None,
    lambda text: Path(text).expanduser(),
    "the demo model's wheel on this disk, where it can't be downloaded.",
)
c_compiler: Knob[str] = Knob(
    "CC", lambda: "", lambda text: text, "Triton's own switch: the C compiler for its launchers."
)

ALL: tuple[Knob, ...] = (
    cache_dir,
    debug,
    target,
    demo_wheel,
    api_keys,
    no_color,
    ci,
    triton_interpret,
    c_compiler,
)


def child_environment(**changes: str | None) -> dict[str, str]:
    """Give this process's environment with changes, for a child; None takes a variable out."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def use_interpreter() -> None:
    """Switch Triton to its CPU interpreter in this process, before `triton` is first imported."""
    os.environ["TRITON_INTERPRET"] = "1"


def use_triton_cache(folder: Path) -> None:
    """Make Triton keep its compiled binaries in `folder`, before the first kernel is compiled."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
