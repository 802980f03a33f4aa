"""The counter-based noise: published Philox vectors, the keying of tokens, and the distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pilotfish.ops.noise import STREAM_ACCEPTANCE, STREAM_RESIDUAL, STREAM_TOKEN, gumbel, philox_4x32, uniform

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ALL_ONES] * 4, [ALL_ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """Random123's kat_vectors for philox4x32-10."""
    assert philox_4x32(*counter, *key).tolist() == expected


def rows(seeds: list[int], sample_indices: list[int], positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    signed = np.array(seeds, dtype=np.uint64).view(np.int64)
    return (
        torch.from_numpy(signed),
        torch.tensor(sample_indices, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )


def test_tokens_are_keyed_as_documented() -> None:
    seed, sample, position, token = 0xFEDCBA9876543210, 3, 1234, 4093
    block = philox_4x32(token >> 2, position, STREAM_RESIDUAL, sample, seed & ALL_ONES, seed >> 32)
    v = np.float32(block[token & 3]) * np.float32(2.0**-32) + np.float32(2.0**-33)
    keys = rows([seed], [sample], [position])
    assert uniform(*keys, 4096, stream=STREAM_RESIDUAL)[0, token].item() == v
    expected = -math.log(-math.log1p(-float(v)))
    assert gumbel(*keys, 4096, STREAM_RESIDUAL)[0, token].item() == pytest.approx(expected, rel=1e-6)


def test_rows_are_independent_of_the_batch_and_of_the_vocabulary_asked_for() -> None:
    keys = rows([1, 2, 2**64 - 1], [0, 1, 0], [5, 5, 2**31 - 1])
    noise = gumbel(*keys, 1001)
    for i in range(3):
        assert torch.equal(gumbel(*(part[i : i + 1] for part in keys), 17)[0], noise[i, :17])


def test_every_key_word_changes_the_noise() -> None:
    seeds, samples, positions = [7, 8, 7 + (1 << 32), 7, 7], [0, 0, 0, 1, 0], [3, 3, 3, 3, 4]
    keys = rows(seeds, samples, positions)
    noise = torch.cat([gumbel(*keys, 64), gumbel(*(part[:1] for part in keys), 64, STREAM_ACCEPTANCE)])
    for i in range(len(noise)):
        for j in range(i):
            assert (noise[i] != noise[j]).float().mean() > 0.9


def test_uniform_moments_and_range() -> None:
    v = uniform(*rows([11], [0], [0]), 200_000, stream=STREAM_ACCEPTANCE).double()
    assert v.min() > 0
    assert v.max() < 1
    # Five standard errors of the mean, 1 / sqrt(12 n), and of the variance, sqrt(1 / (180 n)).
    assert v.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * 200_000))
    assert v.var().item() == pytest.approx(1 / 12, abs=5 / math.sqrt(180 * 200_000))


def test_gumbel_argmax_draws_from_softmax() -> None:
    """Chi-square of 40,000 draws, one a position, against the distribution: 4 degrees of freedom, p = 1e-5."""
    num_draws = 40_000
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    keys = rows([42] * num_draws, [0] * num_draws, list(range(num_draws)))
    counts = (gumbel(*keys, 5) + p.log()).argmax(-1).bincount(minlength=5)
    expected = p * num_draws
    assert ((counts - expected) ** 2 / expected).sum() < 28.5


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([[[0, 1, ALL_ONES - 1, ALL_ONES]]], dtype=np.uint32)
    monkeypatch.setattr("pilotfish.ops.noise.philox_4x32", lambda *_: words)
    v = uniform(*rows([0], [0], [0]), 4, stream=STREAM_TOKEN)[0]
    assert v.tolist() == [2.0**-33, 2.0**-32 + 2.0**-33, 1 - 2.0**-24, 1 - 2.0**-24]
    noise = gumbel(*rows([0], [0], [0]), 4)[0]
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert noise[3].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
