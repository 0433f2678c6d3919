"""Ops of latent attention: their types, what is refused by name, and what joins their append."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from treadle.ir.builder import GraphBuilder
from treadle.ir.errors import LoweringError, ShapeError, SpecError, TreadleError
from treadle.ir.fuse import fuse_latent_write
from treadle.ir.graph import Graph, Value
from treadle.ir.ops.registry import infer_types, make_params
from treadle.ir.pipeline import run_passes
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.types import parse_type
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Situation

HEADS, NOPE, ROPE, RANK, VALUE = 2, 24, 16, 48, 40
Q_DIM = NOPE + ROPE


def test_a_cache_of_latents_is_written_as_it_is_read_and_has_one_plane() -> None:
    text = "latent.bf16[P, 1, 64, 576]"
    type_ = parse_type(text)
    assert str(type_) == text
    assert type_.num_bytes({"P": 3}) == 3 * 64 * 576 * 2


def test_a_cache_of_latents_has_no_quantised_dtype() -> None:
    with pytest.raises(ShapeError, match="int8"):
        parse_type("latent.int8[P, 1, 64, 576]")


@dataclass
class Step:
    """A step of one layer of latent attention, written op by op."""

    b: GraphBuilder
    key_first: bool = False
    other_table: bool = False

    def graph(self) -> Graph:
        b = self.b
        x = b.embed(b.weight("embed", "embed", 32, 64))
        table = b.rope_table("rope", (1.0,) * (ROPE // 2))
        q_table = b.rope_table("other", (0.5,) * (ROPE // 2)) if self.other_table else table
        q = b.linear(x, b.weight("q", "q", HEADS * Q_DIM, 64), name="q")
        down = b.linear(x, b.weight("down", "down", RANK + ROPE, 64), name="down")
        if self.key_first:
            key, latent = b.split(down, ROPE, RANK, name="key latent")
        else:
            latent, key = b.split(down, RANK, ROPE, name="latent key")
        latent = b.rms_norm(latent, b.weight("norm", "norm", RANK), eps=1e-6, name="normed")
        key = b.rope(key, table, head_dim=ROPE, name="k_rope")
        q = b.rope(q, q_table, head_dim=Q_DIM, start=NOPE, name="q_rope")
        latents = b.append_latent(latent, key, cache="kv.0")
        up = b.weight("up", "up", HEADS * (NOPE + VALUE), RANK)
        y = self.attend(q, latent, up, latents)
        rows = b.last_rows(y, name="last")
        head = b.weight("head", "head", 32, HEADS * VALUE)
        return b.finish(b.linear(rows, head, out_dtype="f32", name="logits"))

    def attend(self, q: Value, latent: Value, up: Value, latents: Value) -> Value:
        b, heads = self.b, {"num_heads": HEADS}
        absorbed = b.head_linear(q, up, first=0, rows=NOPE, transposed=True, **heads)
        y = b.latent_attention(
            absorbed, q, latents, value_dim=RANK, scale=0.1, whole_from=8, **heads
        )
        y = b.head_linear(y, up, first=NOPE, rows=VALUE, name="y", **heads)
        sizes = {"nope_dim": NOPE, "value_dim": VALUE}
        b.prompt_attention(q, latent, up, latents, y, scale=0.1, whole_from=8, **sizes, **heads)
        return y


def builder(step: str = "mixed") -> GraphBuilder:
    return GraphBuilder("toy", step=step, dtype="bf16", page_size=16)


def kinds(graph: Graph) -> list[str]:
    return [op.params.kernel if op.body else op.kind for op in graph.ops]


def lower_append(graph: Graph, step: str) -> TreadleError:
    """Give the reason why the op that appends latents has no kernel."""
    dims = {"T": 8, "B": 8, "R": 8, "M": 4, "P": 32, "C": 64}
    (append,) = (op for op in graph.ops if any(i.kind == "latent_write" for i in op.plain))
    with pytest.raises(LoweringError) as caught:
        list(lower(append, graph, Situation(dims, step, "cuda", "sm_90")))
    return caught.value


def test_the_append_takes_the_split_the_norm_and_both_ropes_along() -> None:
    fused, _ = run_passes(Step(builder()).graph(), few_tokens=False)
    assert "rms_norm__rope__latent_write" in kinds(fused)
    assert not {"split", "rope", "rms_norm", "latent_write"} & {*kinds(fused)}


def test_only_steps_with_prompts_make_keys_and_values() -> None:
    mixed, decode = (Step(builder(step)).graph() for step in ("mixed", "decode"))
    assert "prompt_attention" in kinds(mixed) and "prompt_attention" not in kinds(decode)
    whole_from = [
        next(op for op in graph.ops if op.kind == "latent_attention").params.whole_from
        for graph in (mixed, decode)
    ]
    assert whole_from == [8, 0]


def test_q_and_the_key_that_rotate_by_other_tables_stay_apart_and_the_reason_is_told() -> None:
    graph, refusals = fuse_latent_write(Step(builder(), other_table=True).graph())
    assert [refusal.reason for refusal in refusals] == ["q and the key are not rotated alike"]
    error = lower_append(graph, "mixed")
    assert "latent_write alone" in error.message and "fuse_latent_write" in error.remedy


def test_a_key_that_comes_before_its_latent_is_refused_by_the_kernel() -> None:
    fused, _ = run_passes(Step(builder(), key_first=True).graph(), few_tokens=False)
    assert "should follow the latent" in lower_append(fused, "mixed").message


@pytest.mark.parametrize(
    ("kind", "params", "types"),
    [
        # Rows beyond those of a head; a weight that is not of whole heads; too narrow heads of x.
        ("head_linear", {"num_heads": 2, "first": 30, "rows": 4}, ("bf16[T, 64]", "bf16[64, 32]")),
        ("head_linear", {"num_heads": 3, "first": 0, "rows": 4}, ("bf16[T, 96]", "bf16[64, 32]")),
        ("head_linear", {"num_heads": 2, "first": 0, "rows": 4}, ("bf16[T, 60]", "bf16[64, 32]")),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_the_op(
    kind: str, params: dict[str, int], types: tuple[str, ...]
) -> None:
    with pytest.raises(ShapeError, match=f"`{kind}`"):
        infer_types(kind, make_params(kind, params), tuple(map(parse_type, types)))


STEP_TYPES = ("i32[R, M]", "i32[B]", "i32[B+1]", "i32[B]")


def test_latents_do_not_go_where_keys_and_values_are() -> None:
    params = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "scale": 0.1}
    types = ("bf16[T, 128]", "latent.bf16[P, 1, 16, 64]", *STEP_TYPES)
    with pytest.raises(ShapeError, match="a cache of 1 heads of 64"):
        infer_types("attention", make_params("attention", params), tuple(map(parse_type, types)))


def test_one_token_is_no_prompt() -> None:
    params = {"num_heads": HEADS, "value_dim": RANK, "scale": 0.1, "whole_from": 1}
    queries = (f"bf16[T, {HEADS * RANK}]", f"bf16[T, {HEADS * Q_DIM}]")
    types = (*queries, f"latent.bf16[P, 1, 16, {RANK + ROPE}]", *STEP_TYPES)
    kind = "latent_attention"
    with pytest.raises(SpecError, match="2 tokens or more"):
        infer_types(kind, make_params(kind, params), tuple(map(parse_type, types)))


@pytest.mark.parametrize("step", ["mixed", "decode"])
def test_a_fused_graph_with_latents_reads_back(step: str) -> None:
    fused, _ = run_passes(Step(builder(step)).graph(), few_tokens=False)
    assert parse_graph(print_graph(fused)) == fused
