"""The tensors that outlive a step: rows' state, block table, pages, and a step's input buffers.

Called by the executor and by whoever tries programs without one. Must not know kernels or the
scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from treadle.ir.builder import ROW_STATE, STEP_INPUTS, adjustment_state
from treadle.ir.dims import B
from treadle.ir.graph import Graph, Value
from treadle.ir.kv_cache import PLANES
from treadle.ir.types import TensorType
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.runtime.config import EngineConfig

# What the host writes for a step; all i32, so that one copy of one packed buffer brings all.
PACKED_INPUTS: dict[str, TensorType] = {"seq_rows": TensorType((B,), "i32"), **STEP_INPUTS}
ALIGNMENT = 64  # elements: each input starts at a multiple of 256 bytes
PADDING_ROW = -1  # of the sequences that fill a bucket up


@dataclass(frozen=True)
class DeviceState:
    """Hold tensors by the names of graphs' inputs, as large as the largest step needs.

    `caches` gives K and V of each layer, [P, G, S, D] each, or u8[P, G, block bytes] where they are
    quantised; or its latents alone, [P, 1, S, W]. `open_pages` gives those of each row's page that
    is not full yet, f16[R, S, G, D], where keys and values are quantised. `packed` i32 underlies
    the step's inputs, each at its offset in `packed_offsets`.
    """

    dims: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]
    caches: Mapping[str, tuple[torch.Tensor, ...]]
    open_pages: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    packed: torch.Tensor
    packed_offsets: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The bytes of everything but the pages."""
        packed = set(self.packed_offsets)
        rest = sum(t.nbytes for name, t in self.tensors.items() if name not in packed)
        return self.packed.nbytes + rest

    @property
    def cache_bytes(self) -> int:
        """The bytes of all pages."""
        return sum(plane.nbytes for planes in self.caches.values() for plane in planes)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page over all layers."""
        return self.cache_bytes // self.dims["P"]

    @property
    def open_bytes(self) -> int:
        """The bytes of the rows' open pages."""
        return sum(k.nbytes + v.nbytes for k, v in self.open_pages.values())

    # What follows stands in for the scheduler where programs are tried without one.

    def fill_caches(self) -> None:
        """Fill every page with random keys and values, or latents."""
        for planes in (*self.caches.values(), *self.open_pages.values()):
            for cache in planes:
                if cache.dtype == torch.uint8:
                    # Codes up to 63 and words of four such bytes are small numbers in every format.
                    cache.random_(0, 64)
                else:
                    cache.normal_()

    def write_decode(self, num_seqs: int) -> None:
        """Let the first rows decode in the next step; the rest of its bucket is padding."""
        rows = self.tensors["seq_rows"]
        rows.fill_(PADDING_ROW)
        rows[:num_seqs] = torch.arange(num_seqs, dtype=rows.dtype)

    def write_prompts(
        self, prompts: Sequence[Sequence[int]], earlier: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Write a mixed step of prompts, one a row; give its tokens and sequences.

        Before them come rows that decode: one token each, after so many `earlier` ones. The rows'
        pages are left as they are.
        """
        inputs: dict[str, list[int]] = {name: [] for name in PACKED_INPUTS}
        inputs["query_start"].append(0)
        rows = [(first, [0]) for first in earlier] + [(0, list(prompt)) for prompt in prompts]
        for row, (first, tokens) in enumerate(rows):
            count = len(tokens)
            inputs["token_ids"] += tokens
            inputs["positions"] += range(first, first + count)
            inputs["token_seq"] += [row] * count
            inputs["query_start"].append(inputs["query_start"][-1] + count)
            inputs["context_lens"].append(first + count)
            inputs["sample_index"].append(inputs["query_start"][-1] - 1)
            inputs["seq_rows"].append(row)
        for name, values in {**inputs, "length": inputs["context_lens"]}.items():
            self.tensors[name][: len(values)] = torch.tensor(values, dtype=torch.int32)
        return inputs["query_start"][-1], len(rows)


def cache_values(graph: Graph) -> tuple[Value, ...]:
    """Give the graph's caches, a layer each."""
    return tuple(value for value in graph.inputs if value.type.layout)


def page_bytes(graph: Graph) -> int:
    """Give the bytes of one page over all layers."""
    return sum(value.type.num_bytes({"P": 1}) for value in cache_values(graph))


def open_page_bytes(graph: Graph, config: EngineConfig) -> int:
    """Give the bytes of the rows' open pages over all layers; 0 where nothing is quantised."""
    dims = {"R": config.max_rows}
    return sum(value.type.open_bytes(dims) for value in cache_values(graph))


def state_dims(config: EngineConfig, num_pages: int) -> dict[str, int]:
    """Give the largest dims of any step of this engine."""
    return {
        "T": config.max_step_tokens,
        "B": config.max_rows,
        "R": config.max_rows,
        "M": config.pages_per_row,
        "P": num_pages,
        "C": config.max_context_tokens,
    }


def allocate_state(
    caches: Iterable[Value],
    config: EngineConfig,
    num_pages: int,
    device: torch.device,
    vocab_size: int = 0,
) -> DeviceState:
    """Allocate zeroed state for `config` with `num_pages` pages.

    Without a `vocab_size` there is none for adjusted logits, as where programs are only tried.
    """
    dims = state_dims(config, num_pages)
    offsets: dict[str, int] = {}
    total = 0
    for name, type_ in PACKED_INPUTS.items():
        offsets[name] = total
        total += -(-type_.bound_shape(dims)[0] // ALIGNMENT) * ALIGNMENT
    packed = torch.zeros(total, dtype=torch.int32, device=device)
    tensors = {
        name: packed[offset : offset + PACKED_INPUTS[name].bound_shape(dims)[0]]
        for name, offset in offsets.items()
    }
    tensors["seq_rows"].fill_(PADDING_ROW)
    row_state = {**ROW_STATE, **(adjustment_state(vocab_size) if vocab_size else {})}
    for name, type_ in row_state.items():
        shape, dtype = type_.bound_shape(dims), TORCH_DTYPES[type_.dtype]
        tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    pages, open_pages = {}, {}
    for value in caches:
        parts = {
            name: torch.zeros(part.bound_shape({}), dtype=TORCH_DTYPES[part.dtype], device=device)
            for name, part in value.type.stored_parts(dims).items()
        }
        pages[value.name] = tuple(parts[plane] for plane in PLANES[value.type.layout])
        if "open_keys" in parts:
            open_pages[value.name] = (parts["open_keys"], parts["open_values"])
    return DeviceState(dims, tensors, pages, open_pages, packed, offsets)
