"""argmax and noise_argmax: ties, NaN and -inf; the noise against a generator written here; the distribution drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers_kernels import ISAS, Kernels, int32, strided

INFINITY = float("inf")


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters [..., 4] under keys [..., 2]: 32-bit words in uint64."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c, k = [counter[..., i] for i in range(4)], [key[..., i] for i in range(2)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ k[0], b & mask, (a >> shift) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c, axis=-1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_generator_of_this_file_gives_the_published_vectors(counter: str, key: str, words: str) -> None:
    numbers = [np.array([int(word, 16) for word in text.split()], dtype=np.uint64) for text in (counter, key, words)]
    assert philox(numbers[0], numbers[1]).tolist() == numbers[2].tolist()


def gumbels(seed: int, sample_index: int, position: int, vocab: int) -> NDArray[np.float64]:
    """The noise of one row, [vocab]: uniform numbers in float32 as specified, their logarithms in float64."""
    counter = np.zeros(((vocab + 3) // 4, 4), dtype=np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1], counter[:, 3] = position, sample_index
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint64)
    x = philox(counter, key).reshape(-1)[:vocab].astype(np.float32)
    v = np.minimum(x * np.float32(2**-32) + np.float32(2**-33), np.float32(1 - 2**-24))
    return -np.log(-np.log1p(-v.astype(np.float64)))


def argmax(kernels: Kernels, logits: Tensor) -> list[int]:
    out = torch.full((logits.shape[0],), -7, dtype=torch.int32)
    kernels.call("argmax", logits.shape[0], logits=logits, stride=logits.stride(0), vocab=logits.shape[1], out=out)
    return out.tolist()


def noise_argmax(
    kernels: Kernels,
    logits: Tensor,
    inv_temperature: list[float],
    seeds: list[int],
    sample_indices: list[int],
    positions: list[int],
) -> list[int]:
    rows, vocab = logits.shape
    out = torch.full((rows,), -7, dtype=torch.int32)
    arrays = {
        "inv_temperature": torch.tensor(inv_temperature),
        "seeds": torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        "sample_indices": int32(sample_indices),
        "positions": int32(positions),
    }
    kernels.call("noise_argmax", rows, logits=logits, stride=logits.stride(0), vocab=vocab, out=out, **arrays)
    return out.tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [1, 7, 64, 1000, 5003])
def test_argmax(isa: str, num_threads: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = strided(torch.randint(-40, 40, (5, vocab), generator=generator).float(), 3)  # with many ties
    logits[1] = 0.0
    logits[2] = -INFINITY
    logits[3, ::2] = float("nan")
    logits[4] = float("nan")
    expected = logits.nan_to_num(nan=-INFINITY, neginf=-INFINITY, posinf=INFINITY).numpy().argmax(-1)
    kernels = Kernels(isa, num_threads)
    assert argmax(kernels, logits) == expected.tolist()
    for row in range(5):
        assert argmax(kernels, logits[row : row + 1]) == [expected[row]]


@pytest.mark.parametrize("isa", ISAS)
def test_noise_argmax_follows_the_specified_noise(isa: str) -> None:
    rows, vocab = 300, 2050
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    logits[rows // 2 :] = 0.0  # the noise alone decides
    inv_temperature = rng.uniform(0.3, 3, size=rows).astype(np.float32)
    seeds = [int(x) for x in rng.integers(0, 2**64, size=rows, dtype=np.uint64)]
    indices, positions = rng.integers(0, 64, size=(2, rows)).tolist()
    scores = np.stack(
        [
            logits[row].astype(np.float64) * inv_temperature[row]
            + gumbels(seeds[row], indices[row], positions[row], vocab)
            for row in range(rows)
        ]
    )
    best_two = np.sort(scores, axis=-1)[:, -2:]
    assert (best_two[:, 1] - best_two[:, 0]).min() > 1e-5, "choose another seed: float32 could not tell these apart"
    drawn = noise_argmax(Kernels(isa), torch.from_numpy(logits), inv_temperature.tolist(), seeds, indices, positions)
    assert drawn == scores.argmax(-1).tolist()


@pytest.mark.parametrize("isa", ISAS)
def test_noise_is_accurate_to_a_few_ulp(isa: str) -> None:
    """Two candidates whose logits differ by just more or less than their noise does: the choice must flip there."""
    vocab, seed = 400, 0x123456789ABCDEF
    noise = gumbels(seed, 2, 77, vocab)
    kernels = Kernels(isa)
    for margin in (2e-6, -2e-6):  # noise is up to 9 here, so an ulp of the scores is 1e-6
        logits = torch.full((vocab // 2, vocab), -INFINITY)
        for row in range(vocab // 2):
            logits[row, 2 * row], logits[row, 2 * row + 1] = 0.0, noise[2 * row] - noise[2 * row + 1] + margin
        drawn = noise_argmax(kernels, logits, [1.0] * 200, [seed] * 200, [2] * 200, [77] * 200)
        assert drawn == [2 * row + (margin > 0) for row in range(vocab // 2)]


@pytest.mark.parametrize("isa", ISAS)
def test_draw_does_not_depend_on_batch_or_threads(isa: str) -> None:
    rows, vocab = 11, 5000
    logits = strided(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)), 2)
    keys = ([1.0] * rows, list(range(rows)), [0] * rows, [5] * rows)
    expected = noise_argmax(Kernels(isa, 1), logits, *keys)
    for num_threads in (2, 3):
        kernels = Kernels(isa, num_threads)
        assert noise_argmax(kernels, logits, *keys) == expected
        for row in range(rows):
            one = [key[row : row + 1] for key in keys]
            assert noise_argmax(kernels, logits[row : row + 1], *one) == expected[row : row + 1]


@pytest.mark.parametrize("isa", ISAS)
def test_hidden_tokens_and_greedy_rows(isa: str) -> None:
    vocab = 300
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, torch.arange(vocab) != 123] = -INFINITY
    logits[1] = -INFINITY
    logits[2, torch.arange(vocab) != 77] = float("nan")
    logits[3, 5] = -INFINITY
    drawn = noise_argmax(Kernels(isa), logits, [1.0, 1.0, 0.5, 0.0], [9] * 4, [0] * 4, [1] * 4)
    assert drawn == [123, 0, 77, int(logits[3].argmax())]


@pytest.mark.parametrize("isa", ISAS)
def test_draws_follow_softmax(isa: str) -> None:
    """Chi-square over 40,000 draws from a skewed distribution of 24 tokens at temperature 0.7."""
    vocab, draws = 24, 40_000
    logits = torch.linspace(0, 3, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    rows = logits.expand(draws, vocab).contiguous()
    drawn = noise_argmax(Kernels(isa), rows, [1 / 0.7] * draws, [42] * draws, [0] * draws, list(range(draws)))
    expected = (logits.double() / 0.7).softmax(-1) * draws
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 52.0, f"chi-square of 23 degrees of freedom: {chi_square:.1f}"  # 99.95th percentile: 51.6
