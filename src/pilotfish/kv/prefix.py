"""The prefix index: which page already holds the KV of which tokens.

KV of a token depends on every token before it, so a page is known by its whole prefix. A prefix is named by the *node*
of its last page; a page's key is (node of the prefix before it, the page's own tokens). Keys are compared in full, so
two prefixes are never confused, whatever their hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ROOT", "PrefixIndex"]

ROOT = 0
"""The node of the empty prefix."""

_Key = tuple[int, tuple[int, ...]]


class PrefixIndex:
    """Maps full pages of tokens to pages of the pool. Owns no pages: the pool tells it when one is given away."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._entries: dict[_Key, tuple[int, int]] = {}  # key -> (node, page)
        self._key_of_page: dict[int, _Key] = {}
        self._last_node = ROOT

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of_page

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Find the longest indexed prefix of ``token_ids``.

        Returns:
            Its pages in order, and the node of its last page (``ROOT`` for none).
        """
        pages: list[int] = []
        node = ROOT
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            found = self._entries.get((node, tuple(token_ids[start : start + self.page_size])))
            if found is None:
                break
            node, page = found
            pages.append(page)
        return pages, node

    def insert(self, node: int, token_ids: Sequence[int], page: int) -> int:
        """Index a full ``page`` that holds ``token_ids`` after the prefix ``node``.

        If the same tokens are indexed already, that entry stays and ``page`` is not indexed.

        Returns:
            The node of the prefix that ends with these tokens.
        """
        assert len(token_ids) == self.page_size and page not in self._key_of_page
        key = (node, tuple(token_ids))
        found = self._entries.get(key)
        if found is not None:
            return found[0]
        self._last_node += 1
        self._entries[key] = (self._last_node, page)
        self._key_of_page[page] = key
        return self._last_node

    def remove(self, page: int) -> None:
        """Forget ``page``. Prefixes that go through it are no longer found; their own pages age out of the pool."""
        del self._entries[self._key_of_page.pop(page)]
