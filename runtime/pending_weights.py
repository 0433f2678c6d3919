"""Weights that have their memory before their values: what needs addresses goes on meanwhile.

Called by `loading.py`, which builds and captures programs while one thread of its own fills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from treadle.ir.graph import Weight
from treadle.runtime.checkpoint import Checkpoint
from treadle.runtime.upload import AHEAD_BYTES, Uploader
from treadle.runtime.weights import Recipe, assemble, check_finite, name_weights


def can_be_pending(recipes: Iterable[Recipe], checkpoint: Checkpoint) -> bool:
    """Say whether all tensors are in the files as they are.

    Those whose values are computed take memory that is not known before, and would have to be left
    free beside the KV cache.
    """
    sources = (source for recipe in recipes for source in recipe.sources)
    return all(checkpoint.entry(source) is not None for source in sources)


class PendingWeights:
    """Allocate weights as zeros, which `fill` replaces. `tensors` are all weights by name.

    Zeros, because programs may run before the values are there, and must not meet NaN.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        recipes: Sequence[Recipe],
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        max_context_tokens: int,
    ) -> None:
        self._recipes = recipes
        self._checkpoint = checkpoint
        self._device = device
        self._made = [
            torch.zeros(recipe.weight.type.bound_shape({}), dtype=recipe.dtype, device=device)
            for recipe in recipes
        ]
        self.tensors: Mapping[str, torch.Tensor] = name_weights(
            weights, recipes, self._made, max_context_tokens
        )
        self._places = [self._find_places(*each) for each in zip(recipes, self._made, strict=True)]

    @property
    def passing_bytes(self) -> int:
        """The most that `fill` has allocated at any time: for what doesn't go straight there."""
        most = 0
        for recipe, made, places in zip(self._recipes, self._made, self._places, strict=True):
            if places:
                continue
            sizes = [math.prod(self._checkpoint.shape(name)) for name in recipe.sources]
            stored = [
                size * self._checkpoint.dtype(name).itemsize
                for size, name in zip(sizes, recipe.sources, strict=True)
            ]
            in_hand = sum(stored) + 3 * made.nbytes  # cast, joined, and put in order
            if recipe.weight.stack and not recipe.is_joined:
                in_hand //= recipe.weight.stack  # one expert at a time
            most = max(most, in_hand + max(stored))  # the last one that was sent ahead
        return most and AHEAD_BYTES + most

    def fill(
        self,
        allocating: AbstractContextManager[object],
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bring all values, on a stream of its own, and wait for them; or stop when unwanted.

        Memory is allocated while holding `allocating`, which is never held while waiting for files.
        Raises: CheckpointError: a file can't be read, or a tensor holds NaN.
        """
        sources = [source for recipe in self._recipes for source in recipe.sources]
        places: dict[int, torch.Tensor] = {}
        number = 0
        for recipe, found in zip(self._recipes, self._places, strict=True):
            places |= dict(enumerate(found, start=number))
            number += len(recipe.sources)
        with (
            _own_stream(self._device),
            Uploader(
                self._checkpoint,
                self._device,
                sources,
                ahead=True,
                places=places,
                allocating=allocating,
            ) as uploader,
        ):
            for recipe, made, found in zip(self._recipes, self._made, self._places, strict=True):
                if is_unwanted():
                    return
                if found:
                    for name in recipe.sources:
                        uploader.take(name)
                else:
                    assemble(recipe, uploader.take, self._device, made, allocating)
            with allocating:
                check_finite(self._recipes, self._made, self._checkpoint)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _find_places(self, recipe: Recipe, made: torch.Tensor) -> list[torch.Tensor]:
        """Give where in a weight each of its tensors can go as it is; none, if any has to change.

        Shapes: made [...] → a part of its elements for each source, in the source's shape.
        """
        stored = [self._checkpoint.dtype(name) for name in recipe.sources]
        if not recipe.keeps_order or any(dtype != recipe.dtype for dtype in stored):
            return []
        shapes = [self._checkpoint.shape(name) for name in recipe.sources]
        shares = made.view(-1).split([math.prod(shape) for shape in shapes])
        return [share.view(shape) for share, shape in zip(shares, shapes, strict=True)]


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Leave the streams of other threads alone, but begin after what they have asked for so far."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)
