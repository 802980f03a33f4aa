"""Every sampling parameter against a brute-force definition in float64, row by row, in any batch, with any drafts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pilotfish.errors import RequestError
from pilotfish.ops.reference import TorchOps
from pilotfish.sampling import LogitsRow, SamplerState, choose, process_logits, sample, softmax_probs
from pilotfish.sampling.truncate import top_candidates, truncate_row
from pilotfish.types import SamplingParams

EOS = 2
OPS = TorchOps(torch.float32)
PROMPT = [5, 6, 7, 7, 30]

PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "greedy": {"temperature": 0.0, "top_p": 0.5, "top_k": 3},
    "greedy_penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "top_k": {"top_k": 7},
    "top_k_minus_1": {"top_k": -1},
    "top_k_1": {"top_k": 1},
    "top_k_all": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-9},
    "top_p_near_1": {"top_p": 0.999},
    "min_p": {"min_p": 0.1},
    "min_p_1": {"min_p": 1.0},
    "min_p_top_p": {"min_p": 0.02, "top_p": 0.7, "temperature": 1.7},
    "all_three": {"temperature": 1.3, "min_p": 0.01, "top_k": 20, "top_p": 0.9},
    "presence": {"presence_penalty": 1.5},
    "presence_negative": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_1": {"repetition_penalty": 0.5},
    "penalties_and_top_p": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "top_p": 0.9,
        "temperature": 0.8,
    },
    "logit_bias": {"logit_bias": {3: 100.0, 5: -100.0, 11: 1.25}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [9, 10]},
    "min_tokens_ignore_eos": {"min_tokens": 5, "ignore_eos": True, "top_k": 4},
    "min_tokens_reached": {"min_tokens": 1},
    "everything": {
        "temperature": 0.9,
        "min_p": 0.01,
        "top_k": 30,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 3.0, 8: -2.0},
        "min_tokens": 9,
        "stop_token_ids": [4],
    },
}


def params_of(name: str, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, **PARAMS[name], **more})  # type: ignore[arg-type]


def state_of(
    params: SamplingParams, vocab: int, *, output: Sequence[int] = (), seed: int = 1, index: int = 0
) -> SamplerState:
    state = SamplerState(
        params, seed=seed, sample_index=index, prompt_token_ids=PROMPT, vocab_size=vocab, eos_token_ids=[EOS]
    )
    state.commit(output)
    return state


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.5) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def brute_force(logits: NDArray[np.float32], params: SamplingParams, output: Sequence[int]) -> NDArray[np.float64]:
    """The definition, one token at a time, in the documented order."""
    x = [float(value) for value in logits]
    if len(output) < params.min_tokens:
        for token in {EOS, *(params.stop_token_ids or ())}:
            x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(PROMPT) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return np.array(x)
    x = [value / params.temperature for value in x]

    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.min_p > 0:
        order = [token for token in order if math.exp(x[token] - x[order[0]]) >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = math.fsum(math.exp(x[token] - x[order[0]]) for token in order)
    kept: list[int] = []
    mass = 0.0
    for token in order:
        kept.append(token)
        mass += math.exp(x[token] - x[order[0]]) / total
        if params.top_p < 1 and mass >= params.top_p:
            break
    result = np.full(len(x), -np.inf)
    result[kept] = np.array(x)[kept]
    return result


@pytest.mark.parametrize("vocab", [40, 1500, 5000])
@pytest.mark.parametrize("name", PARAMS)
def test_process_logits_is_the_definition(name: str, vocab: int) -> None:
    params, output = params_of(name), [5, 8, 8, 1]
    logits = random_logits(3, vocab)
    logits[2] *= 0.05  # a flat row: its nucleus is most of the vocabulary
    expected = [brute_force(row.numpy(), params, output) for row in logits.clone()]
    row = LogitsRow(state_of(params, vocab, output=output))
    processed = process_logits(logits.clone(), [row] * 3).double().numpy()
    for actual, wanted in zip(processed, expected, strict=True):
        assert np.array_equal(np.isneginf(actual), np.isneginf(wanted))
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_are_history_as_if_committed(name: str) -> None:
    params, output = params_of(name), [8, 1, 8, 33, 5, 12]
    for cut in range(len(output) + 1):
        drafted = LogitsRow(state_of(params, 300, output=output[:cut]), output[cut:])
        committed = LogitsRow(state_of(params, 300, output=output))
        assert drafted.position == committed.position == len(PROMPT) + len(output)
        a, b = (process_logits(random_logits(1, 300), [row]) for row in (drafted, committed))
        assert torch.equal(a, b)
        a_chosen, b_chosen = (sample(random_logits(1, 300), [row], OPS) for row in (drafted, committed))
        assert a_chosen == b_chosen


def test_a_draft_row_leaves_its_state_alone() -> None:
    state = state_of(params_of("everything"), 300, output=[8])
    before = process_logits(random_logits(1, 300), [LogitsRow(state)])
    process_logits(random_logits(1, 300), [LogitsRow(state, [8, 9, 9, 200])])
    assert torch.equal(process_logits(random_logits(1, 300), [LogitsRow(state)]), before)


def test_a_row_is_the_same_in_any_batch() -> None:
    vocab = 1500
    logits = random_logits(len(PARAMS), vocab)
    rows = [
        LogitsRow(state_of(params_of(name, logprobs=3), vocab, output=[8, 8], seed=seed))
        for seed, name in enumerate(PARAMS)
    ]
    together = sample(logits.clone(), rows, OPS, "processed_logprobs")
    assert together.logprobs is not None
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [row], OPS, "processed_logprobs")
        assert alone.logprobs is not None
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[i], together.logprobs[i])
    backwards = sample(logits.flip(0), rows[::-1], OPS, "processed_logprobs")
    assert backwards.token_ids == together.token_ids[::-1]


@pytest.mark.parametrize("name", [name for name in PARAMS if "greedy" not in name])
def test_draws_follow_the_processed_distribution(name: str) -> None:
    vocab, num_draws, output = 40, 2000, [5, 8, 8, 1]
    params = params_of(name)
    logits = random_logits(1, vocab, seed=3, scale=1.2)
    expected = np.exp(brute_force(logits[0].numpy(), params, output))
    expected *= num_draws / expected.sum()
    rows = [LogitsRow(state_of(params, vocab, output=output, seed=seed)) for seed in range(num_draws)]
    drawn = np.bincount(sample(logits.repeat(num_draws, 1), rows, OPS).token_ids, minlength=vocab)
    assert drawn[expected == 0].sum() == 0
    common = expected >= 5  # the rest goes into one cell, as chi-square wants
    observed = np.append(drawn[common], drawn[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(len(wanted) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # the draws are fixed by their seeds: no flakes


def test_seed_index_and_position_key_the_draw() -> None:
    vocab = 1000
    flat = torch.zeros(1, vocab)

    def draw(seed: int, index: int, output: Sequence[int] = ()) -> int:
        row = LogitsRow(state_of(params_of("plain"), vocab, seed=seed, index=index, output=output))
        return sample(flat.clone(), [row], OPS).token_ids[0]

    assert draw(7, 0) == draw(7, 0)
    assert len({draw(seed, 0) for seed in range(20)}) > 15
    assert len({draw(7, index) for index in range(20)}) > 15
    assert len({draw(7, 0, output=[1] * n) for n in range(20)}) > 15


def test_seeds_are_64_bits_signed_or_not() -> None:
    row = [LogitsRow(state_of(params_of("plain"), 1000, seed=seed)) for seed in (-1, 2**64 - 1, -(2**63), 2**63)]
    tokens = sample(torch.zeros(4, 1000), row, OPS).token_ids
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[3]
    assert tokens[0] != tokens[2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-6])
def test_coldest_temperatures_choose_the_most_likely_token(temperature: float) -> None:
    logits = random_logits(8, 5000)
    rows = [LogitsRow(state_of(params_of("plain", temperature=temperature), 5000, seed=s)) for s in range(8)]
    assert sample(logits.clone(), rows, OPS).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e6, 1e300])
@pytest.mark.parametrize("more", [{}, {"top_k": 900}])
def test_hottest_temperatures_are_uniform_not_greedy(temperature: float, more: dict[str, object]) -> None:
    logits = random_logits(1, 1000).repeat(200, 1)
    params = params_of("plain", temperature=temperature, **more)
    tokens = sample(logits, [LogitsRow(state_of(params, 1000, seed=s)) for s in range(200)], OPS).token_ids
    assert len(set(tokens)) > 150


def test_ties_go_to_the_lowest_ids() -> None:
    for params, kept in (({"top_k": 3}, [0, 4, 7]), ({"top_p": 0.3}, [0, 4, 7]), ({"min_p": 1.0}, [0, 4, 7, 9, 11])):
        logits = torch.zeros(1, 2000)
        logits[0, [0, 4, 7, 9, 11]] = 30.0
        if "top_p" in params:
            params = {"top_p": 0.5}  # 2.5 of 5 equal tokens
        processed = process_logits(logits, [LogitsRow(state_of(params_of("plain", **params), 2000))])
        assert torch.isfinite(processed[0]).nonzero()[:, 0].tolist() == kept


def test_truncation_of_quantised_logits_is_exact() -> None:
    """bfloat16 logits are full of ties: each cut goes through some."""
    row = (random_logits(1, 6000)[0] * 0.5).bfloat16().float().numpy()
    for top_k, top_p in ((50, 1.0), (300, 0.9), (0, 0.5), (0, 0.95), (3000, 1.0)):
        params = SamplingParams(top_k=top_k, top_p=top_p)
        expected = brute_force(row, params, [])
        actual = row.copy()
        truncate_row(actual, top_k=top_k, top_p=top_p, min_p=0.0)
        assert np.array_equal(np.isfinite(actual), np.isfinite(expected))


def test_top_candidates_hold_the_top() -> None:
    row = random_logits(1, 5003)[0].numpy()  # a tail that fills no whole group
    row[[5002, 5001]] = 50.0
    for count in (1, 2, 5, 200, 256, 257, 4000, 5003, 9999):
        ids = top_candidates(row, count)
        assert set(np.argsort(-row)[:count]) <= set(ids.tolist())
        assert np.all(np.diff(ids) > 0)
    assert len(top_candidates(row, 64)) < 200


def test_rows_without_processing_are_left_alone() -> None:
    class OnlyArgmax(TorchOps):
        def noise_argmax(self, *_: object) -> torch.Tensor:  # type: ignore[override]
            raise AssertionError("no row needs noise")

    logits = random_logits(4, 100)
    before = logits.clone()
    rows = [LogitsRow(state_of(params_of("plain", temperature=0.0), 100)) for _ in range(4)]
    result = sample(logits, rows, OnlyArgmax(torch.float32))
    assert result.token_ids == before.argmax(-1).tolist()
    assert result.logprobs is None
    assert torch.equal(logits, before)
    assert process_logits(logits, rows) is logits


def test_no_rows_give_no_tokens() -> None:
    result = sample(torch.empty(0, 100), [], OPS)
    assert result.token_ids == []
    assert result.logprobs is None


@pytest.mark.parametrize("name", ["plain", "greedy", "top_p", "top_k", "everything"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_fail_no_other_row(name: str, bad: float) -> None:
    logits = random_logits(3, 500)
    logits[1] = bad
    rows = [LogitsRow(state_of(params_of(name, logprobs=2), 500, seed=s)) for s in range(3)]
    result = sample(logits.clone(), rows, OPS)
    for i in (0, 2):
        assert sample(logits[i : i + 1].clone(), [rows[i]], OPS).token_ids == [result.token_ids[i]]
    assert all(0 <= token < 500 for token in result.token_ids)


@pytest.mark.parametrize(
    ("more", "param"),
    [({"logit_bias": {100: 1.0}}, "logit_bias"), ({"stop_token_ids": [3, 100]}, "stop_token_ids")],
)
def test_token_ids_beyond_the_vocabulary_are_errors(more: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError, match=r"token id 100.*0 to 99") as caught:
        state_of(params_of("plain", **more), 100)
    assert caught.value.param == param


def test_eos_beyond_the_vocabulary_is_ignored() -> None:
    state = SamplerState(
        SamplingParams(min_tokens=4), seed=0, sample_index=0, prompt_token_ids=[1], vocab_size=10, eos_token_ids=[2, 10]
    )
    processed = process_logits(torch.zeros(1, 10), [LogitsRow(state)])
    assert torch.isneginf(processed[0]).nonzero()[:, 0].tolist() == [2]


def test_absurd_repetition_penalties_give_no_nan() -> None:
    for penalty in (1e-300, 1e300):
        params = params_of("plain", repetition_penalty=penalty, min_tokens=4, stop_token_ids=[5])
        processed = process_logits(random_logits(1, 100), [LogitsRow(state_of(params, 100))])
        assert not torch.isnan(processed).any()


@pytest.mark.parametrize("weights", [[0.0, 0.5, 0.0, 0.25, 0.25, 0.0], [3.0], [0.0, 1e-30, 0.0]])
def test_choose_gives_each_token_its_share_of_the_unit_interval(weights: list[float]) -> None:
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    chosen = [choose(torch.tensor(weights), u) for u in (2.0**-33, *grid, 1 - 2.0**-24)]
    assert chosen == sorted(chosen)
    shares = [round(chosen[1:-1].count(token) / 1000, 2) for token in range(len(weights))]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights])


def test_choose_never_gives_a_token_without_weight() -> None:
    """The running sum of many weights may end below or above the number times the total."""
    weights = torch.rand(50_000)
    weights[-3:] = 0.0
    assert choose(weights, 1.0) == 49_996 == choose(weights, 1.0 - 2.0**-53)
    weights[0] = 0.0
    assert choose(weights, 0.0) == 1


def test_softmax_probs_is_one_hot_where_greedy() -> None:
    rows = [LogitsRow(state_of(params_of(name), 100)) for name in ("top_k", "greedy")]
    processed = process_logits(random_logits(2, 100), rows)
    probs = softmax_probs(processed, rows)
    torch.testing.assert_close(probs[0], torch.softmax(processed[0], -1))
    assert probs[1].nonzero()[:, 0].tolist() == [int(processed[1].argmax())]
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
