"""Speculation changes nothing but time, on the real model: every scheme and sampling parameter in bfloat16."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from helpers_heads import fitted_weights, head_config, random_weights, write_head, write_texts
from pilotfish import LLM, RequestOutput, SamplingParams
from pilotfish.config import DraftModel, Eagle, Mtp, Ngram, Speculation
from pilotfish.models.checkpoint import resolve_model
from pilotfish.models.heads import HeadKind
from pilotfish.text import Tokenizer
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


HEADS: Mapping[str, tuple[HeadKind, int]] = {
    "random head": ("mtp", 1), "mtp": ("mtp", 1), "chain": ("mtp", 2), "eagle": ("eagle", 1), "eagle3": ("eagle3", 1),
}  # fmt: skip
"""Kind and number of modules."""

FITTED = ("mtp", "chain", "eagle")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Folders of drafts by scheme: a tiny random model with the target's tokenizer, and heads."""
    root = tmp_path_factory.mktemp("drafts")
    folders = {"random": random_draft(root / "draft")}
    tokenizer = Tokenizer.from_folder(resolve_model(MODEL).path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = write_texts(MODEL, prompts, 24)
    for name, (kind, num_modules) in HEADS.items():
        config = head_config(MODEL, kind, num_modules=num_modules, num_tokens=4096)
        weights = fitted_weights(config, MODEL, texts) if name in FITTED else random_weights(config, 0.05)
        folders[name] = write_head(root / name, config, weights, ids=sorted({t for p in prompts for t in p}))
    return folders


def random_draft(folder: Path) -> str:
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


SCHEMES: Mapping[str, Callable[[Mapping[str, str]], Speculation]] = {
    "ngram": lambda drafts: Ngram(num_drafts=8, min_ngram=1),
    "layers": lambda drafts: DraftModel(num_drafts=8, layers=12),
    "random": lambda drafts: DraftModel(num_drafts=8, model=drafts["random"]),
    "itself": lambda drafts: DraftModel(num_drafts=8, model=MODEL),
    "random head": lambda drafts: Mtp(num_drafts=8, head=drafts["random head"], lookup=0, p_min=0.0),
    "mtp": lambda drafts: Mtp(num_drafts=8, head=drafts["mtp"], lookup=0, p_min=0.0),
    "chain": lambda drafts: Mtp(num_drafts=8, head=drafts["chain"], lookup=0, p_min=0.0),
    "eagle": lambda drafts: Eagle(num_drafts=8, head=drafts["eagle"], lookup=0, p_min=0.0),
    "eagle3": lambda drafts: Eagle(num_drafts=8, head=drafts["eagle3"], lookup=0, p_min=0.0),
}


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """Plain decoding one by one, then of the unrelated requests."""
    return one_by_one(make_llm(), [*PROMPTS, *OTHERS], [*PARAMS, *OTHER_PARAMS])


@pytest.fixture(scope="module", params=list(SCHEMES))
def speculating(request: pytest.FixtureRequest, drafts: Mapping[str, str]) -> tuple[str, LLM]:
    """One engine a scheme; requests say how many of its 8 drafts they want."""
    return request.param, make_llm(SCHEMES[request.param](drafts))


def test_every_parameter_alone_and_in_a_batch(speculating: tuple[str, LLM], plain: list[RequestOutput]) -> None:
    scheme, llm = speculating
    # Every K alone where drafts cost nothing, and in one batch everywhere (every K alone: see the tiny models).
    ks = {"ngram": (1, 2, 5, 8), "layers": (8,), "itself": (8,), "mtp": (5,), "chain": (8,)}.get(scheme, ())
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


@pytest.mark.parametrize("scheme", ["ngram", "layers", "mtp", "chain"])
def test_32_requests_through_a_pool_too_small_for_them(
    scheme: str, plain: list[RequestOutput], drafts: Mapping[str, str]
) -> None:
    speculation = replace(SCHEMES[scheme](drafts), num_drafts=5)
    page = 2 * (30 + {"ngram": 0, "layers": 12, "mtp": 1, "chain": 2}[scheme]) * 3 * 64 * 16 * 2
    llm = make_llm(speculation, kv_cache_memory=40 * page)
    requests = slice(4, 36)
    got = llm.generate(PROMPTS[requests], PARAMS[requests])
    assert llm.engine.pool.num_pages == 40 and llm.engine.stats.num_preemptions > 0
    assert llm.engine.stats.speculation.num_accepted > 0
    assert_same(got, plain[requests])
    assert_all_pages_free(llm)


def test_sixteen_at_once_have_the_acceptance_of_one_by_one(drafts: Mapping[str, str]) -> None:
    llm = make_llm(SCHEMES["mtp"](drafts))
    wanted = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=16) for i in range(16)]
    alone = one_by_one(llm, PROMPTS[:16], wanted)
    together = llm.generate(PROMPTS[:16], wanted)
    assert_same(together, alone)
    assert [a.stats.speculation for a in together] == [b.stats.speculation for b in alone]
    assert sum(output.stats.speculation.num_accepted for output in alone) > 0
