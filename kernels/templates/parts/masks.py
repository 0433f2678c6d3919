"""Masks that fold away where a size is whole tiles."""

import triton
import triton.language as tl


@triton.jit
def below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE; a mask that folds away where BLOCK divides SIZE."""
    if SIZE % BLOCK == 0:
        return index == index
    else:
        return index < SIZE
