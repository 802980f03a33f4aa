"""Speculation changes nothing but time: every scheme, K and sampling parameter on tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import TINY_MODELS, TINY_VOCAB_SIZE, write_tiny_checkpoint
from pilotfish import LLM, RequestOutput, SamplingParams
from pilotfish.config import DraftModel, Ngram, Speculation
from speculation_matrix import assert_all_pages_free, assert_same, one_by_one, parameters

KS = [1, 2, 5, 8]
SETTINGS = {"dtype": "float32", "backend": "native", "threads": 1, "kv_cache_memory": 4 << 20, "seed": 0}
PARAMS = parameters(num_tokens=14, up=9, down=20)
# Prompts that repeat themselves, so that n-grams find something.
PROMPTS = [[i % 150 + 2, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6] * (1 + i % 3) for i in range(len(PARAMS))]
OTHERS = [[i + 3, *range(40, 40 + 7 * i)] for i in range(6)]
OTHER_PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=3 * i + 1) for i in range(len(OTHERS))]

Models = Mapping[str, str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints with a tokenizer, by kind; ``other`` has other weights than ``llama3``."""
    root = tmp_path_factory.mktemp("speculation")
    vocabulary = models.WordLevel({f"t{i}": i for i in range(TINY_VOCAB_SIZE)}, unk_token="t2")
    words = Tokenizer(vocabulary)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1")
    folders = {kind: write_tiny_checkpoint(kind, root / kind) for kind in TINY_MODELS}
    folders["other"] = write_tiny_checkpoint("llama3", root / "other", seed=1)
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    return {kind: str(folder) for kind, folder in folders.items()}


def make_llm(folder: str, speculation: Speculation | None = None, **settings: object) -> LLM:
    return LLM(folder, speculation=speculation, **{**SETTINGS, **settings})  # type: ignore[arg-type]


SCHEMES: Mapping[str, Callable[[Models, int, str], Speculation]] = {
    "ngram": lambda tiny, k, kind: Ngram(num_drafts=k, min_ngram=1),
    "layers": lambda tiny, k, kind: DraftModel(num_drafts=k, layers=2),
    "other": lambda tiny, k, kind: DraftModel(num_drafts=k, model=tiny["other"]),
    "itself": lambda tiny, k, kind: DraftModel(num_drafts=k, model=tiny[kind]),
}


@pytest.fixture(scope="module")
def plain(tiny: Models) -> Callable[[str], list[RequestOutput]]:
    """Plain decoding one by one, then of the unrelated requests; once a kind of model."""
    known: dict[str, list[RequestOutput]] = {}

    def get(kind: str) -> list[RequestOutput]:
        if kind not in known:
            llm = make_llm(tiny[kind])
            known[kind] = one_by_one(llm, [*PROMPTS, *OTHERS], [*PARAMS, *OTHER_PARAMS])
        return known[kind]

    return get


def check(tiny: Models, want: list[RequestOutput], kind: str, scheme: str, k: int) -> LLM:
    llm = make_llm(tiny[kind], SCHEMES[scheme](tiny, k, kind))
    batched = llm.generate([*PROMPTS, *OTHERS], [*PARAMS, *OTHER_PARAMS])
    assert_same(batched, want)
    assert_same(one_by_one(llm, PROMPTS[k % 5 :: 5], PARAMS[k % 5 :: 5]), want[: len(PARAMS)][k % 5 :: 5])
    assert_all_pages_free(llm)
    return llm


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_alone_and_in_a_batch(
    tiny: Models, plain: Callable[[str], list[RequestOutput]], scheme: str, k: int
) -> None:
    stats = check(tiny, plain("llama3"), "llama3", scheme, k).engine.stats.speculation
    assert stats.num_drafted > 50 and len(stats.drafted_at) == k
    if scheme == "itself":
        assert stats.num_accepted == stats.num_drafted
    elif scheme != "other":
        assert 0 < stats.num_accepted < stats.num_drafted, "both accepting and rejecting is put to the test"


@pytest.mark.parametrize("kind", [kind for kind in TINY_MODELS if kind != "llama3"])
@pytest.mark.parametrize("scheme", ["layers", "itself"])
def test_every_kind_of_model(tiny: Models, plain: Callable[[str], list[RequestOutput]], kind: str, scheme: str) -> None:
    stats = check(tiny, plain(kind), kind, scheme, 5).engine.stats.speculation
    assert stats.num_drafted > 100
    assert (stats.num_accepted == stats.num_drafted) == (scheme == "itself")


PAGE_BYTES = 2 * 2 * 12 * 16 * 4  # keys and values, of two heads of 12, of 16 tokens in float32: of one layer
KV_MEMORY = {scheme: 12 * layers * PAGE_BYTES for scheme, layers in zip(SCHEMES, (3, 3 + 2, 3 + 3, 3 + 3), strict=True)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_pool_that_is_too_small(tiny: Models, plain: Callable[[str], list[RequestOutput]], scheme: str) -> None:
    small = {"max_model_len": 96, "kv_cache_memory": KV_MEMORY[scheme], "max_num_batched_tokens": 80}
    llm = make_llm(tiny["llama3"], SCHEMES[scheme](tiny, 5, "llama3"), **small)
    got = llm.generate([*PROMPTS, *OTHERS], [*PARAMS, *OTHER_PARAMS])
    assert llm.engine.stats.num_preemptions > 0, llm.engine.pool.num_pages
    assert_same(got, plain("llama3"))
    assert_all_pages_free(llm)


def test_rejection_at_temperature_0_is_plain(tiny: Models, plain: Callable[[str], list[RequestOutput]]) -> None:
    greedy = [i for i, p in enumerate(PARAMS) if p.temperature == 0.0]
    for speculation in (
        Ngram(num_drafts=5, min_ngram=1, verify="rejection"),
        DraftModel(num_drafts=5, layers=2, verify="rejection"),
    ):
        llm = make_llm(tiny["llama3"], speculation)
        got = llm.generate([PROMPTS[i] for i in greedy], [PARAMS[i] for i in greedy])
        assert_same(got, [plain("llama3")[i] for i in greedy])


@pytest.mark.parametrize("scheme", ["ngram", "layers", "itself"])
def test_a_second_identical_request_has_the_same_acceptance(tiny: Models, scheme: str) -> None:
    llm = make_llm(tiny["llama3"], SCHEMES[scheme](tiny, 4, "llama3"))
    for temperature in (0.0, 1.0):
        for length in (15, 16, 17, 33, 48):
            prompt = [length, *([5, 6, 7] * length)[: length - 1]]
            wanted = SamplingParams(temperature=temperature, seed=2, max_tokens=40, ignore_eos=True)
            first, second = (llm.generate([prompt], [wanted])[0] for _ in range(2))
            assert second.stats.num_cached_tokens == (length - 1) // 16 * 16
            assert_same([second], [first])
            assert first.stats.speculation == second.stats.speculation
            assert first.stats.speculation.num_drafted > 0
