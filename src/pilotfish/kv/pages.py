"""The page pool: a fixed number of KV pages, refcounted, with cached pages evicted in least-recently-used order.

A page is in exactly one of three states: *free*, *used* (refcount above 0), or *cached* (refcount 0, but the prefix
index still names it, so that a later prompt may take it up again). Target and draft KV pools share page numbers, so one
pool serves both models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pilotfish.kv.prefix import PrefixIndex

__all__ = ["PagePool"]


class PagePool:
    """Hands out pages by number.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
        enable_prefix_caching: keep indexed pages after their last user has gone.
    """

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.index: PrefixIndex | None = PrefixIndex(page_size) if enable_prefix_caching else None
        self._free = list(range(num_pages - 1, -1, -1))
        self._refcount = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        """Pages that :meth:`allocate` can hand out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without a user that the prefix index still names."""
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages with refcount 1, evicting cached pages if need be; None (and no change) if too few."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                assert self.index is not None
                self.index.remove(page)
            self._refcount[page] = 1
            pages.append(page)
        return pages

    def match_prefix(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Longest cached prefix of ``token_ids`` in whole pages: its pages (not yet shared) and its node."""
        if self.index is None:
            return [], 0
        return self.index.match(token_ids)

    def num_evictable(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` have no user: sharing them takes that many away from :attr:`num_free`."""
        return sum(self._refcount[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Add one user to each of ``pages``, which are used or cached."""
        for page in pages:
            if self._refcount[page] == 0:
                del self._cached[page]
            self._refcount[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one user of each of ``pages`` (given in sequence order).

        Later pages become the older cache entries: a prefix outlives what was built on it.
        """
        for page in reversed(pages):
            self._refcount[page] -= 1
            assert self._refcount[page] >= 0, f"page {page} released more often than taken"
            if self._refcount[page]:
                continue
            if self.index is not None and page in self.index:
                self._cached[page] = None
            else:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state. For tests."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page, count in enumerate(self._refcount) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert len(free) + len(cached) + len(used) == self.num_pages, "a page is lost"
        if self.index is not None:
            assert all(page in self.index for page in cached), "a cached page is not indexed"
            assert not any(page in self.index for page in free), "a free page is indexed"
