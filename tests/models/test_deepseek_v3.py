"""DeepSeek-V3 against transformers: latent attention, routing by sigmoids with a correction."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.models.families import FamilyTests, assert_greedy, prompts_of
from tests.models.test_deepseek_v2 import EXPERTS, LATENT
from tests.runtime.serving import compile_tiny


class TestDeepseekV3(FamilyTests):
    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    cases: ClassVar = {
        "groups": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 28,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        "yarn, halves of a head rotate": {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 32,
            },
        },
    }

    def test_a_prompt_goes_on_from_keys_of_its_own_to_latents(
        self, tmp_path: Path, rng_seed: int
    ) -> None:
        """Chunks of 48 tokens: the first makes keys and values, the second reads latents alone."""
        model = self.make(tmp_path / "model", "groups", rng_seed)
        artifact = compile_tiny(model, tmp_path / "artifact", max_rows=3, max_step_tokens=48)
        assert_greedy(artifact, self.oracle(model), prompts_of(rng_seed, 70, 36, 2), 8)
