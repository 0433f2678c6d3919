"""Prove a model: each kernel against the reference of its op, each layer against transformers.

A step is played launch by launch. Before each, its results are poisoned and the op's reference is
computed from the very tensors the kernel will read; after it, results and state are compared.
Called by the command `verify` and by tests; works on every target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.ir.errors import CheckpointError
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.registry import lookup
from treadle.ir.ops.sampling import ADJUST_ALLOWED, ADJUST_BIASES, ADJUST_COUNTS
from treadle.ir.types import TensorType
from treadle.kernels.dtypes import TORCH_DTYPES
from treadle.kernels.kv_pages import dequantise_keys, dequantise_values
from treadle.runtime.checkpoint import Checkpoint
from treadle.runtime.loading import LoadedArtifact
from treadle.runtime.near_ties import choose_left_out, share_of_other_choices
from treadle.runtime.reference_program import ReferenceProgram, reference_call
from treadle.runtime.state import DeviceState
from treadle.runtime.triton_program import TritonProgram

# Relative error of a result's norm that its compute dtype explains: a few rounding steps.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 1e-2}
# Of what a quantised cache has a part in: weights times scales are f16, a code may be off by one.
QUANTISED_TOLERANCE = 1e-2


@dataclass(frozen=True)
class OpCheck:
    """Tell how far one result of one launch is from the reference, relative to its norm."""

    op: str
    kernel: str
    result: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Say whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def verify_program(
    program: TritonProgram, graph: Graph, state: DeviceState, num_tokens: int, num_seqs: int
) -> Iterator[OpCheck]:
    """Play a step whose inputs lie in the state and yield a check per result, in launch order."""
    dims = {**state.dims, "T": num_tokens, "B": num_seqs}
    tensors = program.tensors
    for index, op in enumerate(graph.ops):
        expected, expected_state = _reference(op, graph, tensors, state, dims)
        for name in op.outputs:
            _poison(tensors[name])
        program.launch(index, num_tokens, num_seqs)
        kernel = program.plan.launches[index].kernel
        is_quantised = any(graph.type_of(name).kv_format for name in op.inputs)
        for name, value in expected.items():
            found = _bound(tensors[name], graph, name, dims)
            yield _compare(op, kernel, name, value, found, is_quantised)
        for name, parts in expected_state.items():
            if name in state.caches:
                type_ = graph.type_of(name)
                value, found = _numbers(parts, type_), _numbers(_cache(name, state), type_)
            else:
                value, found = parts[0], _bound(tensors[name], graph, name, dims)
            yield _compare(op, kernel, name, value, found, is_quantised)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


def _bound(tensor: torch.Tensor, graph: Graph, name: str, dims: Mapping[str, int]) -> torch.Tensor:
    """Give the part of a buffer that a step of these dims uses."""
    return tensor[: graph.types[name].bound_shape(dims)[0]]


def _cache(name: str, state: DeviceState) -> tuple[torch.Tensor, ...]:
    """Give the tensors of a cache: keys and values, then those of open pages if there are any."""
    return (*state.caches[name], *state.open_pages.get(name, ()))


def _numbers(cache: tuple[torch.Tensor, ...], type_: TensorType) -> torch.Tensor:
    """Give all keys and values that a cache holds, as one vector."""
    if not type_.kv_format:
        return torch.cat([tensor.flatten() for tensor in cache])
    keys, values, *opened = cache
    full = (
        dequantise_keys(keys, type_.kv_format, type_.size(3)),
        dequantise_values(values, type_.kv_format, type_.size(3)),
    )
    return torch.cat([tensor.float().flatten() for tensor in (*full, *opened)])


def _reference(
    op: Op,
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    state: DeviceState,
    dims: Mapping[str, int],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
    """Compute an op's results and the state it should leave, without touching either.

    Of a cache that is all its tensors, of another state one.
    """
    env: dict[str, torch.Tensor] = {}
    changed: dict[str, tuple[torch.Tensor, ...]] = {}
    for inner in op.plain:
        definition = lookup(inner.kind)
        operands: list[torch.Tensor] = []
        operand_names = definition.present(len(inner.inputs))
        function, options = reference_call(inner, graph)
        for operand, name in zip(operand_names, inner.inputs, strict=True):
            if name in state.caches:
                # A body may read what it has appended: what it changed stands for the cache.
                cache = changed.get(name) or tuple(t.clone() for t in _cache(name, state))
                if operand in definition.mutates:
                    changed[name] = cache
                operands += cache[:2]
                if cache[2:]:
                    options["open_pages"] = cache[2:]
                continue
            value = env[name] if name in env else tensors[name]
            if name not in env and not name.startswith("@"):
                value = _bound(value, graph, name, dims)
            if operand in definition.mutates:
                value = value.clone()
                changed[name] = (value,)
            # The reference of a chain rounds once, at its end, as a fused kernel does.
            is_value = value.is_floating_point() and not name.startswith("@")
            operands.append(value.float() if is_value and len(op.plain) > 1 else value)
        if "out_dtype" in options:
            options["out_dtype"] = options["out_dtype"] or torch.float32
        result = function(*operands, **options)
        results = result if isinstance(result, tuple) else (result,)
        env.update(zip(inner.outputs, results, strict=False))
    found = {name: env[name].to(TORCH_DTYPES[graph.types[name].dtype]) for name in op.outputs}
    return found, changed


def _compare(
    op: Op,
    kernel: str,
    name: str,
    expected: torch.Tensor,
    found: torch.Tensor,
    is_quantised: bool,
) -> OpCheck:
    if not expected.is_floating_point():
        error = float((expected != found.view_as(expected)).sum())
        return OpCheck(op.name, kernel, name, error, 0.0)
    found = found.view_as(expected)
    # Banned tokens: equal infinities differ by nothing, and a difference of two is no number.
    banned = expected.isinf() & (found == expected)
    error = relative_error(found.masked_fill(banned, 0.0), expected.masked_fill(banned, 0.0))
    tolerance = max(TOLERANCES[expected.dtype], QUANTISED_TOLERANCE if is_quantised else 0.0)
    return OpCheck(op.name, kernel, name, error, tolerance)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Give the norm of the difference relative to the norm of what was expected."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


# --- against transformers -----------------------------------------------------------------------

LAYER_TOLERANCES = {"f32": 1e-3, "f16": 2e-2, "bf16": 5e-2}
HINTS = (
    "rope: theta, scaling and which features are paired",
    "the norms' epsilon and whether 1 is added to their weights",
    "the attention scale and window",
    "biases, and which of q, k, v comes first in a fused weight",
    "which half of the feed-forward is the gate, and its activation",
)


@dataclass(frozen=True)
class LayerCheck:
    """Tell how far the residual stream after a layer, or the logits, are from transformers'.

    `compared` are the rows of `expected` that count: all, but for those near a tie of their experts
    where these alone could explain a departure.
    """

    layer: str
    error: float
    tolerance: float
    expected: torch.Tensor = field(compare=False, repr=False)
    compared: torch.Tensor = field(compare=False, repr=False)

    @property
    def left_out(self) -> int:
        """The number of rows that do not count."""
        return int((~self.compared).sum())

    @property
    def passed(self) -> bool:
        """Say whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def verify_layers(loaded: LoadedArtifact, prompt: Sequence[int]) -> Iterator[LayerCheck]:
    """Compare the stream after each layer, then the last logits, with eager f32 transformers.

    The first check that fails names the layer to look at: everything after it inherits the error.
    Rounding may give a token other experts where its scores are nearly tied: a layer that departs
    is compared again without the few tokens nearest to a tie, in it or a layer before.
    """
    oracle = load_transformers(loaded.checkpoint)
    with torch.no_grad():
        output = oracle(torch.tensor([list(prompt)]), output_hidden_states=True)
    shares: dict[int, torch.Tensor] = {}
    found = play_prompt(loaded, prompt, shares)
    tied = torch.zeros(len(prompt))
    tolerance = LAYER_TOLERANCES[loaded.engine.dtype]
    num_layers = len(loaded.state.caches)
    # The last hidden state of transformers has passed the final norm: the logits stand for it.
    for layer in range(num_layers - 1):
        expected = output.hidden_states[layer + 1][0]
        stream, compared = found[f"layer {layer}"], torch.ones(len(prompt), dtype=torch.bool)
        tied = torch.maximum(tied, shares.get(layer, tied))
        error = relative_error(stream, expected)
        if not error <= tolerance and tied.any():
            compared = ~choose_left_out(tied)
            error = relative_error(stream[compared], expected[compared])
        yield LayerCheck(f"layer {layer}", error, tolerance, expected, compared)
    expected = output.logits[0, -1:]
    error = relative_error(found["logits"], expected)
    yield LayerCheck("logits", error, tolerance, expected, torch.ones(1, dtype=torch.bool))


def load_transformers(checkpoint: Checkpoint) -> Any:
    """Load the oracle: transformers' own model, eager, in f32, on the CPU.

    Raises: CheckpointError: transformers does not know the model, or can't read it.
    """
    # It takes seconds to import, and the tuner needs the tolerances of this file alone.
    from transformers import AutoModelForCausalLM

    path = checkpoint.path
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if checkpoint.kind == "gguf":
        path, options["gguf_file"] = path.parent, path.name
    try:
        return AutoModelForCausalLM.from_pretrained(str(path), **options).eval()
    # The library reports models it does not know through all of these.
    except (ValueError, LookupError, OSError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"transformers can't load {checkpoint.path}, so there is nothing to compare with: "
            f"{reason}",
            remedy="Prove the kernels alone with --kernels-only.",
        ) from error


def prepare_prompts(loaded: LoadedArtifact, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Write a mixed step of whole prompts to the state; give its tokens and sequences."""
    page_size = loaded.engine.page_size
    block_table = loaded.state.tensors["block_table"]
    next_page = 0
    for row, prompt in enumerate(prompts):
        # Room for one token more: a decode step may follow.
        pages = range(next_page, next_page + len(prompt) // page_size + 1)
        # Not in order, so that a kernel that ignores the table is found out.
        block_table[row, : len(pages)] = torch.tensor(pages[::-1], dtype=block_table.dtype)
        next_page = pages.stop
    return loaded.state.write_prompts(prompts)


def fill_adjustments(state: DeviceState, biased: Sequence[int]) -> None:
    """Let every row ask for all adjustments of its logits, of random sizes, and a few biases."""
    tensors = state.tensors
    tensors["adjusted"].fill_(ADJUST_COUNTS | ADJUST_BIASES | ADJUST_ALLOWED)
    tensors["num_biases"].random_(1, len(biased))
    tensors["bias_tokens"][:, : len(biased)] = torch.tensor(biased, dtype=torch.int32)
    tensors["bias_values"].normal_()
    tensors["bias_stops"].fill_(2**31 - 1)
    tensors["repetition_penalty"].uniform_(0.5, 2.0)
    tensors["presence_penalty"].uniform_(-2.0, 2.0)
    tensors["frequency_penalty"].uniform_(-2.0, 2.0)
    tensors["token_counts"].random_(0, 9)
    tensors["allowed"].random_(-(2**31), 2**31 - 1)


def play_prompt(
    loaded: LoadedArtifact, prompt: Sequence[int], tied: dict[int, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Run the prompt as one mixed step and keep the stream after each layer, and the logits.

    `tied` is filled with how near each token is to a tie of its experts, f32[T], by layer.
    """
    num_tokens, num_seqs = prepare_prompts(loaded, [prompt])
    bucket = min(b for step, b in loaded.programs if step == "mixed" and b >= num_tokens)
    program = loaded.programs["mixed", bucket]
    graph = loaded.graphs["mixed"]
    kept: dict[str, torch.Tensor] = {}
    noise = TOLERANCES[TORCH_DTYPES[loaded.engine.dtype]]

    def note_ties(op: Op, tensors: Mapping[str, torch.Tensor]) -> None:
        if tied is None:
            return
        shares = share_of_other_choices(op, graph, tensors, num_tokens, noise)
        if shares is not None:
            tied[int(op.outputs[0].split(".")[1])] = shares

    if isinstance(program, ReferenceProgram):
        values = program.run(num_tokens, num_seqs, keep_values=True)
        weights = {f"@{name}": weight for name, weight in loaded.weights.items()}
        for op in graph.ops:
            note_ties(op, {**weights, **values})
        return keep_layers(graph, values, num_tokens, num_seqs)
    for index, op in enumerate(graph.ops):
        note_ties(op, program.tensors)
        program.launch(index, num_tokens, num_seqs)
        _keep(op, program.values, kept, num_tokens, num_seqs)
    return kept


def keep_layers(
    graph: Graph, values: Mapping[str, torch.Tensor], num_tokens: int, num_seqs: int
) -> dict[str, torch.Tensor]:
    """Give the stream after each layer, and the logits, of a step whose values are all there."""
    kept: dict[str, torch.Tensor] = {}
    for op in graph.ops:
        _keep(op, values, kept, num_tokens, num_seqs)
    return kept


def _keep(
    op: Op,
    values: Mapping[str, torch.Tensor],
    kept: dict[str, torch.Tensor],
    num_tokens: int,
    num_seqs: int,
) -> None:
    """Copy an op's result under its layer's name; the last of a layer is the stream after it."""
    for name in op.outputs:
        scope = name.split(".")
        if scope[0] == "layers":
            kept[f"layer {scope[1]}"] = values[name][:num_tokens].to(
                "cpu", torch.float32, copy=True
            )
        elif name == "logits":
            kept["logits"] = values[name][:num_seqs].to("cpu", torch.float32, copy=True)
