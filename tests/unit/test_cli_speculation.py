"""The command line's speculation options, colours and comparison, over an engine without a model."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from fake_llm import Letters, make_llm
from pilotfish.cli.app import run
from pilotfish.cli.paint import Painter, wants_colour
from pilotfish.cli.speculation import SpeculationOptions, bench_schemes
from pilotfish.config import Auto, DraftModel, Eagle, Mtp, Ngram, Speculation
from pilotfish.errors import ConfigError
from pilotfish.llm import LLM
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.types import CompletionOutput, SamplingParams

Output = pytest.CaptureFixture[str]

GENERATE = ["generate", "abcabcabc", "--no-chat", "--max-tokens", "20", "--ignore-eos"]
# The fake's tokens are nearly random: a bias towards one letter makes it repeat itself, so that n-grams are accepted.
REPEATING = [*GENERATE, "--logit-bias", "3=100"]
GREEN, CYAN, RESET = "\x1b[32m", "\x1b[36m", "\x1b[0m"


def make_speculating(settings: Speculation | None) -> LLM:
    if settings is None:
        return make_llm()
    assert isinstance(settings, Ngram)
    return make_llm(speculation=settings, proposer=NgramProposer(settings.max_ngram, settings.min_ngram))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Speculation | None]:
    """The settings of the models that the command has loaded."""
    settings: list[Speculation | None] = []

    def load(options: Any, speculation: Speculation | None = None) -> LLM:
        settings.append(speculation)
        return make_speculating(speculation)

    monkeypatch.setattr("pilotfish.cli.session.load_llm", load)
    monkeypatch.setattr("pilotfish.cli.chat.load_llm", load)
    return settings


def plain_text(**params: Any) -> str:
    defaults = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logit_bias": {3: 100.0}}
    output = make_llm().generate(Letters().encode("abcabcabc"), SamplingParams(**defaults | params))[0]
    return output.outputs[0].text


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, Auto()),
        ({"scheme": "auto"}, Auto()),
        ({"num_drafts": 3, "verify": "rejection"}, Auto(num_drafts=3, verify="rejection")),
        ({"scheme": "none"}, None),
        ({"scheme": "ngram"}, Ngram()),
        (
            {"scheme": "ngram", "num_drafts": 7, "max_ngram": 5, "min_ngram": 3},
            Ngram(num_drafts=7, max_ngram=5, min_ngram=3),
        ),
        ({"draft": "layers:8"}, DraftModel(layers=8)),
        (
            {"scheme": "draft", "draft": "some/model", "verify": "rejection"},
            DraftModel(model="some/model", verify="rejection"),
        ),
        ({"scheme": "mtp"}, Mtp()),
        ({"head": "some/head"}, Auto(head="some/head")),
        ({"p_min": 0.5, "lookup": 0, "allow_mismatch": True}, Auto(p_min=0.5, lookup=0, allow_mismatch=True)),
        (
            {"scheme": "mtp", "head": "some/head", "num_drafts": 3, "p_min": 0.5, "lookup": 2, "allow_mismatch": True},
            Mtp(head="some/head", num_drafts=3, p_min=0.5, lookup=2, allow_mismatch=True),
        ),
        ({"scheme": "eagle", "head": "some/head"}, Eagle(head="some/head")),
        (
            {"scheme": "ngram", "verify": "threshold", "threshold": 0.5},
            Ngram(verify="threshold", threshold=0.5),
        ),
    ],
)
def test_options_become_settings(options: dict[str, Any], settings: Speculation | None) -> None:
    assert SpeculationOptions(**options).settings() == settings


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "medusa"], "scheme='medusa': must be one of auto, none, draft, ngram, mtp, eagle"),
        (["--scheme", "draft"], "needs --draft"),
        (["--scheme", "ngram", "--draft", "layers:2"], "it needs --scheme draft"),
        (["--scheme", "none", "--draft", "layers:2"], "it needs --scheme draft"),
        (["--draft", "layers:two"], "layers:N with a number"),
        (["--draft", "layers:0"], "layers=0"),
        (["--max-ngram", "3"], "has no use with --scheme auto; it needs --scheme ngram"),
        (["--scheme", "none", "--num-drafts", "3"], "it needs --scheme auto or --scheme draft or --scheme ngram"),
        (["--scheme", "ngram", "--head", "x"], "it needs --scheme auto or --scheme mtp or --scheme eagle"),
        (["--draft", "layers:2", "--head", "x"], "it needs --scheme auto or --scheme mtp or --scheme eagle"),
        (["--draft-p-min", "2"], "p_min=2.0"),
        (["--draft-lookup", "33"], "lookup=33"),
        (["--scheme", "ngram", "--num-drafts", "0"], "num_drafts=0"),
        (["--draft", "layers:2", "--max-ngram", "3"], "it needs --scheme ngram"),
        (["--scheme", "ngram", "--max-ngram", "1"], "max_ngram=1"),
        (["--scheme", "ngram", "--verify", "luck"], "verify='luck'"),
        (["--scheme", "ngram", "--threshold", "0.5"], "needs --verify threshold"),
        (["--scheme", "ngram", "--verify", "threshold", "--threshold", "2"], "threshold=2.0"),
    ],
)
def test_wrong_combinations_are_one_line_before_anything_is_loaded(
    loaded: list[Any], capsys: Output, command: str, flags: list[str], message: str
) -> None:
    assert run([command, *(["a"] if command == "generate" else []), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert loaded == []


def test_compare_needs_a_scheme(loaded: list[Any], capsys: Output) -> None:
    assert run([*GENERATE, "--scheme", "none", "--compare"]) == 2
    assert "--scheme none" in capsys.readouterr().err
    assert loaded == []


def test_generate_with_a_scheme_prints_the_same_text_and_says_what_drafts_gave(
    loaded: list[Any], capsys: Output
) -> None:
    assert run([*REPEATING, "--scheme", "ngram"]) == 0
    captured = capsys.readouterr()
    assert loaded == [Ngram()]
    assert captured.out == plain_text() + "\n"
    assert captured.err.count("\n") == 1
    found = re.search(r"([\d.]+) tokens a step \(([\d.]+) with drafts, (\d+)% of drafts accepted\)", captured.err)
    assert found is not None, captured.err
    assert float(found[2]) >= float(found[1]) > 1.5
    assert "LOSSY" not in captured.err


def test_the_lossy_rule_is_called_lossy(loaded: list[Any], capsys: Output) -> None:
    assert run([*REPEATING, "--scheme", "ngram", "--verify", "threshold"]) == 0
    assert "LOSSY" in capsys.readouterr().err
    assert run(["generate", "--help"]) == 0
    assert "LOSSY" in capsys.readouterr().out


def test_a_scheme_that_proposes_nothing_says_so(loaded: list[Any], capsys: Output) -> None:
    assert run(["generate", "ab", "--no-chat", "--max-tokens", "2", "--scheme", "ngram", "--min-ngram", "4"]) == 0
    assert "1.00 tokens a step (ngram proposed no draft)" in capsys.readouterr().err


def test_json_has_the_statistics_of_speculation(loaded: list[Any], capsys: Output) -> None:
    assert run([*REPEATING, "--scheme", "ngram", "--num-drafts", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    speculation = result["stats"]["speculation"]
    wanted = {"scheme", "num_drafts", "mean_accepted_length", "acceptance_by_position", "num_drafted", "num_accepted"}
    assert wanted <= set(speculation)
    assert (speculation["scheme"], speculation["num_drafts"], speculation["exact"]) == ("ngram", 3, True)
    assert 1 < speculation["mean_accepted_length"] <= 4
    assert len(speculation["acceptance_by_position"]) == 3
    assert 0 < speculation["num_accepted"] <= speculation["num_drafted"]
    assert "compare" not in result


@pytest.mark.parametrize("flags", [[], ["--temperature", "1.5"], ["--n", "3", "--temperature", "1", "--seed", "3"]])
def test_compare_runs_the_same_request_plainly(loaded: list[Any], capsys: Output, flags: list[str]) -> None:
    assert run([*REPEATING, "--scheme", "ngram", "--compare", *flags]) == 0
    captured = capsys.readouterr()
    assert loaded == [Ngram(), None]
    stats, compared = captured.err.splitlines()
    assert "tokens a step" in stats
    assert re.fullmatch(r"without speculation: [\d.]+ tokens/s, ratio [\d.]+, outputs identical", compared)


def test_compare_in_json(loaded: list[Any], capsys: Output) -> None:
    assert run([*REPEATING, "--scheme", "ngram", "--compare", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == ""
    compare = result["compare"]
    assert compare["identical"] is True
    assert compare["ratio"] == pytest.approx(result["stats"]["tokens_per_second"] / compare["tokens_per_second"])


def test_compare_says_when_outputs_differ(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Any, speculation: Speculation | None = None) -> LLM:
        return make_speculating(speculation) if speculation is not None else make_llm(eos_bias=50.0)

    monkeypatch.setattr("pilotfish.cli.session.load_llm", load)
    assert run([*GENERATE, "--scheme", "ngram", "--compare"]) == 0
    assert capsys.readouterr().err.endswith("outputs differ\n")


def test_a_terminal_shows_drafts_and_own_tokens_in_two_colours(
    loaded: list[Any], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run([*REPEATING, "--scheme", "ngram"]) == 0
    captured = capsys.readouterr()
    assert GREEN in captured.out
    assert CYAN in captured.out
    assert re.sub(r"\x1b\[\d+m", "", captured.out) == plain_text() + "\n"
    assert "(green: accepted drafts)" in captured.err
    assert run([*REPEATING, "--scheme", "none"]) == 0  # plain decoding has nothing to tell apart
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "is_terminal", "coloured"),
    [("NO_COLOR", "1", True, False), ("TERM", "dumb", True, False), ("X", "", True, True), ("X", "", False, False)],
)
def test_who_gets_colours(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_terminal: bool, coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert wants_colour(sys.stdout) is coloured


def test_the_painter_colours_each_tokens_own_text() -> None:
    painter, bare = Painter(coloured=True), Painter(coloured=False)
    completion = CompletionOutput(0)
    assert painter.new_text(completion) == bare.new_text(completion) == ""
    completion.token_ids += [1, 2, 3]
    completion.text, completion.is_draft, completion.text_ends = "on two", [True, True, False], [2, 2, 6]
    # The second token's text was held back: it came with the third.
    assert painter.new_text(completion) == f"{GREEN}on{RESET}{CYAN} two{RESET}"
    assert bare.new_text(completion) == "on two"
    assert painter.new_text(completion) == bare.new_text(completion) == ""
    completion.token_ids.append(4)
    completion.text, completion.is_draft, completion.text_ends = "on two!", [True, True, False, True], [2, 2, 6, 7]
    assert painter.new_text(completion) == f"{GREEN}!{RESET}"
    assert bare.new_text(completion) == "!"


def test_chat_speculates_too(loaded: list[Any], capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["abcabc", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    flags = ["--max-tokens", "12", "--ignore-eos", "--logit-bias", "3=100", "--scheme", "ngram", "-v"]
    assert run(["chat", *flags]) == 0
    captured = capsys.readouterr()
    assert loaded == [Ngram()]
    assert captured.out == "d" * 12 + "\n"
    assert any("tokens a step" in line and "of drafts accepted" in line for line in captured.err.splitlines())


def test_each_scheme_of_a_benchmark_takes_its_own_options() -> None:
    options = {"draft": "layers:3", "head": "some/head", "num_drafts": 2, "max_ngram": 5, "min_ngram": None}
    assert bench_schemes("none, ngram,draft,mtp", options) == {
        "none": None,
        "ngram": Ngram(num_drafts=2, max_ngram=5),
        "draft": DraftModel(num_drafts=2, layers=3),
        "mtp": Mtp(num_drafts=2, head="some/head"),
    }
    assert [*bench_schemes("none,ngram", {"draft": "layers:3"})] == ["none", "ngram", "draft"]
    assert bench_schemes("none", {"head": "some/head", "p_min": 0.5}) == {
        "none": None,
        "auto": Auto(head="some/head", p_min=0.5),
    }
    assert [*bench_schemes("none,eagle", {"head": "some/head"})] == ["none", "eagle"]
    with pytest.raises(ConfigError, match="scheme='auto': must be one of none, draft, ngram, mtp, eagle"):
        bench_schemes("none,auto", {})
