"""Which tuned schedules a compilation uses: a pinned file, the user's table, the shipped one.

The user's tables lie in the cache, one JSON file per GPU, beside the log of timings. Called by the
compiler and the command that tunes.
"""

from __future__ import annotations

from pathlib import Path

from treadle.ir import knobs
from treadle.ir.errors import ConfigError
from treadle.kernels.tuned import TYPICAL_GPU, TunedTable, read_table, shipped_table
from treadle.runtime.artifact import write_error


def table_path(gpu: str) -> Path:
    """Give the place of the user's table for a GPU."""
    return knobs.cache_dir() / "tuned" / f"{gpu.replace(' ', '_')}.json"


def log_path(gpu: str) -> Path:
    """Give the place of the timings of a GPU."""
    return table_path(gpu).with_suffix(".jsonl")


def user_table(gpu: str) -> TunedTable:
    """Give the user's table for a GPU; empty where there is none. Raises: ConfigError."""
    path = table_path(gpu)
    return read_table(path) if gpu and path.is_file() else TunedTable(gpu)


def table_for(gpu: str, architecture: str, autotune: str, pin: Path | None = None) -> TunedTable:
    """Give the choices for a compilation: those of `pin` before the user's before the shipped.

    With `autotune` off only what is pinned counts. Raises: ConfigError: a table can't be read.
    """
    gpu = gpu or TYPICAL_GPU.get(architecture, "")
    table = TunedTable(gpu)
    if autotune != "off":
        table = user_table(gpu).over(shipped_table(gpu, architecture))
    if pin is not None:
        table = read_pin(pin).over(table)
    return table


def read_pin(path: Path) -> TunedTable:
    """Read a table that the user names. Raises: ConfigError: it can't be read."""
    try:
        return read_table(path)
    except ConfigError as error:
        raise ConfigError(
            error.message, remedy="Name a table that `treadle tune --export FILE` wrote."
        ) from None


def save_user_table(table: TunedTable) -> Path:
    """Write the user's table of the table's GPU. Raises: MachineError: it can't be written."""
    path = table_path(table.gpu)
    try:
        table.write(path)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def import_table(path: Path) -> TunedTable:
    """Put the choices of a file into the user's table of its GPU, over those there.

    Raises: ConfigError: the file can't be read, or names no GPU. MachineError.
    """
    found = read_pin(path)
    if not found.gpu:
        raise ConfigError(f"The table {path} names no GPU.", remedy="Use it with --pin instead.")
    save_user_table(found.over(user_table(found.gpu)))
    return found


def export_table(path: Path, gpu: str) -> TunedTable:
    """Write the choices in use for a GPU, the user's over the shipped. Raises: MachineError."""
    table = table_for(gpu, "", "cached")
    try:
        table.write(path)
    except OSError as error:
        raise write_error(path, error) from error
    return table
