"""Offline evaluation of heads: the same hits that the engine accepts, whatever the batch."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import BACKENDS, ISAS, TINY_VOCAB_SIZE, Backend, write_tiny_checkpoint
from pilotfish import LLM, SamplingParams
from pilotfish.cli.app import run
from pilotfish.config import Eagle, EngineConfig, Mtp
from pilotfish.errors import ConfigError
from pilotfish.models import build_model, expected_tensors
from pilotfish.models.checkpoint import load_weights, resolve_model
from pilotfish.models.heads import HeadConfig, head_tensors, load_head, save_head, target_stamp
from pilotfish.runner import HeadRunner
from pilotfish.training.capture import Capture, CaptureOptions
from pilotfish.training.evaluate import (
    OVERALL,
    Accuracy,
    SampleHits,
    evaluate_capture,
    evaluation_runner,
    sample_hits,
)
from pilotfish.training.store import CaptureReader, CaptureWriter, Manifest, Sample

NUM_TOKENS, NUM_PROMPTS, AUX = 25, 8, (1, 2, 3)
BACKEND = BACKENDS[-1]
SETTINGS = {"backend": BACKEND, "threads": 1, "kv_cache_memory": 2 << 20, "max_num_seqs": 4, "max_model_len": 96}
LIMITS = {"max_seqs": 3, "max_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_tiny_checkpoint("llama3", tmp_path_factory.mktemp("target"))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(TINY_VOCAB_SIZE)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def capture_folder(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny model, with aux states."""
    root = tmp_path_factory.mktemp("capture")
    lines = [
        {"text": " ".join(f"t{(7 * i + 3 * j) % 150 + 2}" for j in range(5 + 4 * i)), "source": f"s{i % 2}"}
        for i in range(NUM_PROMPTS)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = CaptureOptions(max_tokens=NUM_TOKENS, aux_layers=AUX)
    config = EngineConfig(**SETTINGS, max_num_batched_tokens=64, speculation=None)  # type: ignore[arg-type]
    for _ in Capture(folder, root / "prompts.jsonl", root / "out", options, config).run():
        pass
    return root / "out"


@pytest.fixture(scope="module")
def reader(capture_folder: Path) -> CaptureReader:
    return CaptureReader([capture_folder])


CASES: Mapping[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp"},
    "mtp-without-row-0": {"kind": "mtp", "first_row": False},
    "mtp-chain-2": {"kind": "mtp", "num_modules": 2},
    "mtp-chain-3": {"kind": "mtp", "num_modules": 3},
    "eagle": {"kind": "eagle", "first_row": False},
    "eagle3-one-state": {"kind": "eagle3", "recycles": "pre_norm"},
    "eagle3": {"kind": "eagle3", "aux_layers": AUX, "first_row": False},
}


def make_head(where: Path, target: str, reader: CaptureReader, changes: Mapping[str, Any]) -> Path:
    """A random head that drafts the few tokens that the answers use most, so that it is right every now and then."""
    changes = dict(changes)
    checkpoint = resolve_model(target)
    used = Counter(
        int(token)
        for i in range(len(reader))
        for token, learnt in zip(reader.token_ids(i), reader.loss_mask(i), strict=True)
        if learnt
    )
    ids = sorted(token for token, _ in used.most_common(5))
    config = HeadConfig(
        shape=replace(checkpoint.config, num_layers=changes.pop("num_modules", 1)),
        target_hidden_size=checkpoint.config.hidden_size,
        draft_vocab_size=len(ids),
        target=target_stamp(checkpoint),
        **changes,
    )
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in head_tensors(config).items()
    }
    save_head(where, config, weights, torch.tensor(ids))
    return where


def head_runner(head: Path, target: str, *, backend: str = BACKEND, max_seqs: int, max_tokens: int) -> HeadRunner:
    checkpoint = resolve_model(target)
    ops = Backend(backend, torch.bfloat16, num_threads=1).ops
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), ops)
    loaded = load_head(head, checkpoint=checkpoint, model=model, ops=ops)
    return evaluation_runner(loaded, ops, max_seqs=max_seqs, max_tokens=max_tokens, max_len=112)


def engine_counts(hits: SampleHits, num_prompt: int, num_drafts: int) -> tuple[list[int], list[int]]:
    """How often the engine drafts and accepts at each position: it visits a row, and goes on behind what it accepts."""
    drafted, accepted = [0] * num_drafts, [0] * num_drafts
    rows = {int(position): i for i, position in enumerate(hits.positions)}
    position, last = num_prompt, int(hits.positions[-1])
    while position <= last:
        # A draft is never the last of max_tokens, for the target's own token comes behind all drafts.
        limit = min(num_drafts, NUM_TOKENS - (position + 1 - num_prompt) - 1)
        known = min(limit, last + 1 - position)  # behind an end of sequence nothing is
        right = int(np.logical_and.accumulate(hits.hits[rows[position], :known]).sum())
        ended = position + right == last + 1  # by a draft: those behind it do not count
        for k in range(right if ended else limit):
            drafted[k] += 1
            accepted[k] += k < right
        position += right + 1
    return drafted, accepted


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_offline_hits_are_what_the_engine_accepts(
    case: str, num_drafts: int, folder: str, reader: CaptureReader, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES[case])
    runner = head_runner(head, folder, **LIMITS)
    found = {h.index: h for h in sample_hits(runner, reader, range(len(reader)), num_drafts, **LIMITS)}
    scheme = Mtp if CASES[case]["kind"] == "mtp" else Eagle
    alone = scheme(head=str(head), num_drafts=num_drafts, p_min=0.0, lookup=0)
    llm = LLM(folder, **SETTINGS, speculation=alone)  # type: ignore[arg-type]
    total = Counter[str]()
    for index in range(len(reader)):
        prompt = [int(t) for t in reader.token_ids(index)[reader.loss_mask(index) == 0]]
        output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))[0]
        assert [*prompt, *output.outputs[0].token_ids] == reader.token_ids(index).tolist()
        drafted, accepted = engine_counts(found[index], len(prompt), num_drafts)
        stats = output.stats.speculation
        assert (list(stats.drafted_at), list(stats.accepted_at)) == (drafted, accepted)
        total.update(drafted=sum(drafted), accepted=sum(accepted))
    assert 0 < total["accepted"] < total["drafted"]  # or nothing was shown


@pytest.mark.parametrize("case", ["mtp-chain-2", "eagle3"])
def test_batch_and_chunks_do_not_change_the_hits(case: str, folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES[case])
    results = []
    for limits in ({"max_seqs": 1, "max_tokens": 1}, {"max_seqs": 8, "max_tokens": 8}, LIMITS):
        runner = head_runner(head, folder, **limits)
        hits = sorted(sample_hits(runner, reader, range(len(reader)), 3, **limits), key=lambda h: h.index)
        results.append([(h.positions.tolist(), h.known.tolist(), h.hits.tolist()) for h in hits])
    assert results[0] == results[1] == results[2] and len(results[0]) == NUM_PROMPTS


@pytest.mark.skipif(not ISAS, reason="no native kernels here")
def test_the_reference_backend_agrees(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES["mtp-chain-2"])
    counts = []
    for backend in ("torch", "native"):
        runner = head_runner(head, folder, backend=backend, **LIMITS)
        counts.append(evaluate_capture(runner, reader, range(len(reader)), 3, **LIMITS)[OVERALL])
    assert counts[0].num_rows.tolist() == counts[1].num_rows.tolist()
    assert np.abs(counts[0].hits - counts[1].hits).max() <= 2  # bfloat16 rounds in another order


def test_sources_add_up(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES["mtp"])
    results = evaluate_capture(head_runner(head, folder, **LIMITS), reader, range(len(reader)), 2, **LIMITS)
    assert next(iter(results)) == OVERALL and set(results) == {OVERALL, "s0", "s1"}
    for name in ("num_rows", "hits", "joint"):
        parts = getattr(results["s0"], name) + getattr(results["s1"], name)
        assert getattr(results[OVERALL], name).tolist() == parts.tolist()
    # Every answer token but those that a chain would run past is predicted at step 1.
    assert results[OVERALL].num_rows[0] == reader.num_supervised.sum()
    assert results[OVERALL].num_rows[1] == reader.num_supervised.sum() - len(reader)


def test_only_some_samples(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES["mtp"])
    hits = list(sample_hits(head_runner(head, folder, **LIMITS), reader, [5, 2], 2, **LIMITS))
    assert sorted(h.index for h in hits) == [2, 5]


def save_capture(folder: Path, samples: list[Sample], **fields: Any) -> CaptureReader:
    empty: dict[str, Any] = {"target": {}, "dtype": "bfloat16", "aux_layers": (), "sampling": {}, "data": {}}
    folder.mkdir()
    writer = CaptureWriter(folder, Manifest(**{**empty, **fields}))
    for sample in samples:
        writer.add(sample)
    writer.close(complete=True)
    return CaptureReader([folder])


def sample(mask: list[int], tokens: NDArray[np.int32] | None = None) -> Sample:
    rng = np.random.default_rng(len(mask))
    ids = rng.integers(0, TINY_VOCAB_SIZE, len(mask)).astype(np.int32) if tokens is None else tokens
    hidden = torch.from_numpy(rng.standard_normal((len(mask), 48), dtype=np.float32)).to(torch.bfloat16)
    return Sample(ids, np.array(mask, np.uint8), hidden, None, 0, "")


def test_rows_are_those_whose_next_token_is_to_be_learnt(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    masks = [[0, 0, 1, 1, 1, 0, 0, 1], [1, 1, 0], [0, 0, 0], [0, 1]]
    other = save_capture(tmp_path / "capture", [sample(mask) for mask in masks])
    head = make_head(tmp_path / "head", folder, reader, CASES["mtp"])
    hits = {h.index: h for h in sample_hits(head_runner(head, folder, **LIMITS), other, range(4), 3, **LIMITS)}
    assert {i: h.positions.tolist() for i, h in hits.items()} == {0: [1, 2, 3, 6], 1: [0], 3: [0]}
    assert hits[0].known.astype(int).tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert not (hits[0].hits & ~hits[0].known).any()
    without = make_head(tmp_path / "without", folder, reader, CASES["mtp-without-row-0"])
    hits = {h.index: h for h in sample_hits(head_runner(without, folder, **LIMITS), other, range(4), 3, **LIMITS)}
    assert {i: h.positions.tolist() for i, h in hits.items()} == {0: [1, 2, 3, 6]}


def test_accuracy_counts_hits_and_chains() -> None:
    accuracy = Accuracy.zeros(2)
    known = np.array([[1, 1], [1, 1], [1, 1], [1, 0]], bool)
    hits = np.array([[1, 1], [0, 1], [1, 0], [1, 0]], bool)
    accuracy.add(SampleHits(0, np.arange(4), known, hits))
    assert accuracy.by_step == [3 / 4, 2 / 3]
    assert accuracy.accepted_by_step == [3 / 4, 1 / 3]
    assert accuracy.accepted_length == pytest.approx(1 + 3 / 4 + 1 / 3)
    assert accuracy.as_dict()["num_rows"] == [4, 3]
    assert Accuracy.zeros(2).accepted_length == 1.0


def test_states_that_the_capture_lacks_are_named(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    runner = head_runner(make_head(tmp_path / "head", folder, reader, CASES["eagle3"]), folder, **LIMITS)
    other = save_capture(tmp_path / "capture", [sample([0, 1])])
    with pytest.raises(ConfigError, match=r"aux_layers=\[1, 2, 3\].*--aux-layers 1,2,3"):
        evaluate_capture(runner, other, [0], 1, **LIMITS)


def test_a_sample_without_room_is_an_error(folder: str, reader: CaptureReader, tmp_path: Path) -> None:
    runner = head_runner(make_head(tmp_path / "head", folder, reader, CASES["mtp"]), folder, max_seqs=1, max_tokens=8)
    other = save_capture(tmp_path / "capture", [sample([0] * 120 + [1])])
    with pytest.raises(ConfigError, match="needs KV for 120 tokens; the pool has 112"):
        evaluate_capture(runner, other, [0], 1, max_seqs=1, max_tokens=8)
    with pytest.raises(ConfigError, match="num_steps=0"):
        evaluate_capture(runner, other, [0], 0, max_seqs=1, max_tokens=8)


def test_the_stamp_of_the_capture_is_that_of_the_head(folder: str, reader: CaptureReader) -> None:
    assert reader.manifests[0].target == asdict(target_stamp(resolve_model(folder)))


def cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(["evaluate", *args, "--threads", "1", "--max-num-seqs", "3"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_on_a_capture(
    folder: str, reader: CaptureReader, capture_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES["eagle3"])
    args = (folder, "--head", str(head), "--data", str(capture_folder), "--num-drafts", "2")
    code, out, _ = cli(capsys, *args, "--json")
    figures = json.loads(out)
    assert code == 0 and figures["num_samples"] == NUM_PROMPTS
    expected = evaluate_capture(head_runner(head, folder, **LIMITS), reader, range(len(reader)), 2, **LIMITS)
    assert figures["sources"] == {source: accuracy.as_dict() for source, accuracy in expected.items()}
    code, out, _ = cli(capsys, *args, "--limit", "3")
    assert code == 0 and "overall" in out and "s0" in out


def test_the_command_on_prompts(
    folder: str, reader: CaptureReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_head(tmp_path / "head", folder, reader, CASES["mtp"])
    questions = [
        {"question_id": i, "category": ("a", "b")[i % 2], "turns": [f"t{i + 3} t{2 * i + 40}"]} for i in range(5)
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    args = (folder, "--head", str(head), "--data", str(data), "--max-tokens", "9", "--num-drafts", "2")
    code, out, _ = cli(capsys, *args, "--json")
    categories = json.loads(out)["categories"]
    assert code == 0 and {name: c["num_requests"] for name, c in categories.items()} == {"overall": 5, "a": 3, "b": 2}
    assert all(c["mean_accepted_length"] >= 1.0 and c["tokens_per_step"] >= 1.0 for c in categories.values())
    code, out, _ = cli(capsys, *args)
    assert code == 0 and "mean length" in out


def test_prompts_of_every_form_are_answered(
    folder: str, reader: CaptureReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} t9 {% endfor %}"
    chat = shutil.copytree(folder, tmp_path / "chat")
    tokenizer.save_pretrained(chat)
    head = make_head(tmp_path / "head", str(chat), reader, CASES["mtp"])
    asked, answer = {"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": "t7"}
    lines = [
        {"messages": [asked], "source": "chat"},
        {"messages": [asked, answer], "category": "chat"},
        {"turns": ["t5 t6", "t8"], "category": "chat"},
        {"text": "t5 t6 t9"},
    ]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = (str(chat), "--head", str(head), "--data", str(data), "--max-tokens", "9", "--num-drafts", "2", "--json")
    code, out, _ = cli(capsys, *args)
    categories = json.loads(out)["categories"]
    assert code == 0 and {name: c["num_requests"] for name, c in categories.items()} == {
        "overall": 4, "chat": 3, "prompts": 1,
    }  # fmt: skip
    # All of them are the same tokens.
    assert categories["chat"]["num_tokens"] == 3 * categories["prompts"]["num_tokens"]
    assert categories["chat"]["tokens_per_step"] == categories["prompts"]["tokens_per_step"]
    code, out, _ = cli(capsys, *args, "--limit", "2")
    assert {name: c["num_requests"] for name, c in json.loads(out)["categories"].items()} == {
        "overall": 2, "chat": 1, "prompts": 1,
    }  # fmt: skip
    for line, message in (("{}", "has none of messages, turns, text and prompt"), ('{"messages": [3]}', "a list of")):
        data.write_text(line)
        code, _, err = cli(capsys, *args)
        assert code == 2 and f"{data}:1: " in err and message in err


def test_what_the_command_refuses(
    folder: str, reader: CaptureReader, capture_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = str(make_head(tmp_path / "head", folder, reader, CASES["mtp"]))
    code, _, err = cli(capsys, folder, "--data", str(capture_folder))
    assert code == 2 and "has no head of its own; name one with --head" in err
    code, _, err = cli(capsys, folder, "--head", head, "--data", str(capture_folder), "--limit", "0")
    assert code == 2 and "limit=0" in err
    code, _, err = cli(capsys, folder, "--head", head, "--data", str(capture_folder), "--num-drafts", "0")
    assert code == 2 and "num_drafts=0" in err
    code, _, err = cli(capsys, folder, "--head", head, "--data", str(tmp_path / "nothing.jsonl"))
    assert code == 2 and "cannot be read" in err
    other = save_capture(tmp_path / "capture", [sample([0, 0, 1])], target={"name": "x", "num_layers": 64})
    assert len(other) == 1
    code, _, err = cli(capsys, folder, "--head", head, "--data", str(tmp_path / "capture"))
    assert code == 2 and "num_layers=64" in err
