"""KV pages on the host: who owns which page, and which page holds which tokens. Knows no tensors."""

from pilotfish.kv.pages import PagePool
from pilotfish.kv.prefix import ROOT, PrefixIndex

__all__ = ["ROOT", "PagePool", "PrefixIndex"]
