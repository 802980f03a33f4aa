"""The counter-based noise of sampling: Philox4x32-10 in numpy, the reference of every backend's own generator.

A random number here is a pure function of (request seed, completion, position, token id, stream), so what one request
draws does not depend on what else is in the batch, on how many tokens a step proposes, or on the order of the draws.
That is what makes sampled output reproducible and lets a draft share the target's noise (design: coupled verification).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
laid out as::

    counter = (token_id >> 2, position, stream, sample_index)      key = (seed low 32 bits, seed high 32 bits)

and word ``token_id & 3`` of the block belongs to the token. A word x becomes a number in (0, 1) in float32 arithmetic::

    v = min(x * 2^-32 + 2^-33, 1 - 2^-24)          gumbel = -log(-log1p(-v))

The fine end of the float32 grid lies at small v, which is where gumbel is large and decides an argmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "STREAM_ACCEPTANCE",
    "STREAM_RESIDUAL",
    "STREAM_TOKEN",
    "gumbel",
    "philox_4x32",
    "uniform",
]

STREAM_TOKEN = 0
"""The choice of a token from the target's (and, coupled, from the draft's) distribution."""
STREAM_ACCEPTANCE = 1
"""The acceptance test of rejection sampling: one number a position."""
STREAM_RESIDUAL = 2
"""The choice of a token from the residual after a rejection."""

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_GROUP_BLOCKS = 1 << 14
"""Blocks that are computed at once: few enough for their temporaries to stay in the cache."""

_Words = npt.NDArray[np.uint64]


def philox_4x32(
    c0: npt.ArrayLike, c1: npt.ArrayLike, c2: npt.ArrayLike, c3: npt.ArrayLike, k0: npt.ArrayLike, k1: npt.ArrayLike
) -> npt.NDArray[np.uint32]:
    """One Philox4x32-10 block for each counter and key.

    Args:
        c0, c1, c2, c3: counter words, unsigned 32-bit values; arrays broadcast against each other and the key.
        k0, k1: key words, as the counter.

    Returns:
        uint32 [..., 4]: the four words of each block, over the broadcast shape.
    """
    x0, x1, x2, x3, key0, key1 = (np.asarray(word, dtype=np.uint64) & _LOW for word in (c0, c1, c2, c3, k0, k1))
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIER_0 * x0
        product1 = _MULTIPLIER_1 * x2
        x0, x1 = (product1 >> _HALF) ^ x1 ^ key0, product1 & _LOW
        x2, x3 = (product0 >> _HALF) ^ x3 ^ key1, product0 & _LOW
        key0 = (key0 + _WEYL_0) & _LOW
        key1 = (key1 + _WEYL_1) & _LOW
    return np.stack(np.broadcast_arrays(x0, x1, x2, x3), axis=-1).astype(np.uint32)


def uniform(seeds: Tensor, sample_indices: Tensor, positions: Tensor, count: int, *, stream: int) -> Tensor:
    """Uniform numbers in (0, 1): ``count`` of them for each row, the one at index i keyed as token id i is.

    Args:
        seeds: int64 [R], bits of the unsigned 64-bit request seeds.
        sample_indices: int32 [R], which completion of the request.
        positions: int32 [R], sequence position of the token that is drawn.
        count: numbers a row.
        stream: one of the ``STREAM_*`` constants.

    Returns:
        float32 [R, count], on the CPU, in [2^-33, 1 - 2^-24].
    """
    key = _unsigned(seeds, np.uint64)[:, None]
    c1, c3 = _unsigned(positions, np.uint32)[:, None], _unsigned(sample_indices, np.uint32)[:, None]
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    v = np.empty((len(key), count), dtype=np.float32)
    step = max(1, _GROUP_BLOCKS // max(1, len(blocks)))
    for first in range(0, len(key), step):
        group = slice(first, first + step)
        words = philox_4x32(blocks, c1[group], stream, c3[group], key[group] & _LOW, key[group] >> _HALF)
        x = words.reshape(len(words), -1)[:, :count].astype(np.float32)
        v[group] = np.minimum(x * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1.0 - 2.0**-24))
    return torch.from_numpy(v)


def gumbel(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, vocab_size: int, stream: int = STREAM_TOKEN
) -> Tensor:
    """Standard Gumbel noise of each row over the vocabulary: ``argmax(logits + gumbel)`` draws from softmax(logits).

    Args:
        seeds, sample_indices, positions: [R] each, see :func:`uniform`.
        vocab_size: V.
        stream: ``STREAM_TOKEN`` or ``STREAM_RESIDUAL``.

    Returns:
        float32 [R, V], on the CPU, finite (within [-2.9, 22.9]).
    """
    v = uniform(seeds, sample_indices, positions, vocab_size, stream=stream).numpy()
    for row in v:  # in place and row by row, for the cache's sake
        np.negative(np.log1p(np.negative(row, out=row), out=row), out=row)
        np.negative(np.log(row, out=row), out=row)
    return torch.from_numpy(v)


def _unsigned(values: Tensor, dtype: Any) -> _Words:
    """The tensor's two's-complement bits, read as unsigned numbers of ``dtype``'s width, widened to uint64."""
    signed = np.int64 if dtype is np.uint64 else np.int32
    array: _Words = values.cpu().numpy().astype(signed).view(dtype).astype(np.uint64)
    return array
