"""``--json-schema`` and ``--regex`` of the command line, over an engine without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fakes import make_engine
from helpers_grammar import json_tokenizer
from pilotfish.cli.app import run
from pilotfish.llm import LLM

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, True, "x"]}}, "required": ["a"]}
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _llm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_engine(make_engine(tokenizer=json_tokenizer(), eos_bias=4.0))
    monkeypatch.setattr("pilotfish.cli.session.load_llm", lambda options, speculation=None: llm)


def generate(capsys: Output, *args: str) -> dict[str, Any]:
    assert run(["generate", "abc", "--no-chat", "--max-tokens", "40", "--json", *args]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("from_file", [False, True])
def test_json_schema(from_file: bool, capsys: Output, tmp_path: Path) -> None:
    text = json.dumps({**SCHEMA, "additionalProperties": False})
    if from_file:
        (tmp_path / "schema.json").write_text(text, encoding="utf-8")
        text = str(tmp_path / "schema.json")
    result = generate(capsys, "--json-schema", text)
    assert result["finish_reason"] == "stop"
    jsonschema.validate(json.loads(result["text"]), SCHEMA)


def test_regex(capsys: Output) -> None:
    result = generate(capsys, "--regex", "ab{3}[012]")
    assert result["text"][:-1] == "abbb" and result["text"][-1] in "012" and result["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--json-schema", "/no/such/file"], "/no/such/file"),
        (["--json-schema", '{"type": "fish"}'], "fish"),
        (["--regex", "("], "regex cannot be used"),
        (["--regex", ""], "regex=''"),
        (["--regex", "a", "--json-schema", "{}"], "exactly one"),
    ],
)
def test_what_cannot_be_used_is_an_error(args: list[str], words: str, capsys: Output) -> None:
    assert run(["generate", "abc", "--no-chat", *args]) != 0
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
