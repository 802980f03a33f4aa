"""Speculation changes nothing but time, on the real model: every scheme and sampling parameter in bfloat16."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from pilotfish import LLM, RequestOutput, SamplingParams
from pilotfish.config import DraftModel, Ngram, Speculation
from pilotfish.models.checkpoint import resolve_model
from speculation_matrix import assert_all_pages_free, assert_same, one_by_one, parameters, with_drafts

MODEL = "smollm2-135m"
PARAMS = parameters(num_tokens=8, up=28, down=198)
TEXTS = [
    "a b c d e f g a b c d e f g a b c",
    "The cat sat on the mat. The cat sat on the",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
    "Count: one, two, three, four, one, two, three,",
]
PROMPTS = [f"{i}. {TEXTS[i % len(TEXTS)]}" for i in range(len(PARAMS))]
OTHERS = ["What lives in the deep sea?", "Berlin ist die Hauptstadt von", "x " * 70]
OTHER_PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=4 * i + 1) for i in range(len(OTHERS))]


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with the target's tokenizer: its drafts are worth nothing."""
    folder = tmp_path_factory.mktemp("random") / "draft"
    checkpoint = resolve_model(MODEL)
    config = transformers.LlamaConfig(
        vocab_size=checkpoint.config.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoint.path) / name, folder / name)
    return str(folder)


def make_llm(speculation: Speculation | None = None, kv_cache_memory: int = 96 << 20) -> LLM:
    return LLM(MODEL, speculation=speculation, max_model_len=256, kv_cache_memory=kv_cache_memory, seed=0)


SCHEMES: Mapping[str, Callable[[str], Speculation]] = {
    "ngram": lambda random_draft: Ngram(num_drafts=8, min_ngram=1),
    "layers": lambda random_draft: DraftModel(num_drafts=8, layers=12),
    "random": lambda random_draft: DraftModel(num_drafts=8, model=random_draft),
    "itself": lambda random_draft: DraftModel(num_drafts=8, model=MODEL),
}


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """Plain decoding one by one, then of the unrelated requests."""
    return one_by_one(make_llm(), [*PROMPTS, *OTHERS], [*PARAMS, *OTHER_PARAMS])


@pytest.fixture(scope="module", params=list(SCHEMES))
def speculating(request: pytest.FixtureRequest, random_draft: str) -> tuple[str, LLM]:
    """One engine a scheme; requests say how many of its 8 drafts they want."""
    return request.param, make_llm(SCHEMES[request.param](random_draft))


def test_every_parameter_alone_and_in_a_batch(speculating: tuple[str, LLM], plain: list[RequestOutput]) -> None:
    scheme, llm = speculating
    # Every K alone where drafts cost nothing, and in one batch everywhere (every K alone: see the tiny models).
    ks = {"ngram": (1, 2, 5, 8), "layers": (8,), "itself": (8,)}.get(scheme, ())
    for k in ks:
        got = llm.generate([*PROMPTS, *OTHERS], [*with_drafts(PARAMS, k), *OTHER_PARAMS])
        assert_same(got, plain)
        accepted = sum(output.stats.speculation.num_accepted for output in got)
        drafted = sum(output.stats.speculation.num_drafted for output in got)
        assert drafted > 50
        assert accepted == drafted if scheme == "itself" else 0 < accepted < drafted
    mixed = [replace(wanted, num_drafts=(1, 2, 5, 8)[i // 2 % 4]) for i, wanted in enumerate(PARAMS)]
    assert_same(llm.generate([*PROMPTS, *OTHERS], [*mixed, *OTHER_PARAMS]), plain)
    some = slice(3, None, 8)
    assert_same(one_by_one(llm, PROMPTS[some], mixed[some]), plain[: len(PARAMS)][some])
    assert_all_pages_free(llm)


def test_a_second_identical_request_has_the_same_acceptance(speculating: tuple[str, LLM]) -> None:
    scheme, llm = speculating
    prompt = "Nemo, the little fish, swam away. " * 4
    wanted = SamplingParams(temperature=0.7, seed=4, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([prompt], [wanted])[0] for _ in range(2))
    assert first.stats.num_cached_tokens == 0 and second.stats.num_cached_tokens >= 16
    assert_same([second], [first])
    assert first.stats.speculation == second.stats.speculation
    assert first.stats.speculation.num_drafted > 0
    assert scheme != "itself" or first.stats.num_steps == 3, "1, then 9, then what is left of 12"


def test_stops_inside_an_accepted_run(speculating: tuple[str, LLM]) -> None:
    """Pieces of what plain decoding gives, as the stop, streamed or not: the run is cut where plain decoding ends."""
    scheme, llm = speculating
    prompt, base = TEXTS[3], SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)
    whole = llm.generate([prompt], [replace(base, speculate=False)])[0].outputs[0]
    text, tokens = whole.text, whole.token_ids
    stops = [
        {"stop": [text[9:12], text[14:20]]},
        {"stop": ["#", text[-9:-4], text[-8:-6]]},
        {"stop_token_ids": [tokens[6]]},
        {"stop_token_ids": [tokens[-2]], "include_stop_str_in_output": True},
    ]
    lengths = range(1, 21) if scheme == "itself" else (5, 11, 20)
    cases = [replace(base, max_tokens=n, **stop) for stop in stops for n in lengths]  # type: ignore[arg-type]
    want = llm.generate([prompt] * len(cases), [replace(case, speculate=False) for case in cases])
    got = llm.generate([prompt] * len(cases), cases)
    assert_same(got, want)
    for case, output, expected in list(zip(cases, got, want, strict=True))[len(lengths) - 1 :: len(lengths)]:
        pieces = list(llm.stream(prompt, case))
        assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
        assert [t for piece in pieces for t in piece.token_ids] == expected.outputs[0].token_ids
        assert_same([pieces[-1].output], [expected])
        assert pieces[-1].output.stats.speculation == output.stats.speculation, "the same drafts alone and in a batch"
    for output in got:
        c, stats = output.outputs[0], output.stats.speculation
        assert sum(c.is_draft) == stats.num_accepted
        assert c.logprobs is not None and len(c.logprobs) == len(c.token_ids) == len(output.stats.token_times)
    assert any(output.outputs[0].finish_reason == "stop" for output in got)
    assert scheme != "itself" or any(o.outputs[0].is_draft[-1] for o in got), "some end with an accepted draft"
    assert_all_pages_free(llm)


@pytest.mark.parametrize("scheme", ["ngram", "layers"])
def test_32_requests_through_a_pool_too_small_for_them(scheme: str, plain: list[RequestOutput]) -> None:
    speculation = Ngram(num_drafts=5, min_ngram=1) if scheme == "ngram" else DraftModel(num_drafts=5, layers=4)
    page = 2 * (30 + 4 * (scheme == "layers")) * 3 * 64 * 16 * 2
    llm = make_llm(speculation, kv_cache_memory=40 * page)
    requests = slice(4, 36)
    got = llm.generate(PROMPTS[requests], PARAMS[requests])
    assert llm.engine.pool.num_pages == 40 and llm.engine.stats.num_preemptions > 0
    assert llm.engine.stats.speculation.num_accepted > 0
    assert_same(got, plain[requests])
    assert_all_pages_free(llm)
