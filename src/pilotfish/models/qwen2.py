"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671): Llama's decoder with biases on the q, k and v projections."""

from __future__ import annotations

from pilotfish.models.llama import Llama

__all__ = ["Qwen2"]


class Qwen2(Llama):
    """See :class:`pilotfish.models.llama.Llama`; ``config.attention_bias`` gives its layers their biases."""
