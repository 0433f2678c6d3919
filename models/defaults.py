"""What an absent key of a config means, per architecture: one entry each, read by the config.

The values are transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defaults:
    """Say what an absent key means for one architecture; the values are transformers' own.

    `bias_keys` are those that the architecture heeds; `has_qkv_bias` says that q, k and v have
    biases whatever the config says.
    """

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size / heads
    sliding_window: int | None = None
    use_sliding_window: bool = True
    bias_keys: tuple[str, ...] = ()
    has_qkv_bias: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    no_rope_layer_interval: int | None = None  # None: every layer has RoPE
    unheeded_keys: tuple[str, ...] = ()  # without a meaning in this architecture


DEFAULTS: dict[str, Defaults] = {
    "LlamaForCausalLM": Defaults("llama", 2048, bias_keys=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Defaults("mistral", 131072, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Defaults(
        "qwen2",
        32768,
        num_kv_heads=32,
        sliding_window=4096,
        use_sliding_window=False,
        has_qkv_bias=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Phi3ForCausalLM": Defaults("phi3", 4096, norm_eps=1e-5, eos_token_id=32000),
    "Qwen3ForCausalLM": Defaults(
        "qwen3",
        32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        use_sliding_window=False,
        bias_keys=("attention_bias",),
        bos_token_id=None,
        eos_token_id=None,
    ),
    "SmolLM3ForCausalLM": Defaults(
        "smollm3",
        32768,
        num_kv_heads=4,
        use_sliding_window=False,
        bias_keys=("attention_bias", "mlp_bias"),
        rope_theta=2000000.0,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        no_rope_layer_interval=4,
        unheeded_keys=("pretraining_tp",),
    ),
}
