"""Checkpoint tensors → the weights a graph declares, checked both ways.

Reads only the declarations: joins, alternating rows, tied heads and computed tables are all data.
Called by the engine and by `verify`; must not know any model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from treadle.ir.errors import CheckpointError
from treadle.ir.graph import RopeTable, Weight
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.models.config import unused_layers
from treadle.runtime.checkpoint import Checkpoint
from treadle.runtime.upload import Uploader

# What a weight may be stored in. Others are the codes of quantised values: cast without the scales
# that belong to them, they would be nonsense.
STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Tensors that published checkpoints carry and no graph needs: they are computed, not learned.
KNOWN_EXTRAS = (
    re.compile(r".*\.rotary_emb\.inv_freq"),
    re.compile(r"rope_freqs\.weight"),
    re.compile(r".*\.attention\.(masked_)?bias"),  # masks that older GPT-NeoX checkpoints carry
)
NAMES_SHOWN = 6


@dataclass(frozen=True)
class Recipe:
    """Make one tensor of `sources` in the checkpoint, arranged as `weight` declares.

    `names` are the weights that share it; `weight` is the first of them.
    """

    weight: Weight
    names: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to load in."""
        return TORCH_DTYPES[self.weight.type.dtype]

    @property
    def is_joined(self) -> bool:
        """Whether one tensor of the checkpoint holds those of all experts."""
        return _holds_all_experts(self.weight, self.sources[0])

    @property
    def keeps_order(self) -> bool:
        """Whether the sources as they are, one after another, are the weight."""
        weight = self.weight
        moves = weight.interleave or weight.groups > 1 or weight.rope_pairs or weight.transposed
        return not moves


def check_names(weights: Iterable[Weight], checkpoint: Checkpoint) -> None:
    """Compare the declared tensors with the checkpoint's before any is read: names, shapes, dtypes.

    Raises: CheckpointError: a declared tensor is missing, has another shape or no floating-point
    numbers, or the checkpoint holds a tensor that nothing declares; each message names tensors.
    """
    present = checkpoint.names()
    asked: set[str] = set()
    missing: list[str] = []
    for weight in weights:
        for source, shape in tensors_of(weight, present).items():
            asked.add(source)
            if source in present:
                _check_tensor(checkpoint, source, shape)
            else:
                missing.append(source)
        if not weight.stack:
            asked.add(weight.fallback)  # a head may be stored beside the embedding it is tied to
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: "
            f"{_some(missing)}.",
            remedy="The download is incomplete, or config.json describes another model.",
        )
    unused = unused_layers(checkpoint.config)
    extras = [
        name
        for name in sorted(present - asked)
        if not any(pattern.fullmatch(name) for pattern in KNOWN_EXTRAS)
        and not name.startswith(unused)
    ]
    if extras:
        raise CheckpointError(
            f"{checkpoint.path} holds {len(extras)} tensors that the model doesn't use: "
            f"{_some(extras)}.",
            remedy="A spec that ignored them would answer wrongly: check the config's layer count, "
            "biases and `tie_word_embeddings`.",
        )


def tensors_of(weight: Weight, present: frozenset[str] = frozenset()) -> dict[str, tuple[int, ...]]:
    """Give the tensors that make up a weight, and their shapes: parts, or the fallback for them."""
    if weight.rope:
        return {}
    whole = weight.type.bound_shape({})
    inner = whole[2:] if weight.stack else whole[1:]
    experts = range(max(weight.stack, 1))
    parts = {
        name: (rows, *inner)
        for expert in experts
        for name, rows in zip(weight.names_of(expert), weight.part_rows, strict=True)
    }
    if _holds_all_experts(weight, weight.parts[0]):
        parts = {weight.parts[0]: whole}
    if weight.fallback in present and not any(name in present for name in parts):
        parts = {weight.fallback: whole}
    if weight.transposed:
        return {name: (*shape[:-2], shape[-1], shape[-2]) for name, shape in parts.items()}
    return parts


def _holds_all_experts(weight: Weight, source: str) -> bool:
    """Say whether a tensor of a weight holds those of all experts as one."""
    return bool(weight.stack) and source in (weight.fallback, *weight.parts) and "{}" not in source


def _check_tensor(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    found = checkpoint.shape(name)
    if tuple(found) != expected:
        raise CheckpointError(
            f"`{name}` should be {list(expected)} by the model's config, but {checkpoint.path} "
            f"holds {list(found)}.",
            remedy="The config belongs to another checkpoint, or the file was converted wrongly.",
        )
    stored = checkpoint.dtype(name)
    if stored not in STORED_DTYPES:
        raise CheckpointError(
            f"`{name}` in {checkpoint.path} should hold floating-point numbers of 16 bits or more, "
            f"but holds {str(stored).removeprefix('torch.')}.",
            remedy="Quantised safetensors other than MXFP4 are not supported: take the original "
            "checkpoint, or a GGUF file of the model.",
        )


def plan_weights(
    weights: Iterable[Weight], checkpoint: Checkpoint, warn: Callable[[str], None]
) -> tuple[Recipe, ...]:
    """Give what is made of which tensors, for all weights but the computed ones.

    `warn` is told what is odd and yet usable.
    Raises: CheckpointError: see `check_names`.
    """
    weights = tuple(weights)
    check_names(weights, checkpoint)
    # What decides a loaded tensor: the names of its parts, the order of its rows, and its dtype.
    alike: dict[tuple[tuple[str, ...], *tuple[object, ...]], list[Weight]] = {}
    for weight in weights:
        if weight.rope:
            continue
        key = (
            _choose_sources(weight, checkpoint, warn),
            weight.interleave,
            weight.sections,
            weight.groups,
            weight.rope_pairs,
            weight.transposed,
            weight.type.dtype,
        )
        alike.setdefault(key, []).append(weight)
    return tuple(
        Recipe(each[0], tuple(weight.name for weight in each), sources)
        for (sources, *_), each in alike.items()
    )


def load_weights(
    weights: Iterable[Weight],
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    max_context_tokens: int,
    warn: Callable[[str], None] = lambda text: None,
) -> Mapping[str, torch.Tensor]:
    """Load every declared weight to `device`; weights of the same source share storage.

    `warn` is told what is odd and yet usable.
    Raises: CheckpointError: see `check_names`; also a tensor that holds NaN.
    """
    weights = tuple(weights)
    return read_weights(
        weights,
        plan_weights(weights, checkpoint, warn),
        checkpoint,
        device=device,
        max_context_tokens=max_context_tokens,
    )


def read_weights(
    weights: Iterable[Weight],
    recipes: Sequence[Recipe],
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    max_context_tokens: int,
) -> Mapping[str, torch.Tensor]:
    """Load weights by the recipes that were planned for them. Raises: see `load_weights`."""
    sources = [source for recipe in recipes for source in recipe.sources]
    with Uploader(checkpoint, device, sources, ahead=device.type == "cuda") as uploader:
        made = [assemble(recipe, uploader.take, device) for recipe in recipes]
    check_finite(recipes, made, checkpoint)
    return name_weights(weights, recipes, made, max_context_tokens)


def name_weights(
    weights: Iterable[Weight],
    recipes: Sequence[Recipe],
    made: Sequence[torch.Tensor],
    max_context_tokens: int,
) -> Mapping[str, torch.Tensor]:
    """Give every weight its tensor by name, those of rope computed."""
    found: dict[str, torch.Tensor] = {}
    for recipe, tensor in zip(recipes, made, strict=True):
        found |= dict.fromkeys(recipe.names, tensor)
    device = made[0].device
    tables = {w.name: rope_table(w.rope, max_context_tokens).to(device) for w in weights if w.rope}
    return found | tables


def check_finite(
    recipes: Sequence[Recipe], made: Sequence[torch.Tensor], checkpoint: Checkpoint
) -> None:
    """Look at all values at once, when all are there: each look waits for the device.

    Raises: CheckpointError: some are NaN or infinite; names the tensor of the checkpoint.
    """
    # The extremes of a tensor are NaN where any value is; no other look needs so little memory.
    extremes = torch.stack([bound.double() for each in made for bound in torch.aminmax(each)])
    for index in (~extremes.isfinite()).nonzero().flatten().tolist():
        recipe = recipes[index // 2]
        for name in recipe.sources:
            if not checkpoint.tensor(name).to(recipe.dtype).isfinite().all():
                raise CheckpointError(
                    f"`{name}` in {checkpoint.path} holds NaN or infinite values as "
                    f"{recipe.dtype}.",
                    remedy="Compile with a wider --dtype (bfloat16), or fetch the file again.",
                )


def assemble(
    recipe: Recipe,
    take: Callable[[str], torch.Tensor],
    device: torch.device,
    into: torch.Tensor | None = None,
    allocating: AbstractContextManager[object] | None = None,
) -> torch.Tensor:
    """Arrange a weight's tensors as they come; those of experts go to their places one by one.

    The result is `into`, where that is given. Memory is allocated while holding `allocating`; no
    tensor is taken meanwhile.
    """
    weight, allocating = recipe.weight, allocating or nullcontext()

    def in_order(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        rows = [tensor.to(recipe.dtype) for tensor in tensors]
        rows = [part.mT if weight.transposed else part for part in rows]
        rows = [sort_sections(part, weight.sections, weight.groups) for part in rows]
        return arrange(rows, weight.interleave)

    if not weight.stack:
        parts = [take(name) for name in recipe.sources]
        with allocating:
            made = pair_halves(in_order(parts), weight.rope_pairs)
            return made if into is None else into.copy_(made)
    if into is None:
        with allocating:
            into = torch.empty(weight.type.bound_shape({}), dtype=recipe.dtype, device=device)
    if recipe.is_joined:
        experts: Iterable[list[torch.Tensor]] = ([one] for one in take(recipe.sources[0]))
    else:
        names = iter(recipe.sources)
        experts = ([take(next(names)) for _ in weight.parts] for _ in range(weight.stack))
    for expert, own in enumerate(experts):
        with allocating:
            into[expert] = in_order(own)
    return into


def _choose_sources(
    weight: Weight, checkpoint: Checkpoint, warn: Callable[[str], None]
) -> tuple[str, ...]:
    """Give the tensors to load: the parts, or the fallback where they are absent or the same."""
    present = checkpoint.names()
    if weight.stack or weight.fallback not in present:
        return tuple(tensors_of(weight, present))
    (part,) = weight.parts
    if part not in present:
        return (weight.fallback,)
    own, shared = checkpoint.tensor(part), checkpoint.tensor(weight.fallback)
    wider = torch.promote_types(own.dtype, shared.dtype)
    if torch.equal(own.to(wider), shared.to(wider)):
        return (weight.fallback,)
    warn(
        f"`{part}` is tied to `{weight.fallback}` by the config, but {checkpoint.path} holds both "
        f"and they differ; `{part}` is used as it is"
    )
    return weight.parts


def arrange(parts: list[torch.Tensor], interleave: int) -> torch.Tensor:
    """Join parts along axis 0; with `interleave` g, two halves alternate in groups of g rows.

    The halves are two parts, or those of one.

    Shapes: parts [N_i, ...] → [sum N_i, ...], contiguous.
    """
    if not interleave:
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    halves = parts[0].chunk(2) if len(parts) == 1 else parts
    gate, up = (half.unflatten(0, (-1, interleave)) for half in halves)
    return torch.stack((gate, up), dim=1).flatten(0, 2).contiguous()


def sort_sections(rows: torch.Tensor, sections: tuple[int, ...], groups: int) -> torch.Tensor:
    """Sort rows that come in groups, each with its share of every section, by section.

    Shapes: rows [sum(sections), ...] → the same.
    """
    if groups == 1:
        return rows
    shares = rows.unflatten(0, (groups, -1)).split([size // groups for size in sections], dim=1)
    return torch.cat([share.flatten(0, 1) for share in shares])


def pair_halves(rows: torch.Tensor, rope_pairs: tuple[int, ...]) -> torch.Tensor:
    """Move neighbours among the rotated rows of heads to where halves of a head are the pairs.

    `rope_pairs` are how many rows are heads, the rows of a head, and how many of those rotate.

    Shapes: rows [N, ...] → the same.
    """
    if not rope_pairs:
        return rows
    count, head_dim, rotary_dim = rope_pairs
    heads = rows[:count].unflatten(0, (-1, head_dim))  # [n, D, ...]
    rotated = heads[:, :rotary_dim].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    heads = torch.cat((rotated, heads[:, rotary_dim:]), dim=1)  # [n, D, ...]
    return torch.cat((heads.flatten(0, 1), rows[count:]))


def rope_table(rope: RopeTable, max_context_tokens: int) -> torch.Tensor:
    """Compute the cosines, then the sines, of every position: f32[C, rotary_dim]."""
    positions = torch.arange(max_context_tokens, dtype=torch.float32)
    is_long = rope.long_inverse_frequencies and max_context_tokens > rope.short_window
    chosen = rope.long_inverse_frequencies if is_long else rope.inverse_frequencies
    frequencies = torch.tensor(chosen, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.scale


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
