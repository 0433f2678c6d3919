"""Every family in bf16 on a GPU, with heads as wide as its models have. Run with `--device cuda`.

Each kernel against its reference and each layer against transformers, as `verify` does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from tests.models.families import FamilyTests
from tests.models.test_cohere2 import TestCohere2 as Cohere2
from tests.models.test_deepseek_v2 import TestDeepseekV2 as DeepseekV2
from tests.models.test_deepseek_v3 import TestDeepseekV3 as DeepseekV3
from tests.models.test_ernie4_5 import TestErnie4p5 as Ernie4p5
from tests.models.test_exaone4 import TestExaone4 as Exaone4
from tests.models.test_gemma2 import TestGemma2 as Gemma2
from tests.models.test_gemma3 import TestGemma3 as Gemma3
from tests.models.test_glm4 import TestGlm4 as Glm4
from tests.models.test_glm4_moe import TestGlm4Moe as Glm4Moe
from tests.models.test_gpt_neox import TestGPTNeoX as GPTNeoX
from tests.models.test_gpt_oss import TestGptOss as GptOss
from tests.models.test_granite import TestGranite as Granite
from tests.models.test_internlm2 import TestInternLM2 as InternLM2
from tests.models.test_internlm3 import TestInternLM3 as InternLM3
from tests.models.test_mistral import TestMistral as Mistral
from tests.models.test_mixtral import TestMixtral as Mixtral
from tests.models.test_olmo2 import TestOlmo2 as Olmo2
from tests.models.test_olmo3 import TestOlmo3 as Olmo3
from tests.models.test_phi3 import TestPhi3 as Phi3
from tests.models.test_qwen2 import TestQwen2 as Qwen2
from tests.models.test_qwen2_moe import TestQwen2Moe as Qwen2Moe
from tests.models.test_qwen3 import TestQwen3 as Qwen3
from tests.models.test_qwen3_moe import TestQwen3Moe as Qwen3Moe
from tests.models.test_smollm3 import TestSmolLM3 as SmolLM3
from tests.models.test_stablelm import TestStableLm as StableLm
from tests.models.test_starcoder2 import TestStarcoder2 as Starcoder2
from tests.runtime.serving import compile_tiny
from treadle.runtime.verify_command import run_verify

# Small weights keep activations of wide layers near one. Where the config has no `head_dim`, four
# heads share the hidden size.
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512, "std": 0.05}
HEAD_128 = {"head_dim": 128}
EXPERTS_128 = {"moe_intermediate_size": 128}
LATENT_576 = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
FAMILIES: dict[type[FamilyTests], dict[str, Any]] = {
    Cohere2: HEAD_128,
    DeepseekV2: LATENT_576 | EXPERTS_128,
    DeepseekV3: LATENT_576 | EXPERTS_128,
    Ernie4p5: HEAD_128,
    Exaone4: HEAD_128,
    Gemma2: {"head_dim": 256, "query_pre_attn_scalar": 256},
    Gemma3: {"head_dim": 256, "query_pre_attn_scalar": 256},
    Glm4: HEAD_128,
    Glm4Moe: HEAD_128 | EXPERTS_128,
    GPTNeoX: {"hidden_size": 384},  # heads of 96
    GptOss: {"head_dim": 64, "intermediate_size": 256},
    Granite: {"hidden_size": 256},  # heads of 64
    InternLM2: {},
    InternLM3: HEAD_128,
    Mistral: HEAD_128,
    Mixtral: HEAD_128 | {"intermediate_size": 256},
    Olmo2: {},
    Olmo3: {},
    Phi3: {"hidden_size": 384},  # heads of 96
    Qwen2: {},
    Qwen2Moe: EXPERTS_128 | {"shared_expert_intermediate_size": 256},
    Qwen3: HEAD_128,
    Qwen3Moe: HEAD_128 | EXPERTS_128,
    SmolLM3: {},
    StableLm: {"hidden_size": 320},  # heads of 80
    Starcoder2: {},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_kernels_and_layers_agree_in_bf16(
    family: type[FamilyTests], device: str, tmp_path: Path, rng_seed: int
) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU: run with --device cuda")
    is_known = family.model_type in CONFIG_MAPPING
    if not is_known and family is not InternLM2:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    tests = family()
    case = next(iter(tests.cases))
    model = tests.make(tmp_path / "model", case, rng_seed, **WIDE | FAMILIES[family])
    artifact = compile_tiny(model, tmp_path / "artifact", target="cuda", dtype="bfloat16")
    # InternLM2, which transformers lacks, has its layers judged elsewhere, in float32.
    run_verify(str(artifact), "auto", not is_known, "", "none", as_json=False)
