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

from tests.checkpoints import load_oracle, make_family, oracle_greedy, oracle_logits
from tests.runtime.serving import answers, compile_tiny, serving
from treadle.ir.errors import TreadleError
from treadle.models.config import from_hf
from treadle.runtime import verify
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.loading import ServeOptions, load_artifact

INTERPRETED = pytest.mark.interpreted
NUM_TOKENS = 32


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    """Draw prompts of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(320) for _ in range(length)] for length in lengths]


class FamilyTests:
    """Logits, tokens, tensor names and config keys of one architecture.

    `model_type` is transformers' name of it, `cases` are keys of its config beside `make_family`'s.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    cases: ClassVar[dict[str, dict[str, Any]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        if "target" in names:
            # Interpreted steps are slow: tokens of one case, of one layer; logits of all.
            few = "greedy" in metafunc.function.__name__
            interpreted = list(self.cases)[: 1 if few else None]
            pairs = [pytest.param(case, "reference") for case in self.cases]
            pairs += [pytest.param(case, "interpret", marks=INTERPRETED) for case in interpreted]
            metafunc.parametrize(("case", "target"), pairs)
        elif "case" in names:
            metafunc.parametrize("case", self.cases)

    def make(self, path: Path, case: str, seed: int, **changes: Any) -> Path:
        """Write the checkpoint of a case."""
        settings = {**self.cases[case], **changes}
        return make_family(path, self.model_type, seed=seed % 1000, **settings)

    def test_logits_are_within_a_thousandth_of_transformers(
        self, tmp_path: Path, rng_seed: int, case: str, target: str
    ) -> None:
        model = self.make(tmp_path / "model", case, rng_seed)
        artifact = compile_tiny(model, tmp_path / "artifact", target=target)
        oracle = load_oracle(model)
        loaded = load_artifact(artifact, ServeOptions(num_pages=16))
        for prompt in prompts_of(rng_seed, 1, 16, 37):
            found = verify.play_prompt(loaded, prompt)["logits"][0]
            expected = oracle_logits(oracle, prompt)[-1]
            assert float((found - expected).abs().max()) < 1e-3, len(prompt)
            assert torch.isfinite(found).all()

    def test_greedy_tokens_are_those_of_transformers(
        self, tmp_path: Path, rng_seed: int, case: str, target: str
    ) -> None:
        """Pages of 16, a prompt in chunks, steps that mix prompts and answers."""
        layers = {"num_hidden_layers": 1} if target == "interpret" else {}
        model = self.make(tmp_path / "model", case, rng_seed, **layers)
        sizes = {"max_rows": 3, "max_step_tokens": 24}
        artifact = compile_tiny(model, tmp_path / "artifact", target=target, **sizes)
        prompts = prompts_of(rng_seed, 40, 3, 17)
        oracle = load_oracle(model)
        expected = [oracle_greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts]

        async def run() -> list[list[int]]:
            async with serving(artifact, num_pages=24) as engine:
                found = await answers(engine, prompts, temperature=0.0, max_tokens=NUM_TOKENS)
                return [list(delta.token_ids) for delta in found]

        assert asyncio.run(run()) == expected

    def test_a_missing_and_an_extra_tensor_are_told_by_name(
        self, tmp_path: Path, case: str
    ) -> None:
        model = self.make(tmp_path / "model", case, 1)
        file = model / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if name.startswith("model.layers.1."):
                rest = {other: tensor for other, tensor in tensors.items() if other != name}
                save_file(rest, file, {"format": "pt"})
                with pytest.raises(TreadleError, match=f"`{name}`"):
                    compile_tiny(model, tmp_path / "artifact")
        extra = "model.layers.0.self_attn.other.weight"
        save_file({**tensors, extra: torch.zeros(4)}, file, {"format": "pt"})
        with pytest.raises(TreadleError, match=f"`{extra}`"):
            compile_tiny(model, tmp_path / "artifact")

    def test_a_saved_config_has_no_key_that_nobody_reads(self, tmp_path: Path, case: str) -> None:
        config = open_checkpoint(self.make(tmp_path, case, 1)).config
        assert config["architectures"] == [self.architecture]
        assert from_hf(config).unknown_keys == ()
