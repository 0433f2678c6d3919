"""One repair of Triton's interpreter, for the versions that need it.

Called by whatever loads modules to be interpreted. Knows Triton's interpreter only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from triton.runtime import interpreter

FIRST_GOOD_VERSION = (3, 7)


@cache
def repair_interpreter() -> None:
    """Let loop bounds be tensors under numpy 2.4 or later, as Triton 3.7 does.

    Triton 3.6 holds a scalar as an array of one element and asks numpy for its number; numpy gives
    that only for arrays without axes since 2.4.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version >= FIRST_GOOD_VERSION:
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_repair
