"""Import kernel modules from files: Triton reads a kernel's source, so each needs a real file.

Must not know what a module computes. Called by all that launch, compile or tune emitted kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from treadle.ir import knobs
from treadle.ir.errors import KernelError
from treadle.ir.files import write_whole
from treadle.ir.graph import fingerprint
from treadle.kernels.interpreter import repair_interpreter


def write_module(text: str, name: str, folder: Path | None = None) -> Path:
    """Write a module's text under its name and fingerprint, once, and give the path.

    `folder` is by default `kernels` in the user's cache.
    """
    folder = folder or knobs.cache_dir() / "kernels"
    path = folder / f"{name}.{fingerprint(text)}.py"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return path
    write_whole(path, text)
    return path


def tell_source_keys(module: ModuleType, keys: Mapping[str, str]) -> None:
    """Give a module's kernels, by name, the digests of their sources, as Triton found them before.

    Triton (3.6 to 3.9) keeps the digest in `hash`, and makes it at a kernel's first launch: it
    parses the source and that of all that it calls, milliseconds that a hundred kernels make long.
    The keys must be those of these very files, as an artifact's are, whose files are checked before
    they are loaded. Of globals that a kernel reads Triton then no
    longer checks that they stay as they were: an emitted module's do.
    """
    for name, key in keys.items():
        getattr(module, name).hash = key


def load_module(source: Path | str, name: str) -> ModuleType:
    """Import the module at a path, or the module whose text this is (written to the cache first).

    A file that was imported before gives the same module again, so its compiled kernels are shared.
    Raises: KernelError: the file is missing, or its text can't be imported.
    """
    path = source if isinstance(source, Path) else write_module(source, name)
    if not path.is_file():
        raise KernelError(f"Kernel `{name}` should lie in `{path}`; there is no such file.")
    text = path.read_text(encoding="utf-8")
    qualified = f"treadle_emitted_{name}_{fingerprint(str(path.resolve()) + text)}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    spec = importlib.util.spec_from_file_location(qualified, path)
    assert spec is not None and spec.loader is not None, f"no import loader for {path}"
    if knobs.triton_interpret():
        repair_interpreter()
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, NameError, ImportError, TypeError, ValueError) as error:
        del sys.modules[qualified]
        raise KernelError(f"Kernel `{name}` in `{path}` can't be imported: {error}.") from error
    return module
