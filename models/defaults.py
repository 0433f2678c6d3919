"""What the keys of a config mean, per architecture: one entry each, read by `config.py`.

The values are transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Defaults:
    """Say which keys one architecture heeds, and what they mean where they are absent.

    `biases` says for each key that turns biases on which projections have them then: `qkv`,
    `output` or `mlp`; `biases_on` are those of these keys that are true where absent, and
    `always_biased` projections heed no key. `scales` are the keys of constants that the
    architecture multiplies by or caps at, with their defaults; elsewhere they are refused unless
    neutral. `unheeded_keys` have no meaning in this architecture, though they have one elsewhere.
    """

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size / heads
    has_window: bool = False  # whether the architecture heeds a sliding window
    sliding_window: int | None = None
    full_every: int | None = None  # every how many layers one has no window; None: none
    full_layers_first: int | None = None  # default of `max_window_layers`; None: it isn't heeded
    rotates_in_windows_only: bool = False
    local_rope_theta: float | None = None  # of layers with a window; None: as all
    use_sliding_window: bool = True
    biases: Mapping[str, str] = field(default_factory=dict)
    biases_on: tuple[str, ...] = ()
    always_biased: str = ""
    norm_eps_key: str = "rms_norm_eps"
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    scales: Mapping[str, float | None] = field(default_factory=dict)
    rope_theta: float = 10000.0
    rope_block: Mapping[str, object] = field(default_factory=dict)  # where the config has none
    partial_rotary_factor: float = 1.0
    has_head_norms_key: bool = False  # whether `use_qk_norm` has a meaning
    parallel_residual: bool | None = None  # None: no key decides it
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    no_rope_layer_interval: int | None = None  # None: every layer has RoPE
    unheeded_keys: tuple[str, ...] = ()
    remark: str = ""  # for people, in docs/models.md
    saved_as: str = ""  # the class that transformers names in a config it saves, where not its own


_LONGROPE = (
    "longrope is chosen by the window that is served, for all positions: long factors where it "
    "exceeds the original window, else short ones"
)
LLAMA_BIASES: Mapping[str, str] = {"attention_bias": "qkv output", "mlp_bias": "mlp"}
ATTENTION_BIAS: Mapping[str, str] = {"attention_bias": "qkv output"}

DEFAULTS: dict[str, Defaults] = {
    "LlamaForCausalLM": Defaults(
        "llama",
        2048,
        biases=LLAMA_BIASES,
        remark="`pretraining_tp` other than 1 is refused",
    ),
    "MistralForCausalLM": Defaults(
        "mistral", 131072, num_kv_heads=8, has_window=True, sliding_window=4096
    ),
    "Qwen2ForCausalLM": Defaults(
        "qwen2",
        32768,
        num_kv_heads=32,
        has_window=True,
        sliding_window=4096,
        full_layers_first=28,
        use_sliding_window=False,
        always_biased="qkv",
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Phi3ForCausalLM": Defaults(
        "phi3", 4096, has_window=True, norm_eps=1e-5, eos_token_id=32000, remark=_LONGROPE
    ),
    "Qwen3ForCausalLM": Defaults(
        "qwen3",
        32768,
        num_kv_heads=32,
        head_dim=128,
        has_window=True,
        sliding_window=4096,
        full_layers_first=28,
        use_sliding_window=False,
        biases=ATTENTION_BIAS,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "SmolLM3ForCausalLM": Defaults(
        "smollm3",
        32768,
        num_kv_heads=4,
        use_sliding_window=False,
        biases=LLAMA_BIASES,
        rope_theta=2000000.0,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        no_rope_layer_interval=4,
        unheeded_keys=("pretraining_tp",),
        remark="`pretraining_tp`, how projections were cut in training, changes nothing and is "
        "ignored, as by transformers; a window in layers without RoPE is refused",
    ),
    "Olmo2ForCausalLM": Defaults(
        "olmo2",
        2048,
        biases=ATTENTION_BIAS,
        norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=50279,
    ),
    "GraniteForCausalLM": Defaults(
        "granite",
        2048,
        biases=LLAMA_BIASES,
        scales={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "Starcoder2ForCausalLM": Defaults(
        "starcoder2",
        4096,
        has_window=True,
        num_kv_heads=2,
        biases={"use_bias": "qkv output mlp"},
        biases_on=("use_bias",),
        norm_eps_key="norm_epsilon",
        norm_eps=1e-5,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=50256,
        eos_token_id=50256,
    ),
    "StableLmForCausalLM": Defaults(
        "stablelm",
        4096,
        num_kv_heads=32,
        biases={"use_qkv_bias": "qkv"},
        norm_eps_key="layer_norm_eps",
        norm_eps=1e-5,
        partial_rotary_factor=0.25,
        parallel_residual=False,
        remark="norms of heads (`qk_layernorm`) are refused",
        bos_token_id=0,
        eos_token_id=0,
    ),
    "GPTNeoXForCausalLM": Defaults(
        "gpt_neox",
        2048,
        biases=ATTENTION_BIAS,
        biases_on=("attention_bias",),
        always_biased="mlp",
        norm_eps_key="layer_norm_eps",
        norm_eps=1e-5,
        hidden_act="gelu",
        partial_rotary_factor=0.25,
        parallel_residual=True,
        bos_token_id=0,
    ),
    "Glm4ForCausalLM": Defaults(
        "glm4",
        131072,
        num_kv_heads=2,
        head_dim=128,
        biases={"attention_bias": "qkv"},
        biases_on=("attention_bias",),
        norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
        bos_token_id=None,
        eos_token_id=(151329, 151336, 151338),
    ),
    "Ernie4_5ForCausalLM": Defaults(
        "ernie4_5",
        131072,
        num_kv_heads=2,
        head_dim=128,
        biases={"use_bias": "qkv output mlp"},
        norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "InternLM2ForCausalLM": Defaults(
        "internlm2",
        2048,
        biases={"bias": "qkv output"},
        biases_on=("bias",),
        remark="transformers has no InternLM2: compared with its definition, by a Llama whose "
        "tensors are renamed and reordered",
    ),
    "InternLM3ForCausalLM": Defaults(
        "internlm3",
        32768,
        num_kv_heads=2,
        head_dim=128,
        # Both names of each: the checkpoints' own and transformers'.
        biases={
            "attention_bias": "qkv",
            "qkv_bias": "qkv",
            "mlp_bias": "output mlp",
            "bias": "output mlp",
        },
        saved_as="LlamaForCausalLM",
        norm_eps=1e-5,
    ),
    "Exaone4ForCausalLM": Defaults(
        "exaone4",
        2048,
        num_kv_heads=32,
        has_window=True,
        sliding_window=4096,
        full_every=4,
        rotates_in_windows_only=True,
        norm_eps=1e-5,
        bos_token_id=0,
    ),
    "Gemma2ForCausalLM": Defaults(
        "gemma2",
        8192,
        num_kv_heads=4,
        head_dim=256,
        has_window=True,
        sliding_window=4096,
        full_every=2,
        biases=ATTENTION_BIAS,
        hidden_act="gelu_pytorch_tanh",
        scales={
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        },
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "Gemma3ForCausalLM": Defaults(
        "gemma3_text",
        131072,
        num_kv_heads=4,
        head_dim=256,
        has_window=True,
        sliding_window=4096,
        full_every=6,
        biases=ATTENTION_BIAS,
        hidden_act="gelu_pytorch_tanh",
        scales={"final_logit_softcapping": None, "query_pre_attn_scalar": 256},
        remark="text only; bidirectional attention is refused",
        rope_theta=1000000.0,
        local_rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "Cohere2ForCausalLM": Defaults(
        "cohere2",
        8192,
        has_window=True,
        sliding_window=4096,
        full_every=4,
        rotates_in_windows_only=True,
        biases=ATTENTION_BIAS,
        norm_eps_key="layer_norm_eps",
        norm_eps=1e-5,
        scales={"logit_scale": 0.0625},
        tie_word_embeddings=True,
        bos_token_id=5,
        eos_token_id=255001,
    ),
    "Olmo3ForCausalLM": Defaults(
        "olmo3",
        2048,
        has_window=True,
        sliding_window=4096,
        full_every=4,
        biases=ATTENTION_BIAS,
        norm_eps=1e-5,
        rope_theta=500000.0,
        local_rope_theta=500000.0,
        bos_token_id=None,
        eos_token_id=50279,
    ),
    "MixtralForCausalLM": Defaults(
        "mixtral",
        131072,
        num_kv_heads=8,
        has_window=True,
        norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "Qwen2MoeForCausalLM": Defaults(
        "qwen2_moe",
        32768,
        num_kv_heads=16,
        has_window=True,
        sliding_window=4096,
        full_layers_first=28,
        use_sliding_window=False,
        biases={"qkv_bias": "qkv"},
        biases_on=("qkv_bias",),
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Qwen3MoeForCausalLM": Defaults(
        "qwen3_moe",
        32768,
        num_kv_heads=4,
        has_window=True,
        sliding_window=4096,
        use_sliding_window=False,
        biases=ATTENTION_BIAS,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Glm4MoeForCausalLM": Defaults(
        "glm4_moe",
        131072,
        num_kv_heads=8,
        biases={"attention_bias": "qkv"},
        has_head_norms_key=True,
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "GptOssForCausalLM": Defaults(
        "gpt_oss",
        131072,
        num_kv_heads=8,
        head_dim=64,
        has_window=True,
        sliding_window=128,
        full_every=2,
        biases=ATTENTION_BIAS,
        biases_on=("attention_bias",),
        norm_eps=1e-5,
        rope_theta=150000.0,
        rope_block={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        remark="experts in MXFP4 are widened to bfloat16 when they are loaded",
        bos_token_id=None,
        eos_token_id=None,
    ),
    "DeepseekV2ForCausalLM": Defaults(
        "deepseek_v2",
        2048,
        biases={"mlp_bias": "mlp"},
        remark="biases of attention, and normalised scales of experts, are refused; the KV cache "
        "is not quantised",
    ),
    "DeepseekV3ForCausalLM": Defaults(
        "deepseek_v3",
        4096,
        bos_token_id=0,
        eos_token_id=1,
        remark="biases of attention, and weights in FP8, as V3 was published, are refused; layers "
        "that draft tokens are left out",
    ),
}
BIAS_KEYS: tuple[str, ...] = tuple(
    sorted({*LLAMA_BIASES, *(key for entry in DEFAULTS.values() for key in entry.biases)})
)
