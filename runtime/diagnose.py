"""Why a layer departs from transformers: the model is played again with one thing changed.

A change that makes the layer agree says what the spec has wrong. Called by `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from treadle.ir.graph import Graph, Op, RopeTable
from treadle.runtime.loading import LoadedArtifact
from treadle.runtime.reference_program import ReferenceProgram
from treadle.runtime.verify import LayerCheck, keep_layers, prepare_prompts, relative_error
from treadle.runtime.weights import rope_table

EPSILONS = (1e-5, 1e-6, 1e-8)
THETAS = (1e4, 1e5, 5e5, 1e6)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
CLOSER = 0.5  # an error this much smaller is worth telling


@dataclass(frozen=True)
class Variation:
    """Change one thing of a model: parameters of ops, or tensors in the place of weights."""

    what: str
    change: Callable[[Op], Op] | None = None
    weights: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class Finding:
    """Tell how far a layer is from transformers with a variation."""

    what: str
    error: float


def find_cause(
    loaded: LoadedArtifact, prompt: Sequence[int], departed: LayerCheck
) -> list[Finding]:
    """Give the variations that bring a layer closer to what was expected, the best first."""
    compared = departed.compared
    graph = loaded.graphs["mixed"]
    sizes = prepare_prompts(loaded, [prompt])
    findings = []
    window = loaded.checkpoint.config.get("sliding_window")
    for variation in variations(graph, loaded.weights, window if isinstance(window, int) else 0):
        changed = _vary(graph, variation.change) if variation.change else graph
        if variation.change and changed == graph:
            continue
        weights = {**loaded.weights, **(variation.weights or {})}
        program = ReferenceProgram(changed, loaded.state, weights)
        found = keep_layers(changed, program.run(*sizes, keep_values=True), *sizes)
        error = relative_error(found[departed.layer][compared], departed.expected[compared])
        findings.append(Finding(variation.what, error))
    closer = [finding for finding in findings if finding.error < CLOSER * departed.error]
    return sorted(closer, key=lambda finding: finding.error)


def variations(
    graph: Graph, weights: Mapping[str, torch.Tensor], window: int = 0
) -> Iterator[Variation]:
    """Yield what authors most often have wrong: norms, RoPE, scores, windows, activations.

    `window` is that of the config, which the spec may have left out.
    """
    for eps in EPSILONS:
        yield Variation(f"norms with an epsilon of {eps:g}", _setting("eps", eps))
    yield Variation("1 added to the weights of norms", _setting("offset", 1.0))
    yield Variation("nothing added to the weights of norms", _setting("offset", 0.0))
    yield Variation("RoPE over pairs of neighbours", _of("rope", interleaved=True))
    yield from _ropes(graph, weights)
    for power, name in ((-0.5, "1/sqrt(head size)"), (-1.0, "1/(head size)"), (0.0, "1")):
        yield Variation(f"an attention scale of {name}", _scaled(power))
    yield Variation("no sliding window", _of("attention", window=0))
    if window:
        text = f"a sliding window of {window} tokens in every layer"
        yield Variation(text, _of("attention", window=window))
    yield Variation("no cap of scores", _of("attention", soft_cap=0.0))
    for act in ACTIVATIONS:
        yield Variation(f"the activation {act}", _setting("act", act))


def _ropes(graph: Graph, weights: Mapping[str, torch.Tensor]) -> Iterator[Variation]:
    """Yield other tables of RoPE: none, or plain ones of well-known bases."""
    tables = [weight.name for weight in graph.weights if weight.rope]
    if not tables:
        return
    for theta, what in [
        (0.0, "no RoPE"),
        *((t, f"plain RoPE with a theta of {t:g}") for t in THETAS),
    ]:
        changed = {}
        for name in tables:
            length, width = weights[name].shape
            pairs = range(width // 2)
            frequencies = tuple(theta ** (-2 * pair / width) if theta else 0.0 for pair in pairs)
            table = rope_table(RopeTable(frequencies), length)
            changed[name] = table.to(weights[name].device)
        yield Variation(what, weights=changed)


def _of(kind: str, **params: Any) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        return replace(op, params=replace(op.params, **params)) if op.kind == kind else op

    return change


def _setting(name: str, value: float | str) -> Callable[[Op], Op]:
    """Change a parameter wherever an op has one of that name."""

    def change(op: Op) -> Op:
        if not hasattr(op.params, name):
            return op
        return replace(op, params=replace(op.params, **{name: value}))

    return change


def _scaled(power: float) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        if op.kind != "attention":
            return op
        return replace(op, params=replace(op.params, scale=op.params.head_dim**power))

    return change


def _vary(graph: Graph, change: Callable[[Op], Op]) -> Graph:
    """Change the plain ops of a graph, in bodies too."""
    return replace(
        graph,
        ops=tuple(
            replace(op, body=tuple(map(change, op.body))) if op.body else change(op)
            for op in graph.ops
        ),
    )
