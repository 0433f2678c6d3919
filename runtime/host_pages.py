"""The second tier of the KV cache: what pages held that were evicted, in pages of host memory.

Knows keys and page numbers only, as `pages.py` does, and how fast this machine copies and computes:
no tensors, no clock. The page pool tells what it evicts and asks what may be fetched; the copies
that follow from it travel with the next step's plan and are made by `page_copies.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from treadle.ir.errors import ConfigError

# What an older measurement counts for when another one comes: some ten of them are remembered.
_DECAY = 0.9


def is_fetch_faster(
    num_bytes: int, num_tokens: int, *, copy_bytes_per_s: float, prefill_tokens_per_s: float
) -> bool:
    """Say whether copying bytes from the host is estimated to take less time than their tokens.

    A rate of 0 is one that was not measured yet. Pages come from prompts that were computed, so it
    is the copies' rate that has to be there: without it nothing is fetched.
    """
    return num_bytes * prefill_tokens_per_s < num_tokens * copy_bytes_per_s


class PageCopies(NamedTuple):
    """The copies between device and host that a step needs, as pairs (device page, host page).

    All of `pages_out` come first, then all of `pages_in`, and both before the step.
    """

    pages_out: tuple[tuple[int, int], ...]
    pages_in: tuple[tuple[int, int], ...]


class HostStats(NamedTuple):
    """Give the gauges and counters of this tier at one moment; all 0 where there is none."""

    pages_total: int = 0
    pages_free: int = 0
    hit_tokens_total: int = 0
    pages_out_total: int = 0
    pages_in_total: int = 0
    bytes_out_total: int = 0
    bytes_in_total: int = 0


class Rate:
    """How much is done per second, over the last measurements; later ones count for more."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count a measurement; one of no time is none."""
        if seconds > 0:
            self._amount = _DECAY * self._amount + amount
            self._seconds = _DECAY * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """The rate, or 0 while nothing was measured."""
        return self._amount / self._seconds if self._seconds else 0.0


class HostPages:
    """Remember which host page holds what an evicted page held; forget the least recently used.

    A host page is *free*, *kept* (its content may be fetched; given up for other content when pages
    are needed) or *lent* (a fetch of the plan that is being made reads it: it stays until
    `take_copies`). What was fetched stays here too, so that it costs no copy when it is evicted
    again.

    Units: `page_bytes` of a page over all layers. Raises: ConfigError: when a size is not positive.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        for field, value in (("num_pages", num_pages), ("page_bytes", page_bytes)):
            if value < 1:
                raise ConfigError(
                    f"Expected `{field}` of host memory of at least 1, found {value}."
                )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.copies = Rate()  # in bytes
        self.prefills = Rate()  # in tokens
        self.hit_tokens_total = 0
        self.pages_out_total = 0
        self.pages_in_total = 0
        self.evictions_total = 0
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: page 0 first
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._lent: dict[bytes, int] = {}
        self._pages_out: list[tuple[int, int]] = []
        self._pages_in: list[tuple[int, int]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept or key in self._lent

    @property
    def num_free(self) -> int:
        """Count the pages that hold nothing."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Count the pages whose content may be fetched."""
        return len(self._kept)

    def stats(self, before: HostStats) -> HostStats:
        """Give the figures of now, counted on from `before`."""
        return HostStats(
            pages_total=self.num_pages,
            pages_free=self.num_free,
            hit_tokens_total=before.hit_tokens_total + self.hit_tokens_total,
            pages_out_total=before.pages_out_total + self.pages_out_total,
            pages_in_total=before.pages_in_total + self.pages_in_total,
            bytes_out_total=before.bytes_out_total + self.pages_out_total * self.page_bytes,
            bytes_in_total=before.bytes_in_total + self.pages_in_total * self.page_bytes,
        )

    def is_worth_fetching(self, num_pages: int, num_tokens: int) -> bool:
        """Say whether to fetch that many pages rather than to compute the tokens they spare."""
        return is_fetch_faster(
            num_pages * self.page_bytes,
            num_tokens,
            copy_bytes_per_s=self.copies.per_s,
            prefill_tokens_per_s=self.prefills.per_s,
        )

    def keep(self, key: bytes, page: int) -> None:
        """Keep what a device page holds, which is about to be evicted.

        Not where every page is lent: the content is then lost, as without this tier.
        """
        if key in self._lent:
            return
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if self._free:
            host_page = self._free.pop()
        elif self._kept:
            _, host_page = self._kept.popitem(last=False)
            self.evictions_total += 1
        else:
            return
        self._kept[key] = host_page
        self._pages_out.append((page, host_page))
        self.pages_out_total += 1

    def lend(self, keys: Sequence[bytes]) -> None:
        """Let nothing take the place of these contents, which are about to be fetched."""
        for key in keys:
            self._lent[key] = self._kept.pop(key)

    def fetch(self, key: bytes, page: int) -> None:
        """Copy a lent content into a device page before the next step."""
        self._pages_in.append((page, self._lent[key]))
        self.pages_in_total += 1

    def take_copies(self) -> PageCopies | None:
        """Give the copies that are due before the step that is being planned, if any.

        Those to the host come first. That is as good as the order in which they were asked for:
        what is fetched is lent from before it is asked for, so no copy to the host writes it.
        """
        # The tail of a sequence is given up before the prefix that leads to it.
        self._kept.update(reversed(self._lent.items()))
        self._lent.clear()
        if not self._pages_out and not self._pages_in:
            return None
        copies = PageCopies(tuple(self._pages_out), tuple(self._pages_in))
        self._pages_out.clear()
        self._pages_in.clear()
        return copies

    def discard(self, key: bytes) -> None:
        """Forget a content that can't be trusted."""
        assert not self._lent, "a content is discarded while a step is being planned"
        host_page = self._kept.pop(key, None)
        if host_page is not None:
            self._free.append(host_page)

    def clear(self) -> None:
        """Forget all contents, because the weights behind them changed."""
        assert not self._lent, "contents are cleared while a step is being planned"
        self._free.extend(self._kept.values())
        self._kept.clear()

    def check_integrity(self) -> None:
        """Verify that every page is in one state: free + kept + lent = all.

        Raises: AssertionError: naming the pages; always a fault of our own.
        """
        pages = sorted((*self._free, *self._kept.values(), *self._lent.values()))
        if pages != list(range(self.num_pages)):
            raise AssertionError(
                f"host pages: {pages} are free, kept or lent, expected each of {self.num_pages}"
            )
        if both := self._kept.keys() & self._lent.keys():
            raise AssertionError(f"host pages: {len(both)} contents are kept twice")
