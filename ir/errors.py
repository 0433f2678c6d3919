"""One exception class per kind of mistake, each with the exit code of the command line.

Knows nothing of the rest of the project; everything may import it.
"""

from __future__ import annotations


class TreadleError(Exception):
    """Say what was expected, what was found and where; `remedy` says what to do about it.

    Raised through its subclasses only. `exit_code` is what the command line returns for it.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class SpecError(TreadleError):
    """A spec is wrong: an op is misused, a weight undeclared, a graph breaks its stage's rules."""


class ShapeError(SpecError):
    """Shapes or dtypes of an op's operands do not fit; the message names both types."""


class LoweringError(TreadleError):
    """No kernel template covers a fused op."""


class KernelError(TreadleError):
    """A kernel, which the message names, does not compile or run, or its result is wrong."""


class RegressionError(TreadleError):
    """What was measured is slower than before, by more than was allowed."""


class CheckpointError(TreadleError):
    """A model's files are missing, truncated, contradictory, or hold tensors nobody asked for."""


class ArtifactError(TreadleError):
    """An artifact does not fit this machine, these weights or this version."""


class ConfigError(TreadleError):
    """An option or environment variable has a value that can't be used."""

    exit_code = 2


class MachineError(TreadleError):
    """The machine lacks something: a GPU, a library, memory, disk space, a free port."""

    exit_code = 3


class RequestError(TreadleError):
    """A client's request can't be served; maps to a 4xx answer.

    `param` is the path of the offending field (`messages.0.role`), `code` a stable word for
    programs.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param
        self.code = code


class QueueFullError(RequestError):
    """The engine is full or draining; the client should retry after `retry_after_s`."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        retry_after_s: float = 1.0,
        code: str = "overloaded",
    ) -> None:
        super().__init__(message, remedy=remedy, code=code)
        self.retry_after_s = retry_after_s
