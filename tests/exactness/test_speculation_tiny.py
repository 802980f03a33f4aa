"""Speculation changes nothing but time: every scheme, K and sampling parameter on tiny random models."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import TINY_MODELS, TINY_VOCAB_SIZE, write_tiny_checkpoint
from helpers_heads import fitted_weights, head_config, random_weights, write_head, write_texts
from pilotfish import LLM, RequestOutput, SamplingParams
from pilotfish.config import DraftModel, Eagle, Mtp, Ngram, Speculation
from pilotfish.models.heads import HeadKind
from speculation_matrix import assert_all_pages_free, assert_same, one_by_one, parameters

KS = [1, 2, 5, 8]
SETTINGS = {"dtype": "float32", "backend": "native", "threads": 1, "kv_cache_memory": 4 << 20, "seed": 0}
PARAMS = parameters(num_tokens=14, up=9, down=20)
# Prompts that repeat themselves, so that n-grams find something.
PROMPTS = [[i % 150 + 2, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6] * (1 + i % 3) for i in range(len(PARAMS))]
OTHERS = [[i + 3, *range(40, 40 + 7 * i)] for i in range(6)]
OTHER_PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=3 * i + 1) for i in range(len(OTHERS))]

HEADS: Mapping[str, tuple[HeadKind, int]] = {
    "mtp": ("mtp", 1), "chain": ("mtp", 3), "eagle": ("eagle", 1), "eagle3": ("eagle3", 1),
}  # fmt: skip
"""Kind and number of modules."""

Models = Mapping[str, str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints with a tokenizer, by kind; ``other`` has other weights than ``llama3``. Heads for them, by name."""
    root = tmp_path_factory.mktemp("speculation")
    vocabulary = models.WordLevel({f"t{i}": i for i in range(TINY_VOCAB_SIZE)}, unk_token="t2")
    words = Tokenizer(vocabulary)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1")
    folders = {kind: write_tiny_checkpoint(kind, root / kind) for kind in TINY_MODELS}
    folders["other"] = write_tiny_checkpoint("llama3", root / "other", seed=1)
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    for kind in TINY_MODELS:
        target = str(folders[kind])
        texts = write_texts(target, PROMPTS, 20)
        for name, (head, num_modules) in HEADS.items():
            if kind != "llama3" and num_modules > 1:
                continue
            config = head_config(target, head, num_modules=num_modules, num_tokens=150)
            fits = head != "eagle3"
            weights = fitted_weights(config, target, texts) if fits else random_weights(config)
            write_head(root / f"{name} of {kind}", config, weights)
            folders[f"{name} of {kind}"] = root / f"{name} of {kind}"
    config = head_config(str(folders["llama3"]), "mtp")
    folders["random head"] = Path(write_head(root / "random head", config, random_weights(config)))
    return {kind: str(folder) for kind, folder in folders.items()}


def make_llm(folder: str, speculation: Speculation | None = None, **settings: object) -> LLM:
    return LLM(folder, speculation=speculation, **{**SETTINGS, **settings})  # type: ignore[arg-type]


SCHEMES: Mapping[str, Callable[[Models, int, str], Speculation]] = {
    "ngram": lambda tiny, k, kind: Ngram(num_drafts=k, min_ngram=1),
    "layers": lambda tiny, k, kind: DraftModel(num_drafts=k, layers=2),
    "other": lambda tiny, k, kind: DraftModel(num_drafts=k, model=tiny["other"]),
    "itself": lambda tiny, k, kind: DraftModel(num_drafts=k, model=tiny[kind]),
    "random head": lambda tiny, k, kind: Mtp(num_drafts=k, head=tiny["random head"], lookup=0, p_min=0.0),
    "mtp": lambda tiny, k, kind: Mtp(num_drafts=k, head=tiny[f"mtp of {kind}"], lookup=0, p_min=0.0),
    "mtp, lookup": lambda tiny, k, kind: Mtp(num_drafts=k, head=tiny[f"mtp of {kind}"], lookup=2, p_min=0.3),
    "chain": lambda tiny, k, kind: Mtp(num_drafts=k, head=tiny[f"chain of {kind}"], lookup=0, p_min=0.0),
    "eagle": lambda tiny, k, kind: Eagle(num_drafts=k, head=tiny[f"eagle of {kind}"], lookup=0, p_min=0.0),
    "eagle3": lambda tiny, k, kind: Eagle(num_drafts=k, head=tiny[f"eagle3 of {kind}"], lookup=0, p_min=0.0),
}
GUESSING = ["other", "random head", "eagle3"]
"""Those that know nothing of the target."""


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
    elif scheme not in GUESSING:
        assert 0 < stats.num_accepted < stats.num_drafted, "both accepting and rejecting is put to the test"


@pytest.mark.parametrize("kind", [kind for kind in TINY_MODELS if kind != "llama3"])
@pytest.mark.parametrize("scheme", ["layers", "itself", "mtp", "eagle", "eagle3"])
def test_every_kind_of_model(tiny: Models, plain: Callable[[str], list[RequestOutput]], kind: str, scheme: str) -> None:
    stats = check(tiny, plain(kind), kind, scheme, 5).engine.stats.speculation
    assert stats.num_drafted > 100
    assert stats.num_accepted > 0 or scheme in GUESSING
    assert (stats.num_accepted == stats.num_drafted) == (scheme == "itself")


PAGE_BYTES = 2 * 2 * 12 * 16 * 4  # keys and values, of two heads of 12, of 16 tokens in float32: of one layer
KV_LAYERS = {"ngram": 0, "layers": 2, "other": 3, "itself": 3, "chain": 3}
KV_MEMORY = {scheme: 12 * (3 + KV_LAYERS.get(scheme, 1)) * PAGE_BYTES for scheme in SCHEMES}


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
        Mtp(num_drafts=5, head=tiny["mtp of llama3"], verify="rejection", lookup=0, p_min=0.0),
        Mtp(num_drafts=5, head=tiny["mtp of llama3"], verify="rejection", lookup=1, p_min=0.3),
        Eagle(num_drafts=5, head=tiny["eagle3 of llama3"], verify="rejection", lookup=0, p_min=0.0),
    ):
        llm = make_llm(tiny["llama3"], speculation)
        got = llm.generate([PROMPTS[i] for i in greedy], [PARAMS[i] for i in greedy])
        assert_same(got, [plain("llama3")[i] for i in greedy])


@pytest.mark.parametrize("scheme", ["ngram", "layers", "itself", "mtp", "mtp, lookup", "chain", "eagle", "eagle3"])
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


@pytest.mark.parametrize("scheme", ["mtp", "mtp, lookup", "chain", "eagle", "eagle3"])
def test_sixteen_at_once_have_the_acceptance_of_one_by_one(tiny: Models, scheme: str) -> None:
    llm = make_llm(tiny["llama3"], SCHEMES[scheme](tiny, 4, "llama3"))
    wanted = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=20) for i in range(16)]
    alone = one_by_one(llm, PROMPTS[:16], wanted)
    together = llm.generate(PROMPTS[:16], wanted)
    assert_same(together, alone)
    assert [a.stats.speculation for a in together] == [b.stats.speculation for b in alone]
    assert sum(output.stats.speculation.num_accepted for output in alone) > 0


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("num_modules", [1, 3])
def test_an_oracle_head_is_always_accepted(tiny: Models, backend: str, num_modules: int, tmp_path: Path) -> None:
    """A target whose layers do nothing chooses by the last token alone, and so does a head that copies its norm."""
    target = tmp_path / "target"
    shutil.copytree(tiny["llama3"], target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = head_config(str(target), "mtp", num_modules=num_modules)
    weights = random_weights(config)
    hidden_size = config.shape.hidden_size
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("enorm.weight"):
            weight.fill_(1.0)
        elif name.endswith(".eh_proj.weight"):
            weight.copy_(torch.cat([torch.eye(hidden_size), torch.zeros(hidden_size, hidden_size)], dim=1))
        elif name.count(".") == 3 and name.endswith(".norm.weight"):
            weight.copy_(tensors["model.norm.weight"])
    head = write_head(tmp_path / "head", config, weights)
    llm = make_llm(str(target), Mtp(num_drafts=5, head=head, lookup=0, p_min=0.0), backend=backend)
    for temperature in (0.0, 1.0):
        wanted = SamplingParams(temperature=temperature, seed=1, max_tokens=25, ignore_eos=True)
        for output in llm.generate(PROMPTS[:6], wanted):
            stats = output.stats.speculation
            assert stats.num_accepted == stats.num_drafted == 20 and output.stats.num_steps == 5
    assert_all_pages_free(llm)
