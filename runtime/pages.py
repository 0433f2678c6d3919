"""The pages of the KV cache: who holds each one, and which full pages can be shared by prefix.

Knows token ids and page numbers only: no tensors, no requests, no clock. Called by the scheduler.
Pages are handed out in the order in which steps run on the device (one stream); see `publish`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from treadle.ir.errors import ConfigError
from treadle.runtime.host_pages import HostPages, PageCopies

Namespace = tuple[tuple[str, str], ...]
"""What besides the token ids decides a page's content, as (kind, value) pairs.

The kinds keep values apart: `("salt", "x")` and `("adapter", "x")` never share a page.
"""

_KEY_BYTES = 32
_WITHDRAWN = -1  # an epoch that no pool ever has


def hash_namespace(namespace: Namespace) -> bytes:
    """Return the key that the first page of a sequence is chained to.

    Kind and value are hashed with their lengths, so no two namespaces spell the same bytes; the
    order of the pairs does not matter.
    """
    digest = blake2b(digest_size=_KEY_BYTES, person=b"treadle-root")
    for pair in sorted(namespace):
        for part in pair:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def hash_page(parent: bytes, token_ids: bytes) -> bytes:
    """Return the key of a full page from the key of the page before it and its own token ids.

    Numerics: BLAKE2b with 256 bits, so equal keys mean equal tokens: a collision is as unlikely as
    breaking the hash, and token ids need not be kept for a second comparison.
    """
    return blake2b(parent + token_ids, digest_size=_KEY_BYTES, person=b"treadle-page").digest()


class PageTable:
    """The pages of one sequence, in order of position; the named owner of one reference to each.

    It belongs to one sequence, whose token ids may grow but never change. `pages[p // page_size]`
    holds position p. `keys` are the chained hashes of the full pages known so far; the first
    `num_published` of them were offered to the prefix cache.
    """

    __slots__ = ("epoch", "keys", "name", "num_published", "pages", "root")

    def __init__(self, name: str, namespace: Namespace = ()) -> None:
        self.name = name
        self.root = hash_namespace(namespace)
        self.pages: list[int] = []
        self.keys: list[bytes] = []
        self.num_published = 0
        self.epoch = 0


class Prefix(NamedTuple):
    """The pages of the longest prefix to reuse, None for one that is to be fetched from the host.

    num_new_pages: how many of all its pages a table would take that nobody holds yet.
    """

    hits: list[int | None]
    num_new_pages: int


class PagePool:
    """Hand out the pages of the KV cache and remember the content of full ones.

    A page is in exactly one of three states: *owned* (held by one or more page tables), *cached*
    (held by none, but its content may be reused; evicted, least recently used first, when pages are
    needed) or *free*. `check_integrity` verifies it.

    With `host`, what is evicted is kept in host memory and can be fetched from there; `take_copies`
    gives the copies that are due before the next step.

    Raises: ConfigError: when a size is not positive.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        host: HostPages | None = None,
    ) -> None:
        for field, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(
                    f"Expected `{field}` of at least 1, found {value}.",
                    remedy="Give the KV cache more memory, or a smaller page.",
                )
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.host = host
        self.query_tokens_total = 0
        self.hit_tokens_total = 0
        self.evictions_total = 0
        self._epoch = 0
        self._pack_page = Struct(f"{page_size}i").pack
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: page 0 first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_references = [0] * num_pages
        self._key_of_page: list[bytes | None] = [None] * num_pages
        self._page_of_key: dict[bytes, int] = {}
        self._tables: dict[int, PageTable] = {}  # by id(): two tables may share a name

    @property
    def num_free(self) -> int:
        """Count the pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Count the pages that nobody holds and whose content may be reused."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Count the pages that can be handed out now: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        """Count the pages that at least one table holds."""
        return self.num_pages - self.num_available

    def count_pages(self, num_tokens: int) -> int:
        """Return how many pages that many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def find_prefix(self, table: PageTable, token_ids: Sequence[int]) -> Prefix:
        """Find the longest prefix to reuse, and how many pages `allocate` would take besides."""
        hits = self._match_prefix(table, token_ids) if self.prefix_cache else []
        num_held = sum(1 for page in hits if page is not None and self._num_references[page])
        return Prefix(hits, self.count_pages(len(token_ids)) - num_held)

    def allocate(
        self,
        table: PageTable,
        token_ids: Sequence[int],
        prefix: Prefix | None = None,
        *,
        count: bool = True,
    ) -> int | None:
        """Give an empty table the pages that all of `token_ids` need; return the tokens reused.

        The longest cached prefix is shared, in whole pages and short of the last token, whose
        logits the caller needs: at least one token is always left to compute. What of it is in host
        memory gets a page here, where fetching it is faster than computing it. All or nothing:
        returns None, and changes nothing, where pages are lacking. `prefix`: what `find_prefix` has
        just given for the same. `count` is False where the look-up should not enter the hit rate (a
        request taken up again).
        """
        assert not table.pages, f"page table `{table.name}` is allocated twice"
        assert token_ids, f"page table `{table.name}` is allocated for no tokens"
        hits, num_new_pages = prefix or self.find_prefix(table, token_ids)
        if num_new_pages > self.num_available:
            return None
        num_references = self._num_references
        shared = [page for page in hits if page is not None]
        for page in shared:
            if num_references[page] == 0:
                del self._cached[page]
            num_references[page] += 1
        if len(shared) < len(hits):
            self._fetch_pages(table, hits, count)
        else:
            table.pages.extend(shared)
        table.pages.extend(
            self._take_page() for _ in range(self.count_pages(len(token_ids)) - len(hits))
        )
        table.num_published = len(hits)
        table.epoch = self._epoch
        self._tables[id(table)] = table
        num_hit_tokens = len(hits) * self.page_size
        if count and self.prefix_cache:
            self.query_tokens_total += len(token_ids)
            self.hit_tokens_total += num_hit_tokens
        return num_hit_tokens

    def append(self, table: PageTable) -> int | None:
        """Give a table one more page and return it, or None when no page is available."""
        assert table.pages, f"page table `{table.name}` grows before it was allocated"
        if not self._free and not self._cached:
            return None
        page = self._take_page()
        table.pages.append(page)
        return page

    def publish(self, table: PageTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Offer a table's full pages among its first `num_computed` tokens to later sequences.

        Call it once the step that writes them has been planned: steps run in order, so a sequence
        planned later reads what that step wrote. `token_ids` are the sequence's, from the start.
        A partly filled page is never offered; nor is a second page of the same content.
        """
        num_full = num_computed // self.page_size
        if num_full <= table.num_published or not self.prefix_cache:
            return
        if table.epoch != self._epoch:  # made before `clear_cache`, or withdrawn
            return
        self._extend_keys(table, token_ids, num_full)
        for index in range(table.num_published, num_full):
            page, key = table.pages[index], table.keys[index]
            if key not in self._page_of_key:
                self._page_of_key[key] = page
                self._key_of_page[page] = key
        table.num_published = num_full

    def withdraw(self, table: PageTable) -> None:
        """Share a table's pages with no later sequence, because their content can't be trusted."""
        for page in table.pages:
            key = self._key_of_page[page]
            if key is not None:
                del self._page_of_key[key]
                self._key_of_page[page] = None
                if self.host is not None:
                    self.host.discard(key)
        table.epoch = _WITHDRAWN

    def free(self, table: PageTable) -> None:
        """Take back a table's reference to each of its pages; the table is empty afterwards."""
        # From the end: the tail of a sequence is evicted before the prefix that leads to it.
        for page in reversed(table.pages):
            self._num_references[page] -= 1
            if self._num_references[page] == 0:
                if self._key_of_page[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None
        table.pages.clear()
        table.num_published = 0
        self._tables.pop(id(table), None)

    def clear_cache(self) -> None:
        """Forget the content of every page, because the weights behind it changed.

        Sequences that hold pages keep them, but nothing they computed is shared any more.
        """
        self._epoch += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of_key.clear()
        self._key_of_page = [None] * self.num_pages
        if self.host is not None:
            self.host.clear()

    def take_copies(self) -> PageCopies | None:
        """Give the copies between device and host that must precede the step being planned.

        No step in flight uses their device pages: a page is evicted, and handed out again, when
        nobody holds it any more, and a sequence holds its pages until its steps are complete.
        """
        return None if self.host is None else self.host.take_copies()

    def check_integrity(self, owners: Iterable[PageTable] | None = None) -> None:
        """Verify that every page is accounted for exactly once, and by whom.

        free + cached + owned = total; each reference belongs to a table, each key to one page.
        `owners`: the tables that may hold pages, where the caller knows them.

        Raises: AssertionError: naming the page and its owners; always a fault of our own.
        """
        holders: dict[int, list[str]] = {}
        for table in self._tables.values():
            for page in table.pages:
                holders.setdefault(page, []).append(table.name)
        free = set(self._free)
        _check(len(free) == len(self._free), "a page is in the free list twice")
        for page in range(self.num_pages):
            names = holders.get(page, [])
            num_references = self._num_references[page]
            where = f"page {page}, held by {names}"
            _check(len(names) == num_references, f"{where}, counts {num_references} references")
            num_states = (page in free) + (page in self._cached) + bool(names)
            _check(num_states == 1, f"{where}, is in {num_states} states at once, expected 1")
            key = self._key_of_page[page]
            if key is not None:
                _check(self._page_of_key.get(key) == page, f"{where}, has the key of another page")
                _check(page not in free, f"{where}, is free but still has a key")
            elif page in self._cached:
                _check(False, f"{where}, is cached without a key")
        num_keys = sum(key is not None for key in self._key_of_page)
        _check(len(self._page_of_key) == num_keys, "a key leads to a page that does not have it")
        if owners is not None:
            known = {id(table) for table in owners}
            lost = [table.name for ident, table in self._tables.items() if ident not in known]
            _check(not lost, f"pages are held by {lost}, which no sequence uses any more")
        if self.host is not None:
            self.host.check_integrity()

    def _match_prefix(self, table: PageTable, token_ids: Sequence[int]) -> list[int | None]:
        """Give the pages of the longest prefix to reuse; None for one to be fetched."""
        num_shareable = (len(token_ids) - 1) // self.page_size
        self._extend_keys(table, token_ids, num_shareable)
        hits: list[int | None] = []
        for key in table.keys[:num_shareable]:
            page = self._page_of_key.get(key)
            if page is None and (self.host is None or key not in self.host):
                break
            hits.append(page)
        if self.host is not None and None in hits:
            num_here = hits.index(None)
            num_spared = (len(hits) - num_here) * self.page_size
            if not self.host.is_worth_fetching(hits.count(None), num_spared):
                del hits[num_here:]
        return hits

    def _fetch_pages(self, table: PageTable, hits: Sequence[int | None], count: bool) -> None:
        """Give a table its hits, those of host memory in pages of their own."""
        assert self.host is not None, "without host memory every hit has a page"
        fetched = [key for key, page in zip(table.keys, hits, strict=False) if page is None]
        self.host.lend(fetched)
        for key, hit in zip(table.keys, hits, strict=False):
            page = hit
            if page is None:
                page = self._take_page()
                self.host.fetch(key, page)
                self._page_of_key[key] = page
                self._key_of_page[page] = key
            table.pages.append(page)
        if count:
            self.host.hit_tokens_total += len(fetched) * self.page_size

    def _extend_keys(self, table: PageTable, token_ids: Sequence[int], num_pages: int) -> None:
        first = len(table.keys)
        if first >= num_pages:
            return
        size, pack = self.page_size, self._pack_page
        parent = table.keys[-1] if table.keys else table.root
        for start in range(first * size, num_pages * size, size):
            parent = hash_page(parent, pack(*token_ids[start : start + size]))
            table.keys.append(parent)

    def _take_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of_page[page]
            assert key is not None, f"cached page {page} has no key"
            del self._page_of_key[key]
            self._key_of_page[page] = None
            self.evictions_total += 1
            if self.host is not None:
                self.host.keep(key, page)
        self._num_references[page] = 1
        return page


def _check(holds: bool, message: str) -> None:
    # Not an `assert` statement: the check must also run under `python -O`.
    if not holds:
        raise AssertionError(f"page pool: {message}")
