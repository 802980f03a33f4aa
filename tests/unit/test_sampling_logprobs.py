"""Log-probabilities: which tokens, which values, which ranks, in all four modes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pilotfish.config import LogprobsMode
from pilotfish.ops.reference import TorchOps
from pilotfish.sampling import LogitsRow, SamplerState, process_logits, sample
from pilotfish.types import Logprob, SamplingParams

OPS = TorchOps(torch.float32)
VOCAB = 1500
MODES: list[LogprobsMode] = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def row_of(**params: object) -> LogitsRow:
    state = SamplerState(
        SamplingParams(**params),  # type: ignore[arg-type]
        seed=11,
        sample_index=0,
        prompt_token_ids=[1, 2, 3],
        vocab_size=VOCAB,
        eos_token_ids=[0],
    )
    return LogitsRow(state)


def logits_of(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def logprobs_of(
    row: LogitsRow, mode: LogprobsMode, logits: torch.Tensor | None = None
) -> tuple[int, dict[int, Logprob]]:
    result = sample(logits_of() if logits is None else logits, [row], OPS, mode)
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    return result.token_ids[0], result.logprobs[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {77: 50.0}},
        {"temperature": 2.0},
        {"temperature": 2.0, "top_k": 40, "repetition_penalty": 1.4},
        {"top_p": 0.7, "min_tokens": 3},
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_values_ranks_and_tokens(mode: LogprobsMode, params: dict[str, object]) -> None:
    row = row_of(logprobs=5, **params)
    values = logits_of()[0] if mode.startswith("raw") else process_logits(logits_of(), [row])[0]
    values = values.double()
    if mode.endswith("logprobs"):
        values = torch.log_softmax(values, -1)
    order = np.argsort(-values.numpy(), kind="stable").tolist()

    token, logprobs = logprobs_of(row, mode)
    assert next(iter(logprobs)) == token
    assert set(logprobs) == {token, *order[:5]}
    assert [t for t in logprobs if t != token] == [t for t in order[:5] if t != token]
    for t, entry in logprobs.items():
        assert entry.logprob == pytest.approx(float(values[t]), abs=2e-5)
        assert order[entry.rank - 1] == t


def test_zero_gives_the_chosen_token_alone() -> None:
    token, logprobs = logprobs_of(row_of(logprobs=0, temperature=5.0), "raw_logprobs")
    assert list(logprobs) == [token]


def test_dropped_tokens_are_not_listed() -> None:
    token, logprobs = logprobs_of(row_of(logprobs=10, top_k=3), "processed_logprobs")
    assert len(logprobs) == 3
    assert math.fsum(math.exp(entry.logprob) for entry in logprobs.values()) == pytest.approx(1.0, abs=1e-6)
    assert token in logprobs


def test_ranks_of_equal_logits_are_distinct() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 30, 70]] = 4.0
    token, logprobs = logprobs_of(row_of(logprobs=3, temperature=0.0), "raw_logits", logits)
    assert token == 9
    assert {t: entry.rank for t, entry in logprobs.items()} == {9: 1, 30: 2, 70: 3}


def test_only_rows_that_ask_get_them_and_tokens_do_not_change() -> None:
    rows = [row_of(), row_of(logprobs=2), row_of(top_k=5), row_of(top_k=5, logprobs=1)]
    with_logprobs = sample(logits_of(4), rows, OPS)
    without = sample(logits_of(4), [row_of(), row_of(), row_of(top_k=5), row_of(top_k=5)], OPS)
    assert with_logprobs.token_ids == without.token_ids
    assert without.logprobs is None
    assert with_logprobs.logprobs is not None
    assert [entry is not None for entry in with_logprobs.logprobs] == [False, True, False, True]
