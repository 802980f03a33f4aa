"""Prompts that a model writes: after its template's beginning, reproducible, each once."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from helpers_gguf import byte_level_vocabulary, tiny_model, write_gguf
from pilotfish.cli.app import run
from pilotfish.config import EngineConfig
from pilotfish.engine import Engine, load_engine
from pilotfish.errors import ConfigError
from pilotfish.training.prompts import PromptOptions, user_prefix, write_prompts

# A random model seldom ends by itself: short prompts of few kinds of tokens, many attempts.
OPTIONS = PromptOptions(temperature=4.0, max_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights = tiny_model("llama")
    weights.get_input_embeddings().weight.data[2] *= 4  # its output head too: EOS comes soon
    return str(write_gguf(tmp_path_factory.mktemp("prompts") / "m.gguf", weights))


@pytest.fixture
def engine(model: str) -> Engine:
    config = EngineConfig(
        dtype="float32", backend="torch", threads=1, max_num_seqs=3, kv_cache_memory=1 << 22, speculation=None
    )
    return load_engine(model, config)


def take(
    engine: Engine, count: int, first: int = 0, known: list[str] | None = None, options: PromptOptions = OPTIONS
) -> list[tuple[int, str]]:
    with closing(write_prompts(engine, options, first, known or [])) as prompts:
        return list(islice(prompts, count))


def test_the_prefix_is_the_template_up_to_the_users_words(engine: Engine) -> None:
    assert engine.tokenizer.decode(user_prefix(engine.tokenizer), skip_special_tokens=False) == "<|im_start|>user\n"


def test_prompts_are_reproducible_and_go_on(engine: Engine) -> None:
    pages = engine.pool.num_free
    whole = take(engine, 6)
    assert len({text for _, text in whole}) == 6
    assert [attempt for attempt, _ in whole] == sorted(attempt for attempt, _ in whole)
    assert engine.pool.num_free == pages and not engine.has_unfinished
    last = whole[2][0]
    assert take(engine, 3, last + 1, [text for _, text in whole[:3]]) == whole[3:]


def test_known_prompts_do_not_come_again(engine: Engine) -> None:
    (first, text), second = take(engine, 2)
    assert take(engine, 1, first, [text])[0] == second


def test_attempts_in_vain_come_to_an_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.training.prompts._MOST_IN_VAIN", 20)
    message = "the last 20 attempts brought no new prompt: {} were among the {} that there are, {} were empty or not"
    with pytest.raises(ConfigError, match="max_tokens=1: " + message.format(0, 0, 20)):
        take(engine, 1, options=replace(OPTIONS, max_tokens=1))
    (first, _), (second, text) = take(engine, 2)
    params = PromptOptions.params
    # As if the temperature were so low that every attempt from the second prompt on gives that one again.
    monkeypatch.setattr(PromptOptions, "params", lambda self, attempt: params(self, min(attempt, second)))
    assert take(engine, 1, second)[0] == (second, text)
    with pytest.raises(ConfigError, match=message.format(20, 2, 0)):
        take(engine, 3, first)
    assert not engine.has_unfinished


def test_prompts_of_a_kind_begin_alike(engine: Engine) -> None:
    texts = [text for _, text in take(engine, 3, options=replace(OPTIONS, begin="hello 123"))]
    assert all(text.startswith("hello 123") and len(text) > len("hello 123") for text in texts)
    assert len(set(texts)) == 3


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(settings={"chat_template": ""})
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), vocabulary=vocabulary)
    engine = load_engine(str(path), EngineConfig(backend="torch", threads=1, kv_cache_memory=1 << 22))
    with pytest.raises(ConfigError, match="cannot write prompts"):
        next(write_prompts(engine, OPTIONS))


def test_temperature_must_be_above_0() -> None:
    with pytest.raises(ConfigError, match=r"temperature=0\.0: must be above 0"):
        PromptOptions(temperature=0.0)


def test_the_command_goes_on_with_its_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(out: Path, num: int) -> None:
        flags = ["--out", str(out), "--num", str(num), "--temperature", "4", "--max-tokens", "40", "--threads", "1"]
        assert run(["prompts", model, *flags, "--max-num-seqs", "3", "--dtype", "float32"]) == 0

    command(tmp_path / "whole.jsonl", 5)
    command(tmp_path / "parts.jsonl", 2)
    command(tmp_path / "parts.jsonl", 5)
    lines = (tmp_path / "whole.jsonl").read_text(encoding="utf-8").split("\n")
    assert lines == (tmp_path / "parts.jsonl").read_text(encoding="utf-8").split("\n")
    entry = json.loads(lines[0])
    assert entry["source"] == "self" and entry["messages"][0]["role"] == "user"
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert run(["prompts", model, "--out", str(tmp_path / "other.jsonl")]) == 2
    assert "holds something else" in capsys.readouterr().err
