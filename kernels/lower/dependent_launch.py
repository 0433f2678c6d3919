"""Where a kernel may start before the one before it has ended (PDL)."""

from __future__ import annotations

from dataclasses import replace

from treadle.kernels.epilogue import TILES
from treadle.kernels.lower.candidates import Candidate

# Templates that read the step's inputs before they wait for the kernel before them. That one must
# let dependents start only once what it depends on has ended: then all that is older is complete.
_EARLY_READERS: dict[str, frozenset[str]] = {
    "rope_kv_write": frozenset(TILES),
    "attention_decode": frozenset({"rope_kv_write"}),
    "rope_kv_write_quantised": frozenset(TILES),
    "attention_decode_quantised": frozenset({"rope_kv_write_quantised"}),
    "expert_gemv_combine": frozenset({"expert_gemv"}),
    "rope_attention_decode": frozenset(TILES),
    "latent_attention_decode": frozenset({"head_linear"}),
}


def without_unsafe_pdl(candidate: Candidate, previous: str) -> Candidate:
    """Give the candidate, without dependent launch where the template before it forbids that."""
    allowed = _EARLY_READERS.get(candidate.template)
    if allowed is None or previous in allowed or not candidate.schedule["USE_PDL"]:
        return candidate
    return replace(candidate, schedule={**candidate.schedule, "USE_PDL": False})
