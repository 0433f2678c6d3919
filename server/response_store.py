"""Responses that may be gone on from: the latest ones, in memory, within a bound.

Must not know HTTP. `server/responses.py` fills it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1_000
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StoredResponse:
    """Hold a response, and the conversation up to and with it, less its instructions."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    size_bytes: int


class ResponseStore:
    """Keep the latest responses; the oldest go when there are too many or they are too large."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response under its id. One larger than the bound is not kept."""
        # A conversation is counted whole for each response, though they share their messages.
        size_bytes = len(json.dumps([response, *messages], ensure_ascii=False).encode())
        self._responses[response["id"]] = StoredResponse(response, tuple(messages), size_bytes)
        self.size_bytes += size_bytes
        while len(self._responses) > self._max_responses or self.size_bytes > self._max_bytes:
            _, gone = self._responses.popitem(last=False)
            self.size_bytes -= gone.size_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Give a response that is still there."""
        return self._responses.get(response_id)

    def remove(self, response_id: str) -> bool:
        """Forget a response; say whether it was there."""
        found = self._responses.pop(response_id, None)
        self.size_bytes -= 0 if found is None else found.size_bytes
        return found is not None
