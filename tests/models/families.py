"""What every family must show on tiny random checkpoints, with transformers as the judge.

A family's test file subclasses `FamilyTests` and lists its configs.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, make_family, oracle_answers, oracle_logits
from tests.runtime.serving import answers, compile_tiny, serving
from treadle.ir.errors import CheckpointError
from treadle.models.config import architecture_of, from_hf
from treadle.models.registry import build_graph
from treadle.runtime import verify
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.loading import ServeOptions, load_artifact
from treadle.runtime.weights import check_names


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    """Draw prompts of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(320) for _ in range(length)] for length in lengths]


def assert_logits(artifact: Path, oracle: Any, prompts: list[list[int]]) -> None:
    """Compare the logits after each prompt, played as one step."""
    loaded = load_artifact(artifact, ServeOptions(num_pages=16))
    for prompt in prompts:
        found = verify.play_prompt(loaded, prompt)["logits"][0]
        expected = oracle_logits(oracle, prompt)[-1]
        assert torch.isfinite(found).all()
        assert float((found - expected).abs().max()) < 1e-3, len(prompt)


def assert_greedy(artifact: Path, oracle: Any, prompts: list[list[int]], max_tokens: int) -> None:
    """Compare the greedy answers to prompts that are served together."""
    prompts, expected = oracle_answers(oracle, prompts, max_tokens)

    async def run() -> list[list[int]]:
        async with serving(artifact, num_pages=24) as engine:
            found = await answers(engine, prompts, temperature=0.0, max_tokens=max_tokens)
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected


class FamilyTests:
    """Logits, tokens, tensor names and config keys of one architecture.

    `model_type` is transformers' name of it, `cases` are keys of its config beside `make_family`'s,
    the one with most kernels first. `prompt_tokens` are the lengths of the prompts whose logits are
    compared.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    cases: ClassVar[dict[str, dict[str, Any]]]
    prompt_tokens: ClassVar[tuple[int, ...]] = (1, 16, 37)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases)

    def make(self, path: Path, case: str, seed: int, **changes: Any) -> Path:
        """Write the checkpoint of a case."""
        settings = {**self.cases[case], **changes}
        return make_family(path, self.model_type, seed=seed % 1000, **settings)

    def oracle(self, model: Path) -> Any:
        """Load what judges a checkpoint that `make` has written."""
        return load_oracle(model)

    def test_logits_are_within_a_thousandth_of_transformers(
        self, tmp_path: Path, rng_seed: int, case: str
    ) -> None:
        model = self.make(tmp_path / "model", case, rng_seed)
        artifact = compile_tiny(model, tmp_path / "artifact")
        assert_logits(artifact, self.oracle(model), prompts_of(rng_seed, *self.prompt_tokens))

    def test_greedy_tokens_are_those_of_transformers(
        self, tmp_path: Path, rng_seed: int, case: str
    ) -> None:
        """Pages of 16, a prompt in chunks, steps that mix prompts and answers."""
        model = self.make(tmp_path / "model", case, rng_seed)
        artifact = compile_tiny(model, tmp_path / "artifact", max_rows=3, max_step_tokens=24)
        assert_greedy(artifact, self.oracle(model), prompts_of(rng_seed, 40, 3, 17), 32)

    @pytest.mark.interpreted
    def test_emitted_kernels_give_what_transformers_gives(
        self, tmp_path: Path, rng_seed: int
    ) -> None:
        """The first case in Triton's interpreter, which is slow: few tokens of few prompts."""
        model = self.make(tmp_path / "model", next(iter(self.cases)), rng_seed)
        sizes = {"target": "interpret", "max_rows": 2, "max_step_tokens": 64}
        artifact = compile_tiny(model, tmp_path / "artifact", **sizes)
        oracle = self.oracle(model)
        assert_logits(artifact, oracle, prompts_of(rng_seed, self.prompt_tokens[-1]))
        assert_greedy(artifact, oracle, prompts_of(rng_seed, 33, 3), 4)

    def test_a_missing_and_an_extra_tensor_are_told_by_name(
        self, tmp_path: Path, case: str
    ) -> None:
        model = self.make(tmp_path, case, 1)
        file = model / "model.safetensors"
        tensors = load_file(file)
        config = from_hf(open_checkpoint(model).config)
        weights = build_graph(config, step="mixed", dtype="f32", page_size=16).weights
        check_names(weights, open_checkpoint(model))
        for name in tensors:
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            save_file(rest, file, {"format": "pt"})
            with pytest.raises(CheckpointError, match=f"`{name}`"):
                check_names(weights, open_checkpoint(model))
        extra = "model.layers.0.self_attn.other.weight"
        save_file({**tensors, extra: torch.zeros(4)}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"`{extra}`"):
            check_names(weights, open_checkpoint(model))

    def test_a_saved_config_has_no_key_that_nobody_reads(self, tmp_path: Path, case: str) -> None:
        config = open_checkpoint(self.make(tmp_path, case, 1)).config
        assert architecture_of(config) == self.architecture
        assert from_hf(config).unknown_keys == ()
