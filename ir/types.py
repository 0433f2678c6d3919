"""Types of values: shape, dtype and, where a kernel depends on it, the layout.

Knows nothing of graphs or torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from treadle.ir.dims import Dim, R, bind, parse_dim
from treadle.ir.errors import ShapeError
from treadle.ir.kv_cache import (
    HEAD_DIM_MULTIPLE,
    KV_FORMATS,
    OPEN_DTYPE,
    PAGE_MULTIPLE,
    PLANES,
)

DTYPE_BYTES: dict[str, int] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
}
FLOATS = ("f32", "f16", "bf16")
LAYOUTS = {
    "": "row-major",
    "kv": "the paged K and V of one layer, each [P, G, S, D]",
    "latent": "the paged latents of one layer, which all heads share, [P, 1, S, W]",
}

_PATTERN = re.compile(r"^(?:(kv|latent)\.)?(\w+)\[([^\]]*)\]$")


@dataclass(frozen=True)
class TensorType:
    """Describe a tensor: prints as `bf16[T, 4096]`, a layer's cache as `kv.bf16[P, 8, 64, 128]`.

    A cache of latents is `latent.bf16[P, 1, 64, 576]`. The dtype of a quantised cache is one of
    `KV_FORMATS`: `kv.int8[P, 8, 64, 128]`.
    Raises: ShapeError: an unknown dtype or layout, a dim that is not positive, or a head that a
    quantised cache can't hold.
    """

    shape: tuple[Dim, ...]
    dtype: str
    layout: str = ""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ShapeError(f"Unknown layout `{self.layout}`; known are {', '.join(LAYOUTS)}.")
        if self.dtype not in DTYPE_BYTES and not (self.layout == "kv" and self.dtype in KV_FORMATS):
            raise ShapeError(f"Unknown dtype `{self.dtype}`; known are {', '.join(DTYPE_BYTES)}.")
        for dim in self.shape:
            if isinstance(dim, int) and dim < 1:
                raise ShapeError(f"A dim must be at least 1, found {dim} in {self.shape}.")
        if self.kv_format and self.size(3) % HEAD_DIM_MULTIPLE:
            raise ShapeError(
                f"A {self.dtype} cache holds heads of whole {HEAD_DIM_MULTIPLE} elements; found "
                f"{self.size(3)}."
            )
        if self.kv_format and self.size(2) % PAGE_MULTIPLE:
            raise ShapeError(
                f"A {self.dtype} cache has pages of whole {PAGE_MULTIPLE} tokens; found "
                f"{self.size(2)}."
            )

    def __str__(self) -> str:
        prefix = f"{self.layout}." if self.layout else ""
        return f"{prefix}{self.dtype}[{', '.join(map(str, self.shape))}]"

    def size(self, axis: int) -> int:
        """Give the size of an axis that is the same in every step.

        Raises: ShapeError: a step decides it; names type and axis.
        """
        dim = self.shape[axis]
        if not isinstance(dim, int):
            raise ShapeError(f"Axis {axis} of {self} should have a fixed size; it is `{dim}`.")
        return dim

    def bound_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Give the shape in a step with these `dims`."""
        return tuple(bind(dim, dims) for dim in self.shape)

    @property
    def kv_format(self) -> str:
        """The format of a quantised cache, one of `KV_FORMATS`; empty for every other tensor."""
        return self.dtype if self.dtype in KV_FORMATS else ""

    def stored_parts(self, dims: Mapping[str, int]) -> dict[str, TensorType]:
        """Give the tensors that a cache lies in: its `PLANES`, and of a quantised one more.

        Keys and values are bytes then, a block for each full page and head; `open_keys` and
        `open_values` hold the page of each row that is not full yet.
        """
        if not self.kv_format:
            plane = TensorType(self.bound_shape(dims), self.dtype)
            return dict.fromkeys(PLANES[self.layout], plane)
        pages, heads, page_size, head_dim = self.bound_shape(dims)
        form = KV_FORMATS[self.dtype]
        open_pages = TensorType((bind(R, dims), page_size, heads, head_dim), OPEN_DTYPE)
        return {
            "keys": TensorType((pages, heads, form.key_block_bytes(page_size, head_dim)), "u8"),
            "values": TensorType((pages, heads, form.value_block_bytes(page_size, head_dim)), "u8"),
            "open_keys": open_pages,
            "open_values": open_pages,
        }

    def num_bytes(self, dims: Mapping[str, int]) -> int:
        """Give the size in bytes in a step with these `dims`; of a cache that of its pages."""
        if not self.layout:
            return math.prod(self.bound_shape(dims)) * DTYPE_BYTES[self.dtype]
        parts = self.stored_parts({"R": 1, **dims})
        return sum(parts[plane].num_bytes({}) for plane in PLANES[self.layout])

    def open_bytes(self, dims: Mapping[str, int]) -> int:
        """Give the bytes of the pages that a quantised cache keeps open, one a row; else 0."""
        parts = self.stored_parts({"P": 1, **dims}) if self.kv_format else {}
        return sum(part.num_bytes({}) for name, part in parts.items() if "open" in name)

    def with_shape(self, *shape: Dim) -> TensorType:
        """Give the same dtype with another shape."""
        return TensorType(shape, self.dtype)


@lru_cache(maxsize=1024)  # layers repeat their types
def parse_type(text: str) -> TensorType:
    """Read a type as `str()` writes it."""
    found = _PATTERN.match(text.strip())
    if not found:
        raise ShapeError(f"`{text}` is not a type: expected something like `bf16[T, 4096]`.")
    dims = tuple(parse_dim(part.strip()) for part in found[3].split(",") if part.strip())
    return TensorType(dims, found[2], found[1] or "")
