"""The author's way to write a graph: one method per op, types checked as they are written.

Called by model specs and tests. Knows the step's inputs and the rows' state, so that a spec says
`attention(q, layer)` and not which block table it reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.ir import dims as d
from treadle.ir.errors import ShapeError, SpecError
from treadle.ir.graph import Graph, Op, RopeTable, Value, Weight
from treadle.ir.ops.registry import infer_types, lookup, make_params
from treadle.ir.ops.sampling import WORD_BITS
from treadle.ir.types import TensorType

ROW_STATE: dict[str, TensorType] = {
    "last_token": TensorType((d.R,), "i32"),
    "length": TensorType((d.R,), "i32"),
    "temperature": TensorType((d.R,), "f32"),
    "top_k": TensorType((d.R,), "i32"),
    "top_p": TensorType((d.R,), "f32"),
    "min_p": TensorType((d.R,), "f32"),
    "seed": TensorType((d.R,), "i64"),
    "block_table": TensorType((d.R, d.M), "i32"),
}

# What decides how a row's token is drawn, in the order of `sample`'s operands.
SAMPLING_STATE = ("temperature", "top_k", "top_p", "min_p", "seed")

STEP_INPUTS: dict[str, TensorType] = {
    "token_ids": TensorType((d.T,), "i32"),
    "positions": TensorType((d.T,), "i32"),
    "token_seq": TensorType((d.T,), "i32"),
    "query_start": TensorType((d.B + 1,), "i32"),
    "context_lens": TensorType((d.B,), "i32"),
    "sample_index": TensorType((d.B,), "i32"),
}

STEP_KINDS = ("decode", "mixed")

# The most tokens of a row whose logits are shifted or banned.
MAX_BIASES = 1024


def adjustment_state(vocab_size: int) -> dict[str, TensorType]:
    """Give the rows' state that says how logits are adjusted before a token is drawn."""
    row = (d.R,)
    return {
        "adjusted": TensorType(row, "i32"),
        "num_biases": TensorType(row, "i32"),
        "bias_tokens": TensorType((d.R, MAX_BIASES), "i32"),
        "bias_values": TensorType((d.R, MAX_BIASES), "f32"),
        "bias_stops": TensorType((d.R, MAX_BIASES), "i32"),
        "repetition_penalty": TensorType(row, "f32"),
        "presence_penalty": TensorType(row, "f32"),
        "frequency_penalty": TensorType(row, "f32"),
        "token_counts": TensorType((d.R, vocab_size), "i16"),
        "allowed": TensorType((d.R, -(-vocab_size // WORD_BITS)), "i32"),
    }


def build_resample(name: str, vocab_size: int) -> Graph:
    """Build the graph that follows a step in which a row asks for adjusted logits.

    It changes the step's `logits` in place, draws again, and counts the tokens. The tokens drawn
    before are its `sample_index`: negative where none is wanted. Rows that ask for nothing draw the
    token they drew before.
    """
    given = {
        "logits": TensorType((d.B, vocab_size), "f32"),
        "seq_rows": TensorType((d.B,), "i32"),
        "sample_index": TensorType((d.B,), "i32"),
        **{name: ROW_STATE[name] for name in (*SAMPLING_STATE, "length", "last_token")},
        **adjustment_state(vocab_size),
    }
    inputs = {name: Value(name, type_) for name, type_ in given.items()}
    tokens = Value("tokens", TensorType((d.B,), "i32"))
    types = {value.name: value.type for value in (*inputs.values(), tokens)}
    chosen = []
    for kind in ("adjust_logits", "sample", "count_tokens"):
        operands = lookup(kind).operands
        params = make_params(kind, {})
        results = (tokens.name,) if kind == "sample" else ()
        found = infer_types(kind, params, tuple(types[operand] for operand in operands))
        assert found == tuple(types[result] for result in results), "the rules give these types"
        chosen.append(Op(kind, operands, results, params))
    return Graph(
        name, tuple(inputs.values()), (), tuple(chosen), (tokens.name, "logits"), (tokens,)
    )


class GraphBuilder:
    """Build the graph of one kind of step.

    `step` is `decode` (one token per sequence, inputs prepared on the device from the rows' state)
    or `mixed` (any tokens, prepared by the host). The spec is the same for both. `dtype` is the
    compute dtype; `page_size` the slots of a KV page, in tokens; `kv_format` one of `KV_FORMATS`,
    or empty where keys and values are stored as they are computed.

    Raises: SpecError, ShapeError: at the author's line.
    """

    def __init__(
        self, name: str, *, step: str, dtype: str, page_size: int, kv_format: str = ""
    ) -> None:
        if step not in STEP_KINDS:
            raise SpecError(f"A step is {' or '.join(STEP_KINDS)}, not `{step}`.")
        self.name = f"{name}.{step}"
        self.step = step
        self.dtype = dtype
        self.page_size = page_size
        self.kv_format = kv_format
        self._inputs: dict[str, Value] = {}
        self._weights: dict[str, Weight] = {}
        self._values: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._scope = ""
        self.seq_rows = self._input("seq_rows", TensorType((d.B,), "i32"))
        state = {name: self._input(name, type_) for name, type_ in ROW_STATE.items()}
        self._state = state
        if step == "decode":
            self._step = dict(
                zip(
                    lookup("advance").results,
                    self.apply("advance", self.seq_rows, state["last_token"], state["length"]),
                    strict=True,
                )
            )
        else:
            self._step = {name: self._input(name, type_) for name, type_ in STEP_INPUTS.items()}
            (self._step["token_ids"],) = self.apply(
                "resolve_tokens",
                self._step["token_ids"],
                self._step["token_seq"],
                self.seq_rows,
                state["last_token"],
            )

    @property
    def token_ids(self) -> Value:
        """The step's tokens, i32[T]."""
        return self._step["token_ids"]

    def scope(self, prefix: str) -> None:
        """Name the values that follow `prefix.…`; an empty prefix ends the scope."""
        self._scope = f"{prefix}." if prefix else ""

    # --- declarations ---------------------------------------------------------------------------

    def _input(self, name: str, type_: TensorType) -> Value:
        self._inputs[name] = Value(name, type_)
        return self._inputs[name]

    def weight(
        self,
        name: str,
        parts: dict[str, int] | str,
        *shape: int,
        fallback: str = "",
        sections: tuple[int, ...] = (),
        groups: int = 1,
        dtype: str = "",
        stack: int = 0,
        transposed: bool = False,
    ) -> Value:
        """Declare a weight from one checkpoint tensor, or from several joined along axis 0.

        `parts` is a tensor's name and `shape` its whole shape; or the rows of each tensor by name,
        and `shape` is what follows the rows. `fallback` is the tensor to use where the part is
        absent. With `groups` the rows come group by group, each with its share of every one of the
        `sections`, whose rows the weight has one after the other. `dtype` is what it is computed
        in, by default the graph's. `stack` X says that the parts are of one of X experts, their
        number standing for `{}` in the names: the weight gets an axis of experts before the rows,
        and `fallback` holds all of them, as a part does whose name has no `{}`. `transposed` says
        that the rows of the weight are the columns of its tensors.
        """
        if isinstance(parts, str):
            parts, shape = {parts: shape[0]}, shape[1:]
        rows = sum(parts.values())
        type_ = TensorType((*([stack] if stack else []), rows, *shape), dtype or self.dtype)
        if groups > 1 and (sum(sections) != rows or any(s % groups for s in sections)):
            raise ShapeError(
                f"The sections of `{name}` should be {rows} rows in all, each of {groups} "
                f"equal groups; found {', '.join(map(str, sections))}."
            )
        weight = Weight(
            name,
            type_,
            tuple(parts),
            tuple(parts.values()),
            fallback,
            sections=sections if groups > 1 else (),
            groups=groups,
            stack=stack,
            transposed=transposed,
        )
        return self._declare(weight)

    def rope_table(
        self,
        name: str,
        inverse_frequencies: Sequence[float],
        scale: float = 1.0,
        *,
        short_window: int = 0,
        long_inverse_frequencies: Sequence[float] = (),
    ) -> Value:
        """Declare the table of cosines and sines for these frequencies.

        The long ones, where there are any, are for a window beyond `short_window` tokens.
        """
        type_ = TensorType((d.C, 2 * len(inverse_frequencies)), "f32")
        table = RopeTable(
            tuple(inverse_frequencies), scale, short_window, tuple(long_inverse_frequencies)
        )
        return self._declare(Weight(name, type_, rope=table))

    def _declare(self, weight: Weight) -> Value:
        if weight.name in self._weights:
            raise SpecError(f"The weight `{weight.name}` is declared twice.")
        self._weights[weight.name] = weight
        return Value(f"@{weight.name}", weight.type)

    # --- ops ------------------------------------------------------------------------------------

    def apply(
        self, kind: str, *operands: Value | None, name: str = "", **params: Any
    ) -> tuple[Value, ...]:
        """Append an op and give its results.

        `name` names the result within the scope, or several results with spaces between.
        """
        given = [operand for operand in operands if operand is not None]
        record = make_params(kind, params)
        types = infer_types(kind, record, tuple(value.type for value in given))
        results = tuple(
            Value(self._unique(self._scope + label), type_)
            for label, type_ in zip(_labels(kind, name, len(types)), types, strict=True)
        )
        self._values.update((value.name, value) for value in results)
        inputs = tuple(value.name for value in given)
        outputs = tuple(value.name for value in results)
        self._ops.append(Op(kind, inputs, outputs, record, _author_line(), origin=outputs))
        return results

    def _unique(self, name: str) -> str:
        taken, number, candidate = self._values, 1, name
        while candidate in taken or candidate in self._inputs:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def embed(self, table: Value, *, scale: float = 1.0, name: str = "embedded") -> Value:
        """Look up the step's tokens."""
        return self.apply("embed", self.token_ids, table, name=name, scale=scale)[0]

    def rms_norm(
        self, x: Value, weight: Value, *, eps: float, offset: float = 0.0, name: str = ""
    ) -> Value:
        """Normalise rows by their root mean square."""
        return self.apply("rms_norm", x, weight, name=name, eps=eps, offset=offset)[0]

    def head_norm(
        self, x: Value, weight: Value, *, eps: float, offset: float = 0.0, name: str = ""
    ) -> Value:
        """Normalise each head by its root mean square; the weight is as wide as one head."""
        return self.apply("head_norm", x, weight, name=name, eps=eps, offset=offset)[0]

    def layer_norm(
        self, x: Value, weight: Value, bias: Value | None = None, *, eps: float, name: str = ""
    ) -> Value:
        """Normalise rows by their mean and variance."""
        return self.apply("layer_norm", x, weight, bias, name=name, eps=eps)[0]

    def section_norm(
        self,
        x: Value,
        weight: Value,
        *,
        sizes: tuple[int, ...],
        eps: float,
        offset: float = 0.0,
        name: str = "",
    ) -> Value:
        """Normalise the first sections of each row, each by its own root mean square."""
        params = {"sizes": sizes, "eps": eps, "offset": offset}
        return self.apply("section_norm", x, weight, name=name, **params)[0]

    def linear(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        out_dtype: str = "",
        name: str = "",
    ) -> Value:
        """Multiply by a weight and add its bias."""
        return self.apply("linear", x, weight, bias, name=name, out_dtype=out_dtype)[0]

    def route(
        self,
        logits: Value,
        correction: Value | None = None,
        *,
        top_k: int,
        score: str = "softmax",
        normalise: bool = False,
        scaling: float = 1.0,
        num_groups: int = 1,
        kept_groups: int = 1,
        group_top: int = 1,
        name: str = "",
    ) -> tuple[Value, Value]:
        """Choose the experts of each token; give their numbers and what their results count."""
        experts, scales = self.apply(
            "route",
            logits,
            correction,
            name=name,
            top_k=top_k,
            score=score,
            normalise=normalise,
            scaling=scaling,
            num_groups=num_groups,
            kept_groups=kept_groups,
            group_top=group_top,
        )
        return experts, scales

    def expert_linear(
        self, x: Value, weight: Value, experts: Value, bias: Value | None = None, *, name: str = ""
    ) -> Value:
        """Multiply by the weights of the experts chosen for each token: a row per choice."""
        return self.apply("expert_linear", x, weight, experts, bias, name=name)[0]

    def combine(self, rows: Value, scales: Value, *, name: str = "") -> Value:
        """Add up the results of each token's experts, scaled."""
        return self.apply("combine", rows, scales, name=name)[0]

    def row_gate(self, x: Value, gate: Value, *, name: str = "") -> Value:
        """Scale each row by the sigmoid of its gate."""
        return self.apply("row_gate", x, gate, name=name)[0]

    def add(self, a: Value, b: Value, *, name: str = "") -> Value:
        """Add two tensors."""
        return self.apply("add", a, b, name=name)[0]

    def scale(self, x: Value, factor: float, *, name: str = "") -> Value:
        """Multiply by a constant."""
        return self.apply("scale", x, name=name, factor=factor)[0]

    def soft_cap(self, x: Value, cap: float, *, name: str = "") -> Value:
        """Bend what is large, so that nothing exceeds the cap."""
        return self.apply("soft_cap", x, name=name, cap=cap)[0]

    def activate(self, x: Value, *, act: str, name: str = "") -> Value:
        """Apply an activation to every element."""
        return self.apply("activate", x, name=name, act=act)[0]

    def glu(
        self,
        gate_up: Value,
        *,
        act: str = "silu",
        limit: float = 0.0,
        sharpness: float = 1.0,
        up_offset: float = 0.0,
        name: str = "",
    ) -> Value:
        """Gate the second half of the features with the activated first half."""
        form = {"act": act, "limit": limit, "sharpness": sharpness, "up_offset": up_offset}
        return self.apply("glu", gate_up, name=name, **form)[0]

    def split(self, x: Value, *sizes: int, name: str = "") -> tuple[Value, ...]:
        """Cut the last axis."""
        return self.apply("split", x, name=name, sizes=sizes)

    def rope(
        self,
        x: Value,
        table: Value,
        *,
        head_dim: int,
        interleaved: bool = False,
        start: int = 0,
        name: str = "",
    ) -> Value:
        """Rotate heads by the step's positions, from the feature `start` on."""
        params = {"head_dim": head_dim, "interleaved": interleaved, "start": start}
        return self.apply("rope", x, self._step["positions"], table, name=name, **params)[0]

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        sinks: Value | None = None,
        *,
        cache: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        name: str = "",
    ) -> Value:
        """Append k and v to the layer's `cache` and attend to everything in it, or to a window."""
        shape = (d.P, num_kv_heads, self.page_size, head_dim)
        pages = self._inputs.get(cache) or self._input(
            cache, TensorType(shape, self.kv_format or self.dtype, "kv")
        )
        # A prompt attends to its own step's keys and values as they were computed.
        own = (k, v) if self.kv_format and self.step == "mixed" else ()
        step, table = self._step, self._state["block_table"]
        # A page is quantised when a step fills it.
        filled = (step["query_start"], step["context_lens"]) if self.kv_format else ()
        self.apply(
            "kv_write",
            k,
            v,
            step["positions"],
            step["token_seq"],
            self.seq_rows,
            table,
            pages,
            *filled,
        )
        return self.apply(
            "attention",
            q,
            pages,
            table,
            self.seq_rows,
            step["query_start"],
            step["context_lens"],
            *own,
            sinks,
            name=name,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )[0]

    def head_linear(
        self,
        x: Value,
        weight: Value,
        *,
        num_heads: int,
        first: int,
        rows: int,
        transposed: bool = False,
        name: str = "",
    ) -> Value:
        """Multiply each head by its own rows of a weight, or by their columns."""
        params = {"num_heads": num_heads, "first": first, "rows": rows, "transposed": transposed}
        return self.apply("head_linear", x, weight, name=name, **params)[0]

    def append_latent(self, latent: Value, k_rope: Value, *, cache: str) -> Value:
        """Append latents to the layer's `cache`; give the cache, for `latent_attention`.

        `latent` is the value of a token and part of its key, `k_rope` the rest of the key.
        Raises: SpecError: the cache should be quantised.
        """
        if self.kv_format:
            raise SpecError(
                f"A cache of latents is stored as it is computed, not in {self.kv_format}.",
                remedy="Leave --kv-dtype out for this model: a latent is small already.",
            )
        width = latent.type.size(-1) + k_rope.type.size(-1)
        type_ = TensorType((d.P, 1, self.page_size, width), self.dtype, "latent")
        pages = self._inputs.get(cache) or self._input(cache, type_)
        step, table = self._step, self._state["block_table"]
        where = (step["positions"], step["token_seq"], self.seq_rows, table)
        self.apply("latent_write", latent, k_rope, *where, pages)
        return pages

    def latent_attention(
        self,
        q: Value,
        q_rope: Value,
        latents: Value,
        *,
        num_heads: int,
        value_dim: int,
        scale: float,
        whole_from: int = 0,
        name: str = "",
    ) -> Value:
        """Attend to all latents of a cache, whose first `value_dim` features are the values.

        Prompts of `whole_from` tokens or more that begin in this step are left to
        `prompt_attention`, if it is not 0.
        """
        step = self._step
        return self.apply(
            "latent_attention",
            q,
            q_rope,
            latents,
            self._state["block_table"],
            self.seq_rows,
            step["query_start"],
            step["context_lens"],
            name=name,
            num_heads=num_heads,
            value_dim=value_dim,
            scale=scale,
            whole_from=whole_from if self.step == "mixed" else 0,
        )[0]

    def prompt_attention(
        self,
        q: Value,
        latent: Value,
        up: Value,
        latents: Value,
        y: Value,
        *,
        num_heads: int,
        nope_dim: int,
        value_dim: int,
        scale: float,
        whole_from: int,
    ) -> None:
        """Overwrite the rows of `y` that are of prompts which begin in this step.

        They attend to keys and values that the weight `up` makes of the step's own `latent`. A
        decode step has no prompts: nothing is added to it.
        """
        if self.step == "decode":
            return
        step = self._step
        self.apply(
            "prompt_attention",
            q,
            self.linear(latent, up, name="own_kv"),
            latents,
            self._state["block_table"],
            self.seq_rows,
            step["query_start"],
            step["context_lens"],
            y,
            num_heads=num_heads,
            nope_dim=nope_dim,
            value_dim=value_dim,
            scale=scale,
            whole_from=whole_from,
        )

    def last_rows(self, x: Value, *, name: str = "") -> Value:
        """Keep the rows whose logits are wanted: the last token of each sequence."""
        return self.apply("gather_rows", x, self._step["sample_index"], name=name)[0]

    def finish(self, logits: Value, hidden: Value | None = None) -> Graph:
        """Sample from the logits and give the graph, which returns the tokens and the logits.

        And the rows that the logits were made of, where they are named: clients may ask for both.
        """
        self.scope("")
        state = self._state
        (tokens,) = self.apply(
            "sample",
            logits,
            self.seq_rows,
            self._step["sample_index"],
            *(state[name] for name in (*SAMPLING_STATE, "length")),
            state["last_token"],
            name="tokens",
        )
        return Graph(
            self.name,
            tuple(self._inputs.values()),
            tuple(self._weights.values()),
            tuple(self._ops),
            (tokens.name, logits.name, *([hidden.name] if hidden else [])),
            tuple(self._values.values()),
        )


def _labels(kind: str, name: str, count: int) -> list[str]:
    """Name the results of an op: as the author says, or by its kind."""
    if count == 1:
        return [name or kind]
    given = name.split() or [f"{kind}.{result}" for result in lookup(kind).results]
    if len(given) == count:
        return given
    return [f"{name or kind}.{index}" for index in range(count)]


def _author_line() -> str:
    """Give `file:line` of the nearest caller outside this module: the author's line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
