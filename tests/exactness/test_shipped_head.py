"""The head that ships for the default model: it is the default, it drafts well, and it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pilotfish import LLM, Auto, Mtp, RequestOutput, SamplingParams
from pilotfish.models.checkpoint import resolve_model
from pilotfish.speculation import find_head
from speculation_matrix import assert_all_pages_free

MODEL = "smollm2-135m"
QUESTIONS = [
    "A baker sells 12 rolls for 40 cents each and 3 loaves for 3 euros each. How much money does he take?",
    "Write a short letter to a friend about a day at the lake.",
    "Summarise: The meeting began at seven. The treasurer reported that the roof was paid for.",
    "Write a Python function that adds two numbers.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def make_llm(speculation: Auto | Mtp | None) -> LLM:
    return LLM(MODEL, speculation=speculation, max_model_len=512, kv_cache_memory=128 << 20)


def ask(llm: LLM, params: SamplingParams, questions: Sequence[str] = QUESTIONS) -> list[RequestOutput]:
    return llm.chat([[{"role": "user", "content": question}] for question in questions], params)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def counts(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    return [(o.stats.speculation.num_drafted, o.stats.speculation.num_accepted) for o in outputs]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return make_llm(None)


@pytest.fixture(scope="module")
def default() -> LLM:
    return make_llm(Auto())


def test_it_is_the_default_and_small_enough_to_ship(default: LLM) -> None:
    folder = find_head(resolve_model(MODEL))
    assert folder is not None
    assert default.engine.config.speculation == Mtp(head=str(folder))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6


def test_it_drafts_well(default: LLM) -> None:
    """Far below what it reaches in the benchmarks, far above what a head that reads the wrong states would."""
    accepted = ask(default, GREEDY)[0].stats.speculation
    assert accepted.mean_accepted_length is not None and accepted.mean_accepted_length > 1.8


@pytest.mark.parametrize("num_drafts", [1, 3, None])
def test_greedy_output_is_the_targets(plain: LLM, default: LLM, num_drafts: int | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, num_drafts=num_drafts)
    assert tokens(ask(default, params)) == tokens(ask(plain, GREEDY))


def test_sampled_output_is_the_targets(plain: LLM, default: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, max_tokens=32, seed=3, n=2)
    assert tokens(ask(default, params)) == tokens(ask(plain, params))


def test_a_second_request_from_the_prefix_cache_is_accepted_alike(default: LLM) -> None:
    question = ["Tell me a story about a fish and a ship that meet in a storm, and how they help each other home."]
    first, second = (ask(default, GREEDY, question) for _ in range(2))
    assert second[0].stats.num_cached_tokens > 0
    assert tokens(second) == tokens(first)
    assert counts(second) == counts(first)


def test_many_at_once_are_as_one_by_one(default: LLM) -> None:
    """Prompts of more tokens than a step computes too: the last are read while the first draft."""
    questions = [f"{i}. " + f"{question} " * (1 + 3 * i) for i in range(4) for question in QUESTIONS]
    together = ask(default, GREEDY, questions)
    alone = [ask(default, GREEDY, [question])[0] for question in questions]
    assert tokens(together) == tokens(alone)
    assert counts(together) == counts(alone)
    assert sum(len(output.prompt_token_ids) for output in alone) > 2 * default.engine.config.max_num_batched_tokens
    assert_all_pages_free(default)
