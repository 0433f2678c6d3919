"""`verify` as a proof: it passes what is right, and names the kernel or the layer that is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_json, make_family, make_llama
from tests.runtime.serving import compile_tiny
from treadle.ir.errors import CheckpointError
from treadle.runtime import planner
from treadle.runtime.artifact import MANIFEST, finish_manifest, read_manifest
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.diagnose import find_cause
from treadle.runtime.loading import LoadedArtifact, ServeOptions, load_artifact
from treadle.runtime.near_ties import choose_left_out
from treadle.runtime.triton_program import TritonProgram
from treadle.runtime.verify import (
    OpCheck,
    fill_adjustments,
    load_transformers,
    play_prompt,
    prepare_prompts,
    relative_error,
    verify_layers,
    verify_program,
)

NUM_PAGES = 16


def load(artifact: Path) -> LoadedArtifact:
    return load_artifact(artifact, ServeOptions(num_pages=NUM_PAGES))


def compile_kernels(tmp_path: Path, seed: int) -> Path:
    """Compile a model of one layer and two rows: the interpreter takes its time."""
    model = make_llama(tmp_path / "model", seed=seed % 1000, num_layers=1)
    return compile_tiny(
        model, tmp_path / "artifact", target="interpret", max_rows=2, max_step_tokens=16
    )


def check(loaded: LoadedArtifact, step: str, bucket: int, seed: int) -> list[OpCheck]:
    """Check a step of two random prompts, or of the tokens that follow them."""
    generator = random.Random(seed)
    program = loaded.programs[step, bucket]
    assert isinstance(program, TritonProgram), "the target has kernels"
    prompts = [[generator.randrange(320) for _ in range(length)] for length in (9, 5)]
    sizes = prepare_prompts(loaded, prompts[:bucket])
    if step == "decode":
        loaded.state.fill_caches()
        loaded.state.write_decode(len(prompts[:bucket]))
        sizes = (bucket, bucket)
    return list(verify_program(program, loaded.graphs[program.plan.form], loaded.state, *sizes))


def edit_kernel(artifact: Path, name: str, edit: Callable[[str], str]) -> None:
    """Change the text of the kernels of a name, and let the artifact pass for whole."""
    paths = list((artifact / "kernels").glob(f"{name}.*.py"))
    assert paths, f"there is no kernel {name}"
    for path in paths:
        text = path.read_text()
        assert edit(text) != text, f"nothing changes in {path.name}"
        path.write_text(edit(text))
    manifest = read_manifest(artifact)
    (artifact / MANIFEST).unlink()
    finish_manifest(artifact, manifest)


@pytest.mark.interpreted
@pytest.mark.parametrize(("step", "bucket"), [("mixed", 16), ("decode", 1), ("decode", 2)])
def test_every_kernel_of_a_sound_model_passes(
    tmp_path: Path, rng_seed: int, step: str, bucket: int
) -> None:
    loaded = load(compile_kernels(tmp_path, rng_seed))
    checks = check(loaded, step, bucket, rng_seed)
    assert [each for each in checks if not each.passed] == []
    form = next(p.form for p in loaded.plan.programs if (p.step, p.bucket) == (step, bucket))
    produced = {name for op in loaded.graphs[form].ops for name in op.outputs}
    changed = {each.result for each in checks} - produced
    assert produced <= {each.result for each in checks}
    assert changed == (
        {"kv.0", "last_token", "length"} if step == "decode" else {"kv.0", "last_token"}
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(("step", "bucket"), [("mixed", 16), ("decode", 2)])
def test_the_kernels_that_adjust_logits_and_draw_again_are_checked_too(
    tmp_path: Path, rng_seed: int, step: str, bucket: int
) -> None:
    artifact = compile_kernels(tmp_path, rng_seed)
    edits: list[Callable[[str], str]] = [
        lambda text: text + "\n",
        lambda text: text.replace("index >> 5", "index >> 4"),
    ]
    for edit, wrong in zip(edits, (set(), {"logits"}), strict=True):
        edit_kernel(artifact, "adjust_logits", edit)
        loaded = load(artifact)
        check(loaded, step, bucket, rng_seed)
        fill_adjustments(loaded.state, random.Random(rng_seed).sample(range(320), 300))
        program, graph = loaded.resamples[step, bucket], loaded.graphs["resample"]
        assert isinstance(program, TritonProgram)
        sizes = (14, 2) if step == "mixed" else (bucket, bucket)
        checks = list(verify_program(program, graph, loaded.state, *sizes))
        assert [each.result for each in checks] == [
            "logits",
            "tokens",
            "last_token",
            "token_counts",
        ]
        assert {each.result for each in checks if not each.passed} == wrong


@pytest.mark.interpreted
@pytest.mark.parametrize("bucket", [1, 2])
def test_a_kernel_that_appends_and_then_attends_is_checked_on_both(
    tmp_path: Path, rng_seed: int, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "JOINED_ROWS", 2)
    artifact = compile_kernels(tmp_path, rng_seed)
    checks = check(load(artifact), "decode", bucket, rng_seed)
    assert [each for each in checks if not each.passed] == []
    joined = [each for each in checks if each.kernel.startswith("rope__kv_write__attention.")]
    assert [each.result for each in joined] == ["layers.0.attended", "kv.0"]

    edit_kernel(artifact, "rope__kv_write__attention", lambda text: text.replace("-sin", "sin"))
    checks = check(load(artifact), "decode", bucket, rng_seed)
    failed = [each for each in checks if not each.passed]
    assert {each.result for each in failed} == {"layers.0.attended", "kv.0"}


@pytest.mark.interpreted
def test_a_wrong_kernel_fails_under_the_name_of_its_op(tmp_path: Path, rng_seed: int) -> None:
    artifact = compile_kernels(tmp_path, rng_seed)
    edit_kernel(artifact, "rms_norm", lambda text: text.replace("EPS=1e-0", "EPS=1e+0"))
    failed = [each for each in check(load(artifact), "mixed", 16, rng_seed) if not each.passed]
    # Others read its wrong result, and are right about it.
    assert {each.op for each in failed} == {
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
        "normed",
    }
    assert {each.kernel.partition(".")[0] for each in failed} == {"rms_norm"}


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value")  # the poison is read by all that follow
def test_a_kernel_that_does_nothing_is_the_first_to_fail(tmp_path: Path, rng_seed: int) -> None:
    artifact = compile_kernels(tmp_path, rng_seed)
    edit_kernel(
        artifact, "embed", lambda text: text.replace(") -> None:", ") -> None:\n    return")
    )
    failed = [each for each in check(load(artifact), "mixed", 16, rng_seed) if not each.passed]
    assert failed[0].op == "embedded"


@pytest.mark.interpreted
def test_a_kernel_that_spoils_the_cache_fails(tmp_path: Path, rng_seed: int) -> None:
    artifact = compile_kernels(tmp_path, rng_seed)
    edit_kernel(artifact, "rope_kv_write", lambda text: text.replace("PAGE_SIZE=16", "PAGE_SIZE=8"))
    failed = [each for each in check(load(artifact), "mixed", 16, rng_seed) if not each.passed]
    assert [(each.op, each.result) for each in failed] == [("layers.0.q_rope", "kv.0")]


def load_layers(tmp_path: Path, seed: int) -> LoadedArtifact:
    model = make_llama(tmp_path / "model", seed=seed % 1000, num_layers=4)
    return load(compile_tiny(model, tmp_path / "artifact"))


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]


def test_every_layer_of_a_sound_model_passes(tmp_path: Path, rng_seed: int) -> None:
    checks = list(verify_layers(load_layers(tmp_path, rng_seed), PROMPT))
    assert [each.layer for each in checks] == ["layer 0", "layer 1", "layer 2", "logits"]
    assert all(each.passed for each in checks), checks


def test_the_first_layer_that_departs_is_the_one_whose_weight_was_changed(
    tmp_path: Path, rng_seed: int
) -> None:
    loaded = load_layers(tmp_path, rng_seed)
    loaded.weights["layers.1.post_attention_layernorm"].mul_(1.5)
    checks = list(verify_layers(loaded, PROMPT))
    assert [each.passed for each in checks] == [True, False, False, False], checks


EXPERTS_OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def tie_experts(tmp_path: Path, seed: int) -> tuple[LoadedArtifact, int]:
    """Load a mixture of experts in which rounding has chosen another expert for one token.

    Gives that token. The correction of an expert is set in the checkpoint so that it just misses
    being chosen in layer 0, and then moved by two millionths in what was loaded.
    """
    sizes = {"first_k_dense_replace": 0, "n_shared_experts": 1, "num_hidden_layers": 3, **EXPERTS}
    model = make_family(tmp_path / "model", "glm4_moe", seed=seed % 1000, **sizes)
    loaded = load(compile_tiny(model, tmp_path / "first"))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    scores: list[torch.Tensor] = []
    oracle = load_transformers(loaded.checkpoint)
    gate = oracle.model.layers[0].mlp.gate
    gate.register_forward_pre_hook(
        lambda module, inputs: scores.append(
            (inputs[0].flatten(0, -2).float() @ gate.weight.float().T).sigmoid()
        )
    )
    with torch.no_grad():
        oracle(torch.tensor([PROMPT]))
    file = model / "model.safetensors"
    tensors = load_file(file)
    best = (scores[0] + tensors[name]).sort(-1, descending=True)
    gaps = best.values[:, 1] - best.values[:, 2]
    token = int(gaps.argmin())
    expert = int(best.indices[token, 2])
    tensors[name][expert] += gaps[token] - 1e-6
    save_file(tensors, file, {"format": "pt"})
    loaded = load(compile_tiny(model, tmp_path / "second"))
    (correction,) = [n for n in loaded.weights if "layers.0" in n and "correction" in n]
    loaded.weights[correction][expert] += 2e-6
    return loaded, token


def test_a_token_that_rounding_gave_another_expert_is_left_out_and_counted(
    tmp_path: Path, rng_seed: int
) -> None:
    loaded, token = tie_experts(tmp_path, rng_seed)
    first, *_ = verify_layers(loaded, PROMPT)
    assert first.passed and not first.compared[token]
    assert 1 <= first.left_out <= 2
    found = play_prompt(loaded, PROMPT)["layer 0"]
    assert relative_error(found, first.expected) > first.tolerance


def test_a_wrong_layer_is_found_beside_a_tie(tmp_path: Path, rng_seed: int) -> None:
    loaded, _ = tie_experts(tmp_path, rng_seed)
    loaded.weights["layers.0.post_attention_layernorm"].mul_(1.05)
    first, *_ = verify_layers(loaded, PROMPT)
    assert not first.passed and first.left_out <= 2


def test_no_more_tokens_are_left_out_than_the_cap_and_the_nearest_ones_first() -> None:
    shares = torch.zeros(200)
    shares[50:150] = torch.linspace(0.1, 0.9, 100)
    assert choose_left_out(shares).nonzero().flatten().tolist() == list(range(140, 150))
    assert choose_left_out(shares[50:60]).nonzero().flatten().tolist() == [8, 9]
    assert not choose_left_out(torch.zeros(24)).any()
    assert not choose_left_out(torch.ones(1)).any()


def test_a_model_that_transformers_does_not_know_is_told_with_a_way_out(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model")
    edit_json(model / "config.json", {"model_type": "nobody_knows_it"})
    with pytest.raises(CheckpointError, match="nothing to compare with") as caught:
        load_transformers(open_checkpoint(model))
    assert "--kernels-only" in caught.value.remedy


# --- why a layer departs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "edits", "cause"),
    [
        ("llama", {}, {"rms_norm_eps": 0.1}, "norms with an epsilon of 1e-06"),
        ("llama", {}, {"rope_theta": 123.0}, "plain RoPE with a theta of 10000"),
        ("llama", {"hidden_act": "gelu"}, {"hidden_act": "silu"}, "the activation gelu"),
        ("mistral", {"sliding_window": 5}, {"use_sliding_window": False}, "window of 5 tokens"),
        ("granite", {"attention_multiplier": 1.0}, {"attention_multiplier": 0.2}, "scale of 1"),
        ("glm4_moe", EXPERTS, {"rms_norm_eps": 0.1}, "norms with an epsilon of 1e-05"),
        ("qwen3_moe", EXPERTS_OF_QWEN, {"rope_theta": 123.0}, "plain RoPE with a theta of 10000"),
    ],
)
def test_the_cause_of_a_layer_that_departs_is_found(
    tmp_path: Path,
    rng_seed: int,
    model_type: str,
    changes: dict[str, object],
    edits: dict[str, object],
    cause: str,
) -> None:
    model = make_family(tmp_path / "model", model_type, seed=rng_seed % 1000, **changes)
    config = json.loads((model / "config.json").read_text())
    edit_json(model / "config.json", edits, drop=["rope_parameters"] * ("rope_theta" in edits))
    artifact = compile_tiny(model, tmp_path / "artifact")
    loaded = load(artifact)
    (model / "config.json").write_text(json.dumps(config))
    departed = next(each for each in verify_layers(loaded, PROMPT) if not each.passed)
    assert departed.layer == "layer 0"
    best, *_ = find_cause(loaded, PROMPT, departed)
    assert cause in best.what
    assert best.error <= departed.tolerance


def test_neighbours_taken_for_halves_are_found(tmp_path: Path, rng_seed: int) -> None:
    ernie = make_family(tmp_path / "ernie", "ernie4_5", seed=rng_seed % 1000, head_dim=16)
    edit_json(ernie / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    loaded = load(compile_tiny(ernie, tmp_path / "artifact"))
    edit_json(
        ernie / "config.json", {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
    )
    departed = next(each for each in verify_layers(loaded, PROMPT) if not each.passed)
    best, *_ = find_cause(loaded, PROMPT, departed)
    assert best.what == "RoPE over pairs of neighbours"
    assert best.error <= departed.tolerance


def test_nothing_is_said_to_help_where_nothing_does(tmp_path: Path, rng_seed: int) -> None:
    loaded = load_layers(tmp_path, rng_seed)
    weight = loaded.weights["layers.0.input_layernorm"]
    weight.copy_(torch.randn_like(weight))
    departed = next(each for each in verify_layers(loaded, PROMPT) if not each.passed)
    causes = find_cause(loaded, PROMPT, departed)
    assert all(each.error > departed.tolerance for each in causes)
