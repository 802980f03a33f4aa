"""The page pool and the prefix index."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.kv import ROOT, PagePool, PrefixIndex


def test_allocate_gives_each_page_once_and_refuses_too_many() -> None:
    pool = PagePool(4, 2)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    assert pool.num_free == 1, "a refused allocation must change nothing"
    pool.release(first)
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_shared_page_is_free_after_its_last_user() -> None:
    pool = PagePool(2, 2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 2


def test_cached_pages_are_found_again_and_evicted_oldest_first() -> None:
    pool = PagePool(3, 2)
    assert pool.index is not None
    tokens = [1, 2, 3, 4, 5, 6]
    pages = pool.allocate(3)
    assert pages is not None
    node = ROOT
    for i, page in enumerate(pages):
        node = pool.index.insert(node, tokens[2 * i : 2 * i + 2], page)
    pool.release(pages)
    assert pool.num_free == 3 and pool.num_cached == 3
    assert pool.match_prefix(tokens)[0] == pages
    assert pool.match_prefix([1, 2, 3, 9])[0] == pages[:1]

    taken = pool.allocate(1)
    assert taken == pages[2:], "the end of a prefix goes before its beginning"
    assert pool.match_prefix(tokens)[0] == pages[:2]
    pool.check_integrity()


def test_the_same_page_of_tokens_after_another_prefix_is_another_key() -> None:
    index = PrefixIndex(2)
    a = index.insert(ROOT, [1, 2], page=0)
    b = index.insert(ROOT, [3, 4], page=1)
    index.insert(a, [5, 6], page=2)
    assert index.match([1, 2, 5, 6])[0] == [0, 2]
    assert index.match([3, 4, 5, 6]) == ([1], b)


def test_inserting_known_tokens_keeps_the_first_page() -> None:
    index = PrefixIndex(2)
    node = index.insert(ROOT, [1, 2], page=0)
    assert index.insert(ROOT, [1, 2], page=5) == node
    assert 5 not in index and index.match([1, 2]) == ([0], node)


def test_a_prefix_whose_middle_was_evicted_is_not_found_through_a_new_page() -> None:
    index = PrefixIndex(1)
    a = index.insert(ROOT, [1], page=0)
    index.insert(a, [2], page=1)
    index.remove(0)
    assert index.match([1, 2]) == ([], ROOT)
    index.insert(ROOT, [1], page=2)
    assert index.match([1, 2])[0] == [2], "page 1 belonged to a prefix that is gone"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_use_never_loses_or_doubles_a_page(data: st.DataObject) -> None:
    """Sequences over two tokens allocate, index, share prefixes and end in random order."""
    pool = PagePool(data.draw(st.integers(1, 8)), page_size=2)
    assert pool.index is not None
    live: list[list[int]] = []
    contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    for _ in range(data.draw(st.integers(1, 25))):
        if live and data.draw(st.booleans()):
            pool.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
            pages, node = pool.match_prefix(tokens)
            assert [contents[page] for page in pages] == [tuple(tokens[: 2 * i + 2]) for i in range(len(pages))]
            pool.share(pages)
            fresh = pool.allocate(len(tokens) // 2 - len(pages))
            if fresh is None:
                pool.release(pages)
            else:
                for page in fresh:
                    start = 2 * len(pages)
                    contents[page] = tuple(tokens[: start + 2])
                    node = pool.index.insert(node, tokens[start : start + 2], page)
                    pages = [*pages, page]
                live.append(pages)
        pool.check_integrity()
    for pages in live:
        pool.release(pages)
    assert pool.num_free == pool.num_pages
    pool.check_integrity()
