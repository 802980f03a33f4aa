"""The promise on the real model: a request's greedy output is the same alone, in a crowd, from the cache, preempted."""

from __future__ import annotations

import pytest

from pilotfish import LLM, RequestOutput, SamplingParams
from pilotfish.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PROMPTS = [
    f"{question} Answer number {i}:"
    for i in range(8)
    for question in (
        "What lives in the deep sea?",
        "def fibonacci(n):",
        "Berlin ist die Hauptstadt von",
        "List the planets from the sun outwards, and say one thing about each of them that a child would remember.",
    )
]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", speculation=None, max_model_len=256, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Each prompt by itself, nothing cached: a new engine would compute the same and take longer to build."""
    return [tokens(LLM.generate(llm, [prompt], GREEDY))[0] for prompt in PROMPTS]


def test_in_a_batch_of_32_and_from_the_prefix_cache(llm: LLM, alone: list[list[int]]) -> None:
    hits = llm.engine.stats.prefix_cache_hits
    assert tokens(llm.generate(PROMPTS, GREEDY)) == alone
    assert llm.engine.stats.prefix_cache_hits > hits
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages


def test_without_the_prefix_cache_in_a_batch(alone: list[list[int]]) -> None:
    fresh = LLM(
        "smollm2-135m", speculation=None, max_model_len=256, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    assert tokens(fresh.generate(PROMPTS, GREEDY)) == alone
    assert fresh.engine.stats.prefix_cache_hits == 0


def test_after_preemption(alone: list[list[int]]) -> None:
    # 40 pages of 16 tokens for 32 sequences of about 45 to 60 tokens: they cannot all be there to the end.
    page = 2 * 30 * 3 * 64 * 16 * 2
    small = LLM("smollm2-135m", speculation=None, max_model_len=256, kv_cache_memory=40 * page)
    assert tokens(small.generate(PROMPTS, GREEDY)) == alone
    assert small.engine.stats.num_preemptions > 0
    assert small.engine.pool.num_free == small.engine.pool.num_pages == 40


def test_on_one_thread(alone: list[list[int]]) -> None:
    single = LLM("smollm2-135m", speculation=None, max_model_len=256, threads=1, kv_cache_memory=64 << 20)
    assert tokens(single.generate(PROMPTS[:4], GREEDY)) == alone[:4]


def test_seeded_sampling_does_not_see_its_neighbours(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=t, top_p=p, seed=i, max_tokens=12)
        for i, (t, p) in enumerate([(0.7, 1.0), (1.0, 0.9), (1.5, 1.0), (0.0, 1.0)])
    ]
    together = tokens(llm.generate(PROMPTS[:4], params))
    assert together == [tokens(llm.generate([PROMPTS[i]], params[i]))[0] for i in range(4)]
    assert together != tokens(
        llm.generate(PROMPTS[:4], [SamplingParams(temperature=1.5, seed=100 + i, max_tokens=12) for i in range(4)])
    )


def test_a_bad_request_among_good_ones_fails_alone(llm: LLM, alone: list[list[int]]) -> None:
    outputs = llm.generate([PROMPTS[0], "", "x " * 400, PROMPTS[1]], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert [outputs[0].outputs[0].token_ids, outputs[3].outputs[0].token_ids] == alone[:2]
    assert isinstance(outputs[2].error, RequestError) and "256" in str(outputs[2].error)


def test_streamed_text_is_the_text(llm: LLM) -> None:
    prompt = "Write one line of emoji: 🐟🌊🐠"
    whole = llm.generate([prompt], GREEDY)[0].outputs[0]
    pieces = list(llm.stream(prompt, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
