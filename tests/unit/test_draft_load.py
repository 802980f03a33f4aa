"""Which models may draft for a target: the same tokens by id, whatever the padding of either vocabulary."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers import TINY_VOCAB_SIZE
from pilotfish.config import DraftModel, EngineConfig, Speculation
from pilotfish.engine import Engine, load_engine
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.draft_vocab import DRAFT_VOCAB_FILE
from pilotfish.speculation import Proposal
from pilotfish.types import SamplingParams

NUM_TOKENS = 190  # of the tokenizer; rows of an embedding from here on are padding
TOKENS = {f"t{i}": i for i in range(NUM_TOKENS)}
EMBEDDING = "model.embed_tokens.weight"  # tied: also the output head

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)


def write_model(source: Path, folder: Path, *, tokens: Mapping[str, int] = TOKENS, vocab_size: int = NUM_TOKENS) -> str:
    """A copy of a tiny checkpoint with this tokenizer and ``vocab_size`` rows; those that are added are zeros."""
    shutil.copytree(source, folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(dict(tokens), unk_token="t2"))).save_pretrained(
        folder
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    tensors = load_file(folder / "model.safetensors")
    table = torch.zeros(vocab_size, tensors[EMBEDDING].shape[1])
    table[:NUM_TOKENS] = tensors[EMBEDDING][:NUM_TOKENS]
    save_file(tensors | {EMBEDDING: table}, folder / "model.safetensors")
    return str(folder)


def make_padding_likely(folder: str) -> None:
    """Of two opposite rows, one has a large logit, whatever the hidden state."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    padding = tensors[EMBEDDING][NUM_TOKENS:]
    row = 100 * torch.randn(padding.shape[1], generator=torch.Generator().manual_seed(0))
    padding[0::2], padding[1::2] = row, -row
    save_file(tensors, file)


def load(target: str, speculation: Speculation | None) -> Engine:
    config = EngineConfig(
        dtype="float32", backend="torch", threads=1, kv_cache_memory=4 << 20, max_model_len=64, speculation=speculation
    )
    return load_engine(target, config)


def serve(engine: Engine, params: Sequence[SamplingParams]) -> list[list[int]]:
    """The tokens of one request for each of ``params``, all at once."""
    outputs: dict[str, Any] = {}
    for i, own in enumerate(params):
        engine.add_request(str(i), [3, 1, 4, 1, 5], own)
    while engine.has_unfinished:
        outputs.update((output.request_id, output) for output in engine.step())
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(params))]


def watch(engine: Engine) -> list[Proposal]:
    """What the engine's proposer proposes from now on."""
    proposals: list[Proposal] = []
    propose = engine.proposer.propose

    def watched(rows: Any) -> Proposal:
        proposals.append(propose(rows))
        return proposals[-1]

    engine.proposer.propose = watched  # type: ignore[method-assign]
    return proposals


@pytest.fixture
def source(tiny_checkpoints: Mapping[str, Path]) -> Path:
    return tiny_checkpoints["llama3"]


@pytest.fixture
def target(source: Path, tmp_path: Path) -> str:
    return write_model(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({**{t: i for t, i in TOKENS.items() if i != 7}, "other": 7}, "token 7 is 'other' in the draft's and 't7' in"),
        (TOKENS | {"t7": 100, "t100": 7}, "token 7 is 't100' in the draft's and 't7' in the target's"),
        ({t: i for t, i in TOKENS.items() if i < NUM_TOKENS - 1}, "token 189 is missing in the draft's and"),
        (TOKENS | {"more": NUM_TOKENS}, "token 190 is 'more' in the draft's and missing in the target's"),
        ({t: i for t, i in TOKENS.items() if i not in (7, 9)}, "token 7 is missing in the draft's and 't7' in"),
    ],
    ids=["another", "swapped", "one less", "one more", "a gap"],
)
def test_a_draft_with_other_tokens_is_refused_and_the_first_is_named(
    source: Path, target: str, tmp_path: Path, tokens: Mapping[str, int], message: str
) -> None:
    draft = write_model(source, tmp_path / "draft", tokens=tokens, vocab_size=TINY_VOCAB_SIZE)
    with pytest.raises(ConfigError, match=rf"draft {re.escape(draft)} has another vocabulary .*: {re.escape(message)}"):
        load(target, DraftModel(model=draft))


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("target_rows", "draft_rows"), [(190, 190), (190, 196), (196, 190), (194, 199), (199, 194), (196, 196)]
)
def test_padding_of_either_vocabulary_is_never_proposed(
    source: Path, tmp_path: Path, target_rows: int, draft_rows: int, verify: Any
) -> None:
    target = write_model(source, tmp_path / "target", vocab_size=target_rows)
    draft = write_model(source, tmp_path / "draft", vocab_size=draft_rows)
    if draft_rows > NUM_TOKENS:
        make_padding_likely(draft)
        written = serve(load(draft, None), [GREEDY, SAMPLED])
        assert all(token >= NUM_TOKENS for tokens in written for token in tokens), "the draft's choice, were it free"
    engine = load(target, DraftModel(model=draft, verify=verify))
    proposals = watch(engine)
    (greedy,) = serve(engine, [GREEDY])
    assert [greedy] == serve(load(target, None), [GREEDY])
    counts = engine.stats.speculation.num_accepted, engine.stats.speculation.num_drafted
    serve(engine, [SAMPLED, GREEDY])
    drafts = [token for proposal in proposals for tokens in proposal.tokens for token in tokens]
    assert drafts and max(drafts) < NUM_TOKENS
    assert counts[0] == counts[1] > 0, "the draft is the target but for its padding"
    distributions = [q for proposal in proposals for q in proposal.probs if q is not None]
    assert bool(distributions) == (verify == "rejection")
    for q in distributions:
        assert q.shape[1] == target_rows and not q[:, NUM_TOKENS:].any()


@pytest.mark.parametrize("layers", [3, 4, 99])
def test_first_layers_must_be_fewer_than_the_target_has(target: str, layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"layers={layers}: the target has 3 layers"):
        load(target, DraftModel(layers=layers))


def test_any_smaller_number_of_first_layers_drafts(target: str) -> None:
    for layers in (1, 2):
        engine = load(target, DraftModel(layers=layers))
        serve(engine, [GREEDY])
        assert engine.stats.speculation.num_drafted > 0


def test_a_draft_with_a_vocabulary_proposes_nothing_else(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    """The target itself drafts, over every third token: those it is right about, of the others it knows nothing."""
    target = write_model(tiny_checkpoints["llama3"], tmp_path / "target")
    draft = write_model(tiny_checkpoints["llama3"], tmp_path / "draft")
    ids = list(range(0, NUM_TOKENS, 3))
    (Path(draft) / DRAFT_VOCAB_FILE).write_text(json.dumps(ids))
    for wanted in (GREEDY, SAMPLED):
        plain = load(target, None)
        engine = load(target, DraftModel(model=draft, num_drafts=3))
        proposals: list[int] = []
        propose = engine.proposer.propose

        def watched(rows: Any, propose: Any = propose, proposals: list[int] = proposals) -> Proposal:
            proposal: Proposal = propose(rows)
            proposals.extend(token for tokens in proposal.tokens for token in tokens)
            return proposal

        engine.proposer.propose = watched  # type: ignore[method-assign]
        for served in (plain, engine):
            served.add_request("a", [1, 2, 3], wanted)
        texts = []
        for served in (plain, engine):
            while served.has_unfinished:
                [output] = served.step()
            texts.append(output.outputs[0].token_ids)
        assert texts[0] == texts[1]
        assert proposals and all(token % 3 == 0 for token in proposals)
        accepted = [t for t, d in zip(output.outputs[0].token_ids, output.outputs[0].is_draft, strict=True) if d]
        assert all(token in ids for token in accepted)


@pytest.mark.parametrize("content", ["{}", "[]", "[3, 2]", "[1, 1]", "[-1]", "[190]", "[true]", "nothing"])
def test_a_damaged_draft_vocabulary_names_its_file(
    content: str, tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    target = write_model(tiny_checkpoints["llama3"], tmp_path / "target")
    draft = write_model(tiny_checkpoints["llama3"], tmp_path / "draft")
    (Path(draft) / DRAFT_VOCAB_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=DRAFT_VOCAB_FILE):
        load(target, DraftModel(model=draft))
