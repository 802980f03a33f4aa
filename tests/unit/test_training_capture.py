"""Capture: the stored text is what the engine writes, the stored states are those that it computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers_gguf import byte_level_vocabulary, tiny_model, write_gguf
from pilotfish.cli.app import run
from pilotfish.config import EngineConfig
from pilotfish.engine import load_engine
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.checkpoint import resolve_model
from pilotfish.training.capture import Capture, CaptureOptions, load_prompts
from pilotfish.training.store import CaptureReader
from pilotfish.types import SamplingParams

CONFIG = EngineConfig(
    dtype="float32", backend="torch", threads=1, max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory=1 << 22,
    speculation=None,
)  # fmt: skip
OPTIONS = CaptureOptions(max_tokens=6, shard_tokens=60)
QUESTIONS = ["hello", "1234 is more than 123?", "a b c d e f g h i j", "hello hello", "so?", "12 12 12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("capture") / "m.gguf", tiny_model("llama")))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "data.jsonl",
        [{"messages": [{"role": "user", "content": text}], "source": f"s{i % 2}"} for i, text in enumerate(QUESTIONS)],
    )


def write_lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def capture(model: str, data: Path, out: Path, options: CaptureOptions = OPTIONS, **settings: Any) -> CaptureReader:
    list(Capture(model, data, out, options, replace(CONFIG, **settings)).run())
    return CaptureReader([out])


def by_row(reader: CaptureReader) -> dict[int, Any]:
    return {sample.row: sample for sample in (reader[i] for i in range(len(reader)))}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_that_the_engine_gives(model: str, data: Path, tmp_path: Path, temperature: float) -> None:
    options = replace(OPTIONS, temperature=temperature, seed=7)
    samples = by_row(capture(model, data, tmp_path / "out", options))
    assert sorted(samples) == list(range(len(QUESTIONS)))
    engine = load_engine(model, CONFIG)
    for row, text in enumerate(QUESTIONS):
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        engine.add_request("r", prompt, SamplingParams(max_tokens=6, temperature=temperature, seed=7 + row))
        while engine.has_unfinished:
            outputs = engine.step()
        answer = outputs[0].outputs[0].token_ids
        assert samples[row].token_ids.tolist() == [*prompt, *answer]
        assert samples[row].loss_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        assert samples[row].source == f"s{row % 2}"


def test_states_are_the_models_own(model: str, data: Path, tmp_path: Path) -> None:
    """transformers gives the same last hidden states for the stored tokens."""
    reference = tiny_model("llama")
    for sample in by_row(capture(model, data, tmp_path / "out")).values():
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))[None]
        with torch.no_grad():
            wanted = reference.model(ids).last_hidden_state[0]
        assert sample.hidden.dtype == torch.bfloat16
        torch.testing.assert_close(sample.hidden[:-1].float(), wanted, rtol=1e-2, atol=1e-2)
        assert not sample.hidden[-1].any()  # the last token of an answer is never computed


def test_preempted_rows_have_the_same_states(model: str, data: Path, tmp_path: Path) -> None:
    plenty = by_row(capture(model, data, tmp_path / "a"))
    # Room for little more than the longest sequence.
    scarce = by_row(capture(model, data, tmp_path / "b", kv_cache_memory=2 * 2 * 2 * 64 * 16 * 4 * 5, max_model_len=64))
    for row, sample in plenty.items():
        assert np.array_equal(scarce[row].token_ids, sample.token_ids)
        assert torch.equal(scarce[row].hidden, sample.hidden)


def test_aux_states(model: str, data: Path, tmp_path: Path) -> None:
    plain = by_row(capture(model, data, tmp_path / "a"))
    samples = by_row(capture(model, data, tmp_path / "b", replace(OPTIONS, aux_layers=(1, 2))))
    reference = tiny_model("llama")
    for row, sample in samples.items():
        assert torch.equal(sample.hidden, plain[row].hidden)
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))[None]
        with torch.no_grad():
            states = reference.model(ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(sample.aux[:-1, :256].float(), states[1][0], rtol=1e-2, atol=1e-2)
        assert sample.aux.shape[1] == 512


def test_an_interrupted_capture_goes_on(model: str, data: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, temperature=1.0, seed=7)
    whole = by_row(capture(model, data, tmp_path / "whole", options))
    first = Capture(model, data, tmp_path / "parts", options, CONFIG)
    samples = first.run()
    next(samples), next(samples)
    samples.close()
    assert not first.manifest.complete
    assert first.manifest.num_samples == 2
    second = Capture(model, data, tmp_path / "parts", options, CONFIG)
    assert second.num_done == 2
    assert len(list(second.run())) == len(QUESTIONS) - 2
    assert second.manifest.complete
    parts = by_row(CaptureReader([tmp_path / "parts"]))
    assert {row: s.token_ids.tolist() for row, s in parts.items()} == {
        row: s.token_ids.tolist() for row, s in whole.items()
    }


def test_equal_prompts_are_each_captured(model: str, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"prompt": "t5 t6 t7"}] * 3 + [{"prompt": "t8"}])
    reader = capture(model, data, tmp_path / "out")
    assert sorted(reader.rows.tolist()) == [0, 1, 2, 3]
    samples = [reader[i] for i in range(4) if reader.rows[i] < 3]
    assert all(torch.equal(sample.hidden, samples[0].hidden) for sample in samples)


@pytest.mark.parametrize("layers", [(0, 2), (2, 99)])
def test_layers_that_the_target_has_not_are_refused(
    layers: tuple[int, ...], model: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"aux_layers={layers[0]},{layers[1]}: must be from 1 to"):
        capture(model, data, tmp_path / "out", replace(OPTIONS, aux_layers=layers))


def test_options_that_cannot_work_leave_no_folder(model: str, data: Path, tmp_path: Path) -> None:
    for wrong, message in (
        ({"temperature": -1.0}, "temperature=-1.0: must be"),
        ({"aux_layers": (1, 1)}, "aux_layers=1,1: must be different"),
    ):
        with pytest.raises(ConfigError, match=message):
            capture(model, data, tmp_path / "out", replace(OPTIONS, **wrong))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_things_is_refused(model: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty and holds no capture"):
        capture(model, data, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [data.name]


def test_another_capture_in_the_folder_is_refused(model: str, data: Path, tmp_path: Path) -> None:
    capture(model, data, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds a capture with sampling=.*'max_tokens': 6.*'max_tokens': 5"):
        Capture(model, data, tmp_path / "out", replace(OPTIONS, max_tokens=5), CONFIG)


def test_given_answers_are_what_is_learnt(model: str, tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": "hello?"},
                    {"role": "assistant", "content": "hello!"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": "1234"},
                ]
            },
            {"text": "hello 123"},
        ],
    )
    samples = by_row(capture(model, data, tmp_path / "out", replace(OPTIONS, keep_answers=True)))
    tokenizer = resolve_model(model).load_tokenizer()
    learnt = tokenizer.decode(samples[0].token_ids[samples[0].loss_mask == 1].tolist(), skip_special_tokens=False)
    assert learnt == "hello!<|im_end|>1234<|im_end|>", "not the newline behind it, which the template writes"
    assert samples[1].loss_mask.tolist() == [0, *[1] * (len(samples[1].token_ids) - 1)]
    assert samples[1].hidden[-1].any()  # given tokens are all computed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"is not JSON"),
        ("[]", r"must be a JSON object, not list"),
        ('{"x": 1}', r"has none of messages, turns, text and prompt"),
        ('{"turns": []}', r"turns=\[\]"),
        ('{"turns": [3]}', r"turns=\[3\]"),
        ('{"text": ""}', r"one is needed, and not empty"),
        ('{"messages": null}', r"has none of messages, turns, text and prompt"),
        ('{"messages": []}', r"messages holds nothing to answer"),
        ('{"messages": ["hi"]}', r"messages must be a list of objects with role and content"),
        ('{"messages": "hi"}', r"messages must be a list of objects with role and content"),
        ('{"messages": [{"role": "user", "content": null}]}', r"content=None: must be a string"),
        ('{"messages": [{"content": "x"}]}', r"role=None: must be a string such as 'user'"),
        ('{"messages": [{"role": "king", "content": "x"}]}', r"Unknown role king"),
    ],
)
@pytest.mark.parametrize("keep_answers", [False, True])
def test_wrong_lines_are_named(model: str, tmp_path: Path, line: str, message: str, keep_answers: bool) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "hello 123"}) + "\n" + line + "\n")
    if keep_answers and "holds nothing" in message:
        message = "must be a list of at least one message"
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: .*{message}"):
        Capture(model, data, tmp_path / "out", replace(OPTIONS, keep_answers=keep_answers), CONFIG)
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_too_long_are_left_out_and_counted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = resolve_model(model).config.max_position_embeddings
    data = write_lines(
        tmp_path / "data.jsonl",
        [{"text": "hello"}, {"text": "1 " * context}, {"text": "so?"}, {"text": "2 " * context}],
    )
    options = replace(OPTIONS, max_prompt_tokens=10 * context, max_tokens=2)
    first = Capture(model, data, tmp_path / "out", options, CONFIG)
    assert (len(first.prompts), first.loaded.num_too_long) == (2, 2)
    assert first.longest_prompt == context - 1
    assert sorted(sample.row for sample in first.run()) == [0, 2]
    assert (first.manifest.complete, first.manifest.num_prompts) == (True, 2)
    flags = ["--max-prompt-tokens", str(10 * context), "--max-tokens", "2", "--dtype", "float32", "--threads", "1"]
    assert run(["capture", model, "--data", str(data), "--out", str(tmp_path / "cli"), *flags]) == 0
    assert f"2 prompts have more than {context - 1:,} tokens and are left out" in capsys.readouterr().err


def test_the_last_prompt_that_fits_the_context_is_captured(model: str, tmp_path: Path) -> None:
    tokenizer = resolve_model(model).load_tokenizer()
    fits, not_so = "a b c d e f g h", "a b c d e f g h i"
    data = write_lines(tmp_path / "data.jsonl", [{"text": fits}, {"text": not_so}])
    context = len(tokenizer.encode(fits)) + 1
    reader = capture(model, data, tmp_path / "out", max_model_len=context)
    assert reader.rows.tolist() == [0] and reader.lengths.tolist() == [context]


@pytest.mark.parametrize(
    ("lines", "keep_answers", "message"),
    [
        ([], False, r"data='.*': has no prompts"),
        ([{"text": "1 " * 500}], False, r"1 have more than 100 tokens \(max_prompt_tokens=100, and a context of"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], True, r"1 have no answer that keep_answers could learn"),
    ],
)
def test_a_file_without_a_usable_prompt_is_an_error(
    model: str, tmp_path: Path, lines: list[dict[str, Any]], keep_answers: bool, message: str
) -> None:
    data = write_lines(tmp_path / "data.jsonl", lines)
    options = replace(OPTIONS, keep_answers=keep_answers, max_prompt_tokens=100)
    with pytest.raises(ConfigError, match=message):
        Capture(model, data, tmp_path / "out", options, CONFIG)
    assert not (tmp_path / "out").exists()


def test_wrong_kinds_of_paths_are_one_line(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        ["capture", model, "--data", str(data), "--out", str(data)],
        ["capture", model, "--data", str(data), "--out", str(data / "out")],
        ["export", str(tmp_path), "--model", model, "--format", "pilotfish", "--out", str(data)],
    ]
    for command in commands:
        assert run(command) == 2
        assert f"{data} is a file" in (err := capsys.readouterr().err) and err.count("\n") == 1
    with pytest.raises(CheckpointError, match=r"data\.jsonl: is no capture"):
        CaptureReader([data])
    assert run(["prompts", model, "--out", str(tmp_path)]) == 2
    assert "is a folder; must be a file" in capsys.readouterr().err
    assert run(["prompts", model, "--out", str(tmp_path / "no" / "x.jsonl")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_turns_are_plain_text_for_a_model_without_a_template(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(settings={"chat_template": ""})
    bare = str(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), vocabulary=vocabulary))
    data = write_lines(tmp_path / "data.jsonl", [{"turns": ["hello 123", "more"]}])
    tokenizer = resolve_model(bare).load_tokenizer()
    assert load_prompts(data, tokenizer, 99).prompts[0].token_ids == tokenizer.encode("hello 123")


def test_an_option_says_how_much_a_kill_may_lose(model: str, data: Path, tmp_path: Path) -> None:
    flags = ["--max-tokens", "6", "--shard-tokens", "60", "--dtype", "float32", "--threads", "1"]
    assert run(["capture", model, "--data", str(data), "--out", str(tmp_path / "out"), *flags]) == 0
    assert len(CaptureReader([tmp_path / "out"]).manifests[0].shards) > 1


def test_no_capture_and_damaged_shards(model: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no capture"):
        CaptureReader([tmp_path])
    capture(model, data, tmp_path / "out")
    shard = tmp_path / "out" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is not a shard of a capture"):
        CaptureReader([tmp_path / "out"])


DAMAGE: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "token_ids from": lambda t: {"token_ids": t["token_ids"].clone().fill_(60_001)},
    "token_ids from -5": lambda t: {"token_ids": t["token_ids"].clone().fill_(-5)},
    "hidden has shape": lambda t: {"hidden": t["hidden"][:, :-4].contiguous()},
    "hidden has": lambda t: {"hidden": t["hidden"][:-1].contiguous()},
    "of loss_mask": lambda t: {"loss_mask": t["loss_mask"][:-3].contiguous()},
    "starts must ascend": lambda t: {"starts": t["starts"].flip(0).contiguous()},
    "rows and": lambda t: {"rows": t["rows"][:-1].contiguous()},
}


@pytest.mark.parametrize("message", DAMAGE)
def test_tensors_that_do_not_fit_are_named(message: str, model: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    capture(model, data, out)
    file = next(out.glob("*.safetensors"))
    tensors = load_file(file)
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    save_file(tensors | DAMAGE[message](tensors), file, metadata)
    with pytest.raises(CheckpointError, match=f"{file.name}: is not a shard of a capture: .*{message}"):
        CaptureReader([out])


def test_captures_of_different_targets_do_not_mix(model: str, data: Path, tmp_path: Path) -> None:
    capture(model, data, tmp_path / "a")
    other = write_gguf(tmp_path / "n.gguf", tiny_model("llama", num_hidden_layers=3))
    capture(str(other), data, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"target=.* is not that of"):
        CaptureReader([tmp_path / "a", tmp_path / "b"])
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert len(CaptureReader([tmp_path / "a", tmp_path / "copy"])) == 2 * len(QUESTIONS)


def test_a_capture_counts_once(model: str, data: Path, tmp_path: Path) -> None:
    capture(model, data, tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    for again in ("out", "x/../out", "link"):
        with pytest.raises(ConfigError, match=rf"data='.*{again}': is the capture '.*out' again"):
            CaptureReader([tmp_path / "out", tmp_path / again])
