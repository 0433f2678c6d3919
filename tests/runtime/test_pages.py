"""The page pool: ownership, prefix sharing, eviction, and that its own check finds faults."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.ir.errors import ConfigError
from treadle.runtime.pages import Namespace, PagePool, PageTable, hash_namespace, hash_page


def take(
    pool: PagePool, tokens: list[int], name: str = "a", namespace: Namespace = ()
) -> tuple[PageTable, int]:
    """Allocate and publish as a sequence whose tokens are all computed."""
    table = PageTable(name, namespace)
    num_hit = pool.allocate(table, tokens)
    assert num_hit is not None
    pool.publish(table, tokens, len(tokens))
    return table, num_hit


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_allocation_holds_exactly_the_pages_of_its_tokens(num_tokens: int, num_pages: int) -> None:
    pool = PagePool(4, 16)
    table, _ = take(pool, list(range(num_tokens)))
    assert len(table.pages) == num_pages
    assert pool.num_owned == num_pages
    pool.check_integrity([table])


def test_pages_are_handed_out_from_zero_and_each_once() -> None:
    pool = PagePool(5, 4)
    first, _ = take(pool, [1] * 8)
    second, _ = take(pool, [2] * 12)
    assert first.pages == [0, 1]
    assert second.pages == [2, 3, 4]


def test_freed_pages_can_be_handed_out_again() -> None:
    pool = PagePool(2, 4, prefix_cache=False)
    for name in "abc":
        table, _ = take(pool, [7] * 8, name)
        pool.free(table)
        assert table.pages == []
        assert pool.num_free == 2
        pool.check_integrity([])


def test_allocation_beyond_the_pool_changes_nothing() -> None:
    pool = PagePool(4, 4)
    held, _ = take(pool, list(range(8)))
    for name, tokens in (("b", list(range(17))), ("c", [9] * 9)):
        table = PageTable(name)
        assert pool.allocate(table, tokens) is None
        assert table.pages == []
    assert (pool.num_free, pool.num_owned) == (2, 2)
    assert (pool.query_tokens_total, pool.hit_tokens_total) == (8, 0)
    pool.check_integrity([held])


def test_a_hit_on_an_idle_page_counts_against_the_available_ones() -> None:
    pool = PagePool(3, 4)
    table, _ = take(pool, list(range(9)))
    pool.free(table)
    assert (pool.num_cached, pool.num_available) == (2, 3)
    assert pool.allocate(PageTable("b"), list(range(8)) + [50] * 8) is None
    assert pool.allocate(PageTable("c"), list(range(8)) + [50] * 4) == 8


def test_append_gives_one_page_and_none_when_all_are_held() -> None:
    pool = PagePool(2, 4)
    table, _ = take(pool, [1, 2, 3, 4])
    assert pool.append(table) == 1
    assert pool.append(table) is None
    assert table.pages == [0, 1]


def test_a_shared_page_is_free_only_when_its_last_owner_let_it_go(rng_seed: int) -> None:
    tokens = random_tokens(rng_seed, 12)
    pool = PagePool(8, 4, prefix_cache=True)
    first, _ = take(pool, tokens, "a")
    second, num_hit = take(pool, tokens, "b")
    assert num_hit == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    pool.free(first)
    pool.check_integrity([second])
    assert pool.num_owned == 3
    pool.free(second)
    pool.check_integrity([])
    assert pool.num_owned == 0


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 126, 127])
def test_a_full_hit_leaves_at_least_one_token_to_compute(num_tokens: int, rng_seed: int) -> None:
    tokens = random_tokens(rng_seed, num_tokens)
    pool = PagePool(32, 16)
    first, num_hit_first = take(pool, tokens, "a")
    second, num_hit = take(pool, tokens, "b")
    assert num_hit_first == 0
    assert num_hit == (num_tokens - 1) // 16 * 16
    assert num_hit < num_tokens
    pool.free(first)
    pool.free(second)
    pool.check_integrity([])


@pytest.mark.parametrize(
    ("num_shared", "num_expected"), [(15, 0), (16, 16), (17, 16), (31, 16), (32, 32)]
)
def test_only_whole_equal_pages_are_shared(num_shared: int, num_expected: int) -> None:
    pool = PagePool(32, 16)
    take(pool, list(range(100)))
    _, num_hit = take(pool, list(range(num_shared)) + [999] * 20, "b")
    assert num_hit == num_expected


def test_a_partly_filled_page_is_not_shared() -> None:
    pool = PagePool(8, 4)
    take(pool, [1, 2, 3, 4, 5, 6])
    _, num_hit = take(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9], "b")
    assert num_hit == 4


def test_pages_not_yet_computed_are_not_shared() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(12))
    table = PageTable("a")
    pool.allocate(table, tokens)
    assert take(pool, tokens, "b")[1] == 0
    pool.free(table)
    again = PageTable("c")
    pool.allocate(again, [50] * 12)
    pool.publish(again, [50] * 12, 7)
    table = PageTable("d")
    assert pool.allocate(table, [50] * 12) == 4


def test_the_same_page_content_after_another_prefix_is_not_shared() -> None:
    pool = PagePool(8, 4)
    take(pool, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert take(pool, [2, 2, 2, 2, 5, 5, 5, 5, 0], "b")[1] == 0
    assert take(pool, [5, 5, 5, 5, 0], "c")[1] == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), (("salt", "x"),)),
        ((("salt", "x"),), (("salt", "y"),)),
        ((("salt", "x"),), (("adapter", "x"),)),
        (
            (("adapter", "x"), ("adapter_version", "1")),
            (("adapter", "x"), ("adapter_version", "2")),
        ),
        ((("salt", "x"),), (("salt", "x"), ("adapter", "x"))),
        ((("salt", "ab"),), (("salta", "b"),)),
        ((("a", "b"), ("c", "d")), (("a", "bcd"),)),
        ((("salt", ""),), ()),
    ],
)
def test_namespaces_share_nothing_with_each_other(first: Namespace, second: Namespace) -> None:
    pool = PagePool(16, 4)
    tokens = list(range(13))
    take(pool, tokens, "a", first)
    assert take(pool, tokens, "b", second)[1] == 0
    assert take(pool, tokens, "c", first)[1] == 12


def test_the_order_of_a_namespace_does_not_matter() -> None:
    pairs = (("salt", "x"), ("adapter", "y"))
    assert hash_namespace(pairs) == hash_namespace(pairs[::-1])


def test_keys_of_pages_and_of_namespaces_are_never_equal() -> None:
    assert hash_namespace(()) != hash_page(b"", b"")


def test_two_pages_of_equal_content_are_offered_once() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(9))
    first, second = PageTable("a"), PageTable("b")
    pool.allocate(first, tokens)
    pool.allocate(second, tokens)
    pool.publish(first, tokens, 9)
    pool.publish(second, tokens, 9)
    pool.free(first)
    pool.free(second)
    assert (pool.num_cached, pool.num_free) == (2, 6)
    pool.check_integrity([])


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(6, 4)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        table, _ = take(pool, [token] * 5, name)
        pool.free(table)
    table, num_hit = take(pool, [1] * 5, "again")  # now `b` is the oldest
    assert num_hit == 4
    pool.free(table)
    assert (pool.num_cached, pool.num_free) == (3, 3)
    held, _ = take(pool, [9] * 15, "d")
    assert pool.evictions_total == 1
    pool.free(held)
    assert [pool.allocate(PageTable(str(t)), [t] * 5) for t in (1, 3, 2)] == [4, 4, 0]


def test_the_tail_of_a_sequence_is_evicted_before_its_head(rng_seed: int) -> None:
    tokens = random_tokens(rng_seed, 16)
    pool = PagePool(4, 4)
    table, _ = take(pool, tokens)
    pool.free(table)
    assert pool.num_cached == 4
    held, _ = take(pool, [5000] * 4, "b")
    pool.free(held)
    again = PageTable("c")
    assert pool.allocate(again, [*tokens[:13]]) == 12


def test_a_page_in_use_is_never_evicted() -> None:
    pool = PagePool(3, 4)
    held, _ = take(pool, [1] * 8)
    table = PageTable("b")
    assert pool.allocate(table, [2] * 8) is None
    assert pool.allocate(table, [2] * 4) == 0
    assert pool.append(table) is None
    assert not set(held.pages) & set(table.pages)


def test_a_disabled_cache_shares_and_keeps_nothing() -> None:
    pool = PagePool(8, 4, prefix_cache=False)
    tokens = list(range(12))
    first, _ = take(pool, tokens, "a")
    _, num_hit = take(pool, tokens, "b")
    pool.free(first)
    assert num_hit == 0
    assert pool.num_cached == 0
    assert (pool.query_tokens_total, pool.hit_tokens_total) == (0, 0)


def test_counters_count_tokens_asked_for_and_found() -> None:
    pool = PagePool(16, 4)
    take(pool, list(range(10)), "a")
    take(pool, list(range(11)), "b")
    assert (pool.query_tokens_total, pool.hit_tokens_total) == (21, 8)
    table = PageTable("c")
    assert pool.allocate(table, list(range(10)), count=False) == 8
    assert (pool.query_tokens_total, pool.hit_tokens_total) == (21, 8)


def test_clearing_the_cache_forgets_all_content() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(9))
    held, _ = take(pool, tokens, "a")
    idle, _ = take(pool, [70] * 9, "b")
    pool.free(idle)
    pool.clear_cache()
    pool.check_integrity([held])
    assert pool.num_cached == 0
    assert take(pool, tokens, "c")[1] == 0
    assert take(pool, [70] * 5, "d")[1] == 0


def test_a_sequence_older_than_the_clearing_offers_no_more_pages() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(9))
    old = PageTable("old")
    pool.allocate(old, tokens)
    pool.clear_cache()
    pool.publish(old, tokens, 9)
    assert take(pool, tokens, "new")[1] == 0
    pool.free(old)
    pool.check_integrity()


def test_withdrawn_pages_are_shared_no_more() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(13))
    table = PageTable("faulty")
    pool.allocate(table, tokens)
    pool.publish(table, tokens, 8)
    sharer, num_hit = take(pool, tokens[:10], "sharer")
    assert num_hit == 8
    pool.withdraw(table)
    pool.check_integrity([table, sharer])
    pool.publish(table, tokens, 13)
    pool.free(table)
    pool.free(sharer)
    assert pool.num_cached == 0
    pool.check_integrity([])
    assert take(pool, tokens, "later")[1] == 0


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_of_no_size_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1, found"):
        PagePool(num_pages, page_size)


def used_pool() -> tuple[PagePool, PageTable]:
    pool = PagePool(8, 4)
    held, _ = take(pool, list(range(9)), "held")
    idle, _ = take(pool, [70] * 9, "idle")
    pool.free(idle)
    pool.check_integrity([held])
    return pool, held


def test_the_check_names_a_page_that_is_held_and_free() -> None:
    pool, held = used_pool()
    pool._free.append(held.pages[0])
    with pytest.raises(AssertionError, match=r"page 0, held by \['held'\], is in 2 states"):
        pool.check_integrity()


def test_the_check_names_a_lost_page() -> None:
    pool, _ = used_pool()
    page = pool._free.pop()
    with pytest.raises(AssertionError, match=rf"page {page}, held by \[\], is in 0 states"):
        pool.check_integrity()


def test_the_check_finds_a_wrong_reference_count() -> None:
    pool, held = used_pool()
    pool._num_references[held.pages[1]] += 1
    with pytest.raises(AssertionError, match="counts 2 references"):
        pool.check_integrity()


def test_the_check_finds_a_key_of_a_free_page() -> None:
    pool, held = used_pool()
    page = held.pages[2]
    pool.free(held)
    pool._key_of_page[page] = b"left behind"
    pool._page_of_key[b"left behind"] = page
    with pytest.raises(AssertionError, match="is free but still has a key"):
        pool.check_integrity()


def test_the_check_finds_a_key_that_leads_to_another_page() -> None:
    pool, held = used_pool()
    key = held.keys[0]
    pool._page_of_key[key] = held.pages[2]
    with pytest.raises(AssertionError, match="has the key of another page"):
        pool.check_integrity()


def test_the_check_finds_a_key_without_a_page() -> None:
    pool, _ = used_pool()
    pool._page_of_key[b"stray"] = 0
    with pytest.raises(AssertionError, match="a key leads to a page"):
        pool.check_integrity()


def test_the_check_names_an_owner_that_nobody_knows() -> None:
    pool, _ = used_pool()
    with pytest.raises(AssertionError, match=r"pages are held by \['held'\]"):
        pool.check_integrity([])


class PoolMachine(RuleBasedStateMachine):
    """Random use of a tiny pool, against a record of what every page really holds."""

    @initialize(
        num_pages=st.integers(1, 8), page_size=st.sampled_from([1, 2, 3]), cache=st.booleans()
    )
    def start(self, num_pages: int, page_size: int, cache: bool) -> None:
        self.pool = PagePool(num_pages, page_size, prefix_cache=cache)
        self.tables: list[tuple[PageTable, list[int], Namespace]] = []
        self.content: dict[int, object] = {}  # page → the prefix its tokens complete

    def write(self, table: PageTable, tokens: list[int], namespace: Namespace, start: int) -> None:
        size = self.pool.page_size
        for index in range(start // size, len(tokens) // size):
            self.content[table.pages[index]] = (namespace, tokens[: (index + 1) * size])
        if len(tokens) % size:
            self.content[table.pages[len(tokens) // size]] = "part"

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        namespace=st.sampled_from([(), (("salt", "x"),)]),
    )
    def allocate(self, tokens: list[int], namespace: Namespace) -> None:
        table = PageTable(f"table {len(self.tables)}", namespace)
        available = self.pool.num_available
        num_new = self.pool.find_prefix(table, tokens).num_new_pages
        num_hit = self.pool.allocate(table, tokens)
        if num_hit is None:
            assert self.pool.num_available == available
            num_pages = -(-len(tokens) // self.pool.page_size)
            assert num_pages > available, "refused, though it fits without any hit"
            assert num_new > available
            return
        assert available - self.pool.num_available == num_new
        assert num_hit < len(tokens)
        for index in range(num_hit // self.pool.page_size):
            prefix = (namespace, tokens[: (index + 1) * self.pool.page_size])
            assert self.content[table.pages[index]] == prefix, "a page of other content was shared"
        self.write(table, tokens, namespace, num_hit)
        self.pool.publish(table, tokens, len(tokens))
        self.tables.append((table, tokens, namespace))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        table, tokens, namespace = data.draw(st.sampled_from(self.tables))
        for token in more:
            if len(tokens) == len(table.pages) * self.pool.page_size:
                available = self.pool.num_available
                page = self.pool.append(table)
                assert (page is None) == (available == 0)
                if page is None:
                    break
            tokens.append(token)
            self.write(table, tokens, namespace, len(tokens) - 1)
        self.pool.publish(table, tokens, len(tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index)[0])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.pool.withdraw(data.draw(st.sampled_from(self.tables))[0])

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(table for table, _, _ in self.tables)
        size = self.pool.page_size
        for table, tokens, namespace in self.tables:
            for index in range(len(tokens) // size):
                prefix = (namespace, tokens[: (index + 1) * size])
                assert self.content[table.pages[index]] == prefix, "a held page was overwritten"

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for table, _, _ in self.tables:
            self.pool.free(table)
        self.pool.check_integrity([])
        assert self.pool.num_available == self.pool.num_pages


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestRandomUse = PoolMachine.TestCase
