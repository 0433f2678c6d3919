"""What a sequence's parameters ask of its logits, as the row state of the op `adjust_logits`.

Knows requests and the op's form; must not know tensors of a device. Called by the scheduler, which
marks sequences, and by the writer of batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from treadle.ir.ops.sampling import ADJUST_ALLOWED, ADJUST_BIASES, ADJUST_COUNTS
from treadle.runtime.request import INT32_MAX, SamplingParams

# What a row's last position of a bias is, when it holds for the whole answer.
FOREVER = INT32_MAX
# Twice the times that a token was generated, plus 1 if the prompt has it: see `adjust_logits`.
_MOST_COUNTED = 2**15 - 1


def find_adjustments(
    params: SamplingParams, stop_ids: frozenset[int], is_constrained: bool = False
) -> int:
    """Say what these parameters ask of the logits, as the bits of a row's `adjusted`.

    `is_constrained`: a grammar or bad words decide anew before each token.
    """
    flags = ADJUST_ALLOWED if is_constrained else 0
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    ):
        flags |= ADJUST_COUNTS
    if params.logit_bias or params.bad_token_ids or (params.min_tokens and stop_ids):
        flags |= ADJUST_BIASES
    return flags


def list_biases(
    params: SamplingParams, stop_ids: frozenset[int], num_prompt_tokens: int
) -> list[tuple[int, float, int]]:
    """Give the row's biases: token, what is added to its logit, and the position it ends before.

    No token that ends the answer may be drawn before `min_tokens` others.
    """
    biases = [(token_id, bias, FOREVER) for token_id, bias in params.logit_bias]
    biases += [(token_id, -math.inf, FOREVER) for token_id in params.bad_token_ids]
    if params.min_tokens:
        stop = min(num_prompt_tokens + params.min_tokens, FOREVER)
        biases += [(token_id, -math.inf, stop) for token_id in sorted(stop_ids)]
    return biases


def count_history(
    token_ids: Sequence[int], num_prompt_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Give the tokens of a sequence and their codes in `token_counts`, each token once.

    Shapes: i64[N], i16[N].
    """
    history = np.asarray(token_ids, dtype=np.int64)
    tokens, places = np.unique(history, return_inverse=True)
    codes = 2 * np.bincount(places[num_prompt_tokens:], minlength=len(tokens))
    codes[places[:num_prompt_tokens]] |= 1
    return tokens, np.minimum(codes, _MOST_COUNTED).astype(np.int16)
