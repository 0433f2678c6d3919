"""What a config says of latent attention, and what its absent keys mean per architecture.

Called by `config.py`, whose reader hands out the values; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.errors import SpecError
from treadle.models.experts import Reader


@dataclass(frozen=True)
class LatentConfig:
    """Hold what a spec needs to know of latent attention. Sizes are of one head or one token.

    Keys and values come from a latent of `kv_rank` features, queries from one of `q_rank`, 0 where
    they are projected as a whole. Of a query and a key `nope_dim` features are not rotated and
    `rope_dim` are, as neighbours if `interleaved`; a value has `value_dim`.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True)
class LatentDefaults:
    """Say what absent keys mean, as in transformers. `has_interleave_key` says whether a key
    decides which features rotate as pairs; without, neighbours do.
    """

    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    has_interleave_key: bool = False


LATENT: dict[str, LatentDefaults] = {
    "DeepseekV2ForCausalLM": LatentDefaults(),
    "DeepseekV3ForCausalLM": LatentDefaults(has_interleave_key=True),
}


def read_latent(reader: Reader, architecture: str) -> LatentConfig | None:
    """Read the sizes of an architecture that has latents.

    Raises: SpecError: a value is impossible; names the key.
    """
    defaults = LATENT.get(architecture)
    if defaults is None:
        return None
    q_rank = reader.get("q_lora_rank", defaults.q_rank)
    if q_rank is not None and (
        isinstance(q_rank, bool) or not isinstance(q_rank, int) or q_rank < 1
    ):
        raise SpecError(
            f"The config's `q_lora_rank` must be a whole number of at least 1, or null; found "
            f"{q_rank!r}.",
            remedy="Correct it in config.json.",
        )
    nope_dim = reader.positive_int("qk_nope_head_dim", defaults.nope_dim)
    rope_dim = reader.positive_int("qk_rope_head_dim", defaults.rope_dim)
    if (stated := reader.get("qk_head_dim")) not in (None, nope_dim + rope_dim):
        raise SpecError(
            f"The config contradicts itself: `qk_head_dim` = {stated!r}, `qk_nope_head_dim` = "
            f"{nope_dim} and `qk_rope_head_dim` = {rope_dim}.",
            remedy="Correct config.json.",
        )
    interleaved = True
    if defaults.has_interleave_key:
        interleaved = reader.boolean("rope_interleave", True)
    return LatentConfig(
        q_rank=q_rank or 0,
        kv_rank=reader.positive_int("kv_lora_rank", defaults.kv_rank),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=reader.positive_int("v_head_dim", defaults.value_dim),
        interleaved=interleaved,
    )
