"""Whole training runs of tiny heads: they learn, they can be stopped and resumed, and several processes agree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from helpers import BACKENDS, make_batch
from pilotfish import _native
from pilotfish.attention import KVShape
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.cli.app import run
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models import Model, ModelConfig, build_model, expected_tensors
from pilotfish.models.base import AuxStates
from pilotfish.models.checkpoint import Checkpoint, load_weights, resolve_model
from pilotfish.models.draft_vocab import read_draft_vocab
from pilotfish.models.heads import HeadConfig, load_head, target_stamp
from pilotfish.ops.reference import TorchOps
from pilotfish.training import validate
from pilotfish.training.data import split_validation
from pilotfish.training.evaluate import OVERALL, Accuracy, evaluate_capture, evaluation_runner
from pilotfish.training.options import TrainOptions
from pilotfish.training.setup import prepare
from pilotfish.training.state import LOG_FILE, STATE_FILE
from pilotfish.training.store import CaptureReader, CaptureWriter, Manifest, Sample
from pilotfish.training.train import Report, train
from pilotfish.training.validate import choose_samples, engine_ops
from pilotfish.training.vocab import draft_vocabulary

NUM_SAMPLES, PROMPT, ANSWER = 20, 5, 14
AUX_LAYERS = (1, 2)
FLOAT32 = TorchOps(torch.float32)


def _attention(config: ModelConfig, num_pages: int = 1) -> ReferenceAttention:
    shape = KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_q_heads=config.num_q_heads,
        head_dim=config.head_dim,
        page_size=32,
        dtype=torch.float32,
    )
    return ReferenceAttention(shape, num_pages)


def write_capture(folder: Path, checkpoint: Checkpoint) -> None:
    """Greedy answers of the target to random prompts, with its true states."""
    config = checkpoint.config
    model = build_model(config, load_weights(checkpoint, expected_tensors(config)), FLOAT32)
    manifest = Manifest(
        target={"name": "tiny", "hidden_size": config.hidden_size, "num_layers": config.num_layers},
        dtype="float32",
        aux_layers=AUX_LAYERS,
        sampling={"temperature": 0.0},
        data={"file": "none"},
    )
    folder.mkdir()
    writer = CaptureWriter(folder, manifest, shard_tokens=150)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(2, config.vocab_size, (NUM_SAMPLES, PROMPT), generator=generator).tolist()
    attention = _attention(config, NUM_SAMPLES)
    for length in range(PROMPT, PROMPT + ANSWER):
        batch = make_batch(texts, [[page] for page in range(NUM_SAMPLES)], 32)
        aux = AuxStates(AUX_LAYERS)
        hidden = model.forward(batch, attention.plan(batch), aux)
        for tokens, token in zip(texts, model.logits(hidden[length - 1 :: length]).argmax(-1).tolist(), strict=True):
            tokens.append(token)
    # The last token of each sample was never computed: zeros.
    hidden, states = (
        F.pad(x.view(NUM_SAMPLES, length, -1), (0, 0, 0, 1)).bfloat16() for x in (hidden, aux.states(FLOAT32))
    )
    for index, tokens in enumerate(texts):
        writer.add(
            Sample(
                token_ids=np.array(tokens, np.int32),
                loss_mask=np.array([0] * PROMPT + [1] * ANSWER, np.uint8),
                hidden=hidden[index],
                aux=states[index],
                row=index,
                source="random",
            )
        )
    writer.close(complete=True)


@pytest.fixture(scope="module")
def target(tiny_checkpoints: Mapping[str, Path]) -> Path:
    return tiny_checkpoints["llama3"]


@pytest.fixture(scope="module")
def capture(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "capture"
    write_capture(folder, resolve_model(str(target)))
    return folder


class _NoTokenizer:
    special_token_ids = frozenset({0, 1})


@pytest.fixture(autouse=True)
def _tiny_checkpoints_have_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "load_tokenizer", lambda self: _NoTokenizer())


def _options(**changes: Any) -> TrainOptions:
    values = {
        "draft_vocab": 120, "epochs": 4, "batch_tokens": 80, "validation": 0.1, "dtype": "float32", "init": "random",
        **changes,
    }  # fmt: skip
    return TrainOptions(**values)


def _train(target: Path, capture: Path, out: Path, options: TrainOptions, **settings: Any) -> Any:
    return train(resolve_model(str(target)), CaptureReader([capture]), options, out, **settings)


def _log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG_FILE).read_text().splitlines()]


def _engine_accuracy(head: Path, target: Path, capture: Path, indices: Iterable[int], num_steps: int = 5) -> Accuracy:
    """Of a saved head, on the reference backend and one sample at a time."""
    checkpoint = resolve_model(str(target), dtype="float32")
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), FLOAT32)
    loaded = load_head(head, checkpoint=checkpoint, model=model, ops=FLOAT32)
    limits = {"max_seqs": 1, "max_tokens": 8}
    runner = evaluation_runner(loaded, FLOAT32, **limits, max_len=32)
    return evaluate_capture(runner, CaptureReader([capture]), indices, num_steps, **limits)[OVERALL]


@pytest.mark.parametrize(("kind", "modules"), [("mtp", 1), ("mtp", 2), ("eagle", 1), ("eagle3", 1)])
def test_a_head_learns_20_samples_by_heart(
    kind: str, modules: int, target: Path, capture: Path, tmp_path: Path
) -> None:
    options = _options(
        kind=kind, epochs=180, learning_rate=2e-2, weight_decay=0.0, loss="lk", batch_tokens=400, validation=0.0,
        train_lm_head=kind == "eagle3", modules=modules,
    )  # fmt: skip
    result = _train(target, capture, tmp_path, options)
    assert result.complete
    assert result.validation is None
    steps = [entry["accuracy"] for entry in _log(tmp_path)[-2:]]
    assert min(accuracy[0] for accuracy in steps) >= 0.95
    first, *others = _engine_accuracy(tmp_path, target, capture, range(NUM_SAMPLES), options.steps_ahead).by_step
    assert first >= 0.95 and min(others) >= 0.9
    config = HeadConfig.from_json(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert (config.kind, config.num_modules) == (kind, modules)
    assert config.draft_vocab_size == 120
    assert config.aux_layers == (AUX_LAYERS if kind == "eagle3" else ())
    assert config.training["steps"] == result.num_steps
    assert config.training["num_supervised"] == NUM_SAMPLES * ANSWER


def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(target: Path, capture: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _train(target, capture, whole, _options())

    def interrupt(report: Report) -> None:
        if report.step == 9:  # in the middle of the second epoch
            os.kill(os.getpid(), signal.SIGINT)

    stopped = _train(target, capture, cut, _options(), report=interrupt)
    assert not stopped.complete
    assert stopped.step == 10  # the step after the signal is the one that sees it
    resumed = _train(target, capture, cut, _options(), resume=True)
    assert resumed.complete
    for file in ("model.safetensors",):
        ours, theirs = load_file(cut / file), load_file(whole / file)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    losses = [[entry["loss"] for entry in _log(out) if "loss" in entry] for out in (whole, cut)]
    assert losses[0] == losses[1]


def test_a_run_is_resumed_with_its_own_options_only(target: Path, capture: Path, tmp_path: Path) -> None:
    _train(target, capture, tmp_path, _options(max_steps=2))
    with pytest.raises(ConfigError, match=r"learning_rate=0\.001, and learning_rate=0\.5"):
        _train(target, capture, tmp_path, _options(max_steps=2, learning_rate=0.5), resume=True)
    with pytest.raises(ConfigError, match="holds no training"):
        _train(target, capture, tmp_path / "none", _options(), resume=True)


def test_a_head_is_not_written_into_a_capture(target: Path, capture: Path) -> None:
    with pytest.raises(ConfigError, match="holds a capture"):
        _train(target, capture, capture, _options(), overwrite=True)


@pytest.mark.parametrize("left", ["log.jsonl", "training.pt", "model.safetensors"])
def test_what_a_folder_holds_is_replaced_only_if_that_is_said(
    left: str, target: Path, capture: Path, tmp_path: Path
) -> None:
    options = _options(max_steps=2)
    (tmp_path / left).write_text("earlier")
    with pytest.raises(ConfigError, match=rf"holds {left} already: --resume .*--overwrite .*--out"):
        _train(target, capture, tmp_path, options)
    with pytest.raises(ConfigError, match="draft_vocab=500"):  # a later check
        _train(target, capture, tmp_path, _options(draft_vocab=500), overwrite=True)
    assert (tmp_path / left).read_text() == "earlier"
    with pytest.raises(ConfigError, match="resume=True and overwrite=True"):
        _train(target, capture, tmp_path, options, resume=True, overwrite=True)
    assert _train(target, capture, tmp_path, options, overwrite=True).complete
    assert [entry["step"] for entry in _log(tmp_path) if "loss" in entry] == [1, 2]
    assert _train(target, capture, tmp_path, options, resume=True).complete


def test_a_run_that_is_replaced_cannot_be_resumed(target: Path, capture: Path, tmp_path: Path) -> None:
    _train(target, capture, tmp_path, _options(max_steps=2))

    def interrupt(report: Report) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _train(target, capture, tmp_path, _options(max_steps=2), overwrite=True, report=interrupt)
    with pytest.raises(ConfigError, match="holds no training"):
        _train(target, capture, tmp_path, _options(max_steps=2), resume=True)


def test_a_file_is_no_folder_for_a_run(target: Path, capture: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "head"):
        with pytest.raises(ConfigError, match=rf"out='{out}': must be a folder, .* {file} is a file"):
            _train(target, capture, out, _options())


def _lose_a_parameter(content: dict[str, Any]) -> None:
    content["parameters"].popitem()


def _reshape(content: dict[str, Any]) -> None:
    content["parameters"] = {name: tensor[:1] for name, tensor in content["parameters"].items()}


def _reshape_moments(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][0]["exp_avg_sq"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_parameter, "it has no 'modules"),
        (lambda content: content.pop("parameters"), "it has no 'parameters'"),
        (lambda content: content.pop("optimizer"), "it has no 'optimizer'"),
        (lambda content: content["progress"].update(lap=1), "lap"),
        (lambda content: content.pop("generator"), "it has no 'generator'"),
        (_reshape, "has shape"),
        (_reshape_moments, r"exp_avg_sq has shape \[1\]"),
        (lambda content: content.pop("identity"), "identity"),
    ],
)
def test_a_damaged_state_is_named(damage: Any, message: str, target: Path, capture: Path, tmp_path: Path) -> None:
    options = _options(max_steps=1)
    _train(target, capture, tmp_path, options)
    file = tmp_path / STATE_FILE
    content = torch.load(file, weights_only=True)
    damage(content)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE}: .*{message}.* --overwrite"):
        _train(target, capture, tmp_path, options, resume=True)


def test_a_state_that_was_cut_off_is_named(target: Path, capture: Path, tmp_path: Path) -> None:
    options = _options(max_steps=1)
    _train(target, capture, tmp_path, options)
    file = tmp_path / STATE_FILE
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE}: cannot be read: .* --overwrite"):
        _train(target, capture, tmp_path, options, resume=True)


def test_half_a_line_of_the_log_is_dropped_and_a_damaged_one_is_named(
    target: Path, capture: Path, tmp_path: Path
) -> None:
    options = _options(max_steps=3, validation=0.0)
    _train(target, capture, tmp_path, options)
    log = tmp_path / LOG_FILE
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"step": 3, "lo')
    _train(target, capture, tmp_path, options, resume=True)
    assert log.read_bytes() == whole
    for line in (b'{"step": 2, "lo', b"\xff", b"[]", b"{}"):
        log.write_bytes(whole + line + b"\n")
        with pytest.raises(CheckpointError, match=rf"{LOG_FILE}:4: is no entry of a run's log"):
            _train(target, capture, tmp_path, options, resume=True)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_states_that_are_not_finite_are_named(kind: str, target: Path, capture: Path, tmp_path: Path) -> None:
    shutil.copytree(capture, tmp_path / "capture")
    file = tmp_path / "capture" / "shard-00001.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    tensors["aux" if kind == "eagle3" else "hidden"][1, 3] = float("nan")
    save_file(tensors, file, metadata)
    first = int(tensors["rows"][0])
    message = rf"shard-00001.safetensors: the sample at its token 0 \(line {first + 1} of the data\) has hidden states"
    with pytest.raises(CheckpointError, match=message):
        _train(target, tmp_path / "capture", tmp_path / "out", _options(kind=kind, validation=0.0))


def test_a_run_that_diverges_blames_the_learning_rate(
    target: Path, capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, clip: torch.tensor(float("inf")))
    with pytest.raises(ConfigError, match=r"learning_rate=0\.001: training diverged at step 0"):
        _train(target, capture, tmp_path, _options())


def test_an_incomplete_capture_is_used_with_a_warning(
    target: Path, capture: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _train(target, capture, tmp_path / "a", _options(max_steps=1))
    assert "incomplete" not in caplog.text
    reader = CaptureReader([capture])
    for num_prompts, count in ((50, f"{NUM_SAMPLES} of 50 samples"), (None, f"{NUM_SAMPLES} samples")):
        reader.manifests[0] = replace(reader.manifests[0], complete=False, num_prompts=num_prompts)
        train(resolve_model(str(target)), reader, _options(max_steps=1), tmp_path / "b", overwrite=True)
        assert f"The capture in {capture} is incomplete: {count}." in caplog.text


def _validations(out: Path) -> list[dict[str, Any]]:
    return [{"step": entry["step"], **entry["validation"]} for entry in _log(out) if "validation" in entry]


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_validation_is_what_the_engine_makes_of_the_saved_head_on_held_out_samples(
    kind: str, target: Path, capture: Path, tmp_path: Path
) -> None:
    # So few samples teach little that helps on others: they are all held out in turn, by the seed.
    options = _options(kind=kind, epochs=10, learning_rate=1e-2, validation=0.5, train_lm_head=kind == "eagle3")
    result = _train(target, capture, tmp_path, options)
    logged = _validations(tmp_path)
    assert [entry["step"] for entry in logged] == [result.num_steps * epoch // 10 for epoch in range(1, 11)]
    accuracy = result.validation
    # 10 of 20 samples; chains of 5 drafts, each a row shorter than the one before.
    assert accuracy.num_rows.tolist() == [10 * (ANSWER - k) for k in range(5)]
    _, held_out = split_validation(NUM_SAMPLES, 0.5, options.seed)
    assert accuracy.as_dict() == _engine_accuracy(tmp_path, target, capture, held_out.tolist()).as_dict()
    assert 0 < accuracy.hits[0] < accuracy.num_rows[0]  # or nothing was shown
    training = json.loads((tmp_path / "config.json").read_text())["training"]
    seconds = logged[-1].pop("seconds")
    assert seconds > 0
    assert training["validation"] == logged[-1] == {"step": result.step, "num_samples": 10, **accuracy.as_dict()}


def test_validation_every_few_steps_and_at_the_end(target: Path, capture: Path, tmp_path: Path) -> None:
    reports: list[Report] = []
    options = _options(max_steps=7)
    _train(target, capture, tmp_path, options, validate_every=3, report=reports.append)
    assert [entry["step"] for entry in _validations(tmp_path)] == [3, 6, 7]
    assert [report.step for report in reports if report.validation is not None] == [3, 6, 7]
    # A finished run that is resumed has nothing to do but to say how good it is.
    before = (tmp_path / "config.json").read_text()
    again = _train(target, capture, tmp_path, options, resume=True, report=reports.append)
    assert again.step == 7 and len(reports) == 7
    assert again.validation.as_dict() == reports[-1].validation.as_dict()
    assert (tmp_path / "config.json").read_text() == before


def test_validation_on_a_machine_without_native_kernels(
    target: Path, capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ops = engine_ops(dtype)
        assert ops.name == BACKENDS[-1] and ops.dtype == dtype
    options = _options(epochs=4, learning_rate=1e-2)
    fast = _train(target, capture, tmp_path / "native", options)
    monkeypatch.setattr(_native, "supported_isas", list)
    assert engine_ops(torch.float32).name == "torch"
    slow = _train(target, capture, tmp_path / "torch", options)
    assert fast.validation.as_dict() == slow.validation.as_dict()


def test_validation_is_bounded_and_spread_evenly(capture: Path) -> None:
    reader = CaptureReader([capture])
    held_out = np.arange(3, 1000, 2)
    reader.num_supervised = np.full(1000, 40)
    chosen = choose_samples(reader, held_out)
    assert len(chosen) == 256 and chosen == sorted(set(chosen)) and set(chosen) <= set(held_out.tolist())
    assert chosen[0] < 10 and chosen[-1] > 990 and np.diff(chosen).max() <= 4
    reader.num_supervised = np.full(1000, 1000)  # tokens to be learnt are bounded, too
    assert len(choose_samples(reader, held_out)) == 16
    reader.num_supervised = np.full(1000, 10**6)
    assert choose_samples(reader, held_out) == [3]
    assert choose_samples(reader, held_out[:0]) == []


def test_a_capture_of_another_target_is_refused(target: Path, capture: Path, tmp_path: Path) -> None:
    reader = CaptureReader([capture])
    stamp = target_stamp(resolve_model(str(target)))
    reader.manifests[0] = replace(reader.manifests[0], target={"name": "other", "vocab_size": stamp.vocab_size + 1})
    with pytest.raises(ConfigError, match=f"vocab_size={stamp.vocab_size + 1}"):
        train(resolve_model(str(target)), reader, _options(), tmp_path)


def test_the_draft_vocabulary_is_what_the_target_writes_most(capture: Path) -> None:
    reader = CaptureReader([capture])
    counts = np.zeros(199, np.int64)
    for i in range(len(reader)):
        np.add.at(counts, reader.token_ids(i)[reader.loss_mask(i) == 1], 1)
    ids = draft_vocabulary(reader, 30, 199, {0, 198, 5000})
    assert ids is not None
    chosen = ids.tolist()
    assert chosen == sorted(set(chosen))
    assert {0, 198} <= set(chosen)
    left_out = max(counts[i] for i in range(199) if i not in chosen)
    assert min(counts[i] for i in chosen if i not in (0, 198)) >= left_out
    assert draft_vocabulary(reader, 0, 199, ()) is None
    filled = draft_vocabulary(reader, 198, 199, ())
    assert filled is not None and set(np.flatnonzero(counts)) <= set(filled.tolist())
    with pytest.raises(ConfigError, match="draft_vocab=200"):
        draft_vocabulary(reader, 200, 199, ())
    with pytest.raises(ConfigError, match="no room"):
        draft_vocabulary(reader, 2, 199, {1, 2, 3})


@pytest.mark.parametrize("kind", ["llama3", "llama3-untied", "qwen2", "qwen3"])
def test_a_draft_llm_learns_and_is_saved_as_an_ordinary_model(
    kind: str, tiny_checkpoints: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "_SPAN", 7)  # prompts and answers are cut
    target = tiny_checkpoints[kind]
    write_capture(tmp_path / "capture", resolve_model(str(target)))
    options = _options(kind="draft", layers=2, draft_vocab=None, epochs=30, learning_rate=5e-3, batch_tokens=160)
    out = tmp_path / "out"
    result = _train(target, tmp_path / "capture", out, options, validate_every=1000)
    log = [entry for entry in _log(out) if "loss" in entry]
    assert log[-1]["divergence"][0] < 0.5 * log[0]["divergence"][0]
    assert len(log[0]["accuracy"]) == 1
    accuracy = result.validation
    assert accuracy.num_rows.tolist() == [2 * (ANSWER - k) for k in range(5)]
    checkpoint = resolve_model(str(out))
    assert checkpoint.config == replace(resolve_model(str(target)).config, num_layers=2)
    # Chains are counted without running any: a draft LLM reads its own drafts as it reads the text.
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), FLOAT32)
    assert json.loads((out / "training.json").read_text())["validation"]["accuracy"] == accuracy.by_step
    reader = CaptureReader([tmp_path / "capture"])
    correct, joint = [0] * 5, [0] * 5
    _, held_out = split_validation(NUM_SAMPLES, 0.1, 0)
    for index in held_out:
        hits = _hits(model, reader, int(index))
        for k in range(5):
            correct[k] += sum(hits[k:])
            joint[k] += sum(all(hits[j : j + k + 1]) for j in range(ANSWER - k))
    assert correct == accuracy.hits.tolist()
    assert joint == accuracy.joint.tolist()
    assert 0 < correct[0] < 2 * ANSWER  # or nothing was shown


def test_a_draft_llm_with_a_vocabulary_is_counted_and_saved_with_it(
    target: Path, capture: Path, tmp_path: Path
) -> None:
    options = _options(kind="draft", layers=2, draft_vocab=60, max_steps=2, batch_tokens=200)
    result = _train(target, capture, tmp_path, options)
    ids = read_draft_vocab(tmp_path, resolve_model(str(target)).config.vocab_size)
    assert ids is not None and ids.shape == (60,)
    checkpoint = resolve_model(str(tmp_path))
    model = build_model(checkpoint.config, load_weights(checkpoint, expected_tensors(checkpoint.config)), FLOAT32)
    reader = CaptureReader([capture])
    _, held_out = split_validation(NUM_SAMPLES, 0.1, 0)
    correct = 0
    for index in held_out:
        tokens = reader.token_ids(int(index)).tolist()
        batch = make_batch([tokens[:-1]], [[0]], 32)
        hidden = model.forward(batch, _attention(model.config).plan(batch))
        likely = ids[model.logits(hidden[PROMPT - 1 :])[:, ids].argmax(-1)].tolist()
        correct += sum(a == b for a, b in zip(likely, tokens[PROMPT:], strict=True))
    assert result.validation is not None and result.validation.hits[0] == correct
    whole = _options(kind="draft", layers=2, draft_vocab=0, max_steps=1)
    assert _train(target, capture, tmp_path, whole, overwrite=True).complete
    assert read_draft_vocab(tmp_path, 10**6) is None


def _hits(model: Model, reader: CaptureReader, index: int) -> list[bool]:
    """At which answer tokens the model's most likely one is the captured one."""
    tokens = reader.token_ids(index).tolist()
    batch = make_batch([tokens[:-1]], [[0]], 32)
    hidden = model.forward(batch, _attention(model.config).plan(batch))
    likely = model.logits(hidden[PROMPT - 1 :]).argmax(-1).tolist()
    return [a == b for a, b in zip(likely, tokens[PROMPT:], strict=True)]


def test_chains_are_of_kind_mtp_and_no_longer_than_the_drafts_that_teach_them() -> None:
    with pytest.raises(ConfigError, match="modules=2 and kind='eagle'"):
        TrainOptions(kind="eagle", modules=2)
    with pytest.raises(ConfigError, match="steps_ahead must be at least 4"):
        TrainOptions(modules=4)
    with pytest.raises(ConfigError, match="modules=0: must be at least 1"):
        TrainOptions(modules=0)


def test_layers_are_for_draft_llms() -> None:
    with pytest.raises(ConfigError, match="layers=None"):
        TrainOptions(kind="draft")
    with pytest.raises(ConfigError, match="layers=2"):
        TrainOptions(kind="mtp", layers=2)


_WORKER = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from pathlib import Path
from pilotfish.models.checkpoint import Checkpoint, resolve_model
from pilotfish.training.distributed import World
from pilotfish.training.data import split_validation
from pilotfish.training.options import TrainOptions
from pilotfish.training.store import CaptureReader
from pilotfish.training import train as loop
class NoTokenizer:
    special_token_ids = frozenset({{0, 1}})
Checkpoint.load_tokenizer = lambda self: NoTokenizer()
options = TrainOptions(draft_vocab=120, epochs=2, batch_tokens=80, validation=0.1, dtype="float32", init="random")
save = loop._Run.save
def compare_and_save(self):
    assert self.world.size == 2
    mine = torch.cat([p.detach().flatten() for p in self.parameters])
    everyones = [torch.empty_like(mine), torch.empty_like(mine)]
    torch.distributed.all_gather(everyones, mine)
    assert torch.equal(*everyones)
    save(self)
loop._Run.save = compare_and_save
def check_average(world):  # a function: no tensor of it may be left when gloo's threads end
    tensors = [torch.zeros(2, 3, requires_grad=True), torch.zeros(1, requires_grad=True)]
    tensors[0].grad = torch.full((2, 3), float(1 + 2 * world.rank))
    assert world.average_gradients(tensors, stop=world.rank == 1)
    assert torch.equal(tensors[0].grad, torch.full((2, 3), 2.0)) and not tensors[1].grad.any()
with World.join() as world:
    check_average(world)
    reader = CaptureReader([Path({capture!r})])
    result = loop.train(resolve_model({target!r}), reader, options, Path({out!r}), world=world)
assert result.complete
assert (result.validation is None) == (world.rank > 0)
"""


@pytest.mark.parametrize("clip", [1e-12, 1.0])
def test_gradients_are_clipped_and_matrices_decay(clip: float, target: Path, capture: Path, tmp_path: Path) -> None:
    """A gradient that is clipped to next to nothing leaves weight decay alone at work."""
    options = _options(max_steps=1, epochs=1, learning_rate=1e-2, warmup=0.0, weight_decay=0.5, clip=clip)
    checkpoint, reader = resolve_model(str(target)), CaptureReader([capture])
    before = prepare(checkpoint, reader, options).parameters
    _train(target, capture, tmp_path, options)
    after = load_file(tmp_path / "model.safetensors")
    for name, start in before.items():
        decayed = start.detach() * (1 - 1e-2 * 0.5 if start.ndim > 1 else 1.0)
        moved = (after[name].float() - decayed.to(torch.bfloat16).float()).abs().max()
        assert (moved <= 1e-4) == (clip < 1.0), name


def test_no_sample_is_both_learnt_and_validated_with() -> None:
    for count, fraction in ((20, 0.1), (7, 0.5), (3, 0.0)):
        train_on, held_out = split_validation(count, fraction, seed=3)
        assert sorted([*train_on, *held_out]) == list(range(count))
        assert (len(held_out) > 0) == (fraction > 0)


def test_two_processes_share_the_batches_and_end_with_the_same_head(
    target: Path, capture: Path, tmp_path: Path
) -> None:
    tests = str(Path(__file__).parents[1])
    script = tmp_path / "worker.py"
    out = tmp_path / "out"
    script.write_text(_WORKER.format(tests=tests, out=str(out), target=str(target), capture=str(capture)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[:6000]
    entries = [entry for entry in _log(out) if "loss" in entry]
    assert [entry["step"] for entry in _validations(out)] == [len(entries) // 2, len(entries)]
    # One process writes the log; each step is a batch of 4 samples on each of two processes.
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    assert all(entry["tokens"] > 80 for entry in entries)
    alone = tmp_path / "alone"
    _train(target, capture, alone, _options(epochs=2))
    per_epoch = len([e for e in _log(alone) if "loss" in e]) // 2
    assert len(entries) == 2 * (per_epoch // 2)


def test_the_command_trains_and_draws(
    target: Path, capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "head", tmp_path / "curves.png"
    command = ["train", str(target), "--data", str(capture), "--out", str(out), "--max-steps", "3"]
    small = ["--draft-vocab", "100", "--batch-tokens", "80", "--dtype", "float32", "--validation", "0.1"]
    assert run([*command, *small, "--plot", str(plot)]) == 0
    said = capsys.readouterr().err
    assert said.count("held out, by the engine's code: top-1") == 1
    assert f"{out.name}: the head after 3 steps; held out, by the engine's code: top-1" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    config = HeadConfig.from_json(json.loads((out / "config.json").read_text()), "config.json")
    assert config.draft_vocab_size == 100
    assert load_file(out / "model.safetensors")["token_ids"].shape == (100,)
    assert run([*command, *small]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert run([*command, *small, "--overwrite"]) == 0
    command += ["--overwrite"]
    for option in ("--validate-every", "--save-every"):
        assert run([*command, option, "0"]) == 2
        assert f"{option[2:].replace('-', '_')}=0" in capsys.readouterr().err
    assert run([*command, "--kind", "medusa"]) == 2
    assert "kind='medusa'" in capsys.readouterr().err
    assert run([*command, "--draft-vocab", "500"]) == 2
    assert "draft_vocab=500: must be from 0" in capsys.readouterr().err
