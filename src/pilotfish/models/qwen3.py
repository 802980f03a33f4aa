"""Qwen3, the dense models (Yang et al., arXiv:2505.09388): Llama's decoder with an RMSNorm on each head of q and k.

The head's width is its own number: Hq D need not be H.
"""

from __future__ import annotations

from pilotfish.models.llama import Llama

__all__ = ["Qwen3"]


class Qwen3(Llama):
    """See :class:`pilotfish.models.llama.Llama`; its layers norm each head of q and k by ``config.architecture``."""
