"""Log probabilities of sampled tokens: what the model thought, beside what was drawn.

They are the log-softmax of the raw logits, before temperature and every other wish of a request.
Computed on the device after a step's program, only in steps where a request asks; the programs, and
the graphs they are captured in, know nothing of it, and torch's own kernels need no compiling.
Called by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treadle.runtime.request import TokenLogprobs

# Stands for the logarithm of 0, which JSON can't hold; OpenAI's value for it.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Wish:
    """Say that a slice's token is asked about, for how many likeliest ones; `key` names the answer.

    `target` is the token asked about; -1: the one that is sampled. `tells_logits`: the row of
    logits too; `tells_hidden`: the row of hidden states that they were made of.
    """

    slice_index: int
    key: Hashable
    num_top: int
    target: int = -1
    tells_logits: bool = False
    tells_hidden: bool = False


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the log probability of each row's token, and the largest ones with their tokens.

    The same token has the same value in both, bit for bit. A negative token stands for token 0.
    Shapes: logits f32[N, V], tokens [N] -> f32[N], f32[N, K], i64[N, K]
    """
    total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [N, 1]
    chosen = logits.gather(1, tokens.clamp(min=0).long()[:, None]) - total  # [N, 1]
    largest, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)  # [N, K]
    return chosen[:, 0], largest - total, ids


class PendingLogprobs:
    """Hold a step's answers to `wishes` while they are on their way from the device.

    Shapes: a row per wish: logits f32[N, V], as the model gave them, tokens i32[N], and the last
    hidden states [N, D], which may be left out where no wish asks for them.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> None:
        self._wishes = wishes
        num_top = max(wish.num_top for wish in wishes)
        chosen_ids = tokens
        targets = [wish.target for wish in wishes]
        if max(targets) >= 0:
            asked = torch.tensor(targets, dtype=chosen_ids.dtype, device=chosen_ids.device)
            chosen_ids = torch.where(asked >= 0, asked, chosen_ids)
        found = (chosen_ids, *log_probabilities(logits.float(), chosen_ids, num_top))
        self._fetched = [_fetch(tensor) for tensor in found]
        self._logits = _Rows(logits, [wish.tells_logits for wish in wishes])
        self._hidden = _Rows(hidden, [wish.tells_hidden for wish in wishes])

    def take(self) -> dict[Hashable, TokenLogprobs]:
        """Give the answers by their keys, once the step is known to be done."""
        chosen_ids, chosen, largest, ids = (tensor.tolist() for tensor in self._fetched)
        logits, hidden = self._logits.take(), self._hidden.take()
        answers: dict[Hashable, TokenLogprobs] = {}
        for index, wish in enumerate(self._wishes):
            pairs = zip(ids[index][: wish.num_top], largest[index], strict=False)
            answers[wish.key] = TokenLogprobs(
                chosen_ids[index],
                _finite(chosen[index]),
                tuple((token, _finite(value)) for token, value in pairs),
                logits.get(index),
                hidden.get(index),
            )
        return answers


class _Rows:
    """Fetch the rows of a tensor that are told, as f32."""

    def __init__(self, tensor: torch.Tensor | None, is_told: Sequence[bool]) -> None:
        self._indices = [index for index, told in enumerate(is_told) if told]
        self._fetched: torch.Tensor | None = None
        if self._indices:
            assert tensor is not None, "rows that a wish asks for are given"
            self._fetched = _fetch(tensor[self._indices].float())

    def take(self) -> dict[int, np.ndarray]:
        """Give the rows by index, once the step is known to be done."""
        if self._fetched is None:
            return {}
        # Copied: what is pinned is scarce, and a client may keep a row for long.
        return dict(zip(self._indices, self._fetched.numpy().copy(), strict=True))


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy to the host, without waiting."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _finite(value: float) -> float:
    # NaN comes with the fault that ends the answer; nobody gets to see it.
    return LEAST_LOGPROB if math.isnan(value) else max(value, LEAST_LOGPROB)
