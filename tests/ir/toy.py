"""A two-layer Llama of toy size, as authored and as fused: what the graph tests look at."""

from __future__ import annotations

from treadle.ir.graph import Graph
from treadle.models.config import from_hf
from treadle.models.registry import build_graph

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def toy_graph(step: str = "decode", **changes: object) -> Graph:
    """Build the authored graph of a step of the toy, some of its config changed."""
    config = from_hf({**CONFIG, **changes})
    return build_graph(config, step=step, dtype="f32", page_size=16)
