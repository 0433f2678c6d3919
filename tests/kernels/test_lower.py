"""Lowering: every op of the fused graphs gets kernels that can be launched, or a reason why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.ir.toy import CONFIG
from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.kv_cache import KV_FORMATS
from treadle.ir.pipeline import run_passes
from treadle.ir.text import parse_graph
from treadle.kernels.lower.by_kind import lower
from treadle.kernels.lower.candidates import Candidate, Situation
from treadle.kernels.lower.dependent_launch import without_unsafe_pdl
from treadle.kernels.schedule.attention import attention_prefill_schedules, within_shared_memory
from treadle.kernels.schedule.linears import GEMV_ROWS
from treadle.models.config import from_hf
from treadle.models.registry import build_graph
from treadle.runtime.compiler import FORMS

# The buckets that each form of graph is lowered for.
BUCKETS: dict[str, tuple[int, ...]] = {
    "decode.few": (GEMV_ROWS,),
    "decode": (8, 64, 256),
    "decode.few.joined": (GEMV_ROWS,),
    "decode.joined": (8,),
    "mixed": (16, 512, 2048),
}
# Target and architecture, and what the compute dtype of a model there is.
TARGETS = {
    "sm_90": ("cuda", "sm_90", "bf16"),
    "sm_80": ("cuda", "sm_80", "bf16"),
    "interpret": ("interpret", "", "f32"),
}
CONFIGS: dict[str, dict[str, object]] = {
    "plain": {},
    "four layers": {"num_hidden_layers": 4},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {
        "hidden_size": 72,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "intermediate_size": 132,
        "num_hidden_layers": 2,
    },
}
LATENTS: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
}
CONFIGS |= {
    "latents": LATENTS | {"q_lora_rank": 20},
    "latents and queries of one projection": LATENTS | {"q_lora_rank": None},
}
# Decode steps have one query for each sequence: they don't ask where a sequence's queries start.
DECODES = ("attention_decode", "rope_attention_decode", "latent_attention_decode")
FORMAT_OF = {f"{kv_format} cache": kv_format for kv_format in KV_FORMATS}
CONFIGS |= {name: {"head_dim": 32} for name in FORMAT_OF}


@cache
def fused_graph(form: str, config: str, dtype: str) -> Graph:
    how = FORMS[form]
    described = from_hf({**CONFIG, "num_hidden_layers": 1, **CONFIGS[config]})
    kv_format = FORMAT_OF.get(config, "")
    graph = build_graph(described, step=how.step, dtype=dtype, page_size=16, kv_format=kv_format)
    return run_passes(graph, few_tokens=how.few_tokens, joined=how.joined)[0]


def situation(step: str, target: str, architecture: str, bucket: int) -> Situation:
    num_seqs = bucket if step == "decode" else min(bucket, 16)
    dims = {"T": bucket, "B": num_seqs, "R": 256, "M": 64, "P": 512, "C": 1024}
    return Situation(dims, step, target, architecture)


def lowered(
    form: str, target: str, config: str = "plain"
) -> Iterator[tuple[Op, Graph, list[Candidate]]]:
    """Yield each op of the form's graph with its candidates, once per bucket."""
    kind, architecture, dtype = TARGETS[target]
    graph = fused_graph(form, config, dtype)
    for bucket in BUCKETS[form]:
        where = situation(FORMS[form].step, kind, architecture, bucket)
        for op in graph.ops:
            yield op, graph, list(lower(op, graph, where))


def launch_parameters(text: str) -> list[str]:
    """Read the parameters of a module's `launch`, in order."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    (launch,) = [function for function in functions if function.name == "launch"]
    return [argument.arg for argument in launch.args.args]


def refusal(text: str, bucket: int = 8) -> str:
    """Lower the last op of a graph that is given as text, and give the error's message."""
    graph = parse_graph(text)
    with pytest.raises(LoweringError) as caught:
        list(lower(graph.ops[-1], graph, situation("mixed", "cuda", "sm_90", bucket)))
    return str(caught.value)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_the_launch_arguments_of_a_candidate_are_the_parameters_of_its_module(
    form: str, target: str, config: str
) -> None:
    # What `launch` takes depends on the template and on the extra tensors, not on the schedule.
    known: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for op, _, candidates in lowered(form, target, config):
        for candidate in candidates:
            key = (candidate.template, candidate.operands)
            if key not in known:
                known[key] = launch_parameters(candidate.emit())
            parameters = known[key]
            assert set(candidate.arguments) == set(parameters), (op.name, candidate.template)
            # Programs bind tensors once and append the sizes at every launch.
            is_size = [candidate.arguments[name].startswith("size:") for name in parameters]
            assert is_size == sorted(is_size), (op.name, candidate.template)


@pytest.mark.parametrize("config", ("plain", "latents", "latents and queries of one projection"))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_every_argument_names_something_that_a_step_has(
    form: str, target: str, config: str
) -> None:
    for op, graph, candidates in lowered(form, target, config):
        for candidate in candidates:
            scratch = {each.name for each in candidate.scratch}
            for argument in candidate.arguments.values():
                kind, _, name = argument.partition(":")
                known = {
                    "value": name in {*op.inputs, *op.outputs},
                    "keys": name in op.inputs and graph.types[name].layout == "kv",
                    "values": name in op.inputs and graph.types[name].layout == "kv",
                    "latents": name in op.inputs and graph.types[name].layout == "latent",
                    "open_keys": name in op.inputs and bool(graph.types[name].kv_format),
                    "open_values": name in op.inputs and bool(graph.types[name].kv_format),
                    "scratch": name in scratch,
                    "size": name in ("T", "B"),
                    "none": name == "",
                }
                assert known[kind], (op.name, candidate.template, argument)


@pytest.mark.parametrize("config", ("plain", "latents", "latents and queries of one projection"))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_every_operand_and_result_of_an_op_is_an_argument(
    form: str, target: str, config: str
) -> None:
    for op, _, candidates in lowered(form, target, config):
        for candidate in candidates:
            passed = {argument.partition(":")[2] for argument in candidate.arguments.values()}
            left_out = {*op.inputs, *op.outputs} - passed
            if candidate.template in DECODES:
                left_out.remove("advance.query_start")
            # Nor do they need a token's sequence and position, where they append it themselves.
            if candidate.template == "rope_attention_decode":
                left_out -= {"advance.token_seq", "advance.positions"}
            assert not left_out, (op.name, candidate.template)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_no_candidate_is_offered_twice(form: str, target: str) -> None:
    for op, _, candidates in lowered(form, target):
        ways = [(each.template, tuple(sorted(each.schedule.items()))) for each in candidates]
        assert len(set(ways)) == len(ways), op.name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_the_layers_of_a_model_share_their_kernels(form: str, target: str) -> None:
    # The first layer is another matter: its text says that it reads the embedding. So is the last
    # one, behind whose attention few rows are wanted.
    texts: dict[int, set[str]] = {1: set(), 2: set()}
    for op, _, candidates in lowered(form, target, "four layers"):
        for layer, found in texts.items():
            if op.name.startswith((f"layers.{layer}.", f"kv_write.kv.{layer}")):
                found.add(candidates[0].emit())
    assert texts[1] == texts[2] != set()


@pytest.mark.parametrize("config", FORMAT_OF)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_that_touch_a_quantised_cache_know_its_format(form: str, config: str) -> None:
    touching = [
        candidate
        for op, graph, candidates in lowered(form, "sm_90", config)
        if any(graph.type_of(name).kv_format for name in op.inputs)
        for candidate in candidates
    ]
    assert {candidate.shape["KV_FORMAT"] for candidate in touching} == {FORMAT_OF[config]}
    assert all(candidate.template.endswith("_quantised") for candidate in touching)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_of_a_plain_cache_know_no_format(form: str) -> None:
    for _, _, candidates in lowered(form, "sm_90"):
        for candidate in candidates:
            assert "KV_FORMAT" not in candidate.shape
            assert not candidate.template.endswith("_quantised")


@pytest.mark.parametrize(
    ("machine", "head_dim", "rows", "stages"),
    [
        ("sm_90", 128, 64, 3),
        ("sm_80", 128, 64, 3),
        ("sm_80", 256, 64, 2),  # three stages would take 168 KiB of 163
        ("gfx942", 128, 64, 2),  # 72 KiB of 64
        ("gfx942", 128, 0, 3),
        ("gfx942", 256, 0, 2),
        ("sm_86", 192, 64, 1),
    ],
)
def test_attention_has_no_more_stages_than_shared_memory_holds(
    machine: str, head_dim: int, rows: int, stages: int
) -> None:
    schedule = {"BLOCK_TOKENS": 64, "num_stages": 3, **({"BLOCK_ROWS": rows} if rows else {})}
    (found,) = within_shared_memory(iter([schedule]), head_dim, 2, machine)
    assert found == {**schedule, "num_stages": stages}


def test_a_capped_prefill_begins_with_small_tiles_and_a_wide_head_with_eight_warps() -> None:
    dims = {"T": 256}
    capped = next(attention_prefill_schedules(128, dims, "sm_80", is_capped=True))
    wide = next(attention_prefill_schedules(256, dims, "sm_80", is_capped=True))
    assert (capped["BLOCK_TOKENS"], capped["num_warps"], capped["num_stages"]) == (32, 4, 3)
    assert (wide["BLOCK_TOKENS"], wide["num_warps"], wide["num_stages"]) == (32, 8, 2)


def test_fp8_is_unpacked_without_ptx_where_the_gpu_has_no_conversion() -> None:
    for target, expected in (("sm_80", {False}), ("sm_90", {True})):
        used = {
            candidate.schedule["USE_PTX"]
            for _, _, candidates in lowered("decode", target, "fp8 cache")
            for candidate in candidates
            if "USE_PTX" in candidate.schedule
        }
        assert used == expected


def test_an_interpreted_step_has_one_candidate_per_op() -> None:
    for form in FORMS:
        for op, _, candidates in lowered(form, "interpret"):
            assert len(candidates) == 1, op.name


def test_few_tokens_are_multiplied_without_tensor_cores_by_default() -> None:
    for op, _, candidates in lowered("decode.few", "sm_90"):
        if any(inner.kind == "linear" for inner in op.plain):
            assert candidates[0].template == "gemv"


def test_a_kind_without_a_template_is_refused_by_name() -> None:
    message = refusal(
        """graph odd {
          input x: f32[T, 16]
          bent: f32[T, 16] = soft_cap(x; cap=30.0)
          return bent
        }"""
    )
    assert "`bent`, of kind soft_cap" in message and "Templates exist for" in message


def test_a_pointwise_op_that_no_linear_took_gets_a_kernel_of_its_own() -> None:
    graph = parse_graph(
        """graph odd {
          input x: f32[T, 16]
          input y: f32[T, 16]
          total: f32[T, 16] = add(x, y)
          gated: f32[T, 8] = glu(total; act='silu', interleave=0)
          return gated
        }"""
    )
    where = situation("mixed", "cuda", "sm_90", 16)
    templates = [next(lower(op, graph, where)).template for op in graph.ops]
    assert templates == ["pointwise", "glu"]


def test_a_norm_folded_into_a_linear_is_refused_for_many_tokens() -> None:
    graph = fused_graph("decode.few", "plain", "bf16")
    op = next(op for op in graph.ops if op.plain[0].kind == "rms_norm")
    assert list(lower(op, graph, situation("decode", "cuda", "sm_90", GEMV_ROWS)))
    with pytest.raises(LoweringError, match=rf"No template fits `{op.name}`.*64 rows.*prologue"):
        list(lower(op, graph, situation("decode", "cuda", "sm_90", 64)))


def test_rows_that_a_bulk_copy_cannot_move_leave_the_templates_that_load_by_pointer() -> None:
    graph = fused_graph("mixed", "odd sizes", "bf16")
    op = next(op for op in graph.ops if op.body and op.params.kernel == "linear__glu")
    candidates = list(lower(op, graph, situation("mixed", "cuda", "sm_90", 512)))
    templates = {candidate.template for candidate in candidates}
    # Its 132 results are 264 bytes: not whole pieces of 16.
    assert "matmul_gluon" not in templates and "matmul" in templates


def test_rows_that_no_step_decides_are_refused_with_their_type() -> None:
    message = refusal(
        """graph odd {
          input x: f32[4, 16]
          weight @w: f32[8, 16] = load({'w': 8})
          y: f32[4, 8] = linear(x, @w; out_dtype='')
          return y
        }"""
    )
    assert "`y`" in message and "`x`" in message and "f32[4, 16]" in message


APPEND = """graph odd {{
  input qkv: f32[T, 64]
  input positions: i32[T]
  input token_seq: i32[T]
  input seq_rows: i32[B]
  input block_table: i32[R, M]
  input kv.0: kv.f32[P, 1, 16, 16]
  weight @rope: f32[C, 16] = rope_table([1.0], scale=1.0)
  weight @other: f32[C, 16] = rope_table([0.5], scale=1.0)
  q_rope: f32[T, 32] = fused rope__kv_write(qkv, positions, @rope, {extra}token_seq, seq_rows, \
block_table, kv.0) {{
    q: f32[T, 32], k: f32[T, 16], v: f32[T, 16] = split(qkv; sizes=(32, 16, 16))
    q_rope: f32[T, 32] = rope(q, positions, @rope; head_dim=16)
    k_rope: f32[T, 16] = rope({roped}, positions, {table}; head_dim=16)
    kv_write({written}, v, positions, token_seq, seq_rows, block_table, kv.0)
  }}
  return q_rope
}}"""
FITTING = {"extra": "", "roped": "k", "table": "@rope", "written": "k_rope"}


def test_the_append_of_a_split_projection_is_one_kernel() -> None:
    graph = parse_graph(APPEND.format(**FITTING))
    (candidate, *_) = lower(graph.ops[-1], graph, situation("mixed", "cuda", "sm_90", 8))
    assert candidate.template == "rope_kv_write"
    assert (candidate.shape["NUM_HEADS"], candidate.shape["NUM_KV_HEADS"]) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extra": "@other, ", "table": "@other"}, "roped alike"),
        ({"roped": "v"}, "split into q, k and v"),
        ({"written": "k"}, "split into q, k and v"),
    ],
)
def test_an_append_that_the_kernel_would_get_wrong_is_refused(
    changes: dict[str, str], reason: str
) -> None:
    message = refusal(APPEND.format(**{**FITTING, **changes}))
    assert "`q_rope`" in message and reason in message


def test_appending_and_attending_are_one_kernel_in_decode_steps_only() -> None:
    graph = fused_graph("decode.joined", "plain", "bf16")
    (op,) = [op for op in graph.ops if op.plain[-1].kind == "attention"]
    candidates = list(lower(op, graph, situation("decode", "cuda", "sm_90", 8)))
    assert {candidate.template for candidate in candidates} == {"rope_attention_decode"}
    with pytest.raises(LoweringError, match=rf"`{op.name}`.*decode steps only.*mixed"):
        list(lower(op, graph, situation("mixed", "cuda", "sm_90", 8)))


def test_norms_of_heads_are_joined_with_append_and_attention() -> None:
    config = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    authored = build_graph(from_hf(config), step="decode", dtype="bf16", page_size=16)
    graph, _ = run_passes(authored, few_tokens=False, joined=True)
    op = next(op for op in graph.ops if op.plain[-1].kind == "attention")
    candidate = next(lower(op, graph, situation("decode", "cuda", "sm_90", 8)))
    assert candidate.name == "head_norm__rope__kv_write__attention"
    assert candidate.shape["HEAD_NORM"] is True
    weights = [candidate.arguments[name] for name in ("q_weight", "k_weight")]
    assert [weight.rpartition(".")[2] for weight in weights] == ["q_norm", "k_norm"]


def test_an_append_without_ropes_is_refused_by_name() -> None:
    message = refusal(
        """graph odd {
          input k: f32[T, 16]
          input v: f32[T, 16]
          input positions: i32[T]
          input token_seq: i32[T]
          input seq_rows: i32[B]
          input block_table: i32[R, M]
          input kv.0: kv.f32[P, 1, 16, 16]
          kv_write(k, v, positions, token_seq, seq_rows, block_table, kv.0)
          return k
        }"""
    )
    assert "`kv_write.kv.0`" in message and "found kv_write alone" in message


NORMED = """graph odd {{
  input qkv: f32[T, 64]
  input positions: i32[T]
  input token_seq: i32[T]
  input seq_rows: i32[B]
  input block_table: i32[R, M]
  input kv.0: kv.f32[P, 1, 16, 16]
  weight @rope: f32[C, 16] = rope_table([1.0], scale=1.0)
  weight @q_norm: f32[16] = load({{'q_norm': 16}})
  weight @k_norm: f32[16] = load({{'k_norm': 16}})
  q_rope: f32[T, 32] = fused head_norm__rope__kv_write(qkv, @q_norm, positions, @rope, @k_norm, \
token_seq, seq_rows, block_table, kv.0) {{
    q: f32[T, 32], k: f32[T, 16], v: f32[T, 16] = split(qkv; sizes=(32, 16, 16))
    q_norm: f32[T, 32] = head_norm(q, @q_norm; eps=1e-06, offset=0.0)
    q_rope: f32[T, 32] = rope(q_norm, positions, @rope; head_dim=16)
    k_norm: f32[T, 16] = head_norm({normed}, @k_norm; eps={eps}, offset=0.0)
    k_rope: f32[T, 16] = rope(k_norm, positions, @rope; head_dim=16)
    kv_write(k_rope, {value}, positions, token_seq, seq_rows, block_table, kv.0)
  }}
  return q_rope
}}"""
ALIKE = {"normed": "k", "eps": "1e-06", "value": "v"}


def test_norms_of_heads_join_the_append() -> None:
    graph = parse_graph(NORMED.format(**ALIKE))
    (candidate, *_) = lower(graph.ops[-1], graph, situation("mixed", "cuda", "sm_90", 8))
    assert (candidate.template, candidate.name) == ("rope_kv_write", "head_norm_rope_kv_write")
    assert candidate.shape["HEAD_NORM"] is True and candidate.shape["EPS"] == 1e-6
    weights = (candidate.arguments["q_weight"], candidate.arguments["k_weight"])
    assert weights == ("value:@q_norm", "value:@k_norm")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eps": "1e-05"}, "normalised alike"),
        ({"normed": "v", "value": "k"}, "heads of q and those of k"),
    ],
)
def test_norms_that_the_kernel_would_get_wrong_are_refused(
    changes: dict[str, str], reason: str
) -> None:
    message = refusal(NORMED.format(**{**ALIKE, **changes}))
    assert "`q_rope`" in message and reason in message


def test_what_reads_early_is_not_launched_early_after_a_kernel_that_does_not_wait() -> None:
    graph = fused_graph("decode", "plain", "bf16")
    where = situation("decode", "cuda", "sm_90", 8)
    op = next(op for op in graph.ops if op.kind == "attention")
    attention = next(c for c in lower(op, graph, where) if c.schedule["USE_PDL"])
    assert without_unsafe_pdl(attention, "rope_kv_write") is attention
    assert not without_unsafe_pdl(attention, "norm").schedule["USE_PDL"]
    joined = fused_graph("decode.joined", "plain", "bf16")
    op = next(op for op in joined.ops if op.plain[-1].kind == "attention")
    both = next(c for c in lower(op, joined, where) if c.schedule["USE_PDL"])
    assert without_unsafe_pdl(both, "matmul_skinny_tma") is both
    assert not without_unsafe_pdl(both, "norm").schedule["USE_PDL"]
    norm = next(op for op in graph.ops if op.kind == "rms_norm")
    early = next(c for c in lower(norm, graph, where) if c.schedule["USE_PDL"])
    assert without_unsafe_pdl(early, "norm") is early
